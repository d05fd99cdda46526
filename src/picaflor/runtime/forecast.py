"""A model's speed before it is loaded: what was measured here, what a plan places where, and the price of each change.

Ties sketches, trials, replays and the arithmetic of a prediction together; must not print.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from picaflor.errors import OutOfBudget, UsageError
from picaflor.formats import REGISTRY
from picaflor.runtime.machine import StateFile, fingerprint, machine_fingerprint, model_fingerprint
from picaflor.runtime.placement import Placement, place
from picaflor.runtime.predict import Misses, Speed, independent_misses, predict, read_time, uniform_misses
from picaflor.runtime.sketch import Sketch, token_bytes
from picaflor.runtime.target import ASSUMED_BYTES_PER_S, Target
from picaflor.runtime.trial import Compute, measure_compute
from picaflor.runtime.trial_reads import Reads, measure_reads
from picaflor.store.budget import Ledger

if TYPE_CHECKING:
    from picaflor.store.routes import Routes

MORE_RAM = 16 << 30
INT3 = "int3-g64"
INT3_LOSS = "costs quality: perplexity +13 % against int4-grouped 64 on the model that comes with the program"
"""As measured: benchmarks/records/eval-int3-experts.json."""
ASSUMED_PART = 0.6
"""Part of memory's rate that multiplying reaches, where the rate is given and nothing is measured."""
GPU_BYTES = 24_000_000_000
GPU_LAYER_S = 90e-6
SHARED_LAYER_S = 400e-6
"""The GPU that is priced: memory and its rate by the data sheet of an RTX 3090; what a layer takes beside its bytes, as
measured on an H200: 75 us with the built-in model, 110 with glm-mid (benchmarks/records/gpu-runtime-h200.json), before
kernels overlapped there, which that card's do not: 66 to 72 and 84 since. What a layer takes more where the processor
multiplies some of its experts: 300 to 480 us with glm-mid, a half and a quarter of its experts on the device
(benchmarks/records/decode-h200.json).
"""


@dataclass(frozen=True, slots=True)
class Change:
    """Something else one could have: what it is, what it gives, or why that cannot be told."""

    name: str
    speed: Speed | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """`speed` None: the disk's rate is not known. `ceiling` is the speed with all experts in memory, that of the device
    where the plan is for one. `placement`: where weights lie then.
    """

    compute: Compute
    reads: Reads | None
    rates_from: str
    routes_from: str
    speed: Speed | None
    ceiling: Speed
    changes: tuple[Change, ...]
    target: Target | None = None
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class _Measured:
    compute: Compute
    reads: Reads | None
    said: str


def forecast(
    plan: Sketch,
    state: StateFile,
    *,
    routes: Routes | None = None,
    memory_rate: int | None = None,
    disk_rate: int | None = None,
    fresh: bool = False,
    target: Target | None = None,
) -> Forecast:
    """Predict. Rates are those given, else those kept in `state`, else measured now and kept; `fresh` measures anew.

    `target`: the device of a plan for one. Raises UsageError for routes of another model, ReadFailed, and OutOfBudget
    where the device cannot hold what must lie there.
    """
    if routes is not None:
        _check_routes(plan, routes)
    measured = _rates(plan, state, memory_rate, disk_rate, fresh)
    guess = _Guess(plan, measured, routes) if target is None else _Beside(plan, measured, routes, target)
    return Forecast(
        compute=measured.compute,
        reads=measured.reads,
        rates_from=measured.said,
        routes_from=_routes_in_words(routes),
        speed=guess.speed(plan.ledger),
        ceiling=guess.all_resident(),
        changes=tuple(guess.changes()) if plan.moe else (),
        target=target,
        placement=guess.place() if isinstance(guess, _Beside) else None,
    )


def _routes_in_words(routes: Routes | None) -> str:
    if routes is None:
        return "no routes given: every expert taken to be wanted equally often, which real routes beat"
    return f"replay of {len(routes)} recorded requests"


def _check_routes(plan: Sketch, routes: Routes) -> None:
    """Raises UsageError for routes of another model, or without a request to each layer."""
    wanted = {block.layer: block.router.experts for block in plan.moe}
    found = {layer.layer: layer.experts for layer in routes.layers}
    if wanted != found:
        raise UsageError(
            f"--replay: routes of {routes.model or 'a model'}: {len(found)} layers of at most "
            f"{max(found.values(), default=0)} experts; this model has {len(wanted)} of at most "
            f"{max(wanted.values(), default=0)}"
        )
    silent = sorted(set(wanted) - {routes.layers[place].layer for place in set(routes.places.tolist())})
    if silent:
        raise UsageError(f"--replay: no request to layer {silent[0]} is recorded: record a run that reads experts")


class _Guess:
    """Predictions for one model, with other memory, other reads, other experts."""

    def __init__(self, plan: Sketch, measured: _Measured, routes: Routes | None) -> None:
        self._plan = plan
        self._sizes = token_bytes(plan.model, plan.index)
        self._measured = measured
        self._routes = routes

    def all_resident(self) -> Speed:
        """With every expert in memory."""
        none: Misses = {0: 1.0}
        return self._predict([none] * len(self._plan.moe), extra_s=(0.0,))

    def speed(self, ledger: Ledger, *, read_share: float = 1.0, expert_share: float = 1.0) -> Speed | None:
        """With this placement, reads in this part of their time and experts of this part of their size."""
        if ledger.all_resident:
            return self._predict([{0: 1.0}] * len(self._plan.moe), extra_s=(0.0,), expert_share=expert_share)
        reads = self._measured.reads
        if reads is None:
            return None
        seconds = [value * read_share * expert_share for value in reads.extra_s]
        ahead = reads.bytes_per_s / read_share if ledger.ahead_slots else 0.0
        return self._predict(self._misses(ledger), extra_s=seconds, expert_share=expert_share, ahead_bytes_per_s=ahead)

    def _misses(self, ledger: Ledger) -> list[Misses]:
        blocks = self._plan.moe
        if self._routes is None:
            slots = [min(ledger.slots[block.layer], block.router.experts) for block in blocks]
            return [
                uniform_misses(block.router.experts, held, block.router.top_k)
                for block, held in zip(blocks, slots, strict=True)
            ]
        from picaflor.store.replay import replay

        found = replay(
            self._routes, slots=ledger.slots, working_slots=ledger.working_slots, policy=self._plan.options.policy
        )
        return [independent_misses(_rate(*found.by_layer[block.layer]), block.router.top_k) for block in blocks]

    def _predict(
        self,
        misses: Sequence[Misses],
        *,
        extra_s: Sequence[float],
        expert_share: float = 1.0,
        ahead_bytes_per_s: float = 0.0,
        compute: Compute | None = None,
    ) -> Speed:
        compute = compute or self._measured.compute
        experts_s = compute.experts_s * expert_share
        nbytes = self._plan.expert_bytes // max(self._plan.experts, 1)
        return predict(
            misses,
            [block.router.top_k for block in self._plan.moe],
            step_s=compute.step_s - compute.experts_s + experts_s,
            experts_s=experts_s,
            extra_s=extra_s,
            expert_bytes=int(nbytes * expert_share),
            ahead_bytes_per_s=ahead_bytes_per_s,
        )

    def nothing_read(self) -> bool:
        """Whether every expert is in memory."""
        return self._plan.ledger.all_resident

    def shared_s(self, there: float) -> float:
        """Seconds of a token in which device and processor hand over, with this part of the experts on a device."""
        shared = 0.0
        for block in self._plan.moe:
            experts = block.router.experts
            shared += 1 - uniform_misses(experts, int(there * experts), block.router.top_k).get(0, 0.0)
        return shared * SHARED_LAYER_S

    def changes(self) -> list[Change]:
        """What each change would give."""
        ledger = self._plan.ledger
        more = self._plan.ledger_with(MORE_RAM)
        resident = self.nothing_read()
        changes = [
            Change("16 GiB more RAM", self.speed(more), "all experts fit already" if resident else ""),
            Change(
                "a second drive as fast as this one",
                self.speed(ledger, read_share=0.5),
                "nothing is read while decoding" if resident else "",
            ),
        ]
        share = int3_share(self._plan)
        if share < 1:
            try:
                smaller = self._plan.ledger_with(0, expert_share=share)
                changes.append(Change(f"{INT3} experts", self.speed(smaller, expert_share=share), INT3_LOSS))
            except OutOfBudget as error:
                changes.append(Change(f"{INT3} experts", None, str(error)))
        changes.append(self.other_device())
        return changes

    def other_device(self) -> Change:
        """A GPU with all but the experts, and experts in what its memory has left; others are multiplied as now."""
        resident = sum(nbytes for name, nbytes in self._sizes.items() if name != "experts")
        left = GPU_BYTES - resident
        name = f"a GPU of {GPU_BYTES / 1e9:.0f} GB"
        needs = (
            f"{resident / 1e9:.1f} GB of its memory for all but the experts, "
            f"{(resident + self._plan.expert_bytes) / 1e9:.1f} GB for all"
        )
        if left < 0:
            return Change(name, None, f"would need {needs}")
        rate = ASSUMED_PART * ASSUMED_BYTES_PER_S
        there = min(left / self._plan.expert_bytes, 1.0)
        now = self._measured.compute
        experts_s = there * self._sizes["experts"] / rate + (1 - there) * now.experts_s
        launches_s = len(self._plan.model.layers) * GPU_LAYER_S + self.shared_s(there)
        compute = Compute(resident / rate + experts_s + launches_s, experts_s, ASSUMED_BYTES_PER_S)
        ledger = self._plan.ledger_with(left)
        reads = self._measured.reads
        if there == 1 or ledger.all_resident:
            speed = self._predict([{0: 1.0}] * len(self._plan.moe), extra_s=(0.0,), compute=compute)
        elif reads is None:
            return Change(name, None, f"would need {needs}")
        else:
            speed = self._predict(self._misses(ledger), extra_s=reads.extra_s, compute=compute)
        assumed = f"{ASSUMED_PART:.0%} of {ASSUMED_BYTES_PER_S / 1e9:.0f} GB/s and {1e6 * GPU_LAYER_S:.0f} us a layer"
        if there < 1:
            assumed += f", {1e6 * SHARED_LAYER_S:.0f} us more where the processor has a part"
        return Change(name, speed, f"assumed: {assumed}; needs {needs}")


class _Beside(_Guess):
    """Predictions with a device: it has all but experts, and of them what fits; the processor multiplies the others,
    from memory, while the device multiplies its own."""

    def __init__(self, plan: Sketch, measured: _Measured, routes: Routes | None, target: Target) -> None:
        super().__init__(plan, measured, routes)
        self._target = target

    def place(self, target: Target | None = None, *, ledger: Ledger | None = None, share: float = 1.0) -> Placement:
        """Where weights lie, with another device, other memory, experts of this part of their size."""
        target, ledger = target or self._target, ledger or self._plan.ledger
        sizes = [int(size * share) for size in self._plan.expert_sizes]
        held = [min(ledger.slots[block.layer], block.router.experts) for block in self._plan.moe]
        return place(target.memory, self._plan.device_needs, sizes, in_ram=sum(held), vram=target.vram)

    def all_resident(self) -> Speed:
        """With every expert on the device."""
        return self._with(1.0, [{0: 1.0}] * len(self._plan.moe), 1.0, (0.0,), 0.0)

    def speed(
        self, ledger: Ledger, *, read_share: float = 1.0, expert_share: float = 1.0, target: Target | None = None
    ) -> Speed | None:
        """With this placement on the host, reads in this part of their time, experts of this part of their size."""
        found = self.place(target, ledger=ledger, share=expert_share)
        there = found.on_device / self._plan.experts if self._plan.experts else 1.0
        if there == 1 or ledger.all_resident:
            return self._with(there, [{0: 1.0}] * len(self._plan.moe), expert_share, (0.0,), 0.0)
        reads = self._measured.reads
        if reads is None:
            return None
        counts = {block.layer: block.router.experts for block in self._plan.moe}
        slots = {layer: min(count, round(there * count) + ledger.slots[layer]) for layer, count in counts.items()}
        seconds = [value * read_share * expert_share for value in reads.extra_s]
        ahead = reads.bytes_per_s / read_share if ledger.ahead_slots else 0.0
        return self._with(there, self._misses(replace(ledger, slots=slots)), expert_share, seconds, ahead)

    def nothing_read(self) -> bool:
        """Whether every expert is in the memory of the host or of the device."""
        return super().nothing_read() or self.place().on_disk == 0

    def _with(
        self, there: float, misses: Sequence[Misses], expert_share: float, extra_s: Sequence[float], ahead: float
    ) -> Speed:
        """With this part of the experts on the device."""
        rate = ASSUMED_PART * self._target.bytes_per_s
        experts = self._sizes.get("experts", 0) * expert_share
        resident = sum(self._sizes.values()) - self._sizes.get("experts", 0)
        device_s = (resident + there * experts) / rate + len(self._plan.model.layers) * GPU_LAYER_S
        ram_s = (1 - there) * self._measured.compute.experts_s * expert_share
        ram_s = max(ram_s - there * experts / rate, 0.0)  # the rest of it hides behind the device's own experts
        ram_s += self.shared_s(there)
        host = ram_s / expert_share  # of experts as they are now
        compute = Compute(device_s + host, host, self._target.bytes_per_s)
        found = self._predict(misses, extra_s=extra_s, expert_share=expert_share, ahead_bytes_per_s=ahead,
                              compute=compute)  # fmt: skip
        seconds = {"disk": found.seconds["reads"], "RAM": ram_s, "device": device_s}
        return replace(found, seconds=seconds)

    def other_device(self) -> Change:
        """The same device with more memory."""
        wider = self._target.doubled()
        fits = self.place().on_device == self._plan.experts
        return Change("twice the device's memory", self.speed(self._plan.ledger, target=wider),
                      "all experts fit already" if fits else "")  # fmt: skip


def _rate(hits: int, loads: int) -> float:
    return hits / (hits + loads) if hits + loads else 1.0


def int3_share(plan: Sketch) -> float:
    """Bytes of the experts in int3-g64 as a part of what they have now."""
    form = REGISTRY[INT3]
    small = now = 0
    for block in plan.moe:
        for expert in plan.index.experts[block.layer]:
            now += expert.nbytes
            small += sum(form.nbytes(m.rows, m.cols) for m in expert.matrices)
    return small / now if now else 1.0


def _rates(plan: Sketch, state: StateFile, memory_rate: int | None, disk_rate: int | None, fresh: bool) -> _Measured:
    said: list[str] = []
    compute = _compute(plan, state, memory_rate, fresh, said)
    reads = _reads(plan, compute, state, disk_rate, fresh, said)
    return _Measured(compute, reads, ", ".join(said))


def _compute(plan: Sketch, state: StateFile, memory_rate: int | None, fresh: bool, said: list[str]) -> Compute:
    if memory_rate is not None:
        said.append(f"multiplying: {ASSUMED_PART:.0%} of --memory-rate")
        sizes = token_bytes(plan.model, plan.index)
        rate = memory_rate * ASSUMED_PART
        return Compute(sum(sizes.values()) / rate, sizes.get("experts", 0) / rate, float(memory_rate))
    options = plan.options
    key = fingerprint(
        [
            "compute",
            machine_fingerprint(),
            model_fingerprint(plan.model, plan.index),
            [plan.threads, plan.isa, options.precision, list(options.disable)],
        ]
    )
    kept = None if fresh else state.get(key)
    try:
        if kept is not None:
            found = Compute(float(kept["step_s"]), float(kept["experts_s"]), float(kept["memory_bytes_per_s"]))
            said.append("multiplying: measured earlier")
            return found
    except (KeyError, TypeError, ValueError):
        said.append("multiplying: what was kept is damaged")
    found = measure_compute(plan)
    state.put(
        key,
        {"step_s": found.step_s, "experts_s": found.experts_s, "memory_bytes_per_s": found.memory_bytes_per_s},
    )
    said.append("multiplying: measured now")
    return found


def _reads(
    plan: Sketch, compute: Compute, state: StateFile, disk_rate: int | None, fresh: bool, said: list[str]
) -> Reads | None:
    if not plan.moe:
        return None
    top_k = max(block.router.top_k for block in plan.moe)
    nbytes = plan.expert_bytes // plan.experts
    if disk_rate is not None:
        said.append("reads: --disk-rate")
        expert_s = compute.experts_s / sum(block.router.top_k for block in plan.moe)
        return Reads(read_time(top_k, read_s=nbytes / disk_rate, expert_s=expert_s), nbytes, float(disk_rate), None)
    key = fingerprint(["reads", machine_fingerprint(), _device(plan.path), nbytes, top_k, read_options(plan)])
    kept = None if fresh else state.get(key)
    try:
        if kept is not None and len(kept["extra_s"]) == top_k + 1:
            said.append("reads: measured earlier")
            extra_s = tuple(map(float, kept["extra_s"]))
            return Reads(extra_s, nbytes, float(kept["bytes_per_s"]), kept.get("storage_share"))
    except (KeyError, TypeError, ValueError):
        said.append("reads: what was kept is damaged")
    found = measure_reads(plan)
    if found is None:
        said.append("reads: unknown, they cannot be tried here (--disk-rate)")
        return None
    state.put(
        key,
        {"extra_s": list(found.extra_s), "bytes_per_s": found.bytes_per_s, "storage_share": found.storage_share},
    )
    said.append("reads: measured now")
    return found


def read_options(plan: Sketch) -> list[object]:
    """The options that change how reads are made."""
    reading = plan.reading
    compute = [plan.threads, plan.isa, plan.options.precision]
    weights = reading.mirror is not None
    return [reading.engine, reading.depth, sorted(set(reading.blocks.values())), weights, compute]


def _device(path: Path) -> int:
    return os.stat(path).st_dev
