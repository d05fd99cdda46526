"""The kernels read what they were promised and no byte more: buffers at the edge of memory that faults when touched.

A weight's plane may be read up to 64 bytes behind its end, not before its start; rows of x, prepared rows and products
not at all outside. Each check runs in a process of its own, which a touch of the wrong page would kill.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from kernel_harness import CASE_IDS, CASES

CODE = """
import ctypes, mmap, sys
import numpy as np
from picaflor import _native, formats
from picaflor.backends.cpu.kernels import FORMAT_NUMBERS, hold

PAGE, PROMISED = mmap.PAGESIZE, 64
libc = ctypes.CDLL(None, use_errno=True)
kept = []

def fenced(nbytes):
    # (first address behind a closed page, first address of the closed page that follows it, at least nbytes later)
    inside = -(-nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, inside + 2 * PAGE)
    kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + PAGE + inside):
        if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    return start + PAGE, start + PAGE + inside

def placed(data, *, front, slack):
    # the address of a copy of data: right behind a closed page, or `slack` bytes before one
    first, last = fenced(data.nbytes + slack)
    address = first if front else last - slack - data.nbytes
    ctypes.memmove(address, data.ctypes.data, data.nbytes)
    return address

def room(nbytes, *, front, align=1):
    first, last = fenced(nbytes)
    return first if front else (last - nbytes) // align * align

def check(name, size, rows, cols, count, planes, isa, front, rng):
    stored = [np.ascontiguousarray(p).reshape(-1).view(np.uint8)
              for p in formats.REGISTRY[name].sample(rng, rows, cols, size)]
    places = [(placed(p, front=front, slack=PROMISED), p.nbytes) for p in stored] + [(0, 0)]
    weight = _native.Weight(FORMAT_NUMBERS[name], rows, cols, group=size, codes=places[0][0],
                            codes_bytes=places[0][1], scales=places[1][0], scales_bytes=places[1][1])
    x = rng.standard_normal((count, cols)).astype(np.float32)
    x_at = placed(x.view(np.uint8), front=front, slack=0)
    prepared = room(_native.prepared_bytes(weight, planes) * count, front=front, align=64)
    y_at = room(4 * rows * count, front=front)
    _native.matmul_at(isa, weight, planes, x_at, prepared, y_at, count)
    y = np.ctypeslib.as_array(ctypes.cast(y_at, ctypes.POINTER(ctypes.c_float)), (count, rows))
    plain = hold(name, tuple(stored), rows, cols, size)
    expected = _native.matmul("scalar", plain.native, planes, x, 0, rows)
    if not np.array_equal(y, expected, equal_nan=True):
        raise SystemExit(f"{isa} [{rows}, {cols}] x {count}, planes {planes}: other products than scalar")
    if name != "e8-iq3-lattice":
        for row in (0, rows - 1):
            _native.decode_row_at(isa, weight, row, room(4 * cols, front=front))
    for memory in kept:
        try:
            memory.close()
        except BufferError:
            pass  # numpy still looks at it
    kept.clear()

def main(name, size):
    rng, done = np.random.default_rng(8), 0
    for isa in _native.kernel_isas():
        for rows, cols in ((1, 1), (3, 7), (17, 130), (33, 64), (40, 515)):
            for count in (1, 3, 8, 21):
                for planes in (1, 2, 3):
                    for front in (False, True):
                        check(name, size, rows, cols, count, planes, isa, front, rng)
                        done += 1
    print(done, "checked")
"""
SHAPES, COUNTS, PLANES, SIDES = 5, 4, 3, 2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mprotect through the C library, as Linux has it")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CODE + code], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("name", "size"), CASES, ids=CASE_IDS)
def test_no_byte_outside_is_touched(name: str, size: int) -> None:
    """Every instruction set, odd shapes, both loops, buffers at the end and at the start of readable memory."""
    done = run(f"main({name!r}, {size})")
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-500:]}"
    cases = SHAPES * COUNTS * PLANES * SIDES
    count = int(done.stdout.split()[0])
    assert count % cases == 0
    assert count >= 2 * cases


@pytest.mark.parametrize("place", ["last", "first - 1"])
def test_the_fence_kills(place: str) -> None:
    """A touch of either closed page ends the process: the checks above can fail."""
    done = run(f"first, last = fenced(100); ctypes.string_at({place}, 1)")
    assert done.returncode == -11
