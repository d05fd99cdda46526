"""The memory ledger: what may be used and who says so, what is needed and which option changes it.

Knows byte counts, /proc and cgroup files; must not know models, formats or containers. What cannot be read is unknown,
never zero. Counts anonymous, shared and locked memory of the whole process; mapped file pages are the system's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from picaflor.errors import OutOfBudget
from picaflor.sizes import format_bytes
from picaflor.store.arena import arena_bytes

PROC = Path("/proc")
CGROUP_MOUNT = Path("/sys/fs/cgroup")
HOST_SHARE = 0.88
"""Part of the memory found free that is used: buffered reads slow down badly when no room is left for file pages."""
TOLERANCE = 0.02
STACK_BYTES = 8 << 20
"""Address space of one thread's stack where the system names no size."""
_NO_LIMIT = 1 << 60  # cgroup v1 writes the largest page-aligned number for "no limit"


@dataclass(frozen=True, slots=True)
class Source:
    """One voice on how much this process may use in all.

    `nbytes` None: no limit from here if `unknown` is false, else it could not be read. `detail` says where the number
    comes from.
    """

    name: str
    nbytes: int | None
    detail: str
    unknown: bool = False

    def __str__(self) -> str:
        said = "unknown" if self.unknown else "no limit" if self.nbytes is None else format_bytes(self.nbytes)
        return f"{self.name} {said} ({self.detail})"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that needs memory; `flag` is the option that changes it, empty if none does."""

    name: str
    nbytes: int
    flag: str = ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Sources, items and the slots that they leave. `slots` maps each MoE layer to its number of expert slots;
    `working_slots` are shared by the layers that do not fit completely, `ahead_slots` hold what is read ahead for
    them."""

    sources: tuple[Source, ...]
    items: tuple[Item, ...]
    slots: Mapping[int, int]
    working_slots: int
    all_resident: bool
    ahead_slots: int = 0

    @property
    def limit(self) -> Source:
        """The source with the smallest number."""
        return tightest(self.sources)

    @property
    def total_bytes(self) -> int:
        """Sum of all items."""
        return sum(item.nbytes for item in self.items)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What this process holds now, in bytes; `file` pages are mapped files and count against nobody's budget.

    `shared` is the part of `anonymous` that is shared memory.
    """

    anonymous: int
    locked: int
    file: int
    peak: int
    shared: int = 0

    @property
    def charged(self) -> int:
        """What the budget bounds: locked memory is anonymous here, so the larger of both."""
        return max(self.anonymous, self.locked)


def process_memory(*, proc: Path = PROC) -> ProcessMemory | None:
    """This process's memory from `/proc/self/status` (RssAnon + RssShmem, VmLck, RssFile, VmHWM); None if unknown."""
    try:
        text = (proc / "self" / "status").read_text()
    except OSError:
        return None
    fields = _kib_fields(text)
    try:
        anonymous = fields["RssAnon"] + fields["RssShmem"]
        held = (anonymous, fields.get("VmLck", 0), fields["RssFile"], fields["VmHWM"])
        return ProcessMemory(*held, shared=fields["RssShmem"])
    except KeyError:
        return None


def memory_sources(
    ram: int | None,
    *,
    held: int,
    threads: int = 0,
    mapped: int = 0,
    proc: Path = PROC,
    cgroup_mount: Path = CGROUP_MOUNT,
) -> tuple[Source, ...]:
    """The word of `--ram`, of the host, of the control groups and of the process's own limits (`ulimit`) on what this
    process may use, `held` bytes (what it holds now) included.

    `threads`: how many will be started; the process's limits count the address space of their stacks. `mapped`: address
    space that is taken already for what is not part of `held` and is planned for.
    """
    given = Source("--ram", ram, "given" if ram is not None else "not given")
    return (
        given,
        _host_source(held, proc),
        _cgroup_source(held, proc, cgroup_mount),
        _process_source(held, threads, mapped, proc),
    )


def tightest(sources: Sequence[Source]) -> Source:
    """The source with the smallest number. Raises OutOfBudget if none gives a number."""
    known = [source for source in sources if source.nbytes is not None]
    if not known:
        said = "; ".join(map(str, sources))
        raise OutOfBudget(f"nothing says how much memory may be used: {said}; give --ram, as --ram 8GiB")
    return min(known, key=lambda source: source.nbytes or 0)


def fit(
    sources: Sequence[Source],
    items: Sequence[Item],
    slot_nbytes: Mapping[int, int],
    experts: Mapping[int, int],
    *,
    wanted_slots: int | None,
    working_slots: int,
    ahead_slots: int = 0,
) -> Ledger:
    """How many expert slots each layer gets, from what the other `items` leave.

    `slot_nbytes` and `experts`: bytes of the widest expert and number of experts by layer. Without `wanted_slots`
    every layer gets the same number, as many as fit, and what is then left gives single layers one more, in order.
    When all experts fit there is no working set and nothing to read ahead. Where one slot per layer does not fit beside
    them, or the wanted number, nothing is read ahead, and then the working set shrinks (not for a wanted number).
    Raises OutOfBudget with every number if one slot per layer, or the wanted number, does not fit.
    """
    limit = tightest(sources)
    assert limit.nbytes is not None
    room = limit.nbytes - sum(item.nbytes for item in items)
    planner = _Slots(slot_nbytes, experts, working_slots, ahead_slots)
    if ahead_slots and planner.total(planner.uniform(wanted_slots or 1)) > room:
        planner = _Slots(slot_nbytes, experts, working_slots, 0)
    if wanted_slots is None:
        planner = planner.shrunk(room)
    slots = planner.most(room) if wanted_slots is None else planner.uniform(wanted_slots)
    ledger = Ledger(
        tuple(sources),
        (*items, *planner.items(slots, wanted_slots)),
        slots,
        planner.working(slots),
        planner.all_resident(slots),
        planner.ahead(slots),
    )
    if ledger.total_bytes > limit.nbytes:
        raise OutOfBudget(_refusal(ledger, limit))
    return ledger


class _Slots:
    """Arithmetic of slots: how much memory a number of slots per layer takes."""

    def __init__(
        self, slot_nbytes: Mapping[int, int], experts: Mapping[int, int], working_slots: int, ahead_slots: int
    ) -> None:
        self._slot_nbytes = slot_nbytes
        self._experts = experts
        self._working_slots = working_slots
        self._ahead_slots = ahead_slots

    def shrunk(self, room: int) -> _Slots:
        """With a smaller working set, at least 1, if one slot per layer would not fit otherwise."""
        count = self._working_slots
        while count > 1 and self._with(count).total(self.uniform(1)) > room:
            count -= 1
        return self._with(count)

    def _with(self, working_slots: int) -> _Slots:
        return _Slots(self._slot_nbytes, self._experts, working_slots, self._ahead_slots)

    def uniform(self, count: int) -> dict[int, int]:
        """The same number for each layer, cut to its experts."""
        return {layer: min(count, experts) for layer, experts in self._experts.items()}

    def all_resident(self, slots: Mapping[int, int]) -> bool:
        return all(slots[layer] == experts for layer, experts in self._experts.items())

    def working(self, slots: Mapping[int, int]) -> int:
        return 0 if self.all_resident(slots) else self._working_slots

    def ahead(self, slots: Mapping[int, int]) -> int:
        return 0 if self.all_resident(slots) else self._ahead_slots

    def layer_bytes(self, slots: Mapping[int, int]) -> int:
        return sum(arena_bytes(count, self._slot_nbytes[layer]) for layer, count in slots.items())

    def working_bytes(self, slots: Mapping[int, int]) -> int:
        return arena_bytes(self.working(slots), self._widest(slots))

    def ahead_bytes(self, slots: Mapping[int, int]) -> int:
        return arena_bytes(self.ahead(slots), self._widest(slots))

    def _widest(self, slots: Mapping[int, int]) -> int:
        """Of the layers that do not fit completely."""
        partial = [layer for layer, count in slots.items() if count < self._experts[layer]]
        return max((self._slot_nbytes[layer] for layer in partial), default=0)

    def total(self, slots: Mapping[int, int]) -> int:
        return self.layer_bytes(slots) + self.working_bytes(slots) + self.ahead_bytes(slots)

    def most(self, room: int) -> dict[int, int]:
        """The largest uniform number that fits `room` bytes, at least 1, then one more for single layers.

        The working set vanishes only when all experts fit, so that case is tried first.
        """
        top = max(self._experts.values(), default=0)
        if self.total(self.uniform(top)) <= room:
            return self.uniform(top)
        low, high = 1, max(top, 1)  # low fits or is the minimum; high does not fit
        while high - low > 1:
            middle = (low + high) // 2
            if self.total(self.uniform(middle)) <= room:
                low = middle
            else:
                high = middle
        slots = self.uniform(low)
        for layer, experts in self._experts.items():
            more = {**slots, layer: slots[layer] + 1}
            if slots[layer] < experts and self.total(more) <= room:
                slots = more
        return slots

    def items(self, slots: Mapping[int, int], wanted: int | None) -> list[Item]:
        """The ledger lines of the expert slots, the working set and what is read ahead."""
        counts = sorted(set(slots.values()))
        each = "0" if not counts else f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        flag = "" if wanted is None or max(counts, default=0) <= 1 else "--expert-slots"
        items = [
            Item(f"expert slots ({each} in each of {len(slots)} layers)", self.layer_bytes(slots), flag),
            Item(f"working set ({self.working(slots)} experts)", self.working_bytes(slots)),
        ]
        if self.ahead(slots):
            items.append(Item(f"read ahead ({self.ahead(slots)} experts)", self.ahead_bytes(slots), "--prefetch"))
        return items


def _refusal(ledger: Ledger, limit: Source) -> str:
    """One line: each item, the sum, the limit, the options that would help."""
    parts = " + ".join(f"{item.name} {format_bytes(item.nbytes)}" for item in ledger.items if item.nbytes)
    needed = -(-ledger.total_bytes // (1 << 20))
    words = {"--prefetch": "give --prefetch off"}  # the other flags are sizes
    lower = [
        f"{words.get(item.flag, f'lower {item.flag}')} ({item.name})"
        for item in ledger.items
        if item.flag and item.nbytes
    ]
    if limit.name == "--ram":
        remedy = [f"give --ram {needed}MiB or more", *lower]
    else:
        remedy = ["free memory or raise that limit", *lower]
    return (
        f"needs {format_bytes(ledger.total_bytes)}: {parts}; allowed are {limit}: short of "
        f"{format_bytes(ledger.total_bytes - (limit.nbytes or 0))}; {', or '.join(remedy)}"
    )


def _kib_fields(text: str) -> dict[str, int]:
    """`Name:   123 kB` lines as bytes; other lines are left out."""
    fields: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdecimal():
            fields[name] = int(words[0]) * 1024
    return fields


def _host_source(held: int, proc: Path) -> Source:
    """MemAvailable of `/proc/meminfo`, with the share that is left to file pages taken off."""
    path = proc / "meminfo"
    try:
        available = _kib_fields(path.read_text()).get("MemAvailable")
    except OSError as error:
        return Source("host", None, f"{path}: {error.strerror}", unknown=True)
    if available is None:
        return Source("host", None, f"{path} has no MemAvailable", unknown=True)
    detail = f"{HOST_SHARE:.0%} of {format_bytes(available)} available"
    return Source("host", int(available * HOST_SHARE) + held, f"{detail}, and what the process holds")


def _process_source(held: int, threads: int, mapped: int, proc: Path) -> Source:
    """The tightest of `ulimit -d` and `ulimit -v`, which count address space, touched or not."""
    limits, status = proc / "self" / "limits", proc / "self" / "status"
    try:
        lines = limits.read_text().splitlines()
        used = _kib_fields(status.read_text())
    except OSError as error:
        return Source("ulimit", None, f"{error.filename}: {error.strerror}", unknown=True)
    stacks = threads * _stack_bytes(lines)
    found: list[tuple[int, str]] = []
    for words, letter, field in (("Max data size", "d", "VmData"), ("Max address space", "v", "VmSize")):
        limit = _soft_limit(lines, words)
        if limit is None:
            continue
        if field not in used:
            return Source("ulimit", None, f"{status} has no {field}", unknown=True)
        taken = max(used[field] - mapped, 0) + stacks
        said = f"{HOST_SHARE:.0%} of {format_bytes(limit)} less {format_bytes(taken)} of address space"
        found.append((max(0, int((limit - taken) * HOST_SHARE)), f"ulimit -{letter}: {said}"))
    if not found:
        return Source("ulimit", None, "neither -d nor -v is set")
    room, detail = min(found)
    return Source("ulimit", room + held, f"{detail}, and what the process holds")


def _stack_bytes(lines: Sequence[str]) -> int:
    """Address space that the system reserves for a thread's stack."""
    return _soft_limit(lines, "Max stack size") or STACK_BYTES


def _soft_limit(lines: Sequence[str], name: str) -> int | None:
    """A soft limit in bytes from `/proc/self/limits`; None where it is unlimited or not listed."""
    for line in lines:
        if line.startswith(name):
            words = line[len(name) :].split()
            return int(words[0]) if words and words[0].isdecimal() else None
    return None


def _cgroup_source(held: int, proc: Path, mount: Path) -> Source:
    """The tightest limit among the process's control group and those above it, version 1 or 2."""
    path = proc / "self" / "cgroup"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        return Source("cgroup", None, f"{path}: {error.strerror}", unknown=True)
    room: list[tuple[int, str]] = []
    unreadable: list[str] = []
    for version, folder, group in _memory_groups(lines, mount):
        for level in _levels(folder, group):
            try:
                found = _group_room(version, level)
            except (OSError, ValueError) as error:
                unreadable.append(f"{level}: {error}")
                continue
            if found is not None:
                room.append(found)
    if room:
        free, detail = min(room)
        return Source("cgroup", max(0, int(free * HOST_SHARE)) + held, f"{detail}, and what the process holds")
    if unreadable:
        return Source("cgroup", None, unreadable[0], unknown=True)
    return Source("cgroup", None, "no memory limit is set")


def _memory_groups(lines: Sequence[str], mount: Path) -> list[tuple[int, Path, str]]:
    """(version, folder of the hierarchy, path in it) of the lines of `/proc/self/cgroup` that can limit memory."""
    groups: list[tuple[int, Path, str]] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            unified = mount / "unified"
            groups.append((2, unified if unified.is_dir() else mount, group))
        elif "memory" in controllers.split(","):
            groups.append((1, mount / "memory", group))
    return groups


def _levels(folder: Path, group: str) -> list[Path]:
    """The group's folder and those above it up to the mount, where they exist.

    In a container the path can be the host's: then only its mount, which is the container's own group, is there.
    """
    parts = [part for part in group.split("/") if part not in ("", "..", ".")]
    levels = [folder.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [level for level in levels if level.is_dir()]


def _group_room(version: int, level: Path) -> tuple[int, str] | None:
    """(bytes still free, words) of one group; None if it sets no limit. File pages in its usage can be dropped, so
    they count as free. Raises OSError or ValueError for a limit that cannot be read."""
    limits = list(_group_limits(version, level))
    if not limits:
        return None
    limit, file = min(limits)
    usage = int((level / ("memory.usage_in_bytes" if version == 1 else "memory.current")).read_text())
    pages = min(usage, _group_stat(level, version, ("active_file", "inactive_file")))
    words = f"{file}: {HOST_SHARE:.0%} of {format_bytes(limit)} less {format_bytes(usage - pages)} used"
    return limit - (usage - pages), words


def _group_limits(version: int, level: Path) -> Iterator[tuple[int, str]]:
    """(bytes, file) of each limit that a group sets: version 2 also slows a group down above `memory.high`; version 1
    tells the limit of the groups above, which a container cannot see, in `memory.stat`."""
    names = ("memory.limit_in_bytes",) if version == 1 else ("memory.max", "memory.high")
    for name in names:
        file = level / name
        if not file.exists():
            continue  # the root of version 2, or a group without the memory controller
        text = file.read_text().strip()
        if text != "max" and int(text) < _NO_LIMIT:
            yield int(text), str(file)
    if version == 1:
        above = _group_stat(level, 2, ("hierarchical_memory_limit",))
        if 0 < above < _NO_LIMIT:
            yield above, f"{level / 'memory.stat'}: hierarchical_memory_limit"


def _group_stat(level: Path, version: int, names: Sequence[str]) -> int:
    """Sum of entries of a group's `memory.stat`; 0 if it does not tell (its usage then counts in full).

    Version 1 has sums over the groups below under another name."""
    try:
        lines = (level / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    prefix = "total_" if version == 1 else ""
    stats = dict(line.split()[:2] for line in lines if len(line.split()) == 2)
    return sum(int(stats.get(prefix + name, 0)) for name in names)
