"""What every stored weight means, read plainly from docs/formats.md: one formula per format.

Must not use the formats' own decoders or any kernel; of the format files only the published lattice table is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.errors import UnknownFormat
from picaflor.formats.e8_grid import load_grid

F64 = NDArray[np.float64]
Bytes = NDArray[Any]

_LATTICE = load_grid().astype(np.float64)


@dataclass(frozen=True)
class Stored:
    """A matrix as it is stored: float64 `codes` and `scales` of every weight, `[rows, cols]`."""

    codes: F64
    scales: F64

    @cached_property
    def weights(self) -> F64:
        """The weights: code times scale, rounded to float32 once."""
        with np.errstate(over="ignore", under="ignore"):
            return (self.codes * self.scales).astype(np.float32).astype(np.float64)

    @cached_property
    def sizes(self) -> F64:
        """Magnitudes of the weights."""
        return np.abs(self.weights)


def read(format_name: str, planes: Sequence[Bytes], rows: int, cols: int, group_size: int) -> Stored:
    """Codes and scales of a matrix. Raises UnknownFormat for a format that has no formula here."""
    if format_name not in _READERS:
        raise UnknownFormat(f"the oracle has no formula for {format_name}; it has {', '.join(_READERS)}")
    flat = [np.ascontiguousarray(plane).reshape(-1).view(np.uint8) for plane in planes]
    return _READERS[format_name](flat, rows, cols, group_size)


def _places(rows: int, cols: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of every weight."""
    return np.arange(rows)[:, None], np.arange(cols)[None, :]


def _float(dtype: str) -> Callable[..., Stored]:
    def reader(planes: list[Bytes], rows: int, cols: int, group_size: int) -> Stored:
        values = planes[0].view(dtype).astype(np.float64).reshape(rows, cols)
        return Stored(values, np.ones((rows, cols)))

    return reader


def _bf16(planes: list[Bytes], rows: int, cols: int, group_size: int) -> Stored:
    upper = planes[0].view("<u2").astype(np.uint32) << np.uint32(16)
    return Stored(upper.view(np.float32).astype(np.float64).reshape(rows, cols), np.ones((rows, cols)))


def _row_scales(plane: Bytes, rows: int, cols: int) -> F64:
    return np.broadcast_to(plane.view("<f4").astype(np.float64)[:, None], (rows, cols))


def _int8_row(planes: list[Bytes], rows: int, cols: int, group_size: int) -> Stored:
    codes = planes[0].astype(np.float64).reshape(rows, cols)
    codes = np.where(codes > 127, codes - 256, codes)
    return Stored(codes, _row_scales(planes[1], rows, cols))


def _nibbles(plane: Bytes, rows: int, cols: int) -> NDArray[np.int64]:
    """Column i lies in byte i // 2 of its row: low nibble if i is even, else the high one."""
    i = np.arange(cols)
    byte = plane.reshape(rows, (cols + 1) // 2)[:, i // 2]
    return np.where(i % 2 == 0, byte % 16, byte // 16).astype(np.int64)


def _int4_row(planes: list[Bytes], rows: int, cols: int, group_size: int) -> Stored:
    codes = _nibbles(planes[0], rows, cols).astype(np.float64) - 8
    return Stored(codes, _row_scales(planes[1], rows, cols))


def _int4_grouped(planes: list[Bytes], rows: int, cols: int, group_size: int) -> Stored:
    r, i = _places(rows, cols)
    groups = (cols + group_size - 1) // group_size
    scales = planes[1].view("<f4").astype(np.float64)[r * groups + i // group_size]
    return Stored(_nibbles(planes[0], rows, cols).astype(np.float64) - 8, scales)


def _int2_row(planes: list[Bytes], rows: int, cols: int, group_size: int) -> Stored:
    r, i = _places(rows, cols)
    byte = planes[0].reshape(rows, (cols + 3) // 4)[r, i // 4].astype(np.int64)
    codes = ((byte >> (2 * (i % 4))) % 4).astype(np.float64) - 2
    return Stored(codes, _row_scales(planes[1], rows, cols))


def _int3_g64(planes: list[Bytes], rows: int, cols: int, group_size: int) -> Stored:
    r, i = _places(rows, cols)
    blocks = (cols + 63) // 64
    block, j = i // 64, i % 64
    stored = planes[0].reshape(rows, blocks * 24).astype(np.int64)
    low = (stored[r, block * 24 + j // 4] >> (2 * (j % 4))) % 4
    high = (stored[r, block * 24 + 16 + j // 8] >> (j % 8)) % 2
    scales = planes[1].view("<f4").astype(np.float64)[r * blocks + block]
    return Stored((low + 4 * high).astype(np.float64) - 4, scales)


_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _mxfp4(planes: list[Bytes], rows: int, cols: int, group_size: int) -> Stored:
    r, i = _places(rows, cols)
    nibble = _nibbles(planes[0], rows, cols)
    value = np.where(nibble >= 8, -1.0, 1.0) * _E2M1[nibble % 8]
    exponent = planes[1].astype(np.float64)[r * ((cols + 31) // 32) + i // 32]
    return Stored(value, np.where(exponent == 255, np.nan, 2.0 ** (exponent - 127)))


def _fp8_b128(planes: list[Bytes], rows: int, cols: int, group_size: int) -> Stored:
    r, i = _places(rows, cols)
    byte = planes[0].astype(np.int64).reshape(rows, cols)
    exponent, mantissa = byte % 128 // 8, byte % 8
    value = np.where(exponent == 0, mantissa / 512.0, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value = np.where(byte % 128 == 127, np.nan, value) * np.where(byte >= 128, -1.0, 1.0)
    scales = planes[1].view("<f4").astype(np.float64)[(r // 128) * ((cols + 127) // 128) + i // 128]
    return Stored(value, scales)


def _e8(planes: list[Bytes], rows: int, cols: int, group_size: int) -> Stored:
    r, i = _places(rows, cols)
    blocks = (cols + 255) // 256
    stored = planes[0].reshape(rows, blocks, 98)
    block, j = i // 256, i % 256
    magnitude = _LATTICE[stored[r, block, j // 4], j % 4] / 2
    words = np.ascontiguousarray(stored[:, :, 64:96]).view("<u4").astype(np.int64)
    word = words[r, block, j // 32]
    lane, bit = j % 32 // 8, j % 8
    seven = (word >> (7 * lane)) % 128
    parity = sum((seven >> k) % 2 for k in range(7)) % 2
    negative = np.where(bit == 7, parity, (seven >> np.minimum(bit, 6)) % 2)
    d = np.ascontiguousarray(stored[:, :, 96:98]).view("<f2").astype(np.float32)[r, block, 0]
    db = d * (np.float32(0.5) + (word >> 28).astype(np.float32)) * np.float32(0.5)
    return Stored(np.where(negative == 1, -magnitude, magnitude), db.astype(np.float64))


_READERS: dict[str, Callable[[list[Bytes], int, int, int], Stored]] = {
    "f32": _float("<f4"),
    "bf16": _bf16,
    "f16": _float("<f2"),
    "int8-row": _int8_row,
    "int4-row": _int4_row,
    "int2-row": _int2_row,
    "int4-grouped": _int4_grouped,
    "int3-g64": _int3_g64,
    "e8-iq3-lattice": _e8,
    "mxfp4": _mxfp4,
    "fp8-e4m3-b128": _fp8_b128,
}


@lru_cache(maxsize=64)
def rotation_signs(size: int) -> F64:
    """+-1 of one rotation block, from the generator of docs/formats.md."""
    state, out = 417 + size, []
    for _ in range((size + 7) // 8):
        state ^= state >> 12
        state = (state ^ (state << 25)) % 2**64
        state ^= state >> 27
        top = (state * 2685821657736338717) % 2**64 >> 56
        out += [-1.0 if (top >> bit) % 2 else 1.0 for bit in range(8)]
    return np.array(out[:size])


def rotation_spans(cols: int) -> list[tuple[int, int]]:
    """(start, size) of the rotation's blocks."""
    spans, start = [], 0
    while start < cols:
        size = 1
        while (cols - start) % (2 * size) == 0 and size < 32768:
            size *= 2
        spans.append((start, size))
        start += size
    return spans


def _butterflies(part: F64) -> F64:
    """The orthonormal Walsh-Hadamard transform of rows whose length is a power of two."""
    rows, size = part.shape
    stride = 1
    while stride < size:
        pairs = part.reshape(rows, size // (2 * stride), 2, stride)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        part = np.stack([a + b, a - b], axis=2).reshape(rows, size)
        stride *= 2
    out: F64 = part / np.sqrt(size)
    return out


def rotate(x: F64) -> F64:
    """Rows of activations, rotated as the lattice's rows are, in float64: signs first, then the transform."""
    out = np.array(x, dtype=np.float64)
    for start, size in rotation_spans(x.shape[-1]):
        out[:, start : start + size] = _butterflies(out[:, start : start + size] * rotation_signs(size))
    return out


def unrotate(matrix: F64) -> F64:
    """The inverse of `rotate`, row by row: the transform is its own inverse."""
    out = np.array(matrix, dtype=np.float64)
    for start, size in rotation_spans(matrix.shape[-1]):
        out[:, start : start + size] = _butterflies(out[:, start : start + size]) * rotation_signs(size)
    return out
