"""Where a model's weights would lie with a device: in its memory, in the host's, on disk.

Knows sizes only; must not know devices, files or formats, and must not measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from picaflor.device_memory import DeviceMemory
from picaflor.errors import OutOfBudget
from picaflor.sizes import format_bytes
from picaflor.store.budget import Item

SHARE: Final = 0.92
"""Part of the free memory of a device that is used where `--vram` does not say."""
SCRATCH_BYTES: Final = 1 << 29
"""For attention's scores and products under way."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`usable` bytes of the device are shared by `needs` first, experts after them. Numbers of experts by place."""

    memory: DeviceMemory
    usable: int
    needs: tuple[Item, ...]
    on_device: int
    in_ram: int
    on_disk: int
    device_bytes: int

    def __str__(self) -> str:
        needs = ", ".join(f"{item.name} {format_bytes(item.nbytes)}" for item in self.needs)
        free, total = format_bytes(self.memory.free), format_bytes(self.memory.total)
        text = f"{self.memory.name}: {free} of {total} free, {format_bytes(self.usable)} usable; {needs}"
        experts = self.on_device + self.in_ram + self.on_disk
        if experts:
            text += f"; of {experts} experts {self.on_device} there ({format_bytes(self.device_bytes)})"
            text += f", {self.in_ram} in RAM, {self.on_disk} on disk" if self.on_device < experts else ", that is all"
        return text


def place(
    memory: DeviceMemory, needs: Sequence[Item], expert_bytes: Sequence[int], *, in_ram: int, vram: int | None = None
) -> Placement:
    """Place experts of these sizes behind what must be on the device; `in_ram` is how many the host can hold.

    `vram`: as many bytes may be used, whatever is free now. A device's experts do not depend on what the host keeps.
    Raises OutOfBudget where the needs alone do not fit.
    """
    items = (*needs, Item("scratch", SCRATCH_BYTES))
    usable = int(memory.free * SHARE) if vram is None else min(vram, memory.total)
    taken = sum(item.nbytes for item in items)
    if taken > usable:
        largest = max(items, key=lambda item: item.nbytes)
        told = memory.others()
        raise OutOfBudget(
            f"{memory.name}: {format_bytes(taken)} are needed before any expert ({largest.name} "
            f"{format_bytes(largest.nbytes)}), {format_bytes(usable)} may be used" + f"; {told}" * bool(told)
            + ": raise --vram, lower --ctx or --prefill-chunk, or leave the device out"
        )  # fmt: skip
    left, on_device, used = usable - taken, 0, 0
    for size in sorted(expert_bytes, reverse=True):
        if used + size > left:
            break
        on_device, used = on_device + 1, used + size
    rest = len(expert_bytes) - on_device
    return Placement(memory, usable, items, on_device, min(in_ram, rest), rest - min(in_ram, rest), used)
