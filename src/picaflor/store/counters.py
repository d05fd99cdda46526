"""What the store counts, per layer. Telemetry reads it; nothing else counts these things.

Knows numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LayerCounters:
    """Sums over the requests of one layer.

    Every requested expert is counted once as `pinned` (all experts of the layer are resident for good), `lru` (it was
    in a slot), `prefetched` (it was read ahead in time), `joined` (its read was running already; `late` of them were
    read ahead) or `loaded` (its read was started). `wasted` were read ahead and not asked for. `read_bytes` and
    `service_s` (seconds that read threads spent, summed over threads) include failed and wasted reads. `wait_s` is the
    time that requests waited for reads.
    """

    requests: int = 0
    pinned: int = 0
    lru: int = 0
    prefetched: int = 0
    joined: int = 0
    late: int = 0
    loaded: int = 0
    reads: int = 0
    failed: int = 0
    evicted: int = 0
    wasted: int = 0
    wasted_bytes: int = 0
    read_bytes: int = 0
    service_s: float = 0.0
    wait_s: float = 0.0

    @property
    def hits(self) -> int:
        """Experts that were there when they were asked for."""
        return self.pinned + self.lru + self.prefetched

    @property
    def asked(self) -> int:
        """Experts that were asked for."""
        return self.hits + self.joined + self.loaded


@dataclass(slots=True)
class StoreCounters:
    """Counters by layer number. `preload_bytes` and `preload_s` (wall time) are not part of the layers' sums."""

    layers: dict[int, LayerCounters] = field(default_factory=dict)
    preload_bytes: int = 0
    preload_s: float = 0.0

    def total(self) -> LayerCounters:
        """The sum over layers."""
        total = LayerCounters()
        for layer in self.layers.values():
            for name in LayerCounters.__dataclass_fields__:
                setattr(total, name, getattr(total, name) + getattr(layer, name))
        return total

    def reset(self) -> None:
        """Start again from zero, in place: whoever holds the objects keeps them."""
        for layer in self.layers.values():
            for name, entry in LayerCounters.__dataclass_fields__.items():
                setattr(layer, name, entry.default)
        self.preload_bytes = 0
        self.preload_s = 0.0
