"""The safetensors header: from untrusted bytes to checked `TensorInfo` entries.

Knows the file format and its rules (docs/container.md, "What is checked"); must not know shard sets, formats or
families. Every bound is checked before anything is allocated or used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NoReturn

from picaflor.container.strict_json import parse_object, show
from picaflor.container.types import TensorInfo
from picaflor.errors import BadContainer

MAX_HEADER_BYTES = 512 * 1024 * 1024
MAX_RANK = 8
_LIMIT = 1 << 63

# Bytes per element of every dtype code that is read.
ITEM_BYTES = MappingProxyType(
    {
        "BF16": 2,
        "F16": 2,
        "F32": 4,
        "U8": 1,
        "I8": 1,
        "F8_E4M3": 1,
        "F8_E4M3FN": 1,
        "float8_e4m3fn": 1,
        "F8_E8M0": 1,
        "F8_E8M0FNU": 1,
        "I64": 8,
        "U64": 8,
    }
)

# Packed codes: their shape says nothing about their bytes.
PACKED = frozenset({"U8", "I8"})


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: its tensors in file order, the text metadata, and where the data starts (bytes)."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    data_start: int


def header_bytes(prefix: bytes, file_bytes: int, where: str) -> int:
    """Length of the JSON header from the file's first 8 bytes, checked against the file's size and the cap.

    Raises BadContainer naming `where` (the file).
    """
    if file_bytes < 8 or len(prefix) < 8:
        raise BadContainer(
            f"{where}: truncated: a safetensors file starts with an 8-byte header length, the file has "
            f"{min(file_bytes, len(prefix))} bytes; fetch it again"
        )
    (length,) = struct.unpack("<Q", prefix[:8])
    if length > MAX_HEADER_BYTES:
        raise BadContainer(
            f"{where}: the header claims {length} bytes, at most {MAX_HEADER_BYTES} are accepted (the file has "
            f"{file_bytes}): damaged, or not a safetensors file"
        )
    if length > file_bytes - 8:
        raise BadContainer(
            f"{where}: truncated: the header claims {length} bytes, but the file holds only {file_bytes - 8} after its "
            "length prefix; fetch it again"
        )
    return int(length)


def parse_header(data: bytes, file_bytes: int, where: str, shard: int = 0) -> Header:
    """Check the header JSON `data` of a file of `file_bytes` bytes; offsets become absolute in the file.

    `shard` is copied into every entry. Raises BadContainer with one line that names `where`, the tensor, what was
    expected and what was found.
    """
    start = 8 + len(data)
    fields = parse_object(data, f"{where}: header")
    metadata = _metadata(fields.pop("__metadata__", {}), where)
    available = file_bytes - start
    tensors = [_entry(name, entry, where, shard, start, available) for name, entry in fields.items()]
    tensors.sort(key=_position)
    _refuse_overlaps(tensors, where, start)
    return Header(tensors=tuple(tensors), metadata=metadata, data_start=start)


def _position(info: TensorInfo) -> tuple[int, int]:
    return (info.offset, info.nbytes)


def _refuse(where: str, name: str, text: str) -> NoReturn:
    raise BadContainer(f"{where}: tensor {show(name)}: {text}")


def _metadata(value: object, where: str) -> dict[str, str]:
    """The `__metadata__` entry: an object of strings."""
    if not isinstance(value, dict):
        raise BadContainer(f"{where}: __metadata__: expected an object of strings, found {show(value)}")
    for key, text in value.items():
        if not isinstance(text, str):
            raise BadContainer(f"{where}: __metadata__ entry {show(key)}: expected a string, found {show(text)}")
    return value


def _entry(name: str, entry: object, where: str, shard: int, start: int, available: int) -> TensorInfo:
    """One checked tensor entry. `start` is where the data begins, `available` its bytes."""
    if not isinstance(entry, dict):
        _refuse(where, name, f"expected an object with dtype, shape and data_offsets, found {show(entry)}")
    dtype = entry.get("dtype")
    item = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item is None or not isinstance(dtype, str):
        found = show(dtype) if "dtype" in entry else "none"
        _refuse(where, name, f"dtype: expected one of {', '.join(ITEM_BYTES)}; found {found}")
    shape = _shape(name, entry, where)
    offsets = entry.get("data_offsets")
    if not isinstance(offsets, list) or len(offsets) != 2 or type(offsets[0]) is not int or type(offsets[1]) is not int:
        found = show(offsets) if "data_offsets" in entry else "none"
        _refuse(where, name, f"data_offsets: expected two integers, found {found}")
    begin, end = offsets
    if begin < 0 or end < begin:
        _refuse(where, name, f"data_offsets: expected 0 <= begin <= end, found {show(offsets)}")
    if end > available:
        _refuse(
            where,
            name,
            f"data_offsets end at {show(end)}, but the file holds {available} data bytes: truncated? fetch it again",
        )
    count = _elements(name, shape, where)
    if dtype not in PACKED and end - begin != count * item:
        _refuse(
            where,
            name,
            f"shape {show(list(shape))} of {dtype} needs {count * item} bytes, data_offsets span {end - begin}",
        )
    return TensorInfo(name, dtype, shape, shard, start + begin, end - begin)


def _shape(name: str, entry: dict[str, Any], where: str) -> tuple[int, ...]:
    """The entry's shape: a list of at most MAX_RANK integers in [0, 2^63)."""
    shape = entry.get("shape")
    if not isinstance(shape, list):
        _refuse(where, name, f"shape: expected a list of integers, found {show(shape) if 'shape' in entry else 'none'}")
    if len(shape) > MAX_RANK:
        _refuse(where, name, f"shape: expected at most {MAX_RANK} dimensions, found {len(shape)}")
    for extent in shape:
        if type(extent) is not int or not 0 <= extent < _LIMIT:
            _refuse(where, name, f"shape: expected integers from 0 to 2^63-1, found {show(extent)} in {show(shape)}")
    return tuple(shape)


def _elements(name: str, shape: tuple[int, ...], where: str) -> int:
    """Product of the extents; every partial product must stay below 2^63."""
    count = 1
    for extent in shape:
        count *= extent
        if count >= _LIMIT:
            _refuse(where, name, f"shape {show(list(shape))}: the number of elements is 2^63 or more")
    return count


def _refuse_overlaps(tensors: list[TensorInfo], where: str, start: int) -> None:
    """Refuse two tensors that share bytes; `tensors` ascend in the file."""
    for before, after in pairwise(tensors):
        if after.offset < before.offset + before.nbytes:
            spans = [
                f"{show(info.name)} [{info.offset - start}, {info.offset + info.nbytes - start})"
                for info in (before, after)
            ]
            raise BadContainer(f"{where}: overlapping data_offsets: {spans[0]} and {spans[1]}; expected disjoint spans")
