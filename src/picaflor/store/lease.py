"""What a request for experts gets: a lease, and the reads that it waits for.

Knows copies and the store that it asks; must not know files, policies or what an expert computes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32
from picaflor.errors import ReadFailed
from picaflor.store.types import Copy, ExpertKey

if TYPE_CHECKING:
    from picaflor.store.store import ExpertStore

Addresses = NDArray[np.uint64]


class Purpose(Enum):
    """Why an expert is read. `PRELOAD` and `WARM` fill slots at the start and are no part of the layers' sums."""

    __hash__ = object.__hash__

    DEMAND = "demand"
    AHEAD = "ahead"
    PRELOAD = "preload"
    WARM = "warm"


class Load:
    """A read on its way: its ticket, the copy that it fills and the leases that wait for it."""

    __slots__ = ("copy", "error", "leases", "purpose", "ticket")

    def __init__(self, copy: Copy, purpose: Purpose) -> None:
        self.copy = copy
        self.purpose = purpose
        self.ticket = -1
        self.leases: list[Lease] = []
        self.error: ReadFailed | None = None


class PinnedLease:
    """A request to a layer whose experts are all resident for good: one batch, nothing to give back."""

    __slots__ = ("_addresses", "_experts")

    def __init__(self, experts: I32, addresses: Addresses) -> None:
        self._experts = experts
        self._addresses = addresses

    def __enter__(self) -> PinnedLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def batches(self) -> Iterator[tuple[I32, Addresses]]:
        """All experts at once."""
        return iter(((self._experts, self._addresses),) if len(self._experts) else ())


class Lease:
    """A request to a layer of which some experts may have to be read."""

    __slots__ = ("_store", "arrived", "error", "held", "layer", "loads", "missing", "thread", "wanted")

    def __init__(self, store: ExpertStore, layer: int, experts: I32) -> None:
        self._store = store
        self.layer = layer
        self.wanted = [ExpertKey(layer, expert) for expert in experts.tolist()]
        self.missing: list[ExpertKey] = []  # no read was started; the next one is the last
        self.loads: dict[Load, None] = {}  # reads that this lease waits for, in order of submission
        self.arrived: list[Copy] = []  # acquired, not yielded
        self.held: list[Copy] = []  # acquired and yielded
        self.error: ReadFailed | None = None
        self.thread = threading.get_ident()

    def __enter__(self) -> Lease:
        self._store._begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store._end(self)

    def batches(self) -> Iterator[tuple[I32, Addresses]]:
        """First what is resident, then all that has arrived, as reads succeed. A batch is valid until the next one is
        asked for or the lease ends. Raises ReadFailed."""
        while copies := self._store._next(self):
            experts = np.array([copy.key.expert for copy in copies], dtype=np.int32)
            yield experts, np.array([self._store._address(copy) for copy in copies], dtype=np.uint64)
