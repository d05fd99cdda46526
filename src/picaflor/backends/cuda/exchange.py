"""A call of experts of few rows of which only some are on the device: the host computes the others meanwhile.

Knows pinned buffers, one event and the order of a call's stages; must not know families, files or who reads experts.
Nothing is sent for computing: rows and choices come to the host, which computes what the device does not have, and the
single results go back. Both compute the same bits, so that it changes no token who computed what.

Stages: `ask` and `give` and `join` launch work on the device only, the same for every step, so that graphs can be
captured of them. The host acts between them: `mark` behind `ask`, `serve` before `join`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

import picaflor._native as _native
from picaflor.backends.api import AheadProvider, ExpertProvider
from picaflor.backends.cpu.backend import PLANES
from picaflor.backends.cpu.early import MOST_ROWS
from picaflor.backends.cpu.experts import Experts
from picaflor.backends.cuda.experts import combine, expert_ffn
from picaflor.backends.cuda.prepare import Prepared
from picaflor.backends.cuda.rows import Tensor
from picaflor.formats.base import F32

if TYPE_CHECKING:
    from picaflor.backends.cuda.slots import HeldLayer
    from picaflor.backends.cuda.tier import ExpertTier

HOST_ROWS: Final = 64
"""Most rows of a step whose missing experts the host computes. It reads an expert about as fast as it could copy it to
pinned memory, so computing is sooner done than sending, until each expert has many rows: with a quarter of glm-mid's
experts on an H200, 16 processors took 54 to 81 ms for steps of 16 to 64 rows; sending took 179 to 284."""


def exchange_bytes(layers: Sequence[HeldLayer]) -> int:
    """Bytes of the host's memory that an exchange and the CPU's operation take for these layers, about."""
    if not layers:
        return 0
    pairs = max(held.top_k * held.hidden for held in layers)
    inner = max(layout.gate.rows * held.top_k for held in layers for layout in held.layouts)
    return HOST_ROWS * (2 * pairs + 3 * inner + 3 * max(held.hidden for held in layers)) * 4


class HostExperts:
    """The CPU's expert operation for up to HOST_ROWS rows. `used(layer, formats)` is told of a layer's first call.

    Nothing is made before the first call.
    """

    def __init__(self, threads: int, precision: str, used: Callable[[int, Sequence[str]], None]) -> None:
        self._threads = threads
        self._planes = PLANES[precision]
        self._used = used
        self._pool: Any = None
        self._made: dict[int, tuple[HeldLayer, Any, int]] = {}
        self._of: dict[tuple[int, int], Experts] = {}
        self._ffn: Any = None

    def begin(self, held: HeldLayer, x: F32, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Start a call for rows of x and their choices, -1 for none: the distinct ones. Both stay until `pairs`."""
        self._ffn, number = self._layer(held)
        found: NDArray[np.int32] = self._ffn.begin(number, x.ctypes.data, x.shape[1], ids.ctypes.data, len(x))
        return found

    def run(self, numbers: NDArray[np.int32], addresses: NDArray[np.uint64]) -> None:
        """Compute experts in slots at these addresses."""
        self._ffn.run(numbers, addresses)

    def pairs(self, out: F32) -> None:
        """Write the single results of what was chosen to out `[rows, top_k, hidden]`, and leave the others alone."""
        self._ffn.pairs(out.ctypes.data)

    def _layer(self, held: HeldLayer) -> tuple[Any, int]:
        known = self._made.get(held.layer)
        if known is None or known[0] is not held:
            if self._pool is None:
                self._pool = _native.Pool(self._threads)
            key = (held.hidden, held.top_k)
            if key not in self._of:
                isa = _native.check_isa("auto")
                self._of[key] = Experts(self._pool, isa=isa, planes=self._planes, max_rows=HOST_ROWS)
            experts = self._of[key]
            experts.add_layer(held.layouts, hidden=held.hidden, top_k=held.top_k, layer=held.layer)
            ffn, numbers = experts.native()
            known = self._made[held.layer] = (held, ffn, numbers[0])
            self._used(held.layer, sorted({m.format for e in held.layouts for m in (e.gate, e.up, e.down)}))
        return known[1], known[2]


class Exchange:
    """The buffers of all layers' calls, which come one after the other.

    One buffer of each kind is enough. What `ask` copies to the host is read in `serve`, and the copies of the next
    `ask` are launched after that. What `serve` writes is copied to the device by `join`, and the next `serve` waits for
    an event that comes behind that copy. `waited_s`, `served_s`: seconds that the host waited for the device, and that
    it then took for what was missing.
    """

    def __init__(self, tier: ExpertTier, host: HostExperts, device: Any, layers: Sequence[HeldLayer]) -> None:
        self._tier = tier
        self._host = host
        self._device = device
        self._real = device.type != "cpu"
        pairs = HOST_ROWS * max(held.top_k * held.hidden for held in layers)
        self._ids = self._pinned(HOST_ROWS * max(held.top_k for held in layers), torch.int32)
        self._x = self._pinned(HOST_ROWS * max(held.hidden for held in layers))
        self._logits = self._pinned(MOST_ROWS * max(len(held.layouts) for held in layers))
        self._results = self._pinned(pairs)
        self._pairs = torch.empty(pairs, dtype=torch.float32, device=device)
        self._arrived = torch.empty(pairs, dtype=torch.float32, device=device)
        self._event = torch.cuda.Event() if self._real else None
        self.waited_s = 0.0
        self.served_s = 0.0

    def _pinned(self, size: int, dtype: Any = torch.float32) -> Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=self._real)

    # ---- on the device ----

    def ask(self, held: HeldLayer, x: Tensor, ids: Tensor) -> None:
        """Send rows and choices to the host, and what the next layer's router would say to these rows."""
        count = x.shape[0]
        _part(self._ids, count, held.top_k).copy_(ids, non_blocking=True)
        _part(self._x, count, held.hidden).copy_(x, non_blocking=True)
        if held.early is not None and count <= MOST_ROWS:
            logits = held.early.logits(x)
            _part(self._logits, *logits.shape).copy_(logits, non_blocking=True)

    def give(self, held: HeldLayer, x: Tensor, ids: Tensor, weights: Tensor, prepared: Sequence[Prepared]) -> None:
        """Compute the single results of the experts that are on the device."""
        pairs = _part(self._pairs, *ids.shape, held.hidden)
        expert_ffn(x, ids, weights, held.live.there, x, self._tier.precision, pairs=pairs, prepared=prepared,
                   arrived=self._tier.counts(held, ids))  # fmt: skip

    def join(self, held: HeldLayer, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        """out = the sum in routing order over the device's results and the host's."""
        shape = (*ids.shape, held.hidden)
        others = _part(self._arrived, *shape)
        others.copy_(_part(self._results, *shape), non_blocking=True)
        combine(_part(self._pairs, *shape), weights, out, others=others, ids=ids, kind_of=held.live.there.kind_of)

    # ---- on the host ----

    def mark(self) -> None:
        """What was asked is complete from here on."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def serve(self, held: HeldLayer, rows: int, provider: ExpertProvider) -> None:
        """Wait for what was asked, and compute what the device does not have. Raises ReadFailed."""
        started = time.perf_counter()
        self._wait()
        waited = time.perf_counter()
        ids = _part(self._ids, rows, held.top_k).numpy()
        here = self._tier.found(held, ids)
        asked = np.where(here, -1, ids).astype(np.int32)
        if here.all():
            self._expect(held, rows, provider)
        else:
            self._compute(held, rows, asked, provider)
        self.waited_s += waited - started
        self.served_s += time.perf_counter() - waited

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def _compute(self, held: HeldLayer, rows: int, asked: NDArray[np.int32], provider: ExpertProvider) -> None:
        host, tier = self._host, self._tier
        missing = host.begin(held, _part(self._x, rows, held.hidden).numpy(), asked)
        with provider.acquire(held.layer, missing) as lease:
            self._expect(held, rows, provider)
            for numbers, addresses in lease.batches():
                with tier.offers(held, numbers, addresses):  # a slot is this lease's until the next batch
                    host.run(numbers, addresses)
        host.pairs(_part(self._results, rows, held.top_k, held.hidden).numpy())
        tier.computed(held, missing)

    def _expect(self, held: HeldLayer, rows: int, provider: ExpertProvider) -> None:
        """Tell a provider that reads ahead what the next call will probably want and the device does not have."""
        early = held.early
        if early is None or rows > MOST_ROWS or not isinstance(provider, AheadProvider):
            return
        if not provider.reads_ahead(early.layer):
            return
        told = early.likely(_part(self._logits, rows, early.experts).numpy())
        told = told[~self._tier.here(early.layer)[told]]
        if len(told):
            provider.expect(early.layer, told)


def _part(buffer: Tensor, *shape: int) -> Tensor:
    """The beginning of a flat buffer, in this shape."""
    size = 1
    for length in shape:
        size *= length
    return buffer[:size].view(*shape)
