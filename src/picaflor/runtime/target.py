"""The device that a plan is for: the one that is here, asked without a weight, or one of a given size that is not.

Knows what backends tell of their devices; must not know models or where weights lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from picaflor.device_memory import DeviceMemory
from picaflor.errors import UnsupportedKernel
from picaflor.runtime import plan as planning
from picaflor.runtime.plan import EngineOptions
from picaflor.sizes import format_bytes

ASSUMED_BYTES_PER_S: Final = 936e9
"""Of a device that is not here: what the data sheet of an RTX 3090 says of its memory."""


@dataclass(frozen=True, slots=True)
class Target:
    """A device. `bytes_per_s`: its memory's rate; `vram`: so many bytes may be used, None for the usual part of what is
    free; `said`: where the numbers come from."""

    memory: DeviceMemory
    bytes_per_s: float
    vram: int | None
    said: str

    def doubled(self) -> Target:
        """With twice the memory."""
        memory = replace(self.memory, free=2 * self.memory.free, total=2 * self.memory.total)
        return replace(self, memory=memory, vram=None if self.vram is None else 2 * self.vram)


def not_here(vram: int, why: str) -> Target:
    """A device with `vram` bytes for us."""
    said = f"an estimate for a device that is not here ({why}), whose memory is taken to give"
    rate = f"{ASSUMED_BYTES_PER_S / 1e9:.0f} GB/s"
    return Target(DeviceMemory("a device", vram, vram), ASSUMED_BYTES_PER_S, vram, f"{said} {rate}")


def find_target(backend: str, options: EngineOptions, notice: Callable[[str], None]) -> Target:
    """The device of a backend, its free memory and its rate measured now; one of `--vram` where there is none, or none
    so large. Raises UnsupportedKernel with the reason where there is neither."""
    vram = options.vram_bytes
    try:
        opened: Any = planning.load_backend(replace(options, backend=backend, device="auto"), notice)
        memory: DeviceMemory | None = opened.memory()
        if memory is None:
            raise UnsupportedKernel(f"backend {backend}: the {opened.isa} has no memory of its own")
        if getattr(opened, "shares_memory", False):
            raise UnsupportedKernel(
                f"backend {backend}: {memory.name} shares the host's memory, no plan is made for it"
            )
    except UnsupportedKernel as error:
        if vram is None:
            raise UnsupportedKernel(f"{error}; --vram SIZE plans for a device that is not here") from error
        return not_here(vram, str(error))
    if vram is not None and vram > memory.total:
        return not_here(vram, f"{memory.name} has {format_bytes(memory.total)}")
    return Target(memory, opened.measure_rates().memory, vram, "measured now")
