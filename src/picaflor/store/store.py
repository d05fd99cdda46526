"""The expert store: experts of every layer in slots, read from disk when they are asked for.

Ties the reader and the shelves, where experts lie, to those who ask. Must not know programs, devices other than host
memory, or what an expert computes.

A lease's experts are usable from the moment they are yielded until its generator is advanced or the lease ends. Where
a request needs more slots than there are, later experts take the slots of earlier ones, so any number of slots from 1
serves any request.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32, ExpertLayout
from picaflor.errors import ReadFailed
from picaflor.store.ahead import Switch
from picaflor.store.arena import Arena
from picaflor.store.counters import LayerCounters, StoreCounters
from picaflor.store.lease import Lease, Load, PinnedLease, Purpose
from picaflor.store.policy.base import PolicyFactory
from picaflor.store.reader import ExpertFiles, Pool, Reader, ReadOutcome, native_pool
from picaflor.store.routes import RoutesWriter
from picaflor.store.shelves import AHEAD, Shelves
from picaflor.store.sources import Sources
from picaflor.store.types import Copy, ExpertKey, State

READ_THREADS = 8
WORKING_SLOTS = 8
PRELOAD_AHEAD = 32
WARM_AHEAD = 4
_TICK_S = 0.2  # an interrupt from the keyboard is seen this often while waiting for the disk
_RETRY_S = 0.02

Progress = Callable[[int, int], None]


class ExpertStore:
    """Gives programs their experts (`backends.api.ExpertProvider`).

    `slots`: how many experts of each layer stay in memory, one number for all layers or one per layer; at least 1, cut
    to the layer's number of experts. `working_slots` more are shared by all layers that do not fit completely; reads
    land there when the policy has no victim to give. `ahead_slots` more hold what is read ahead where `prefetch` is not
    off. `policy`: a fresh factory, `auto` without one. A layer with a slot for every expert is pinned once all of them
    were read. Safe for several threads; a thread must not open a second
    lease while it holds slots that it needs. Raises OutOfBudget if the system gives no memory.
    """

    def __init__(
        self,
        files: ExpertFiles,
        *,
        slots: int | Mapping[int, int],
        working_slots: int = WORKING_SLOTS,
        ahead_slots: int = 0,
        prefetch: str = "off",
        read_threads: int = READ_THREADS,
        policy: PolicyFactory | None = None,
        pool: Pool | None = None,
        sources: Sources | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self.files = files
        self.counters = StoreCounters({layer: LayerCounters() for layer in files.layers})
        self._shelves = Shelves(
            files, slots, working_slots=working_slots, ahead_slots=ahead_slots, policy=policy, counters=self.counters
        )
        self.slots = self._shelves.slots
        self.working_slots = self._shelves.working_slots
        self.ahead_slots = self._shelves.ahead_slots
        self._residency = self._shelves.residency
        self._expected = self._shelves.expected
        self._policies = self._shelves.policies
        self._wants_ahead = prefetch != "off"
        self.prefetch = Switch(prefetch if self.ahead_slots else "off")
        self._first = min(self._policies, default=-1)
        self._step_began = 0.0
        self._step_counts = False
        self._step_needed = 0
        self.recorder: RoutesWriter | None = None  # told of every request while it is set
        self.asked_for = {layer: [0] * files.count(layer) for layer in self._policies}
        """How often each expert was asked for, in the layers that do not fit completely."""
        self._to_warm: list[ExpertKey] = []  # the next one is the last
        self._warming = 0
        self._reader = Reader(
            files, native_pool(read_threads) if pool is None else pool, sources=sources, notice=notice
        )
        self._loads: dict[int, Load] = {}
        self._loading: dict[ExpertKey, Load] = {}
        self._leases: set[Lease] = set()
        self._closed = False
        self._changed = threading.Condition()
        self._finalizer = weakref.finalize(self, _shut_down, self._reader, tuple(self._shelves.arenas.values()))

    @property
    def nbytes(self) -> int:
        """Memory of all slots, as granted by the system."""
        return sum(arena.nbytes for arena in self._shelves.arenas.values())

    def layouts(self, layer: int) -> list[ExpertLayout]:
        """The layout of each expert of a layer in its slot, by id."""
        return self.files.layouts(layer)

    def resident(self, layer: int) -> list[int]:
        """Ids of the layer's experts that could be used without a read, ascending."""
        with self._changed:
            return [copy.key.expert for copy in self._shelves.usable(layer)]

    def busy_s(self) -> float:
        """Wall seconds with at least one read under way so far, the preload included."""
        return self._reader.busy_s()

    @property
    def spared_reads(self) -> dict[str, int]:
        """Experts that were not read as they were meant to be, by what went wrong."""
        return self._reader.spared_reads()

    def memory(self) -> list[NDArray[np.uint8]]:
        """The bytes of all experts that could be used without a read; slots stay mapped until `close`."""
        with self._changed:
            return [self._shelves.view(copy) for layer in self.files.layers for copy in self._shelves.usable(layer)]

    def acquire(self, layer: int, experts: I32) -> PinnedLease | Lease:
        """A lease of distinct experts; enter it to start the reads of those that are missing.

        Raises IndexError for an id that the layer does not have, ValueError for one that is given twice.
        """
        if self.recorder is not None:
            self.recorder.add(layer, experts.tolist())
        table = self._shelves.pinned[layer]
        if table is not None:
            addresses = table[experts.astype(np.uint32)]  # unsigned: a negative id must not count from the end
            counters = self.counters.layers[layer]
            counters.requests += 1
            counters.pinned += len(experts)
            return PinnedLease(experts, addresses)
        return Lease(self, layer, experts)

    def preload(self, progress: Progress | None = None) -> int:
        """Read all experts of the layers that fit completely, in file order. Returns the bytes read.

        `progress(done, total)` is told bytes as reads succeed. Raises ReadFailed.
        """
        self._check_open()
        started = time.perf_counter()
        layers = [layer for layer in self.files.layers if self.slots[layer] == self.files.count(layer)]
        keys = [ExpertKey(layer, expert) for layer in layers for expert in range(self.files.count(layer))]
        keys = [key for key in keys if self._shelves.find(key) is None]
        keys.sort(key=self.files.place, reverse=True)
        total = sum(self.files.reads(key).read_nbytes for key in keys)
        done = 0
        loads: list[Load] = []
        try:
            while keys or loads:
                with self._changed:
                    self._check_open()
                    ahead = [keys.pop() for _ in range(min(len(keys), PRELOAD_AHEAD - len(loads)))]
                    new = (key for key in ahead if self._shelves.find(key) is None)
                    loads += self._start([copy for key in new if (copy := self._shelves.place(key))], Purpose.PRELOAD)
                self._wait([load.ticket for load in loads if load.ticket in self._loads], _TICK_S)
                for load in [load for load in loads if load.ticket not in self._loads]:
                    if load.error is not None:
                        raise load.error
                    loads.remove(load)
                    done += self.files.reads(load.copy.key).read_nbytes
                    if progress is not None:
                        progress(done, total)
        finally:
            with self._changed:
                for load in loads:
                    self._cancel(load)
            self.counters.preload_bytes += done
            self.counters.preload_s += time.perf_counter() - started
        return done

    def warm(self, wanted: Mapping[int, Sequence[int]]) -> None:
        """Read these experts of each layer, the first ones first, into slots that are free, behind all other reads and
        in file order. Returns at once; what is asked for meanwhile takes slots as it always does."""
        with self._changed:
            keys = [
                ExpertKey(layer, expert)
                for layer in self._policies
                for expert in wanted.get(layer, ())[: self.slots[layer]]
            ]
            self._to_warm = sorted(keys, key=self.files.place, reverse=True)
            self._warm_more()

    def reads_ahead(self, layer: int) -> bool:
        """Whether to tell `expect` what a layer will probably be asked for. Asked once per layer of a step that is
        small enough to tell."""
        self._step_counts = True
        return self.prefetch.enabled and layer in self._shelves.takes_ahead

    def expect(self, layer: int, experts: I32) -> None:
        """Read these experts of a layer, the likeliest first, behind all that was asked for, as far as slots allow."""
        with self._changed:
            if self._closed or layer not in self._shelves.takes_ahead:
                return
            free = self._residency.free_slots(AHEAD)
            copies: list[Copy] = []
            for expert in experts.tolist():
                key = ExpertKey(layer, expert)
                if len(copies) == free:
                    break
                if self._shelves.find(key) is None:
                    copies.append(self._shelves.place_ahead(key))
            with contextlib.suppress(ReadFailed):  # nobody asked for them yet: the request that does will say so
                self._start(copies, Purpose.AHEAD)

    def elsewhere(self, layer: int, experts: I32) -> None:
        """A device holds these experts now and asks for them no more: their slots are free for others."""
        with self._changed:
            if self._closed or layer not in self._policies:
                return
            for expert in experts.tolist():
                self._shelves.leave(ExpertKey(layer, expert))

    @property
    def prefetch_in_words(self) -> str:
        """Whether experts are read ahead; empty where all have a slot."""
        if not self._policies:
            return ""
        return str(self.prefetch) if self.ahead_slots or not self._wants_ahead else "off: no memory for its slots"

    @property
    def policy_in_force(self) -> str:
        """The ranking by which victims are chosen now; empty where all experts have a slot."""
        policy = next(iter(self._policies.values()), None)
        return str(getattr(policy, "in_force", ""))

    def close(self) -> None:
        """End all reads and give the memory back (with the last lease, if one is open). Later requests raise
        ReadFailed."""
        with self._changed:
            self._closed = True
            self._shelves.unpin()
            self._changed.notify_all()
            if self._leases:
                self._reader.close()
            else:
                self._finalizer()

    def __enter__(self) -> ExpertStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What leases call.

    def _address(self, copy: Copy) -> int:
        return self._shelves.address(copy)

    def _begin(self, lease: Lease) -> None:
        """Acquire what is resident, join reads that run, start the others as far as slots allow."""
        count = self.files.count(lease.layer)
        bad = [key.expert for key in lease.wanted if not 0 <= key.expert < count]
        if bad:
            raise IndexError(f"layer {lease.layer} has experts 0 to {count - 1}, not {bad[0]}")
        if len(set(lease.wanted)) != len(lease.wanted):
            raise ValueError(f"experts of one request must be distinct: {[key.expert for key in lease.wanted]}")
        with self._changed:
            self._check_open()
            if self._loads:
                self._apply(self._reader.wait(list(self._loads), 0))
            if lease.layer == self._first:
                self._time_step()
            self.counters.layers[lease.layer].requests += 1
            self._leases.add(lease)
            policy = self._policies.get(lease.layer)
            if policy is not None:
                asked = [key.expert for key in lease.wanted]
                policy.asked(asked)
                counts = self.asked_for[lease.layer]
                for expert in asked:
                    counts[expert] += 1
            self._withdraw(lease)
            expected = self._expected
            lease.missing = [key for key in lease.wanted if key in expected or not self._claim(lease, key)]
            lease.missing.reverse()
            self._step_needed += len(lease.missing)
            try:
                self._fill(lease)
            except BaseException:
                self._give_back(lease)
                raise
            if policy is not None:
                policy.rest()  # while the reads run
            self._warm_more()

    def _next(self, lease: Lease) -> list[Copy]:
        """Wait for the next copies to yield; none when all were yielded. Raises ReadFailed."""
        waited_from: float | None = None
        while True:
            with self._changed:
                self._check_open()
                if lease.missing:
                    self._release(lease.held)
                    self._fill(lease)
                if lease.error is not None:
                    raise lease.error
                if lease.arrived or not (lease.loads or lease.missing):
                    batch, lease.arrived = lease.arrived, []
                    lease.held += batch
                    if waited_from is not None:
                        self.counters.layers[lease.layer].wait_s += time.perf_counter() - waited_from
                    return batch
                waited_from = waited_from or time.perf_counter()
                tickets = [load.ticket for load in lease.loads]
                seconds = _TICK_S
                if not tickets:  # all slots are held by others
                    tickets, seconds = list(self._loads), _RETRY_S
                if not tickets:
                    self._refuse_deadlock(lease)
                    self._changed.wait(_TICK_S)
                    continue
            self._wait(tickets, seconds)

    def _end(self, lease: Lease) -> None:
        """Give back all that a lease holds; reads that nobody else waits for and that have not begun are cancelled."""
        with self._changed:
            self._give_back(lease)

    # The rest is called with the lock held, but for `_wait`.

    def _give_back(self, lease: Lease) -> None:
        lease.missing.clear()
        self._release(lease.held)
        self._release(lease.arrived)
        for load in lease.loads:
            load.leases.remove(lease)
            if not load.leases and load.purpose is Purpose.DEMAND:
                self._cancel(load)
        lease.loads.clear()
        self._leases.discard(lease)
        if self._closed and not self._leases:
            self._finalizer()

    def _release(self, copies: list[Copy]) -> None:
        if copies:
            for copy in copies:
                self._residency.release(copy)
            copies.clear()
            self._changed.notify_all()

    def _claim(self, lease: Lease, key: ExpertKey, *, ahead: bool = False) -> bool:
        """Acquire a copy that is usable, or join its read. False if there is no copy. `ahead`: it was read ahead."""
        copy = self._shelves.find(key)
        if copy is None:
            return False
        counters = self.counters.layers[key.layer]
        if copy.state is State.LOADING:
            load = self._loading[key]
            load.leases.append(lease)
            lease.loads[load] = None
            counters.joined += 1
            counters.late += ahead
            if load.purpose is not Purpose.DEMAND:
                self._reader.promote(load.ticket)
            return True
        self._residency.acquire(copy)
        lease.arrived.append(copy)
        if ahead:
            counters.prefetched += 1
            return True
        counters.lru += 1
        self._shelves.touch(copy)
        return True

    def _fill(self, lease: Lease) -> None:
        """Start reads of missing experts until no slot can be had. Raises ReadFailed, none of them started then."""
        copies: list[Copy] = []
        while lease.missing:
            key = lease.missing[-1]
            ahead = key in self._expected
            if ahead and not self._shelves.adopt(key):
                break
            if not self._claim(lease, key, ahead=ahead):  # another lease may have got it meanwhile
                copy = self._shelves.place(key)
                if copy is None:
                    break
                copies.append(copy)
            lease.missing.pop()
        for load in self._start(copies, Purpose.DEMAND):
            load.leases.append(lease)
            lease.loads[load] = None
        self.counters.layers[lease.layer].loaded += len(copies)

    def _warm_more(self) -> None:
        """Keep a few reads of `warm` under way. One that fails is read again when its expert is asked for."""
        while self._to_warm and self._warming < WARM_AHEAD:
            key = self._to_warm.pop()
            if self._shelves.has_room(key.layer) and self._shelves.find(key) is None:
                copy = self._shelves.place(key)
                assert copy is not None
                try:
                    self._warming += len(self._start([copy], Purpose.WARM))
                except ReadFailed:  # nobody asked for it yet: the request that does will say so
                    self._to_warm.clear()

    def _withdraw(self, lease: Lease) -> None:
        """What was read ahead for a layer and is not asked for by its request goes."""
        for copy in self._expected.unwanted(lease.layer, lease.wanted):
            if copy.state is State.READY:
                self._shelves.waste(copy)
                continue
            load = self._loading[copy.key]
            if not load.leases:
                self._cancel(load)
                if copy.state is State.LOADING:
                    self._expected.stale.add(copy.key)

    def _time_step(self) -> None:
        """A step of the program begins: tell the switch how long the one before took."""
        now = time.perf_counter()
        if self._step_counts and self._step_began:
            self.prefetch.step(now - self._step_began, self._step_needed)
        self._step_began, self._step_counts, self._step_needed = now, False, 0

    def _start(self, copies: Sequence[Copy], purpose: Purpose) -> list[Load]:
        """Start the reads of new copies, in file order but for those ahead, all or none. Raises ReadFailed."""
        if not copies:
            return []
        if purpose is not Purpose.AHEAD:
            copies = sorted(copies, key=lambda copy: self.files.place(copy.key))
        try:
            wanted = [(copy.key, self._shelves.address(copy)) for copy in copies]
            tickets = self._reader.submit(wanted, demand=purpose is Purpose.DEMAND)
        except BaseException:
            for copy in copies:
                self._shelves.drop(copy)
            raise
        loads = [Load(copy, purpose) for copy in copies]
        for load, ticket in zip(loads, tickets, strict=True):
            load.ticket = ticket
            self._loads[ticket] = load
            self._loading[load.copy.key] = load
        return loads

    def _cancel(self, load: Load) -> None:
        """Take a read back if it has not begun; otherwise it ends by itself and its copy may be of use later."""
        if not self._closed and load.ticket in self._loads and self._reader.cancel(load.ticket):
            del self._loads[load.ticket]
            del self._loading[load.copy.key]
            self._shelves.drop(load.copy)
            self._changed.notify_all()

    def _wait(self, tickets: Sequence[int], seconds: float) -> None:
        """Wait for the first of these reads, without the lock, and take in what finished."""
        if tickets:
            outcomes = self._reader.wait(tickets, seconds)
            with self._changed:
                self._apply(outcomes)

    def _apply(self, outcomes: Sequence[ReadOutcome]) -> None:
        """Take in finished reads. Those that another thread took in already are skipped."""
        for outcome in outcomes if not self._closed else ():
            load = self._loads.pop(outcome.ticket, None)
            if load is None:
                continue
            copy = load.copy
            del self._loading[copy.key]
            finished = self._reader.finish(outcome)
            counters = self.counters.layers[copy.key.layer]
            if load.purpose is Purpose.WARM:
                self._warming -= 1
                self.counters.preload_bytes += finished.nbytes
            if load.purpose in (Purpose.DEMAND, Purpose.AHEAD):
                counters.reads += 1
                counters.read_bytes += finished.nbytes
                counters.service_s += finished.seconds
            if finished.error is not None:
                counters.failed += 1
                load.error = finished.error
                self._shelves.drop(copy)
            else:
                self._residency.loaded(copy.key, copy.tier, copy.layout, copy.generation)
            for lease in load.leases:
                lease.loads.pop(load, None)
                if load.error is not None:
                    lease.error = load.error
                else:
                    self._residency.acquire(copy)
                    lease.arrived.append(copy)
            if copy.pool == AHEAD:
                if load.error is None and copy.key in self._expected.stale:
                    self._shelves.waste(copy)
            elif load.error is None:
                self._shelves.arrived(copy)
        if self._to_warm and not self._closed:
            self._warm_more()
        self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ReadFailed("the expert store was closed")

    def _refuse_deadlock(self, lease: Lease) -> None:
        """A thread that waits for slots that only it can free would wait for ever. Raises RuntimeError."""
        holders = [other for other in self._leases if other is not lease and (other.held or other.arrived)]
        if all(other.thread == lease.thread for other in holders):
            raise RuntimeError(
                f"no slot for an expert of layer {lease.layer}: the same thread holds {len(holders)} other leases, and "
                f"the policy gives no victim for {self.working_slots} working slots"
            )


def _shut_down(reader: Reader, arenas: Sequence[Arena]) -> None:
    """End the reads, then free the slots that they wrote to."""
    reader.close()
    for arena in arenas:
        arena.close()
