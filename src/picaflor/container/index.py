"""An opened model directory: every tensor by name, and reads of their bytes.

Knows bytes and names; must not know formats, families or devices. Files are untrusted: docs/container.md lists what is
checked and what is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.container.files import FileSet
from picaflor.container.safetensors import Header, header_bytes, parse_header
from picaflor.container.shards import (
    IndexFile,
    check_index,
    declared_count,
    find_shards,
    index_belongs,
    missing_by_name,
    read_index,
    read_small_file,
    refuse_missing,
    refuse_stray,
)
from picaflor.container.stamps import collect_rules, collect_stamps
from picaflor.container.strict_json import parse_object, show, show_path
from picaflor.container.types import Shard, Span, TensorInfo
from picaflor.errors import BadContainer, MissingTensor, OutOfBudget

MAX_CONFIG_BYTES = 256_000_000
MAX_DECLARED_BYTES = 1 << 50
"""Most bytes that the header of one file may declare where the file itself is not here."""
PAD_NAME = re.compile(r"__pad__\.\d+")
_FLOATS = ("F32", "BF16", "F16")


class Container:
    """A model directory whose headers were read and checked. Use as a context manager or call `close`.

    `tensors` maps name -> TensorInfo without padding entries; `shards` is sorted by full path. `stamps` and
    `rules_json` are the merged `colibri.fmt` claims and the raw `picaflor.formats` texts. `notes` are one-line remarks
    that a user should see. `missing_shards` is empty unless opened with `allow_missing`. Reads are safe from several
    threads.
    """

    def __init__(
        self,
        path: Path,
        *,
        shards: tuple[Shard, ...],
        tensors: dict[str, TensorInfo],
        files: FileSet,
        index: IndexFile | None,
        notes: tuple[str, ...],
        missing_shards: tuple[str, ...],
        padding_nbytes: int,
    ) -> None:
        self.path = path
        self.shards = shards
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.notes = notes
        self.missing_shards = missing_shards
        self.padding_nbytes = padding_nbytes
        self.stamps: Mapping[str, str] = MappingProxyType(collect_stamps(shards))
        self.rules_json = collect_rules(shards)
        self._files = files
        self._index = index

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        extra_dirs: Sequence[Path | str] = (),
        allow_missing: bool = False,
        headers_only: bool = False,
        max_open_files: int | None = None,
    ) -> Container:
        """Read and check all headers of a model directory; `extra_dirs` are searched after it for more shards.

        `allow_missing` lists shards that names or index declare and that are not here instead of refusing (for
        `inspect`). `headers_only` accepts files that end after their header, for `plan`: sizes are those that the
        headers declare, and nothing can be read. Raises BadContainer, one line naming the file.
        """
        directory = Path(path)
        paths = find_shards(directory, [Path(extra) for extra in extra_dirs])
        names = [shard.name for shard in paths]
        notes: list[str] = []
        index = read_index(directory)
        if index is not None and not index_belongs(index, names):
            notes.append(f"{show_path(index.path)}: ignored: it names none of the shards here")
            index = None
        missing = missing_by_name(names)
        source = "their names declare them"
        if index is not None:
            refuse_stray(index, names)
            absent = [name for name in index.shard_names if name not in set(names)]
            if absent:
                missing, source = tuple(absent), f"{index.path.name} names them"
        if not allow_missing:
            refuse_missing(directory, missing, len(paths), source)
        files = FileSet(paths, limit=max_open_files)
        try:
            shards, tensors, padding = _read_headers(files, paths, headers_only=headers_only)
            if index is not None:
                notes += _index_notes(index, shards, tensors)
            return cls(
                directory,
                shards=shards,
                tensors=tensors,
                files=files,
                index=index,
                notes=tuple(notes),
                missing_shards=missing,
                padding_nbytes=padding,
            )
        except BaseException:
            files.close()
            raise

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; later reads raise ReadFailed."""
        self._files.close()

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def get(self, name: str) -> TensorInfo | None:
        """The entry of a tensor, or None."""
        return self.tensors.get(name)

    def require(self, name: str) -> TensorInfo:
        """The entry of a tensor. Raises MissingTensor with the number of shards that are here and declared."""
        info = self.tensors.get(name)
        if info is None:
            names = [shard.path.name for shard in self.shards]
            declared = declared_count([*names, *self.missing_shards], self._index)
            raise MissingTensor(
                f"{show_path(self.path)}: tensor {show(name)} is in no shard; {len(names)} of {declared} declared "
                f"shards are here, with {len(self.tensors)} tensors"
            )
        return info

    def handle(self, shard: int) -> AbstractContextManager[int]:
        """A shard's descriptor for positional reads, kept open while the context lasts. Raises ReadFailed."""
        return self._files.handle(shard)

    def read_into(self, span: Span | TensorInfo, view: memoryview) -> None:
        """Fill a writable, contiguous byte view of exactly `span.nbytes` bytes.

        Raises ReadFailed naming file, offset, expected and found.
        """
        shard = self.shards[span.shard]
        target = view.cast("B") if view.format != "B" or view.ndim != 1 else view
        if len(target) != span.nbytes:
            raise ValueError(f"read of {span.nbytes} bytes into a view of {len(target)}")
        if span.offset < 0 or span.offset + span.nbytes > shard.nbytes:
            raise BadContainer(
                f"{show_path(shard.path)}: bytes [{span.offset}, {span.offset + span.nbytes}) are outside the file of "
                f"{shard.nbytes} bytes"
            )
        self._files.read(span.shard, span.offset, target)

    def read(self, info: TensorInfo | Span) -> NDArray[np.uint8]:
        """The raw bytes `[nbytes]` of a tensor or span. Raises ReadFailed, OutOfBudget if memory is refused."""
        try:
            data: NDArray[np.uint8] = np.empty(info.nbytes, dtype=np.uint8)
        except MemoryError:
            raise OutOfBudget(
                f"{show_path(self.shards[info.shard].path)}: no memory for a read of {info.nbytes} bytes"
            ) from None
        if info.nbytes:
            self.read_into(info, data.data)
        return data

    def read_float(self, name: str, shape: Sequence[int] | None = None) -> NDArray[np.float32]:
        """An F32, BF16 or F16 tensor as float32 of its own shape, which must be `shape` if that is given.

        Raises MissingTensor, BadContainer for another dtype or shape, ReadFailed.
        """
        info = self.require(name)
        where = f"{show_path(self.shards[info.shard].path)}: tensor {show(name)}"
        if info.dtype not in _FLOATS:
            raise BadContainer(f"{where}: expected dtype {', '.join(_FLOATS)}; found {info.dtype}")
        if shape is not None and info.shape != tuple(shape):
            raise BadContainer(f"{where}: expected shape {list(shape)}, found {list(info.shape)}")
        return widen(self.read(info), info.dtype).reshape(info.shape)

    def config(self) -> dict[str, Any]:
        """The parsed `config.json`. Raises BadContainer if it is missing, too large or malformed."""
        found = self.side_json("config.json", limit=MAX_CONFIG_BYTES)
        if found is None:
            small = ("config.json", "tokenizer.json")
            needed = ", ".join(name for name in small if not (self.path / name).exists())
            raise BadContainer(
                f"{show_path(self.path)}: no config.json: the model's family is unknown until config.json is there; "
                f"{len(self.shards)} shards found, still needed: {needed}"
            )
        return found

    def side_json(self, name: str, *, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any] | None:
        """A JSON object of the primary directory (`generation_config.json`, ...), or None if the file is absent.

        Raises BadContainer when it is larger than `limit` bytes, malformed, or no object with unique keys.
        """
        data = read_small_file(self.path / name, limit)
        return None if data is None else parse_object(data, show_path(self.path / name))


def widen(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Bytes of an F32, BF16 or F16 tensor (little-endian) as flat float32; every value is exact."""
    if dtype == "F32":
        return data.view("<f4").astype(np.float32, copy=False)
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F16":
        return data.view("<f2").astype(np.float32)
    raise BadContainer(f"expected dtype {', '.join(_FLOATS)}; found {show(dtype)}")


def _read_headers(
    files: FileSet, paths: Sequence[Path], *, headers_only: bool
) -> tuple[tuple[Shard, ...], dict[str, TensorInfo], int]:
    """Shards, tensors by name and padding bytes. Raises BadContainer, also for a name in two shards."""
    shards: list[Shard] = []
    tensors: dict[str, TensorInfo] = {}
    padding = 0
    for number, path in enumerate(paths):
        header, nbytes = _read_header(files, number, path, headers_only=headers_only)
        shards.append(Shard(number, path, nbytes, header.metadata))
        for info in header.tensors:
            if info.name.startswith("__pad__.") and PAD_NAME.fullmatch(info.name):
                padding += _padding(info, path)
                continue
            other = tensors.setdefault(info.name, info)
            if other is not info:
                raise BadContainer(
                    f"{show_path(path)}: tensor {show(info.name)} is also in {show_path(paths[other.shard])}; expected "
                    "each tensor in one shard"
                )
    return tuple(shards), tensors, padding


def _padding(info: TensorInfo, path: Path) -> int:
    """Bytes of a padding entry. Raises BadContainer if it is no U8 tensor."""
    if info.dtype != "U8":
        raise BadContainer(
            f"{show_path(path)}: tensor {show(info.name)}: padding is expected to be U8, found {info.dtype}"
        )
    return info.nbytes


def _read_header(files: FileSet, number: int, path: Path, *, headers_only: bool) -> tuple[Header, int]:
    """One shard's checked header and its file size in bytes, with `headers_only` the size that the header declares."""
    where = show_path(path)
    nbytes = files.stamp(number).nbytes
    prefix = bytearray(min(8, nbytes))
    files.read(number, 0, memoryview(prefix))
    length = header_bytes(bytes(prefix), nbytes, where)
    data = bytearray(length)
    files.read(number, 8, memoryview(data))
    if not headers_only:
        return parse_header(bytes(data), nbytes, where, number), nbytes
    header = parse_header(bytes(data), MAX_DECLARED_BYTES, where, number)
    ends = (info.offset + info.nbytes for info in header.tensors)
    return header, max(nbytes, *ends, header.data_start)


def _index_notes(index: IndexFile, shards: Iterable[Shard], tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Cross-check the index; a remark if the shards hold tensors that it does not list."""
    names = [shard.path.name for shard in shards]
    holders = {name: names[info.shard] for name, info in tensors.items()}
    unlisted = check_index(index, names, holders)
    return [f"{show_path(index.path)}: does not list {unlisted} tensors that are in the shards"] if unlisted else []
