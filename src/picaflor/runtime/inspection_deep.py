"""The deep inspection: every byte is read, and values that no sound file has are counted.

Knows containers and how formats store scales; must not know families or the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from picaflor.container.index import Container
from picaflor.container.strict_json import show_path
from picaflor.container.types import Matrix, Span
from picaflor.errors import ReadFailed
from picaflor.formats import REGISTRY, e8_iq3, fp8_b128, mxfp4
from picaflor.models.loading import ModelIndex
from picaflor.runtime.inspection import in_file_order, matrices_of

# A multiple of every item size and of the super-block of e8.
CHUNK_BYTES = e8_iq3.BLOCK_BYTES * 8 * 65_536

Bytes = NDArray[np.uint8]
Bad = NDArray[np.bool_]
Progress = Callable[[str, int, int], None]
_E4M3_NAN = np.isnan(fp8_b128.e4m3_values())
_UE8M0_NAN = np.isnan(mxfp4.exponent_scales())


@dataclass(frozen=True, slots=True)
class Finding:
    """`count` bad values in a tensor, the first at `first` (counted in values); count 0: it could not be read."""

    tensor: str
    shard: str
    text: str
    count: int
    first: int

    def record(self) -> dict[str, object]:
        """The finding as JSON values."""
        return {
            "tensor": self.tensor,
            "shard": self.shard,
            "finding": self.text,
            "count": self.count,
            "first": self.first,
        }


@dataclass(frozen=True, slots=True)
class _Check:
    """What is looked for: `bad(bytes)` marks values, `text` says what they are."""

    text: str
    bad: Callable[[Bytes], Bad]


def _f32(data: Bytes) -> Bad:
    bad: Bad = ~np.isfinite(data.view("<f4"))
    return bad


def _bf16(data: Bytes) -> Bad:
    bad: Bad = (data.view("<u2") & np.uint16(0x7F80)) == np.uint16(0x7F80)
    return bad


def _f16(data: Bytes) -> Bad:
    bad: Bad = (data.view("<u2") & np.uint16(0x7C00)) == np.uint16(0x7C00)
    return bad


def _e8(data: Bytes) -> Bad:
    scales = data.reshape(-1, e8_iq3.BLOCK_BYTES)[:, e8_iq3.SCALE_OFFSET :]
    return _f16(np.ascontiguousarray(scales).reshape(-1))


_FLOATS = {"F32": _f32, "BF16": _bf16, "F16": _f16}
_WEIGHTS = "weights are not finite"
_SCALES = "scales are not finite"
_FP8 = _Check("fp8 codes are NaN", lambda data: _E4M3_NAN[data])
_FIRST_PLANE = {
    "f32": _Check(_WEIGHTS, _f32),
    "bf16": _Check(_WEIGHTS, _bf16),
    "f16": _Check(_WEIGHTS, _f16),
    fp8_b128.NAME: _FP8,
    e8_iq3.NAME: _Check("scales inside the codes are not finite", _e8),
}


def _plane_check(format_name: str, plane: int) -> _Check | None:
    """What can be wrong in a plane; None where every byte is a legal code."""
    if plane == 0:
        return _FIRST_PLANE.get(format_name)
    if format_name == mxfp4.NAME:
        return _Check("scales are NaN", lambda data: _UE8M0_NAN[data])
    if REGISTRY[format_name].planes[plane].dtype == np.dtype("<f4"):
        return _Check(_SCALES, _f32)
    raise AssertionError(f"{format_name}: plane {plane} is of no kind that the deep inspection knows")


def _dtype_check(dtype: str) -> _Check | None:
    """What can be wrong in a tensor of which only the dtype is known."""
    if dtype in _FLOATS:
        return _Check("values are not finite", _FLOATS[dtype])
    return _FP8 if dtype in ("F8_E4M3", "F8_E4M3FN", "float8_e4m3fn") else None


def _work(container: Container, index: ModelIndex | None) -> Iterator[tuple[str, Span, _Check | None]]:
    """Every byte of every tensor once: planes of known matrices, then what they leave."""
    planes: dict[tuple[int, int], tuple[Matrix, int]] = {}
    for matrix in matrices_of(index) if index is not None else ():
        for plane, span in enumerate(matrix.spans):
            planes.setdefault((span.shard, span.offset), (matrix, plane))
    for info in in_file_order(container):
        at, end = info.offset, info.offset + info.nbytes
        while at < end:
            known = planes.get((info.shard, at))
            if known is None:
                yield info.name, Span(info.shard, at, end - at), _dtype_check(info.dtype)
                break
            matrix, plane = known
            span = matrix.spans[plane]
            name = info.name if span.nbytes == info.nbytes else f"{info.name} ({matrix.name})"
            yield name, span, _plane_check(matrix.format, plane)
            at += span.nbytes


def read_everything(
    container: Container, index: ModelIndex | None, *, progress: Progress | None = None
) -> list[Finding]:
    """Read all tensors and return what is wrong in them; a tensor that cannot be read is a finding too.

    `progress(stage, done, total)` counts bytes. At most 51 MB are in memory.
    """
    findings: list[Finding] = []
    total = sum(info.nbytes for info in container.tensors.values())
    done = 0
    for name, span, check in _work(container, index):
        shard = show_path(container.shards[span.shard].path)
        count, first, seen = 0, -1, 0
        try:
            for start in range(0, span.nbytes, CHUNK_BYTES):
                part = Span(span.shard, span.offset + start, min(CHUNK_BYTES, span.nbytes - start))
                data = container.read(part)
                done += part.nbytes
                if check is not None:
                    bad = check.bad(data)
                    if bad.any():
                        first = seen + int(bad.argmax()) if first < 0 else first
                        count += int(np.count_nonzero(bad))
                    seen += bad.size
                if progress is not None:
                    progress("reading", done, total)
        except ReadFailed as error:
            findings.append(Finding(name, shard, str(error), 0, -1))
        if check is not None and count:
            findings.append(Finding(name, shard, check.text, count, first))
    return findings
