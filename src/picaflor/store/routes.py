"""Recorded routes: which experts each request of a store asked for, as a small portable file. Ids only, no text.

Knows layers, ids and bytes per expert; must not know models, policies or how experts are stored.

The file, little-endian: `PFROUTES`, uint32 version (1), uint32 length, then so many bytes of JSON:
`{"model": text, "experts_per_token": n, "layers": [{"layer": n, "expert_bytes": [n, ...]}, ...]}`, one size for each
expert of the layer. Then one record per request until the end: uint16 place of the layer in the list, uint16 number of
experts, their ids as uint16 each. A last record that was cut off (the process was killed) is left out.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from picaflor.container.plain_file import OPEN_FLAGS, kind_fault, open_plain, read_plain
from picaflor.container.strict_json import parse_object, show, show_path
from picaflor.errors import BadContainer, BadStateFile, WriteFailed

MAGIC = b"PFROUTES"
VERSION = 1
MOST_HEADER_BYTES = 16 << 20
MOST_FILE_BYTES = 4 << 30
MOST_IDS = 0xFFFF
_HEAD = struct.Struct("<8sII")
_FLUSH_BYTES = 1 << 16
_NOT_THERE = "routes cannot be written there"
_NO_ROUTES = f"is no file of routes: expected it to start with {MAGIC.decode()}"

U16 = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class RoutedLayer:
    """A layer with experts: its number in the model and the bytes that reading each expert takes."""

    layer: int
    expert_bytes: tuple[int, ...]

    @property
    def experts(self) -> int:
        """How many it has."""
        return len(self.expert_bytes)


@dataclass(frozen=True, slots=True)
class Routes:
    """Requests in order. `places[i]` is the place in `layers` of request i, `ids[starts[i]:starts[i + 1]]` its experts.

    `experts_per_token`: how many one token chooses in a layer; a request of more belongs to several tokens.
    `cut`: the file ended in the middle of a record.
    """

    model: str
    experts_per_token: int
    layers: tuple[RoutedLayer, ...]
    places: U16
    starts: NDArray[np.int64]
    ids: U16
    cut: bool = False

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """(place of the layer, ids) of each request."""
        ids, starts = self.ids.tolist(), self.starts.tolist()
        for number, place in enumerate(self.places.tolist()):
            yield place, ids[starts[number] : starts[number + 1]]

    @classmethod
    def from_tokens(
        cls, chosen: NDArray[Any], *, experts: int, expert_bytes: int = 1, first_layer: int = 0, model: str = ""
    ) -> Routes:
        """Routes of tokens that were decoded one by one: `[tokens, layers, experts per token]`."""
        tokens, layers, top = chosen.shape
        if chosen.size and int(chosen.max()) >= experts:
            raise BadStateFile(f"expert {int(chosen.max())} in routes of {experts} experts per layer")
        return cls(
            model=model,
            experts_per_token=top,
            layers=tuple(RoutedLayer(first_layer + at, (expert_bytes,) * experts) for at in range(layers)),
            places=np.tile(np.arange(layers, dtype=np.uint16), tokens),
            starts=np.arange(tokens * layers + 1, dtype=np.int64) * top,
            ids=np.ascontiguousarray(chosen, dtype=np.uint16).reshape(-1),
        )

    @classmethod
    def read(cls, path: Path) -> Routes:
        """The routes of a file. Raises BadStateFile for anything that is no such file."""
        with open_plain(path, most_bytes=MOST_FILE_BYTES, error=BadStateFile) as file:
            start = file.read(len(MAGIC))
        if start != MAGIC:  # before the rest is read
            raise BadStateFile(f"{show_path(path)}: {_NO_ROUTES}")
        data = read_plain(path, most_bytes=MOST_FILE_BYTES, error=BadStateFile)
        try:
            header, at = _split(data)
            layers = _layers(header)
            places, starts, ids, cut = _records(np.frombuffer(data, np.uint8, offset=at), layers)
        except (BadContainer, ValueError) as error:
            raise BadStateFile(f"{show_path(path)}: {error}") from None
        return cls(str(header["model"]), header["experts_per_token"], layers, places, starts, ids, cut)

    def write(self, path: Path) -> None:
        """Write a file. Raises WriteFailed."""
        with RoutesWriter(path, self.model, self.experts_per_token, self.layers) as writer:
            for place, ids in self:
                writer.add(self.layers[place].layer, ids)
        if writer.failure is not None:
            raise writer.failure

    def counts(self) -> dict[int, list[int]]:
        """Requests for each expert, by layer."""
        lengths = np.diff(self.starts)
        place_of_id = np.repeat(self.places, lengths)
        return {
            layer.layer: np.bincount(self.ids[place_of_id == place], minlength=layer.experts).tolist()
            for place, layer in enumerate(self.layers)
        }


def _split(data: bytes) -> tuple[Mapping[str, Any], int]:
    """The header and where the records start. Raises BadContainer, ValueError."""
    if len(data) < _HEAD.size or data[:8] != MAGIC:
        raise ValueError(_NO_ROUTES)
    _, version, length = _HEAD.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"routes of version {version}; known is {VERSION}")
    if length > MOST_HEADER_BYTES or _HEAD.size + length > len(data):
        raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
    return parse_object(data[_HEAD.size : _HEAD.size + length], "header"), _HEAD.size + length


def _layers(header: Mapping[str, Any]) -> tuple[RoutedLayer, ...]:
    """Raises ValueError naming what is wrong."""
    if sorted(header) != ["experts_per_token", "layers", "model"] or not isinstance(header["model"], str):
        raise ValueError(f"header: expected model, experts_per_token and layers, found {show(list(header))}")
    if not _is_count(header["experts_per_token"], MOST_IDS):
        raise ValueError(f"header: experts_per_token is {show(header['experts_per_token'])}")
    entries = header["layers"]
    if not isinstance(entries, list) or not 0 < len(entries) <= MOST_IDS:
        raise ValueError(f"header: layers is {show(entries)}; expected a list")
    found = []
    for entry in entries:
        if not isinstance(entry, dict) or sorted(entry) != ["expert_bytes", "layer"]:
            raise ValueError(f"header: a layer is {show(entry)}; expected layer and expert_bytes")
        layer, sizes = entry["layer"], entry["expert_bytes"]
        if not (_is_count(layer, 1 << 20) or layer == 0):
            raise ValueError(f"header: a layer has number {show(layer)}")
        if (
            not isinstance(sizes, list)
            or not 0 < len(sizes) <= MOST_IDS
            or not all(_is_count(n, 1 << 50) for n in sizes)
        ):
            raise ValueError(f"header: expert_bytes of layer {layer} is {show(sizes)}; expected sizes above 0")
        found.append(RoutedLayer(layer, tuple(sizes)))
    if len({layer.layer for layer in found}) != len(found):
        raise ValueError("header: a layer stands there twice")
    return tuple(found)


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def _is_size(value: object) -> bool:
    return _is_count(value, 1 << 50)


def _records(data: NDArray[np.uint8], layers: Sequence[RoutedLayer]) -> tuple[U16, NDArray[np.int64], U16, bool]:
    """Places, starts and ids. Raises ValueError for a layer or id that the header does not have."""
    words = data[: len(data) // 2 * 2].view("<u2")
    known = words.tolist()
    places: list[int] = []
    lengths: list[int] = []
    parts: list[U16] = []
    at, end = 0, len(known)
    while at + 2 <= end and at + 2 + known[at + 1] <= end:
        place, length = known[at], known[at + 1]
        ids = known[at + 2 : at + 2 + length]
        if place >= len(layers):
            raise ValueError(f"record {len(places)}: layer {place} of {len(layers)}")
        if len(set(ids)) != length or max(ids, default=0) >= layers[place].experts:
            raise ValueError(
                f"record {len(places)}: experts {show(ids)}; expected distinct ones below {layers[place].experts}"
            )
        places.append(place)
        lengths.append(length)
        parts.append(words[at + 2 : at + 2 + length])
        at += 2 + length
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids_found = np.concatenate(parts).astype(np.uint16) if parts else np.empty(0, np.uint16)
    return np.array(places, dtype=np.uint16), starts, ids_found, 2 * at != len(data)


def check_target(path: Path) -> None:
    """Raises WriteFailed where routes must not go: over a file that holds anything else, or over no regular file."""
    try:
        fault = kind_fault(path.stat().st_mode)
    except FileNotFoundError:
        return
    except OSError as error:
        raise WriteFailed(f"{show_path(path)}: {_NOT_THERE}: {error.strerror}") from None
    if fault:
        raise WriteFailed(f"{show_path(path)}: {_NOT_THERE}: it {fault}")
    with open_plain(path, most_bytes=None, error=WriteFailed) as file:
        _check_start(path, file.read(len(MAGIC)))


def _check_start(path: Path, start: bytes) -> None:
    """Empty, or the beginning of routes, also of a recording that was cut off there. Raises WriteFailed."""
    if not MAGIC.startswith(start):
        raise WriteFailed(
            f"{show_path(path)}: {_NOT_THERE}: it holds something else (it starts with {start!r}); give "
            "another name or remove it"
        )


def _open_to_record(path: Path) -> BinaryIO:
    """The file, emptied only after a look at what the open file holds. Raises OSError, WriteFailed."""
    check_target(path)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o666), "r+b")
    try:
        if fault := kind_fault(os.fstat(file.fileno()).st_mode):
            raise WriteFailed(f"{show_path(path)}: {_NOT_THERE}: it {fault}")
        _check_start(path, file.read(len(MAGIC)))
        file.seek(0)
        file.truncate()
    except BaseException:
        file.close()
        raise
    return file


class RoutesWriter:
    """Appends requests to a file as they come. A disk that fails ends the recording, not the run: see `failure`."""

    def __init__(self, path: Path, model: str, experts_per_token: int, layers: Sequence[RoutedLayer]) -> None:
        self.path = path
        self.failure: WriteFailed | None = None
        self.requests = 0
        self._places = {layer.layer: place for place, layer in enumerate(layers)}
        header = {
            "model": model,
            "experts_per_token": experts_per_token,
            "layers": [{"layer": layer.layer, "expert_bytes": list(layer.expert_bytes)} for layer in layers],
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        self._waiting: list[int] = []
        try:
            self._file = _open_to_record(path)
            self._file.write(_HEAD.pack(MAGIC, VERSION, len(text)) + text)
        except OSError as error:
            raise WriteFailed(f"{show_path(path)}: {_NOT_THERE}: {error.strerror}") from None

    def add(self, layer: int, ids: Sequence[int]) -> None:
        """One request."""
        self.requests += 1
        self._waiting += (self._places[layer], len(ids), *ids)
        if len(self._waiting) * 2 >= _FLUSH_BYTES:
            self._flush()

    def close(self) -> None:
        """Write the rest."""
        self._flush()
        try:
            self._file.close()
        except OSError as error:
            self._fail(error)

    def __enter__(self) -> RoutesWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush(self) -> None:
        words, self._waiting = self._waiting, []
        if self.failure is not None or not words:
            return
        try:
            self._file.write(np.array(words, dtype="<u2").tobytes())
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if self.failure is None:
            reason = error.strerror or str(error)
            self.failure = WriteFailed(f"{show_path(self.path)}: recording of routes ended here: {reason}")
