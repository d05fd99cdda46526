"""The next layer's router applied early on a device: which experts it will probably choose.

Knows the router's matrix and both layers' norms; must not know who reads experts. What it says changes reads, never a
number. The same as backends/cpu/early.py, over rows that are on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from picaflor.backends.api import I32, RouterSpec
from picaflor.backends.cpu.early import likeliest
from picaflor.backends.cuda.matmul import matmul
from picaflor.backends.cuda.rows import Tensor
from picaflor.backends.cuda.weights import HeldMatrix
from picaflor.formats.base import F32


@dataclass(frozen=True, slots=True)
class RouterInputs:
    """What makes a layer's choice: its router's matrix and bias, and the norm whose output both multiply."""

    weight: HeldMatrix
    norm: Tensor
    bias: Tensor | None
    spec: RouterSpec


class EarlyRouter:
    """The router of the next call of experts, that of `layer`, applied to the input of the router `here`."""

    def __init__(self, here: RouterInputs, there: RouterInputs, *, layer: int, precision: str) -> None:
        self.layer = layer
        self._here = here
        self._there = there
        self._precision = precision
        self._ratio: Tensor = None
        self._bias: NDArray[np.float32] | None = None

    @property
    def experts(self) -> int:
        """How many the router chooses from."""
        return self._there.spec.experts

    def logits(self, x: Tensor) -> Tensor:
        """The router's `[rows, experts]` for the rows of x `[rows, hidden]`, on the device."""
        if self._ratio is None:
            here, there = self._here.norm, self._there.norm
            self._ratio = torch.where(here != 0, there / here, torch.zeros_like(there))
            self._bias = None if self._there.bias is None else self._there.bias.cpu().numpy()
        logits = torch.empty((x.shape[0], self.experts), dtype=torch.float32, device=x.device)
        matmul(x * self._ratio, self._there.weight.device, logits, self._precision)
        return logits

    def likely(self, logits: F32) -> I32:
        """Ids from those logits on the host, the likeliest first."""
        return likeliest(logits, self._bias, self._there.spec)
