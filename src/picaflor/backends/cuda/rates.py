"""How fast a device's memory is read and how fast the host's memory gets there, measured in the running process.

Knows plain copies; must not know weights or experts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from picaflor.backends.api import DeviceRates

DEVICE_BYTES: Final = 256 << 20
"""Copied within the device: several times what its caches hold."""
LINK_BYTES: Final = 32 << 20
HOST_BYTES: Final = 1 << 20
"""Both, where the host plays the device."""
REPEATS: Final = 5


def measure(device: Any) -> DeviceRates:
    """Medians of plain copies. Within the device bytes count when they are read and when they are written."""
    real = device.type != "cpu"
    source = torch.zeros(DEVICE_BYTES if real else HOST_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.zeros(LINK_BYTES if real else HOST_BYTES, dtype=torch.uint8, pin_memory=real)
    within = _seconds(device, lambda: target.copy_(source))
    there = _seconds(device, lambda: target[: len(host)].copy_(host, non_blocking=True))
    return DeviceRates(2 * len(source) / within, len(host) / there)


def _seconds(device: Any, call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        if device.type == "cpu":
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return max(statistics.median(times), 1e-9)
