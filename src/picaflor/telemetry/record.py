"""One run's figures: counted once, where they arise; everything else is derived here.

Must not know who counts or who prints. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from picaflor.telemetry.names import TIME_CLASSES


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of 100 of the values do not exceed (nearest rank); 0 of none."""
    if not values:
        return 0.0
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[max(rank, 1) - 1]


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0


def _measured(top: float, bottom: float) -> float | None:
    """A rate, or None where there is nothing to divide by."""
    return top / bottom if bottom else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Prefill or decode: tokens, time and expert traffic.

    `seconds` has classes of `names.TIME_CLASSES` only, exclusive of each other. `step_s` is the time of each forward
    pass. `read_service_s` sums over readers, `read_busy_s` is wall time with a read under way, 0 where nobody measured
    it. `hits_device` were in the memory of a device that computes, `on_host` of the others were computed by the CPU
    beside it, `sent` went to the device, to be computed or to stay there. `joined` counts experts whose read was under
    way already when they were wanted, `prefetch_late` those of them that were read ahead; `wasted_bytes` is the part of
    `read_bytes` that was read ahead for nothing. `storage_bytes` is what the system fetched from storage meanwhile, for
    whatever purpose; None where it does not tell.
    """

    tokens: int = 0
    wall_s: float = 0.0
    step_s: tuple[float, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    hits_pinned: int = 0
    hits_lru: int = 0
    hits_prefetched: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    wasted_bytes: int = 0
    hits_device: int = 0
    on_host: int = 0
    on_host_bytes: int = 0
    sent: int = 0
    sent_bytes: int = 0
    joined: int = 0
    loads: int = 0
    read_bytes: int = 0
    read_service_s: float = 0.0
    read_busy_s: float = 0.0
    weight_bytes: int = 0
    storage_bytes: int | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.seconds) - set(TIME_CLASSES))
        if unknown:
            raise ValueError(f"time class {unknown[0]} is not one of {', '.join(TIME_CLASSES)}")

    @property
    def tokens_per_s(self) -> float:
        return _ratio(self.tokens, self.wall_s)

    @property
    def wanted(self) -> int:
        """Experts that were asked for."""
        return self.hits + self.joined + self.loads

    @property
    def hits(self) -> int:
        """Experts that were there when they were asked for."""
        return self.hits_pinned + self.hits_lru + self.hits_prefetched + self.hits_device

    @property
    def hit_rate(self) -> float:
        return _ratio(self.hits, self.wanted)

    @property
    def cold_read_bytes(self) -> int | None:
        """Bytes of experts that came from storage; None where the system does not tell. Never more than were read."""
        return None if self.storage_bytes is None else min(self.storage_bytes, self.read_bytes)

    @property
    def read_bytes_per_token(self) -> float:
        return _ratio(self.read_bytes, self.tokens)

    @property
    def needed_read_bytes_per_token(self) -> float:
        """Without what was read ahead for nothing."""
        return _ratio(self.read_bytes - self.wasted_bytes, self.tokens)

    @property
    def read_bytes_per_s(self) -> float:
        return _ratio(self.read_bytes, self.read_busy_s)

    @property
    def read_wait_s(self) -> float:
        return self.seconds.get("read_wait", 0.0)

    def shares(self) -> dict[str, float]:
        """Parts of the time by class, `other` being what no class claimed; they add to 1, or all are 0."""
        claimed = {name: max(self.seconds.get(name, 0.0), 0.0) for name in TIME_CLASSES}
        total = max(self.wall_s, sum(claimed.values()))
        shares = {name: _ratio(seconds, total) for name, seconds in claimed.items()}
        shares["other"] = max(1.0 - sum(shares.values()), 0.0) if total else 0.0
        return shares

    def to_json(self, *, moe_layers: int) -> dict[str, Any]:
        """All figures, counted and derived, by the names of names.py; None for what was not measured."""
        timed = bool(self.step_s)
        wanted_per_token = _measured(self.wanted, self.tokens)
        loads_per_token = _measured(self.loads, self.tokens)
        cold = self.cold_read_bytes
        shares = self.shares()
        return {
            "tokens": self.tokens,
            "wall_s": self.wall_s or None,
            "tokens_per_s": _measured(self.tokens, self.wall_s),
            "steps": len(self.step_s) if timed or not self.tokens else None,
            "step_p50_s": percentile(self.step_s, 50) if timed else None,
            "step_p90_s": percentile(self.step_s, 90) if timed else None,
            "step_p99_s": percentile(self.step_s, 99) if timed else None,
            "step_max_s": max(self.step_s) if timed else None,
            "hits_pinned": self.hits_pinned,
            "hits_lru": self.hits_lru,
            "hits_prefetched": self.hits_prefetched,
            "hits_device": self.hits_device,
            "on_host": self.on_host,
            "on_host_bytes": self.on_host_bytes,
            "sent": self.sent,
            "sent_bytes": self.sent_bytes,
            "prefetch_late": self.prefetch_late,
            "prefetch_wasted": self.prefetch_wasted,
            "wasted_bytes": self.wasted_bytes,
            "joined": self.joined,
            "loads": self.loads,
            "hit_rate": self.hit_rate if self.wanted else None,
            "wanted_per_token": wanted_per_token,
            "wanted_per_layer": None if wanted_per_token is None else _measured(wanted_per_token, moe_layers),
            "loads_per_token": loads_per_token,
            "loads_per_layer": None if loads_per_token is None else _measured(loads_per_token, moe_layers),
            "read_bytes": self.read_bytes,
            "read_bytes_per_token": _measured(self.read_bytes, self.tokens),
            "read_service_s": self.read_service_s,
            "read_busy_s": self.read_busy_s if self.read_busy_s or not self.read_bytes else None,
            "read_bytes_per_s": _measured(self.read_bytes, self.read_busy_s),
            "read_bytes_per_s_per_reader": _measured(self.read_bytes, self.read_service_s),
            "reads_at_once": _measured(self.read_service_s, self.read_busy_s),
            "read_busy_share": _measured(self.read_busy_s, self.wall_s),
            "cold_read_bytes": cold,
            "warm_read_bytes": None if cold is None else self.read_bytes - cold,
            "read_wait_s": self.read_wait_s,
            "weight_bytes": self.weight_bytes if self.weight_bytes or not self.tokens else None,
            "shares": shares if any(shares.values()) else dict.fromkeys(shares),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory at the end of the run; None where the system does not tell, or where no budget was granted."""

    budget_bytes: int | None = None
    budget_source: str | None = None
    anonymous_bytes: int | None = None
    locked_bytes: int | None = None
    mapped_bytes: int | None = None
    peak_resident_bytes: int | None = None
    resident_experts: int = 0
    resident_expert_bytes: int = 0
    pinned_experts: int = 0
    all_experts: int = 0
    all_expert_bytes: int = 0
    expert_slots: int = 0
    device_experts: int = 0

    def to_json(self) -> dict[str, int | str | None]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run. `kernels` and `fallbacks` count calls by name (`backend.op.format.isa`)."""

    model: str
    description: str = ""
    parameters: int = 0
    backend: str = "cpu"
    isa: str = ""
    precision: str = "standard"
    threads: int = 1
    threads_source: str = ""
    context: int = 0
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    finish_reason: str = ""
    load_s: float = 0.0
    first_token_s: float = 0.0
    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)
    memory: Memory = field(default_factory=Memory)
    moe_layers: int = 0
    experts_per_token: int = 0
    readers: int = 0
    prefetch: str = ""
    physical_read_bytes: int | None = None
    memory_limit_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    host_memory_bytes_per_s: float | None = None
    kernels: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    lossy: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All figures by the names of names.py, None for what was not measured; report.py adds the verdict."""
        plain = {
            name: getattr(self, name)
            for name in self.__slots__
            if name not in ("prefill", "decode", "memory", "kernels", "fallbacks", "lossy", "warnings", "devices")
        }
        return {
            **plain,
            "load_s": self.load_s or None,
            "first_token_s": self.first_token_s or None,
            "prefill": self.prefill.to_json(moe_layers=self.moe_layers),
            "decode": self.decode.to_json(moe_layers=self.moe_layers),
            "memory": self.memory.to_json(),
            "kernels": dict(self.kernels),
            "fallbacks": dict(self.fallbacks),
            "lossy": list(self.lossy),
            "warnings": list(self.warnings),
            "devices": list(self.devices),
        }
