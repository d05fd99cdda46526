"""The one writer of safetensors containers: declared first, then streamed shard by shard.

Knows names, dtypes and bytes; must not know formats or families. Layout rules: docs/container.md, "What is written".
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from picaflor.container.safetensors import ITEM_BYTES, MAX_RANK
from picaflor.container.shards import MAX_SHARDS
from picaflor.container.stamps import MAX_STAMPS, RULES_KEY, STAMP_KEY
from picaflor.container.strict_json import show, show_path
from picaflor.errors import BadContainer, UsageError, WriteFailed

EXPERT_ALIGN_BYTES = 4096
TENSOR_ALIGN_BYTES = 64
# The safetensors package refuses longer headers.
MAX_WRITTEN_HEADER_BYTES = 100_000_000
# The codes that the safetensors package knows; the others are read only.
WRITTEN_DTYPES = ("BF16", "F16", "F32", "U8", "I8", "F8_E4M3", "F8_E8M0", "I64", "U64")
DEFAULT_SHARD_BYTES = 5_000_000_000
AHEAD_BYTES = 256 << 20
"""Most bytes of groups that threads make while earlier ones are written."""

Arrays = Mapping[str, NDArray[Any]]
Produce = Callable[[], Arrays]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to write: header dtype, shape, and the format name to stamp it with (resident tensors only)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stamp: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor: elements times item size, also for U8."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors that lie together in one shard and are produced together; `starts` aligns each, in bytes."""

    specs: tuple[TensorSpec, ...]
    starts: tuple[int, ...]
    produce: Produce

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A group in a shard: offsets of its tensors, relative to the data start."""

    group: _Group
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """One shard before it is written: its name, header bytes and placed groups; sizes in bytes."""

    name: str
    header: bytes
    placed: tuple[_Placed, ...]
    data_nbytes: int

    @property
    def nbytes(self) -> int:
        """Size of the finished file."""
        return len(self.header) + self.data_nbytes


class ContainerWriter:
    """Writes one model directory. Declare all tensors, then call `write` once.

    `metadata` goes into every shard, `rules_json` too (as `picaflor.formats`). Shards are called
    `STEM-00001-of-0000N.safetensors` and hold at most `max_shard_bytes`, or one group that is larger. Nothing is read
    or computed before `write`; then each group's arrays are asked for once, in the order of declaration, and at most
    one group is in memory. With `workers` of 1 or more that many threads make groups ahead of the one that is written,
    AHEAD_BYTES of them at most besides it: `produce` functions are then called from these threads.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        metadata: Mapping[str, str] | None = None,
        rules_json: str | None = None,
        stem: str = "model",
        workers: int = 0,
    ) -> None:
        if max_shard_bytes < 1:
            raise UsageError(f"max_shard_bytes: expected 1 or more, found {max_shard_bytes}")
        self._directory = Path(directory)
        self._max_shard_bytes = max_shard_bytes
        self._metadata = dict(metadata or {})
        for key in (RULES_KEY, STAMP_KEY):
            if key in self._metadata:
                raise BadContainer(f"metadata {key} is written by rules_json and stamps, not by metadata")
        if rules_json is not None:
            self._metadata[RULES_KEY] = rules_json
        self._stem = stem
        self._workers = workers
        self._groups: list[_Group] = []
        self._names: set[str] = set()
        self._stamps = 0

    def add(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        array: NDArray[Any] | Callable[[], NDArray[Any]],
        *,
        stamp: str | None = None,
    ) -> None:
        """Declare one resident tensor; `array` is its data or makes it when its turn comes."""

        def produce() -> Arrays:
            return {name: array() if callable(array) else array}

        self.add_group([TensorSpec(name, dtype, tuple(shape), stamp)], produce)

    def add_group(self, specs: Sequence[TensorSpec], produce: Produce) -> None:
        """Declare resident tensors that `produce` makes together (codes and scales, say); each starts at 64 bytes."""
        self._declare(specs, [TENSOR_ALIGN_BYTES] * len(specs), produce)

    def add_expert(
        self,
        *,
        down: Sequence[TensorSpec],
        gate: Sequence[TensorSpec],
        up: Sequence[TensorSpec],
        produce: Produce,
    ) -> None:
        """Declare one routed expert: per matrix its weight and, where the format has one, its scales.

        On disk: the three weights in the order down, gate, up without gaps, from a multiple of 4 KiB; then the three
        scales in the same order, from a multiple of 64 bytes. Where dtypes are mixed, each starts at a multiple of its
        own item size. `produce` returns all arrays by name.
        """
        matrices = (down, gate, up)
        if not all(1 <= len(specs) <= 2 for specs in matrices):
            raise BadContainer("an expert's matrix has a weight and at most one scale tensor")
        weights = [specs[0] for specs in matrices]
        scales = [specs[1] for specs in matrices if len(specs) == 2]
        for spec in (*weights, *scales):
            if spec.stamp is not None:
                raise BadContainer(
                    f"tensor {show(spec.name)}: routed experts are not stamped, found {show(spec.stamp)}"
                )
        specs = [*weights, *scales]
        first = {0: EXPERT_ALIGN_BYTES, len(weights): TENSOR_ALIGN_BYTES}
        # `_declare` refuses an unknown dtype
        starts = [first.get(place, ITEM_BYTES.get(spec.dtype, 1)) for place, spec in enumerate(specs)]
        self._declare(specs, starts, produce)

    def write(
        self,
        *,
        resume: bool = False,
        progress: Progress | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> tuple[Path, ...]:
        """Write all shards and return their paths; `share` (i, n): only every n-th from the i-th on, with `resume`, so
        that n processes with the same declarations write one directory together.

        Every shard is written under a temporary name, synced, and renamed. Without `resume` all renames come last, and
        a failure leaves the directory as it was. With `resume` each finished shard is renamed at once and stays, and a
        shard that is already there with the same size and header is kept. `progress(done, total)` gets bytes.
        Raises WriteFailed (disk), BadContainer (an array that does not match its declaration), UsageError (the
        directory already holds other shards).
        """
        every = self._plan()
        plans = every[share[0] :: share[1]]
        kept = self._existing(every, resume)
        todo = [plan for plan in plans if plan.name not in kept]
        total = sum(plan.nbytes for plan in todo)
        made = not self._directory.exists()
        temporary: dict[Path, Path] = {}
        renamed: list[Path] = []
        done = 0
        try:
            self._make_directory(plans, total)
            groups = [item.group for plan in todo for item in plan.placed]
            with closing(_made(groups, self._workers)) as made_arrays:
                for plan in todo:
                    temp = self._directory / f".{plan.name}.tmp-{os.getpid()}"
                    temporary[temp] = self._directory / plan.name
                    done = _write_shard(plan, temp, made_arrays, done, total, progress)
                    if resume:
                        os.replace(temp, temporary.pop(temp))
            for temp, final in temporary.items():
                os.replace(temp, final)
                renamed.append(final)
            sync_directory(self._directory)
        except BaseException as error:
            _clean(self._directory, (*temporary, *renamed), made)
            if isinstance(error, OSError):
                where = show_path(self._directory)
                more = "; finished files stay, and the same command goes on from them" if resume else ""
                raise WriteFailed(
                    f"{where}: writing failed after {done} of {total} bytes: {error.strerror}{more}"
                ) from error
            raise
        return tuple(self._directory / plan.name for plan in plans)

    def _declare(self, specs: Sequence[TensorSpec], starts: Sequence[int], produce: Produce) -> None:
        """Check the specs of a group and keep it."""
        for spec in specs:
            where = f"tensor {show(spec.name)}"
            if spec.dtype not in WRITTEN_DTYPES:
                known = ", ".join(WRITTEN_DTYPES)
                raise BadContainer(f"{where}: dtype: expected one of {known}; found {show(spec.dtype)}")
            if len(spec.shape) > MAX_RANK or any(extent < 0 for extent in spec.shape):
                raise BadContainer(
                    f"{where}: shape: expected at most {MAX_RANK} extents of 0 or more, found {list(spec.shape)}"
                )
            if spec.name.startswith(("__pad__.", "__metadata__")):
                raise BadContainer(f"{where}: the name is reserved")
            if spec.name in self._names:
                raise BadContainer(f"{where}: declared twice")
            self._names.add(spec.name)
            self._stamps += spec.stamp is not None
        if self._stamps > MAX_STAMPS:
            raise BadContainer(f"{self._stamps} stamped tensors, readers accept at most {MAX_STAMPS}")
        self._groups.append(_Group(tuple(specs), tuple(starts), produce))

    def _plan(self) -> list[_Plan]:
        """Distribute the groups over shards, in order, and build every header."""
        shards: list[list[_Placed]] = [[]]
        end = 0
        for group in self._groups:
            offsets, last = _offsets(group, end)
            if shards[-1] and last > self._max_shard_bytes:
                shards.append([])
                offsets, last = _offsets(group, 0)
            shards[-1].append(_Placed(group, offsets))
            end = last
        if len(shards) > MAX_SHARDS:
            raise BadContainer(
                f"{show_path(self._directory)}: {len(shards)} shards of {self._max_shard_bytes} bytes, readers take at "
                f"most {MAX_SHARDS}; make the shards larger"
            )
        plans: list[_Plan] = []
        pads = 0
        for number, placed in enumerate(shards, 1):
            name = f"{self._stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            header, used, nbytes = self._header(name, placed, pads)
            pads += used
            plans.append(_Plan(name, header, tuple(placed), nbytes))
        return plans

    def _header(self, name: str, placed: Sequence[_Placed], first_pad: int) -> tuple[bytes, int, int]:
        """Length prefix and JSON of a shard, the number of padding entries in it, and the shard's data bytes."""
        entries: dict[str, Any] = {}
        stamps = {spec.name: spec.stamp for item in placed for spec in item.group.specs if spec.stamp is not None}
        metadata = dict(self._metadata)
        if stamps:
            metadata[STAMP_KEY] = json.dumps(stamps, sort_keys=True)
        if metadata:
            entries["__metadata__"] = metadata
        end = pads = 0
        for item in placed:
            for spec, offset in zip(item.group.specs, item.offsets, strict=True):
                if offset > end:
                    pad = TensorSpec(f"__pad__.{first_pad + pads}", "U8", (offset - end,))
                    entries[pad.name] = _entry(pad, end)
                    pads += 1
                entries[spec.name] = _entry(spec, offset)
                end = offset + spec.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % EXPERT_ALIGN_BYTES)
        if len(text) > MAX_WRITTEN_HEADER_BYTES:
            raise BadContainer(
                f"{name}: a header of {len(text)} bytes, the safetensors package reads at most "
                f"{MAX_WRITTEN_HEADER_BYTES}; make the shards smaller"
            )
        return struct.pack("<Q", len(text)) + text, pads, end

    def _existing(self, plans: Sequence[_Plan], resume: bool) -> set[str]:
        """Names of finished shards of this very plan. Raises UsageError for any other shard in the directory."""
        by_name = {plan.name: plan for plan in plans}
        kept: set[str] = set()
        for path in sorted(self._directory.glob("*.safetensors")) if self._directory.is_dir() else []:
            if path.name.startswith("."):
                continue
            plan = by_name.get(path.name)
            if not resume or plan is None or not _same(path, plan):
                raise UsageError(
                    f"{show_path(path)}: already there and not a finished shard of this write; expected a directory "
                    "without other *.safetensors files"
                )
            kept.add(path.name)
        return kept

    def _make_directory(self, plans: Sequence[_Plan], total: int) -> None:
        """Create the directory, remove what a killed write left, and compare free space with what is to be written."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for plan in plans:
            for leftover in self._directory.glob(f".{plan.name}.tmp-*"):
                leftover.unlink(missing_ok=True)
        free = shutil.disk_usage(self._directory).free
        if free < total:
            raise WriteFailed(f"{show_path(self._directory)}: {total} bytes to write, {free} bytes free on this disk")


def _made(groups: Sequence[_Group], workers: int) -> Generator[Arrays, None, None]:
    """The arrays of each group, in order; threads make the next ones meanwhile. Closing it ends the threads."""
    if workers < 1:
        for group in groups:
            yield group.produce()
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="picaflor-make")
    waiting = iter(groups)
    upcoming = next(waiting, None)
    ahead: deque[tuple[_Group, Future[Arrays]]] = deque()
    held = 0
    try:
        while upcoming is not None or ahead:
            while upcoming is not None and (not ahead or held + upcoming.nbytes <= AHEAD_BYTES):
                ahead.append((upcoming, pool.submit(upcoming.produce)))
                held += upcoming.nbytes
                upcoming = next(waiting, None)
            group, made = ahead.popleft()
            arrays = made.result()
            held -= group.nbytes
            del made
            yield arrays
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _write_shard(
    plan: _Plan, temp: Path, made: Iterable[Arrays], done: int, total: int, progress: Progress | None
) -> int:
    """Write one shard to `temp` and sync it; its groups' arrays come from `made`. Returns the bytes done so far."""
    with temp.open("wb") as file:
        file.write(plan.header)
        done += len(plan.header)
        end = 0
        for item, arrays in zip(plan.placed, made, strict=False):  # `made` goes on with the next shard's groups
            for spec, offset in zip(item.group.specs, item.offsets, strict=True):
                file.write(bytes(offset - end))
                _write_tensor(file, spec, arrays)
                done += offset + spec.nbytes - end
                end = offset + spec.nbytes
            if progress is not None:
                progress(done, total)
        file.flush()
        os.fsync(file.fileno())
    return done


def _offsets(group: _Group, end: int) -> tuple[tuple[int, ...], int]:
    """Where the group's tensors start behind `end`, and where the last one ends."""
    offsets: list[int] = []
    for spec, align in zip(group.specs, group.starts, strict=True):
        end = -(-end // align) * align
        offsets.append(end)
        end += spec.nbytes
    return tuple(offsets), end


def _entry(spec: TensorSpec, offset: int) -> dict[str, Any]:
    """A tensor's header entry."""
    return {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, offset + spec.nbytes]}


def _write_tensor(file: BinaryIO, spec: TensorSpec, arrays: Arrays) -> None:
    """Write one array. Raises BadContainer when it is missing or has another size than declared."""
    array = arrays.get(spec.name)
    if array is None:
        raise BadContainer(f"tensor {show(spec.name)}: declared, but its producer did not return it")
    if array.nbytes != spec.nbytes or array.dtype.itemsize not in (1, ITEM_BYTES[spec.dtype]):
        raise BadContainer(
            f"tensor {show(spec.name)}: declared {spec.dtype} {list(spec.shape)} = {spec.nbytes} bytes, its producer "
            f"returned {array.dtype} {list(array.shape)} = {array.nbytes} bytes"
        )
    if array.nbytes:
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _clean(directory: Path, files: Sequence[Path], made: bool) -> None:
    """Remove the files of a failed write, and its directory if that was made for it and is empty."""
    for path in files:
        path.unlink(missing_ok=True)
    if made and directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def _same(path: Path, plan: _Plan) -> bool:
    """Whether a file has the size and the header of a planned shard."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == plan.nbytes and file.read(len(plan.header)) == plan.header
    except OSError:
        return False


def sync_directory(directory: Path) -> None:
    """Make renames durable where the system can sync a directory."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
