"""Kernels that begin while the one before them ends: what it takes to start one is hidden then (NVIDIA, sm_90).

Knows devices and options of launches; must not know what a kernel computes. Such a kernel calls `take_turn` (or
`let_the_next_start` and, behind the loads of what never changes, `wait_for_the_last`) in every program, before it reads
what another kernel wrote and before it writes anything: where a kernel has ended, all before it have, as each of its
programs has waited. What is read earlier must have been there when the last kernel that was launched to start in its
turn began: experts' `_outer` reads the routing early, as `_inner`, right before it, is launched so.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton

from picaflor.backends.cuda import interpret
from picaflor.backends.cuda.arithmetic import EXACT
from picaflor.backends.cuda.vectors import let_the_next_start, wait_for_the_last


@triton.jit
def take_turn():
    """Lets the next kernel start, and waits for the one before."""
    let_the_next_start()
    wait_for_the_last()


def overlaps() -> bool:
    """Whether kernels overlap on the current device: where that was run and compared, which is sm_90."""
    return not interpret.active() and torch.version.hip is None and _overlaps(torch.cuda.current_device())


@lru_cache(maxsize=64)
def _overlaps(device: int) -> bool:
    return bool(torch.cuda.get_device_capability(device) == (9, 0))


def chained() -> dict[str, Any]:
    """Options of a launch whose kernel has `OVERLAP`."""
    return {**EXACT, "OVERLAP": True, "launch_pdl": True} if overlaps() else EXACT
