"""What a device's memory holds already: its own words, and those for a user whose plan it changes.

Knows sizes only; must not know devices or models, and must not measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from picaflor.sizes import format_bytes

OTHERS_SHARE: Final = 0.1
"""From this part of the memory on, what others hold is worth a word."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a device says of its memory, in bytes; `name` is what its maker calls it."""

    name: str
    free: int
    total: int

    @property
    def held(self) -> int:
        """What others hold."""
        return self.total - self.free

    def others(self) -> str:
        """A sentence on others, where they hold enough of it to change a plan; else empty."""
        if self.held < OTHERS_SHARE * self.total:
            return ""
        size = format_bytes(self.held)
        return f"another program holds {size} of the {format_bytes(self.total)} of {self.name}"

    def notice(self, vram: int | None) -> str:
        """For a run that may use `vram` bytes (None: what is free): a sentence where others leave less; else empty."""
        told = self.others()
        if not told or (vram is not None and vram <= self.free):
            return ""
        if vram is None:
            return f"{told}: experts get what is left of it, {format_bytes(self.free)} are free"
        return f"{told}: --vram {format_bytes(vram)} is more than the {format_bytes(self.free)} that are free"
