"""Which options are fastest on this machine for one model: tried in pairs, in both orders, kept only beyond noise.

Knows option names and rates; must not know how a rate is measured. Only options that cannot change a token are tried,
and the contract of exactness says which those are: threads, and how experts are read.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from picaflor.models.base import Model
from picaflor.models.config import Notices
from picaflor.models.loading import ModelIndex
from picaflor.runtime.devices import MEASURED
from picaflor.runtime.machine import fingerprint, machine_fingerprint, model_fingerprint

LEAST_GAIN = 0.03
TAIL_FACTOR = 1.2
"""Most that the 99th percentile of a step may grow."""

Options = Mapping[str, int | str]
TUNABLE: Mapping[str, type] = {
    "backend": str,
    "threads": int,
    "direct": str,
    "read_engine": str,
    "read_threads": int,
    "queue_depth": int,
    "prefetch": str,
}
_WORDS = {
    "backend": MEASURED,
    "direct": ("auto", "on", "off"),
    "read_engine": ("auto", "threads", "io_uring"),
    "prefetch": ("auto", "on", "off"),
}
_MOST = {"threads": 1024, "read_threads": 256, "queue_depth": 1024}


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: tokens per second of each repeat, and the 99th percentile of a step in seconds."""

    rates: tuple[float, ...]
    step_p99_s: float

    @property
    def rate(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Half of the range of the repeats, as a part of their median: what is noise."""
        return (max(self.rates) - min(self.rates)) / 2 / self.rate


Measure = Callable[[Options], Sample]


@dataclass(frozen=True, slots=True)
class Step:
    """One comparison. `gains`: with the candidate first and with it last; `noise` is the larger spread."""

    option: str
    value: int | str
    gains: tuple[float, float]
    noise: float
    tail: float
    kept: bool


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found. `before` and `after` are tokens per second, of the first and the last measurement of each."""

    options: Options
    before: float
    after: float
    steps: tuple[Step, ...]


def search(
    axes: Mapping[str, Sequence[int | str]],
    measure: Measure,
    *,
    applies: Callable[[str, Options], bool] = lambda option, best: True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tuned:
    """Try every value of every option against the best so far; what gains less than 3 % beyond noise is not kept.

    An option that does not apply to the best so far is left out.
    """
    best: dict[str, int | str] = {}
    steps: list[Step] = []
    total = sum(map(len, axes.values()))
    first: float | None = None
    last = 0.0
    for option, values in axes.items():
        for value in values if applies(option, best) else ():
            progress(len(steps), total)
            pairs = []
            for candidate_first in (False, True):
                with_it = {**best, option: value}
                ahead, behind = (with_it, best) if candidate_first else (best, with_it)
                samples = (measure(ahead), measure(behind))
                pairs.append(samples[::-1] if candidate_first else samples)
            first = pairs[0][0].rate if first is None else first
            step = _compared(option, value, pairs)
            steps.append(step)
            last = statistics.median(pair[1 if step.kept else 0].rate for pair in pairs)
            if step.kept:
                best[option] = value
    progress(total, total)
    return Tuned(best, first or 0.0, last, tuple(steps))


def _compared(option: str, value: int | str, pairs: Sequence[tuple[Sample, Sample]]) -> Step:
    """Judge a candidate from two (now, with it) pairs, one in each order."""
    gains = tuple(new.rate / now.rate - 1 for now, new in pairs)
    noise = max(sample.spread for pair in pairs for sample in pair)
    tail = max(new.step_p99_s / now.step_p99_s if now.step_p99_s else 1.0 for now, new in pairs)
    kept = min(gains) - noise >= LEAST_GAIN and tail <= TAIL_FACTOR
    return Step(option, value, (gains[0], gains[1]), noise, tail, kept)


def axes(
    *, threads: int, streams: bool, engines: Sequence[str], readers: int, devices: Sequence[str] = ()
) -> dict[str, list[int | str]]:
    """What is worth trying: `threads` are granted, `streams` says that experts are read while decoding, `engines` are
    the read engines that work here, `readers` is how many reads are under way now, `devices` are backends of MEASURED
    that can be expected to start."""
    found: dict[str, list[int | str]] = {"backend": list(devices)}
    found["threads"] = list(dict.fromkeys(n for n in (threads // 2, threads - 1) if 0 < n < threads))
    if streams:
        found["direct"] = ["on", "off"]
        found["read_engine"] = [engine for engine in engines if engine != "threads"]
        found["read_threads"] = [n for n in (4, 8, 16, 32) if n != readers]
        found["queue_depth"] = [n for n in (4, 16, 32) if "io_uring" in engines]
        found["prefetch"] = ["on", "off"]  # the cache's split: without it, its slots hold experts of the layers
    return {name: values for name, values in found.items() if values}


def reads_apply(engine: str) -> Callable[[str, Options], bool]:
    """Whether an option matters: each read engine has its own number of reads under way. `engine`: the one in use."""
    needed = {"read_threads": "threads", "queue_depth": "io_uring"}

    def applies(option: str, best: Options) -> bool:
        return needed.get(option) in (None, best.get("read_engine", engine))

    return applies


def key_of(model: Model, index: ModelIndex) -> str:
    """Under which name options are kept: machine and model together."""
    return fingerprint([machine_fingerprint(), model_fingerprint(model, index)])


def applied(options: Any, model: Model, index: ModelIndex, notices: Notices) -> tuple[Any, str]:
    """(engine options with the tuned ones where the user gave none, which those are in words, empty if none).

    `options.tuned` are the kept entries by key. An entry that is no such thing is told and left out.
    """
    if not options.tuned:
        return options, ""
    key = key_of(model, index)
    if key not in options.tuned:
        return options, ""
    entry = options.tuned[key]
    values = entry.get("options") if isinstance(entry, Mapping) else entry
    if not isinstance(entry, Mapping) or not isinstance(values, Mapping):
        notices.tell(f"tuned options: entry {key}: {values!r:.40} are no options that tune writes: left out")
        return options, ""
    taken: dict[str, int | str] = {}
    for name, value in values.items():
        if not _valid(name, value):
            notices.tell(f"tuned options: {name} {value!r:.40} is none that tune writes: left out")
        elif getattr(options, name) in (None, "auto") and name != "backend":  # `auto` asks for it by `chosen_backend`
            taken[name] = value
    return replace(options, **taken), in_words(taken)


def chosen_backend(options: Any, model: Model, index: ModelIndex) -> str:
    """The backend that tune kept for this model and machine, `cpu` where it kept none."""
    entry = options.tuned.get(key_of(model, index)) if options.tuned else None
    kept = entry.get("options") if isinstance(entry, Mapping) else None
    value = kept.get("backend") if isinstance(kept, Mapping) else None
    return str(value) if value in MEASURED else "cpu"


def device_gain(options: Any, model: Model, index: ModelIndex) -> tuple[str, float] | None:
    """(backend, its speed by the CPU's) as tune measured it for this model and machine; None where it did not.

    Of two comparisons the smaller one counts.
    """
    entry = options.tuned.get(key_of(model, index)) if options.tuned else None
    steps = entry.get("steps") if isinstance(entry, Mapping) else None
    for step in steps if isinstance(steps, list | tuple) else ():
        if isinstance(step, Mapping) and step.get("option") == "backend" and step.get("value") in MEASURED:
            gains = step.get("gains")
            if isinstance(gains, Sequence) and gains and all(isinstance(gain, int | float) for gain in gains):
                return str(step["value"]), 1 + min(gains)
    return None


def _valid(name: object, value: object) -> bool:
    if name not in TUNABLE or type(value) is not TUNABLE[str(name)]:
        return False
    return value in _WORDS[str(name)] if isinstance(value, str) else 0 < int(str(value)) <= _MOST[str(name)]


def in_words(options: Options) -> str:
    """As `threads 2, queue depth 16`."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in options.items())
