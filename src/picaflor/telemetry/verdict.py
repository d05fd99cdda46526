"""What limited a run, in one plain sentence with its numbers.

Must not know more than the record holds. Thresholds as in the C engine's profile: waiting for reads 30 %, multiplying
weights 40 %, attention 35 % of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from picaflor.sizes import format_rate
from picaflor.telemetry.names import WEIGHT_CLASSES
from picaflor.telemetry.record import Phase, Record

WAIT_SHARE = 0.30
WEIGHT_SHARE = 0.40
ATTENTION_SHARE = 0.35
LOW_HIT_RATE = 0.90
WORTH_IT = 1.25
"""How much faster a run must be for more memory to be named as the cure."""
MEMORY_PART = 0.60
"""From this part of the memory's measured rate on, multiplying waits for memory rather than for arithmetic."""

Kind = Literal[
    "disk-bound", "link-bound", "memory-bound", "compute-bound", "attention-bound", "balanced", "nothing measured"
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`kind` for programs, `text` for people."""

    kind: Kind
    text: str


def verdict(record: Record) -> Verdict:
    """Judge the decode phase, or prefill where nothing was decoded."""
    phase, name = (record.decode, "decode") if record.decode.tokens else (record.prefill, "prefill")
    if not phase.tokens or not phase.wall_s:
        return Verdict("nothing measured", "nothing measured: no token was computed")
    tiers = _tiers(record, phase)
    if len(tiers) > 1:
        return _slowest(phase, name, tiers)
    shares = phase.shares()
    weights = sum(shares[part] for part in WEIGHT_CLASSES)
    if shares["read_wait"] >= WAIT_SHARE:
        return Verdict("disk-bound", _disk(record, phase, name, shares["read_wait"]))
    if weights >= WEIGHT_SHARE:
        return _weights(record, phase, name, weights)
    if shares["attention"] >= ATTENTION_SHARE:
        text = (
            f"attention-bound: attention takes {shares['attention']:.0%} of {name}; a shorter context would help most"
        )
        return Verdict("attention-bound", text)
    largest = max(shares, key=lambda part: shares[part])
    return Verdict(
        "balanced", f"balanced: the largest part of {name} is {largest.replace('_', ' ')}, {shares[largest]:.0%}"
    )


@dataclass(frozen=True, slots=True)
class _Tier:
    """One place that weights come from: bytes per token and bytes per second."""

    kind: Kind
    name: str
    per_token: float
    rate: float

    @property
    def seconds(self) -> float:
        """Of one token."""
        return self.per_token / self.rate


def _tiers(record: Record, phase: Phase) -> list[_Tier]:
    """Where weights come from that are not all on the device, for a phase in which there were some; else none."""
    here = record.memory_limit_bytes_per_s
    if not here or not (phase.sent_bytes or phase.on_host_bytes):
        return []
    tokens = phase.tokens
    rates: tuple[tuple[Kind, str, int, float | None], ...] = (
        ("memory-bound", "device memory", phase.weight_bytes - phase.on_host_bytes, here),
        ("memory-bound", "RAM", phase.on_host_bytes, record.host_memory_bytes_per_s),
        ("link-bound", "RAM to device", phase.sent_bytes, record.link_bytes_per_s),
    )
    if any(nbytes and not rate for _, _, nbytes, rate in rates):
        return []
    tiers = [_Tier(kind, name, nbytes / tokens, rate) for kind, name, nbytes, rate in rates if nbytes > 0 and rate]
    if phase.read_bytes and phase.read_bytes_per_s:
        tiers.append(_Tier("disk-bound", "disk", phase.needed_read_bytes_per_token, phase.read_bytes_per_s))
    return tiers


def _slowest(phase: Phase, name: str, tiers: list[_Tier]) -> Verdict:
    """The ceiling is the slowest tier's: what the others do can hide behind it."""
    slowest = max(tiers, key=lambda tier: tier.seconds)
    parts = ", ".join(f"{t.name} {t.rate / 1e9:.2f} GB/s for {t.per_token / 1e6:.1f} MB" for t in tiers)
    text = (
        f"{slowest.kind}: per token of {name} {parts} -> ceiling {1 / slowest.seconds:.1f} tok/s by {slowest.name},"
        f" got {phase.tokens_per_s:.1f}"
    )
    return Verdict(slowest.kind, text)


def _disk(record: Record, phase: Phase, name: str, wait: float) -> str:
    readers = record.readers
    text = f"disk-bound: {wait:.0%} of {name} waits for reads"
    rate, bound = phase.read_bytes_per_s, ""
    if not rate and phase.read_service_s and readers:
        rate, bound = phase.read_bytes * readers / phase.read_service_s, "at most "
    needed = phase.needed_read_bytes_per_token
    if rate and needed:
        ceiling = rate / needed
        text += (
            f"; disk {bound}{rate / 1e9:.2f} GB/s, {needed / 1e6:.1f} MB per token"
            f" -> ceiling {ceiling:.1f} tok/s, got {phase.tokens_per_s:.1f}"
        )
    cold = phase.cold_read_bytes
    if cold is not None and cold < phase.read_bytes / 2:
        text += f"; {1 - cold / phase.read_bytes:.0%} of the bytes were in the system's page cache, not on the disk"
    if phase.hit_rate >= LOW_HIT_RATE:
        return f"{text}; hit rate {phase.hit_rate:.1%}: a faster disk would help most"
    return f"{text}; hit rate {phase.hit_rate:.1%}: {_more_memory(record, phase)}"


def _more_memory(record: Record, phase: Phase) -> str:
    """What more memory would give: the smallest power of two of GB that makes the phase 1.25 times as fast, or all.

    The experts that are read are taken to be wanted equally often, so misses fall with their number on disk.
    """
    memory = record.memory
    missing = memory.all_expert_bytes - memory.resident_expert_bytes
    if missing <= 0 or not memory.resident_expert_bytes:
        return "more memory (--ram) would help most"
    extra = 1e9
    while extra < missing and _speed_with(phase, extra / missing) < WORTH_IT * phase.tokens_per_s:
        extra *= 2
    if extra >= missing:
        most = format_rate(_speed_with(phase, 1.0))
        return f"{missing / 1e9:.1f} GB more RAM would hold all experts and give about {most}"
    return f"{extra / 1e9:.0f} GB more RAM would give about {format_rate(_speed_with(phase, extra / missing))}"


def _speed_with(phase: Phase, part: float) -> float:
    """Tokens per second when this part of what is on disk were in memory."""
    return phase.tokens / (phase.wall_s - part * phase.read_wait_s)


def _weights(record: Record, phase: Phase, name: str, share: float) -> Verdict:
    limit = record.memory_limit_bytes_per_s
    seconds = sum(phase.seconds.get(part, 0.0) for part in WEIGHT_CLASSES)
    if not limit or not phase.weight_bytes or not seconds:
        text = f"compute-bound: {share:.0%} of {name} multiplies weights; memory's limit was not measured in this run"
        return Verdict("compute-bound", text)
    rate = phase.weight_bytes / seconds
    per_token = phase.weight_bytes / phase.tokens
    kind: Kind = "memory-bound" if rate >= MEMORY_PART * limit else "compute-bound"
    text = (
        f"{kind}: {share:.0%} of {name} multiplies weights, at {rate / 1e9:.1f} of memory's {limit / 1e9:.1f} GB/s;"
        f" {per_token / 1e6:.1f} MB per token -> ceiling {limit / per_token:.1f} tok/s, got {phase.tokens_per_s:.1f}"
    )
    return Verdict(kind, text)
