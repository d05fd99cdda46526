"""Drawing tokens in Triton: from rows of logits on the device to numbers of tokens, those that the CPU draws.

Knows rows of logits and how tokens are drawn; must not know models or recorders. docs/design/contracts.md has the rule:
weights count as whole numbers, whose sums are the same in any order; native/cpu/ops_choose.cpp has it for the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from picaflor.backends.api import NO_TOKEN, Chance, draw_rows
from picaflor.backends.cuda.arithmetic import EXACT, exp, rank
from picaflor.backends.cuda.memory import all_given
from picaflor.backends.cuda.rows import Tensor, columns
from picaflor.backends.device import sample_on_host
from picaflor.backends.programs import DeviceFailed, Guard
from picaflor.backends.table import NO_FORMAT, CapabilityTable, Cell
from picaflor.formats.base import F32

MOST_TOKENS: Final = 1 << 20
"""Sums of so many weights fit 62 bits."""
BLOCK: Final = 1024
"""Tokens of one program where a row is spread over many."""
BINS: Final = 2048 + 512 + 512
"""Sums of weights by the first 11 bits of their keys, then by the next 9 and the last 9."""

_SCALE = tl.constexpr(4398046511104.0)  # 2^42
_ONE = tl.constexpr(0x3F800000)  # bits of the smallest weight that is not 0, as a float


@triton.jit
def _best(logits, logits_row, best, finite, bins, n, blocks, B: tl.constexpr):
    # Per block the largest logit and the largest finite one: rank, then the lower token; -1 where there is none.
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * B + tl.arange(0, B)
    real = token < n
    x = tl.load(logits + row * logits_row + token, mask=real, other=0.0)
    order = tl.where(real, rank(x) * 2147483648 + (2147483647 - token), -1)
    tl.store(best + row * blocks + block, tl.max(order, axis=0))
    tl.store(finite + row * blocks + block, tl.max(tl.where(x - x == 0.0, order, -1), axis=0))
    if block == 0:
        zeros = tl.zeros((512,), tl.int64)
        for i in tl.static_range(6):
            tl.store(bins + row * 3072 + i * 512 + tl.arange(0, 512), zeros)


@triton.jit
def _largest(orders, blocks, BLOCKS: tl.constexpr):
    at = tl.arange(0, BLOCKS)
    return tl.max(tl.load(orders + at, mask=at < blocks, other=-1), axis=0)


@triton.jit
def _token_of(order):
    return 2147483647 - (order & 2147483647)


@triton.jit
def _key(weight):
    """29 bits in the order of the weights, which are whole numbers: 0 for 0."""
    bits = weight.to(tl.int32, bitcast=True)
    return tl.where(bits >= _ONE, bits - (_ONE - 1), 0)


@triton.jit
def _weigh(logits, logits_row, finite, chances, weights, sums, bins, n, blocks, B: tl.constexpr, BLOCKS: tl.constexpr):
    # Weights as whole numbers in float32, their sum per block, and by the first bits of their keys. Sums of a row are
    # 0 if it is greedy, or colder than floats can say, or without a finite logit.
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature = tl.load(chances + row * 3).to(tl.float32)
    order = _largest(finite + row * blocks, blocks, BLOCKS)
    total = tl.full((), 0, tl.int64)
    if (temperature > 0.0) & (order >= 0):
        top = tl.div_rn(tl.load(logits + row * logits_row + _token_of(order)), temperature)
        if top - top == 0.0:
            token = block * B + tl.arange(0, B)
            x = tl.load(logits + row * logits_row + token, mask=token < n, other=float("-inf"))
            weight = tl.where(x - x == 0.0, exp(tl.div_rn(x, temperature) - top), 0.0)
            count = (weight * _SCALE).to(tl.int64)
            whole = count.to(tl.float32)
            tl.store(weights + row * n + token, whole, mask=token < n)
            total = tl.sum(count, axis=0)
            if tl.load(chances + row * 3 + 1) < 1.0:
                tl.atomic_add(bins + row * 3072 + (_key(whole) >> 18), count, mask=count > 0, sem="relaxed")
    tl.store(sums + row * blocks + block, total)


@triton.jit
def _sum(sums, blocks, BLOCKS: tl.constexpr):
    at = tl.arange(0, BLOCKS)
    return tl.sum(tl.load(sums + at, mask=at < blocks, other=0), axis=0)


@triton.jit
def _crossing(bins, above, needed, N: tl.constexpr):
    """The last of N bins from which on, with `above`, the sums reach `needed`; and `above` with all bins behind it."""
    at = tl.arange(0, N)
    here = tl.load(bins + at)
    behind = above + tl.sum(here, axis=0) - tl.cumsum(here, axis=0)
    chosen = tl.max(tl.where(behind + here >= needed, at, 0), axis=0)
    return chosen, tl.sum(tl.where(at == chosen, behind, 0), axis=0)


@triton.jit
def _cut(bins, needed, LEVELS: tl.constexpr):
    """The first 11, 20 or 29 bits of the key at which the largest weights reach `needed`; the sum of those above it."""
    prefix, above = _crossing(bins, tl.full((), 0, tl.int64), needed, 2048)
    if LEVELS >= 2:
        second, above = _crossing(bins + 2048, above, needed, 512)
        prefix = prefix * 512 + second
    if LEVELS >= 3:
        third, above = _crossing(bins + 2560, above, needed, 512)
        prefix = prefix * 512 + third
    return prefix, above


@triton.jit
def _needed(top_p, mass):
    """The whole number that the kept weights must reach; at most the sum, as top_p is below 1."""
    wanted = top_p * mass.to(tl.float64)
    needed = wanted.to(tl.int64)
    needed += (needed.to(tl.float64) < wanted).to(tl.int64)
    return tl.maximum(needed, 1)


@triton.jit
def _refine(chances, weights, sums, bins, n, blocks, SHIFT: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr):
    # Sums by the next 9 bits of the weights whose keys begin as that of the least one that is kept.
    row = tl.program_id(0).to(tl.int64)
    mass = _sum(sums + row * blocks, blocks, BLOCKS)
    top_p = tl.load(chances + row * 3 + 1)
    if (mass > 0) & (top_p < 1.0):
        mine = bins + row * 3072
        prefix, _ = _cut(mine, _needed(top_p, mass), 1 if SHIFT == 9 else 2)
        token = tl.program_id(1) * C + tl.arange(0, C)
        weight = tl.load(weights + row * n + token, mask=token < n, other=0.0)
        key = _key(weight)
        inside = ((key >> (SHIFT + 9)) == prefix) & (key > 0)
        next_bins = mine + (2048 if SHIFT == 9 else 2560)
        tl.atomic_add(next_bins + ((key >> SHIFT) & 511), weight.to(tl.int64), mask=inside, sem="relaxed")


@triton.jit
def _weight_of(key):
    return (key + (_ONE - 1)).to(tl.int32).to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def _keep(chances, weights, sums, bins, parts, kept, n, blocks, pieces, C: tl.constexpr, BLOCKS: tl.constexpr):
    # Per piece the sum of the weights above the least key that is kept, and how many have that very key. Per row that
    # key, how many of it are kept, and the sum that the token's is to exceed.
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    mass = _sum(sums + row * blocks, blocks, BLOCKS)
    if mass > 0:
        least = 0
        ties = tl.full((), 0, tl.int64)
        top_p = tl.load(chances + row * 3 + 1)
        if top_p < 1.0:
            needed = _needed(top_p, mass)
            least, above = _cut(bins + row * 3072, needed, 3)
            tied = _weight_of(least)
            ties = (needed - above + tied - 1) // tied
            mass = above + ties * tied
        token = piece * C + tl.arange(0, C)
        weight = tl.load(weights + row * n + token, mask=token < n, other=0.0)
        key = _key(weight)
        at = parts + row * pieces * 2 + piece
        tl.store(at, tl.sum(tl.where(key > least, weight, 0.0).to(tl.int64), axis=0))
        tl.store(at + pieces, tl.sum(((key == least) & (key > 0)).to(tl.int64), axis=0))
        if piece == 0:
            uniform = tl.load(chances + row * 3 + 2)
            tl.store(kept + row * 3, least)
            tl.store(kept + row * 3 + 1, ties)
            tl.store(kept + row * 3 + 2, tl.minimum((uniform * mass.to(tl.float64)).to(tl.int64), mass - 1))


@triton.jit
def _pick(weights, parts, least, ties, passed, n, pieces, PIECES: tl.constexpr, C: tl.constexpr):
    """The first token at which the sum of kept weights is above `passed`."""
    tied = _weight_of(least)
    at = tl.arange(0, PIECES)
    over = tl.load(parts + at, mask=at < pieces, other=0)
    same = tl.load(parts + pieces + at, mask=at < pieces, other=0)
    equal = tl.cumsum(same, axis=0) - same
    mass = over + tl.minimum(tl.maximum(ties - equal, 0), same) * tied
    reached = tl.cumsum(mass, axis=0)
    piece = tl.min(tl.where(reached > passed, at, 2147483647), axis=0)
    before = tl.sum(tl.where(at == piece, reached - mass, 0), axis=0)
    equal_before = tl.sum(tl.where(at == piece, equal, 0), axis=0)
    token = piece * C + tl.arange(0, C)
    weight = tl.load(weights + token, mask=token < n, other=0.0)
    key = _key(weight).to(tl.int64)
    same_here = ((key == least) & (key > 0)).to(tl.int64)
    turn = equal_before + tl.cumsum(same_here, axis=0)
    keep = (key > least) | ((same_here > 0) & (turn <= ties))
    total = before + tl.cumsum(tl.where(keep, weight, 0.0).to(tl.int64), axis=0)
    return tl.min(tl.where(keep & (total > passed), token, 2147483647), axis=0)


@triton.jit
def _choose(best, finite, chances, weights, sums, parts, kept, out, n, blocks, pieces, BLOCKS: tl.constexpr,
            PIECES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(chances + row * 3).to(tl.float32)
    order = _largest(finite + row * blocks, blocks, BLOCKS)
    token = 0
    if temperature <= 0.0:
        token = _token_of(_largest(best + row * blocks, blocks, BLOCKS)).to(tl.int32)
    elif order >= 0:
        token = _token_of(order).to(tl.int32)  # colder than floats can say: greedy
        if _sum(sums + row * blocks, blocks, BLOCKS) > 0:
            at = kept + row * 3
            token = _pick(weights + row * n, parts + row * pieces * 2, tl.load(at), tl.load(at + 1), tl.load(at + 2),
                          n, pieces, PIECES, C)  # fmt: skip
    tl.store(out + row * 2, token)
    tl.store(out + row * 2 + 1, (order >= 0).to(tl.int32))


class Drawer:
    """Draws one token per row on one device; its memory there is kept for the next rows."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._real = device.type != "cpu"
        self._scratch: dict[str, Tensor] = {}

    def __call__(self, logits: Tensor, chances: Sequence[Chance]) -> NDArray[np.int32]:
        """int32 `[rows, 2]` from float32 logits `[rows, vocabulary]` of the device: the token, as `Backend.sample` has
        it, and whether any logit is finite. Waits once, for the result. Raises ValueError for too long a row."""
        found = self.launch(logits, chances)
        if self._real:
            torch.cuda.current_stream(self._device).synchronize()
        tokens: NDArray[np.int32] = found.numpy().copy()
        return tokens

    def launch(self, logits: Tensor, chances: Sequence[Chance]) -> Tensor:
        """Where the result will be on the host when the device has done all that it was given."""
        rows, n = logits.shape
        if n > MOST_TOKENS:
            raise ValueError(f"a row of {n} logits; accepted: up to {MOST_TOKENS}")
        blocks, piece = triton.cdiv(n, BLOCK), columns(n, most=4096)
        pieces = triton.cdiv(n, piece)
        table = self._kept("host chances", (rows, 3), torch.float64, host=True)
        table.numpy()[:] = [[np.float32(chance.temperature), chance.top_p, chance.uniform] for chance in chances]
        given = self._kept("chances", (rows, 3), torch.float64)
        given.copy_(table, non_blocking=True)
        best, finite, sums = (self._kept(name, (rows, blocks), torch.int64) for name in ("best", "finite", "sums"))
        bins = self._kept("bins", (rows, BINS), torch.int64)
        out = self._kept("out", (rows, 2), torch.int32)
        parts, kept = self._kept("parts", (rows, 2 * pieces), torch.int64), self._kept("kept", (rows, 3), torch.int64)
        drawn = any(chance.temperature > 0 for chance in chances)
        weights = self._kept("weights", (rows, n), torch.float32) if drawn else logits
        wide: dict[str, Any] = {"BLOCKS": triton.next_power_of_2(blocks), **EXACT}
        grid, cut = (rows, blocks), (rows, pieces)
        _best[grid](logits, logits.stride(0), best, finite, bins, n, blocks, B=BLOCK, num_warps=4, **EXACT)
        if drawn:
            _weigh[grid](logits, logits.stride(0), finite, given, weights, sums, bins, n, blocks, B=BLOCK, num_warps=4,
                         **wide)  # fmt: skip
            if any(chance.top_p < 1 for chance in chances):
                for shift in (9, 0):
                    _refine[cut](given, weights, sums, bins, n, blocks, SHIFT=shift, C=piece, num_warps=8, **wide)
            _keep[cut](given, weights, sums, bins, parts, kept, n, blocks, pieces, C=piece, num_warps=8, **wide)
        _choose[(rows,)](best, finite, given, weights, sums, parts, kept, out, n, blocks, pieces, C=piece,
                         PIECES=triton.next_power_of_2(pieces), num_warps=16, **wide)  # fmt: skip
        found = self._kept("host out", (rows, 2), torch.int32, host=True)
        found.copy_(out, non_blocking=True)
        return found

    def _kept(self, name: str, shape: tuple[int, int], dtype: Any, *, host: bool = False) -> Tensor:
        """Memory of this shape, from what is there where it is large enough."""
        size = shape[0] * shape[1]
        kept = self._scratch.get(name)
        if kept is None or kept.numel() < size:
            where: dict[str, Any] = {"pin_memory": self._real} if host else {"device": self._device}
            kept = self._scratch[name] = torch.empty(size, dtype=dtype, **where)
        return kept[:size].view(shape)


class Drawing:
    """Tokens from logits of one device; on the host where the device may not draw or a call of it is to fail."""

    def __init__(self, device: Any, *, table: CapabilityTable, backend: str, guard: Guard) -> None:
        self._drawer = Drawer(device)
        self._device = device
        self._table = table
        self._backend = backend
        self._guard = guard
        self._cell: Cell | None = None

    def require(self) -> None:
        """Before a first token is drawn: raises UnsupportedKernel where none may be."""
        self._table.require("sample", NO_FORMAT, self._backend)

    def __call__(self, logits: Tensor, chances: Sequence[Chance]) -> list[int]:
        """One token from each row `[rows, vocabulary]`; NO_TOKEN where none of a row is finite. Raises OutOfBudget."""
        found = self._drawn(logits, chances)
        if found is None:
            return self.on_host(logits.cpu().numpy(), chances)
        return [token if finite else NO_TOKEN for token, finite in found.tolist()]

    def sample(self, logits: F32, *, temperature: float, top_p: float, uniform: float) -> int:
        """`Backend.sample` of logits on the host."""
        row = np.ascontiguousarray(logits, dtype=np.float32)
        found = self._drawn(torch.from_numpy(row)[None].to(self._device), [Chance(temperature, top_p, uniform)])
        if found is None:
            return sample_on_host(row, temperature=temperature, top_p=top_p, uniform=uniform)
        return int(found[0, 0])

    @staticmethod
    def on_host(logits: F32, chances: Sequence[Chance]) -> list[int]:
        """The same from rows that the host has."""
        return draw_rows(logits, chances, sample_on_host)

    def _drawn(self, logits: Tensor, chances: Sequence[Chance]) -> NDArray[np.int32] | None:
        """What the device draws; None where the host is to draw."""
        if self._cell is None:
            self._cell = self._table.select("sample", NO_FORMAT, self._backend)
            self._table.announce()
        if self._cell.backend != self._backend:
            return None
        try:
            with all_given():
                self._guard.allowed("sample")
                return self._drawer(logits, chances)
        except DeviceFailed as failure:
            self._guard.failed(failure)
            return None
