"""Verifies the Vulkan backend on this machine's device, compares it with the CPU and times it: for a card lent briefly.

    python benchmarks/vulkan_device.py [--part info,speed,verify,model] [--out FILE] [--quick]
        [--tilings 32,4,1,3 ...] [--seconds 60] [--share 1/4]

Prints one JSON object. `info`: adapter, limits, features. `speed`: bytes of weights per second of products and of a
group of experts as part of the fastest copy, per tiling (lanes, rows, teams, steps, twins, spread), over more memory
than a cache holds. `verify`: quick cases beside the CPU's bits until the seconds are over. `model`: the built-in
model's greedy tokens beside the CPU's. A part that fails leaves its error in the object, and exit code 1.

Times: commands are made before the clock starts; time of many rounds less that of one, over their number. The
waiting of each launch for the one before is in them (`in order`: all write to the same rows), or not (`apart`: each
launch has rows of its own, so that none waits; the time of all less that of the first, over their number).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from picaflor.backends.vulkan import capabilities
from picaflor.backends.vulkan.backend import VulkanBackend
from picaflor.backends.vulkan.device import Launch, Stream, adapters, open_gpu
from picaflor.backends.vulkan.program import Moment
from picaflor.backends.vulkan.tiling import Tiling
from picaflor.backends.vulkan.wgsl import Kernel
from picaflor.conformance import suite
from picaflor.conformance.case import Matrix, Prepared, Slots, hold, make_batch, make_matrix
from picaflor.conformance.check import compare, differing
from picaflor.conformance.verify import Variant, What, open_device

Found = dict[str, Any]
Encode = Callable[[Stream, int], None]
HIDDEN, INNER, TOP_K = 6144, 2048, 8
GROUP = 64
ROTATE_BYTES = 600_000_000
TILINGS = (
    "32,4,1,3", "32,4,1,1,1,4", "32,4,1,3,0", "32,2,1,1,1,4", "32,4,2,1,1,4", "32,8,1,1,1,4", "32,4,4,1", "32,4,2,3",
    "32,2,2,1,0,4", "32,4,1,1,0,4",
)  # fmt: skip


def part_info() -> Found:
    """Every adapter, and what the chosen one was opened with."""
    listed = [
        {**{key: str(value) for key, value in adapter.info.items()}, "features": sorted(map(str, adapter.features)),
         "limits": dict(adapter.limits)}
        for adapter in adapters()
    ]  # fmt: skip
    gpu = open_gpu()
    return {"device": gpu.name, "driver": gpu.driver, "software": gpu.software, "fusion": gpu.fusion,
            "binding_bytes": gpu.most_bytes, "adapters": listed}  # fmt: skip


# ---- times ----


def seconds_of(gpu: Any, buffer: Any, encode: Encode, rounds: int, repeats: int) -> float:
    """Median seconds of one round, and of nothing else: the device's work, not its recording."""

    def once(count: int) -> float:
        stream = Stream(gpu)
        encode(stream, count)
        commands = stream.finish()
        gpu.read(buffer, 0, 4)
        started = time.perf_counter()
        gpu.device.queue.submit([commands])
        gpu.read(buffer, 0, 4)
        return time.perf_counter() - started

    once(1)
    many = statistics.median(once(rounds + 1) for _ in range(repeats))
    return max(many - statistics.median(once(1) for _ in range(repeats)), 1e-9) / rounds


READ_VECTORS = 16
_READ = Kernel(
    "read",
    (("x", "vec4<u32>", "read"), ("y", "u32", "read_write")),
    ("vectors",),
    f"""
fn run(wid: u32, lid: u32) {{
  var sum = vec4<u32>(0u);
  for (var k = 0u; k < {READ_VECTORS}u; k++) {{ sum ^= x[min(wid * {64 * READ_VECTORS}u + k * 64u + lid, p.vectors)]; }}
  if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x9e3779b9u) {{ y[0] = 1u; }}
}}
""",
)
_COPY = Kernel(
    "copied",
    (("x", "vec4<u32>", "read"), ("y", "vec4<u32>", "read_write")),
    ("vectors",),
    "fn run(wid: u32, lid: u32) { let i = wid * 64u + lid; if (i < p.vectors) { y[i] = x[i]; } }",
)


def copies(nbytes: int, repeats: int) -> Found:
    """Bytes per second, read and written: the device's own copy, a copying kernel, torch's; and of reading alone."""
    gpu = open_gpu()
    source, target = gpu.buffer(nbytes, "a copy"), gpu.buffer(nbytes, "a copy")
    vectors = nbytes // 16

    def commands(stream: Stream, count: int) -> None:
        stream.launch(Launch(_COPY, (source, target), {"vectors": 0}), 1)
        stream._pass.end()
        for _ in range(count):
            stream._encoder.copy_buffer_to_buffer(source, 0, target, 0, nbytes)
        stream._pass = stream._encoder.begin_compute_pass()

    def kernels(kernel: Kernel, per_group: int) -> Encode:
        launch = Launch(kernel, (source, target), {"vectors": vectors - 1 if kernel is _READ else vectors})

        def encode(stream: Stream, count: int) -> None:
            for _ in range(count):
                stream.launch(launch, -(-vectors // per_group))

        return encode

    found: Found = {
        "commands": 2 * nbytes / seconds_of(gpu, target, commands, 10, repeats),
        "kernel": 2 * nbytes / seconds_of(gpu, target, kernels(_COPY, 64), 10, repeats),
        "read_alone": nbytes / seconds_of(gpu, target, kernels(_READ, 64 * READ_VECTORS), 10, repeats),
    }
    try:
        found["torch"] = torch_copy(nbytes, repeats)
    except Exception as error:  # noqa: BLE001
        found["torch_failed"] = f"{type(error).__name__}: {error}"[:200]
    return found


DOTS = 4 * 4 * 256
_SIXTEEN = " ".join(f"a.{'xyzw'[n // 4]} += dot4I8Packed(w.{'xyzw'[n % 4]}, {n}u + p.seed);" for n in range(16))
_DOTS = Kernel(
    "dots",
    (("y", "u32", "read_write"),),
    ("seed",),
    f"""
fn run(wid: u32, lid: u32) {{
  var a = vec4<i32>(0);
  var v = wid * 64u + lid + p.seed;
  for (var k = 0u; k < {DOTS // 16}u; k++) {{
    v = v * 1664525u + 1013904223u;
    let w = vec4<u32>(v, v ^ 0x5bd1e995u, v + 0x9e3779b9u, v >> 3u);
    {_SIXTEEN}
  }}
  if ((a.x ^ a.y ^ a.z ^ a.w) == 0x1e3779b9) {{ y[0] = 1u; }}
}}
""",
)


def dots_per_s(invocations: int, repeats: int) -> float:
    """Products of four packed bytes per second: tells whether the device has an instruction for them."""
    gpu = open_gpu()
    out = gpu.buffer(64, "dots")
    launch = Launch(_DOTS, (out,), {"seed": 1})

    def encode(stream: Stream, count: int) -> None:
        for _ in range(count):
            stream.launch(launch, invocations // 64)

    per_s: float = DOTS * invocations / seconds_of(gpu, out, encode, 4, repeats)
    return per_s


def torch_copy(nbytes: int, repeats: int) -> float:
    """The same by torch's copy, where there is torch with CUDA."""
    import torch

    source = torch.zeros(nbytes // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    taken = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        taken.append(float(start.elapsed_time(end)) * 1e-4)
    return 2 * nbytes / statistics.median(taken[2:])


def runs_of(program: Any, count: int, experts: Any) -> Encode:
    """Encodes a program's steps so many times."""

    def encode(stream: Stream, rounds: int) -> None:
        for _ in range(rounds):
            for step in program._steps:
                step.run(Moment(stream, count, 1, experts))

    return encode


APART_ROUNDS = 4


def seconds_apart(gpu: Any, buffer: Any, program: Any, count: int, repeats: int) -> float:
    """Median seconds of one of a program's steps where none waits for another."""

    def once(steps: Sequence[Any]) -> float:
        stream = Stream(gpu)
        for step in steps:
            step.run(Moment(stream, count, 1, None))
        commands = stream.finish()
        gpu.read(buffer, 0, 4)
        started = time.perf_counter()
        gpu.device.queue.submit([commands])
        gpu.read(buffer, 0, 4)
        return time.perf_counter() - started

    steps = program._steps
    once(steps)
    many = statistics.median(once(steps) for _ in range(2 * repeats))
    one = statistics.median(once(steps[:2]) for _ in range(2 * repeats))
    return max(many - one, 1e-9) / (len(steps) - 2)


class Products:
    """Matrices of one kind, more than a cache holds, and their products with the same rows."""

    def __init__(self, rows: int, cols: int, format_name: str, size: int) -> None:
        self.device = VulkanBackend()
        self.what = f"{format_name} gs {size} [{rows}, {cols}]"
        self._shape = rows, cols
        matrix = make_matrix(np.random.default_rng(1), format_name, rows, cols, size)
        self.nbytes = sum(plane.nbytes for plane in matrix.planes)
        count = max(3, min(96, ROTATE_BYTES // self.nbytes))
        self._weights = [hold(self.device, matrix, f"w{number}") for number in range(count)]

    def timed(self, count: int, *, apart: bool, repeats: int) -> Found:
        """`count` rows of x, prepared once."""
        rows, cols = self._shape
        recorder = self.device.recorder(max_rows=count, max_outputs=1, page_tokens=16, pages=1)
        x = recorder.rows(cols)
        launches = self._weights * (APART_ROUNDS if apart else 1)
        outs = [recorder.rows(rows) for _ in (launches if apart else launches[:1])]
        for number, weight in enumerate(launches):
            recorder.matmul(x, weight, outs[number % len(outs)])
        program: Any = recorder.finish()
        program.write(x, np.random.default_rng(3).standard_normal((count, cols)).astype(np.float32))
        program.run(make_batch([0] * count, pages=np.zeros((1, 1), np.int32), outputs=[]))
        gpu, memory = self.device.gpu, outs[0].handle.memory
        if apart:
            seconds = seconds_apart(gpu, memory, program, count, repeats)
        else:
            many = max(1, int(0.01 / (len(launches) * 4e-6)))
            seconds = seconds_of(gpu, memory, runs_of(program, count, None), many, repeats) / len(launches)
        self.device._recorders.clear()
        return {"what": f"{self.what} S {count}, {'apart' if apart else 'in order'}", "us": 1e6 * seconds,
                "bytes": self.nbytes, "bytes_per_s": self.nbytes / seconds}  # fmt: skip


class Experts:
    """Groups of experts of one layer, more than a cache holds: another choice in each call."""

    def __init__(self, hidden: int, inner: int, groups: int) -> None:
        self.device = VulkanBackend(vram_bytes=64 << 30)
        self._hidden, self._inner = hidden, inner
        rng = np.random.default_rng(2)
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        member: tuple[Matrix, ...] = tuple(make_matrix(rng, "int4-grouped", *shape, GROUP) for shape in shapes)
        self.nbytes = TOP_K * sum(plane.nbytes for matrix in member for plane in matrix.planes)
        self._groups = groups
        self._slots = Slots(self.device, {0: [member] * (groups * TOP_K)})  # type: ignore[list-item]

    def timed(self, count: int, *, repeats: int) -> Found:
        """All that a call launches: activations prepared, both kernels, the sum."""
        recorder = self.device.recorder(max_rows=count, max_outputs=1, page_tokens=16, pages=1)
        x, y = recorder.rows(self._hidden), recorder.rows(self._hidden)
        choices = [(recorder.rows(TOP_K, dtype="i32"), recorder.rows(TOP_K)) for _ in range(self._groups)]
        for ids, weights in choices:
            recorder.experts(x, ids, weights, y, layer=0, layouts=self._slots.layouts(0))
        program: Any = recorder.finish()
        program.write(x, np.random.default_rng(3).standard_normal((count, self._hidden)).astype(np.float32) / 64)
        for number, (ids, weights) in enumerate(choices):
            one = np.arange(number * TOP_K, (number + 1) * TOP_K, dtype=np.int32)
            program.write(ids, np.tile(one, (count, 1)))
            program.write(weights, np.full((count, TOP_K), 0.125, np.float32))
        program.run(make_batch([0] * count, pages=np.zeros((1, 1), np.int32), outputs=[]), self._slots)
        encode = runs_of(program, count, self._slots)
        seconds = seconds_of(self.device.gpu, y.handle.memory, encode, 24, repeats) / len(choices)
        self.device._recorders.clear()
        return {"what": f"{TOP_K} experts of {self._hidden} x {self._inner}, int4-grouped gs {GROUP}, S {count}",
                "us": 1e6 * seconds, "bytes": self.nbytes, "bytes_per_s": self.nbytes / seconds}  # fmt: skip


def lines_of(products: Sequence[Products], experts: Experts, repeats: int, *, short: bool) -> Iterator[Found]:
    """What is timed for one tiling; `short`: what decides between tilings."""
    for one in products[: 2 if short else None]:
        for apart in (True, False):
            yield one.timed(1, apart=apart, repeats=repeats)
    yield experts.timed(1, repeats=repeats)
    if not short:
        for count in (2, 8):
            yield products[0].timed(count, apart=True, repeats=repeats)
        yield experts.timed(8, repeats=repeats)


def tiling_of(text: str) -> Tiling:
    """Its fields, the first four or more."""
    lanes, rows, teams, steps, *more = map(int, text.split(","))
    return Tiling(lanes, rows, teams, steps, bool(more[0]) if more else True, more[1] if len(more) > 1 else 1)


def part_speed(tilings: Sequence[str], seconds: float, save: Callable[[Found], None], *, quick: bool) -> Found:
    """Copies, then the deciding lines of every tiling, then all lines of the best one. `save` gets what is known after
    each."""
    until = time.monotonic() + seconds
    gpu = open_gpu()
    repeats, scale = (2, 16) if quick else (5, 1)
    copied = copies((16 << 20) if quick else (1 << 30), repeats)
    copy = max(value for name, value in copied.items() if name in ("commands", "kernel", "torch"))
    found: Found = {"copies": copied, "copy_bytes_per_s": copy, "tilings": {},
                    "dots_per_s": dots_per_s((1 << 12) if quick else (1 << 20), repeats)}  # fmt: skip
    hidden, inner = HIDDEN // scale, INNER // scale
    shapes = [(inner, hidden, "int4-grouped", GROUP), (8 * inner, inner, "int4-grouped", GROUP),
              (hidden, inner, "int4-grouped", GROUP), (hidden, 8 * inner, "int4-grouped", GROUP),
              (hidden, hidden, "int4-grouped", 128), (hidden, hidden, "int8-row", 0),
              (hidden, hidden, "bf16", 0)]  # fmt: skip
    products, experts = [Products(*shape) for shape in shapes[:2]], Experts(hidden, inner, 2 if quick else 6)
    default, best = gpu.tiling, (0.0, "")
    for text in tilings:
        if time.monotonic() > until:
            break
        gpu.tiling = tiling_of(text)
        lines = found["tilings"][text] = list(_marked(lines_of(products, experts, repeats, short=True), copy, text))
        save(found)
        best = max(best, (min(line["part_of_copy"] for line in lines if "in order" not in line["what"]), text))
    gpu.tiling = tiling_of(best[1]) if best[1] else default
    found["chosen"] = best[1]
    if time.monotonic() < until:
        products += [Products(*shape) for shape in shapes[2:]]
        found["timed"] = []
        for line in _marked(lines_of(products, experts, repeats, short=False), copy, best[1]):
            found["timed"].append(line)
            save(found)
    gpu.tiling = default
    return found


def _marked(lines: Iterator[Found], copy: float, text: str) -> Iterator[Found]:
    for line in lines:
        line["part_of_copy"] = line["bytes_per_s"] / copy
        print(
            f"{text:>10} {line['part_of_copy']:6.3f} {line['us']:9.2f} us  {line['what']}", file=sys.stderr, flush=True
        )
        yield line


# ---- right or wrong ----


def part_verify(seconds: float, share: str, save: Callable[[Found], None]) -> Found:
    """Every quick case in every precision, twice on the device and once on the CPU, until the time is over; `save` gets
    what is known after each case."""
    until = time.monotonic() + seconds
    first, shares = map(int, share.split("/"))
    cases = suite.offered(suite.pick(suite.all_cases()), capabilities.cells())
    order = np.random.default_rng(1).permutation(len(cases))[first - 1 :: shares]
    found: Found = {"cases": len(order), "run": 0, "values": 0, "other_bits_than_before": 0, "other_bits_than_cpu": 0,
                    "largest_metric": {}, "failures": [], "unlike": {}}  # fmt: skip
    for number in order:
        if time.monotonic() > until:
            break
        case = Prepared(cases[int(number)])
        for precision in ("standard", "exact", "fast"):
            try:
                here, again = (case.run(open_device(What("vulkan"), Variant("auto", 1), precision)) for _ in range(2))
                there = case.run(open_device(What("cpu"), Variant("auto", 1), precision))
                outcome = compare(here, case.expected(precision), precision)
            except Exception as error:  # noqa: BLE001
                found["failures"].append(f"{case.case.label} {precision}: {type(error).__name__}: {error}"[:300])
                continue
            found["values"] += sum(array.size for array in here)
            found["other_bits_than_before"] += differing(here, again)
            unlike = differing(here, there)
            found["other_bits_than_cpu"] += unlike
            if unlike:
                found["unlike"][f"{case.case.label} {precision}"] = unlike
            largest = found["largest_metric"]
            largest[precision] = max(largest.get(precision, 0.0), outcome.metric)
            if outcome.fault:
                found["failures"].append(f"{case.case.label} {precision}: {outcome.fault}"[:300])
        found["run"] += 1
        save(found)
    return found


def greedy(backend: str, tokens: int) -> Found:
    """Greedy tokens of the built-in model, the smallest gap to the second likeliest, tokens per second."""
    from picaflor.runtime.builtin import folder
    from picaflor.runtime.engine import Engine, EngineOptions
    from picaflor.runtime.kvcache import Sequence as Rows
    from picaflor.runtime.runner import Work

    prompt = np.array([3, 14, 15, 92, 65, 35], np.int32)
    with Engine.open(folder(), EngineOptions(backend=backend, context=128), warn=lambda text: None) as engine:
        sequence, out, gap, given, started = Rows(), [], np.inf, prompt, 0.0
        for number in range(tokens):
            if number == 8:
                started = time.perf_counter()
            row = engine.runner.step([Work(sequence, given, "last")])[-1]
            second, top = np.partition(row, -2)[-2:]
            gap = min(gap, float(top - second))
            out.append(int(np.argmax(row)))
            given = np.array(out[-1:], np.int32)
        rate = (tokens - 8) / (time.perf_counter() - started)
        record = engine.record()
    return {"tokens": out, "smallest_gap": gap, "tokens_per_s": rate, "fallbacks": record.fallbacks,
            "kernels": {name: count for name, count in record.kernels.items() if name.startswith(backend)}}  # fmt: skip


def part_model(*, quick: bool) -> Found:
    """The built-in model end to end, beside the CPU."""
    here, there = (greedy(backend, 16 if quick else 100) for backend in ("vulkan", "cpu"))
    return {"same_tokens": here["tokens"] == there["tokens"], "vulkan": here, "cpu": there}


def main() -> int:
    """Run the parts; exit code 1 where something is not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="info,speed,verify,model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="of speed and of verify, each")
    parser.add_argument("--share", default="1/1", help="of the cases of verify")
    parser.add_argument("--tilings", nargs="+", default=list(TILINGS))
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script itself")
    options = parser.parse_args()
    found: Found = {"kind": "vulkan device"}

    def save(part: str, values: Found) -> None:
        found[part] = values
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    parts: dict[str, Callable[[], Found]] = {
        "info": part_info,
        "speed": lambda: part_speed(
            options.tilings, options.seconds, lambda values: save("speed", values), quick=options.quick
        ),
        "verify": lambda: part_verify(options.seconds, options.share, lambda values: save("verify", values)),
        "model": lambda: part_model(quick=options.quick),
    }
    wrong = False
    for name in options.part.split(","):
        try:
            save(name, parts[name]())
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            save(name, {"failed": f"{type(error).__name__}: {error}"[:2000]})
            wrong = True
    if options.out is None:
        print(json.dumps(found, indent=1))
    checked = found.get("verify", {})
    wrong = wrong or bool(checked.get("failures")) or bool(checked.get("other_bits_than_before"))
    return 1 if wrong or not found.get("model", {}).get("same_tokens", True) else 0


if __name__ == "__main__":
    sys.exit(main())
