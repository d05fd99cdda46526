"""Routed experts on a device: from the provider's slots on the host to what one call of a layer computes.

Knows layouts, slots and products; must not know families, files or who reads them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from picaflor.backends.api import I32, ExpertLayout, ExpertProvider, MatrixLayout
from picaflor.backends.cuda import rows
from picaflor.backends.cuda.arithmetic import EXACT
from picaflor.backends.cuda.formats import DeviceWeight
from picaflor.backends.cuda.matmul import matmul
from picaflor.backends.cuda.rows import Tensor, columns, tiles
from picaflor.formats import REGISTRY

SLACK_BYTES = 64


@dataclass(frozen=True, slots=True)
class HeldLayer:
    """One layer's experts as they were recorded."""

    layer: int
    layouts: tuple[ExpertLayout, ...]


@triton.jit
def _weighted_sum(products, weights, weights_row, out, out_row, rows, width, TOP: tl.constexpr, R: tl.constexpr,
                  B: tl.constexpr):  # fmt: skip
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    col = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    inside = (row < rows)[:, None] & (col < width)
    acc = tl.zeros((R, B), tl.float32)
    for k in range(0, TOP):
        w = tl.load(weights + row * weights_row + k, mask=row < rows, other=0.0)[:, None]
        y = tl.load(products + (row * TOP + k)[:, None] * width + col, mask=inside, other=0.0)
        acc = tl.fma(w, y, acc)
    tl.store(out + row[:, None] * out_row + col, acc, mask=inside)


class ExpertTier:
    """Experts are copied to the device for each call."""

    def __init__(self, device: Any, precision: str) -> None:
        self._device = device
        self._precision = precision

    def add_layer(self, layer: int, layouts: Sequence[ExpertLayout], *, hidden: int) -> HeldLayer:
        """A layer as it is recorded. Raises ValueError where shapes do not fit."""
        for number, expert in enumerate(layouts):
            inner = expert.gate.rows
            shapes = [(m.rows, m.cols) for m in (expert.gate, expert.up, expert.down)]
            if shapes != [(inner, hidden), (inner, hidden), (hidden, inner)]:
                raise ValueError(f"layer {layer}, expert {number}: gate, up, down are {shapes} for rows of {hidden}")
        return HeldLayer(layer, tuple(layouts))

    def compute(
        self, held: HeldLayer, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, provider: ExpertProvider
    ) -> None:
        """out = sum over k, in routing order, of weights[k] * expert[ids[k]](x)."""
        chosen: I32 = ids.cpu().numpy()
        count, top_k = chosen.shape
        if chosen.min() < 0 or chosen.max() >= len(held.layouts):
            raise ValueError(f"a row chose an expert outside 0 to {len(held.layouts) - 1}: {chosen.tolist()}")
        width = x.shape[1]
        products = torch.empty((count, top_k, width), dtype=torch.float32, device=self._device)
        with provider.acquire(held.layer, np.unique(chosen).astype(np.int32)) as lease:
            for numbers, addresses in lease.batches():
                for number, address in zip(numbers.tolist(), addresses.tolist(), strict=True):
                    slot = self._copied(address, held.layouts[number].nbytes)
                    where = torch.from_numpy(np.argwhere(chosen == number).astype(np.int64)).to(self._device)
                    y = self._expert(held.layouts[number], slot, x[where[:, 0]].contiguous())
                    products[where[:, 0], where[:, 1]] = y
        tile, wide = tiles(), columns(width)
        _weighted_sum[(triton.cdiv(count, tile.rows), triton.cdiv(width, wide))](
            products, weights, weights.stride(0), out, out.stride(0), count, width, TOP=top_k, R=tile.rows, B=wide,
            **EXACT,
        )  # fmt: skip

    def _copied(self, address: int, nbytes: int) -> Tensor:
        host: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        slot = torch.zeros(nbytes + SLACK_BYTES, dtype=torch.uint8, device=self._device)
        slot[:nbytes].copy_(torch.from_numpy(host))
        return slot

    def _expert(self, layout: ExpertLayout, slot: Tensor, x: Tensor) -> Tensor:
        count, inner = x.shape[0], layout.gate.rows
        gate, up = (torch.empty((count, inner), dtype=torch.float32, device=self._device) for _ in range(2))
        y = torch.empty_like(x)
        matmul(x, _placed(layout.gate, slot), gate, self._precision)
        matmul(x, _placed(layout.up, slot), up, self._precision)
        rows.silu_mul(gate, up, gate, rows=count)
        matmul(gate, _placed(layout.down, slot), y, self._precision)
        return y


def _placed(matrix: MatrixLayout, slot: Tensor) -> DeviceWeight:
    sizes = (matrix.rows, matrix.cols, matrix.group_size)
    planes = tuple(
        slot[offset : offset + plane.nbytes(*sizes)]
        for plane, offset in zip(REGISTRY[matrix.format].planes, matrix.offsets, strict=True)
    )
    return DeviceWeight(matrix.format, *sizes, planes)
