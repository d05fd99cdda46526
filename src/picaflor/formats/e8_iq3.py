"""Format e8-iq3-lattice: super-blocks of 256 rotated weights, each four of them one row of a lattice.

Must not know files, kernels or devices. docs/formats.md, section e8-iq3-lattice. Also holds the rotation that
activations need before they meet this format.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from picaflor.errors import BadContainer
from picaflor.formats.base import F32, ActivationGeometry, Format, Plane, Planes, ScaleGeometry
from picaflor.formats.e8_grid import load_grid
from picaflor.formats.numeric import ceil_div, row_blocks, take_planes

NAME = "e8-iq3-lattice"
BLOCK = 256
SUB_BLOCK = 32
INDEX_BYTES = 64
SCALE_OFFSET = 96
BLOCK_BYTES = 98
TAG = 6.0
ROTATION_SEED = 417
ROTATION_MULTIPLIER = 2685821657736338717
ROTATION_MAX = 32768
GRID = load_grid()
PLANES = (
    Plane("codes", np.dtype("u1"), lambda rows, cols, _: (rows, ceil_div(cols, BLOCK), BLOCK_BYTES)),
    Plane("tag", np.dtype("<f4"), lambda rows, cols, _: (1,), suffix=".qs"),
)

_HALF_GRID = GRID.astype(np.float32) * np.float32(0.5)
_PIECE = 64  # super-blocks encoded together: their scores stay inside the processor's cache
_MASK64 = (1 << 64) - 1
_LANE_SHIFTS = np.array([0, 7, 14, 21], dtype=np.uint32)


@lru_cache(maxsize=64)
def rotation_signs(size: int) -> F32:
    """Signs of one rotation block of `size` values, float32 +-1 `[size]` (read-only)."""
    state = ROTATION_SEED + size
    signs = bytearray()
    for _ in range(ceil_div(size, 8)):
        state ^= state >> 12
        state = (state ^ (state << 25)) & _MASK64
        state ^= state >> 27
        signs.append(((state * ROTATION_MULTIPLIER) & _MASK64) >> 56)
    bits = np.unpackbits(np.frombuffer(bytes(signs), dtype=np.uint8), bitorder="little")[:size]
    out = np.where(bits == 1, np.float32(-1), np.float32(1))
    out.flags.writeable = False
    return out


def rotation_blocks(dim: int) -> tuple[tuple[int, int], ...]:
    """(start, size) of the rotation's blocks over a vector of `dim` values, from the left."""
    blocks = []
    start = 0
    while start < dim:
        rest = dim - start
        size = min(rest & -rest, ROTATION_MAX)
        blocks.append((start, size))
        start += size
    return tuple(blocks)


def _hadamard(values: F32) -> F32:
    """Un-normalised Walsh-Hadamard transform over the last axis, float32, butterflies of stride 1, 2, 4, ..."""
    size = values.shape[-1]
    stride = 1
    while stride < size:
        pairs = values.reshape(-1, size // (2 * stride), 2, stride)
        values = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2)
        stride *= 2
    return values.reshape(-1, size)


def rotate(x: F32) -> F32:
    """The activations as this format needs them: float32 `[..., dim]` in and out, each vector on its own."""
    flat = np.ascontiguousarray(x, dtype=np.float32).reshape(-1, x.shape[-1])
    out = np.empty_like(flat)
    for start, size in rotation_blocks(x.shape[-1]):
        part = _hadamard(flat[:, start : start + size] * rotation_signs(size))
        out[:, start : start + size] = part * (np.float32(1) / np.sqrt(np.float32(size)))
    return out.reshape(x.shape)


def unrotate(x: F32) -> F32:
    """Inverse of `rotate` up to float32 rounding."""
    flat = np.ascontiguousarray(x, dtype=np.float32).reshape(-1, x.shape[-1])
    out = np.empty_like(flat)
    for start, size in rotation_blocks(x.shape[-1]):
        part = _hadamard(flat[:, start : start + size]) * (np.float32(1) / np.sqrt(np.float32(size)))
        out[:, start : start + size] = part * rotation_signs(size)
    return out.reshape(x.shape)


def decode(planes: Planes, rows: int, cols: int, group_size: int) -> F32:
    """The stored, rotated matrix `[rows, cols]`."""
    blocks, _ = take_planes(NAME, PLANES, planes, rows, cols, group_size)
    out = np.empty((rows, cols), dtype=np.float32)
    for part in row_blocks(rows, cols):
        out[part] = _decode_rows(blocks[part])[:, :cols]
    return out


def _decode_rows(blocks: NDArray[np.uint8]) -> F32:
    """`[rows, super-blocks, 98]` to float32 `[rows, 256 * super-blocks]`."""
    rows, count, _ = blocks.shape
    words = np.ascontiguousarray(blocks[..., INDEX_BYTES:SCALE_OFFSET]).view("<u4")
    super_scale = np.ascontiguousarray(blocks[..., SCALE_OFFSET:]).view("<f2").astype(np.float32)
    codes = (words >> np.uint32(28)).astype(np.float32)
    scales = super_scale * (np.float32(0.5) + codes) * np.float32(0.5)
    lanes = ((words[..., None] >> _LANE_SHIFTS) & np.uint32(127)).astype(np.uint8)
    bits = np.unpackbits(lanes[..., None], axis=-1, bitorder="little")
    bits[..., 7] = bits[..., :7].sum(axis=-1, dtype=np.uint8) & 1
    magnitudes = GRID[blocks[..., :INDEX_BYTES]].astype(np.float32).reshape(rows, count, 8, SUB_BLOCK) * np.float32(0.5)
    values = magnitudes * scales[..., None]
    negative = bits.reshape(rows, count, 8, SUB_BLOCK).astype(bool)
    return np.where(negative, -values, values).reshape(rows, count * BLOCK)


def _check_cols(cols: int) -> None:
    """Raises BadContainer where rows are no whole number of super-blocks: such a matrix is read but never written."""
    if cols % BLOCK:
        raise BadContainer(f"{NAME}: rows of {cols} weights cannot be encoded, only multiples of {BLOCK}")


def encode(weights: F32, group_size: int = 0) -> Planes:
    """Rotates the rows of the true matrix, then takes lattice points by the reference's rule (docs/formats.md).

    Raises BadContainer where the row length is no multiple of 256 or a weight is not finite.
    """
    return _encode(weights, closer=False)


def encode_closer(weights: F32) -> Planes:
    """As `encode`, but knows of a flipped sign when it chooses the magnitude: same format, smaller error.

    Raises BadContainer like `encode`.
    """
    return _encode(weights, closer=True)


def _encode(weights: F32, *, closer: bool) -> Planes:
    """Both encoders, in pieces of whole rows."""
    rows, cols = weights.shape
    _check_cols(cols)
    out = np.empty((rows, cols // BLOCK, BLOCK_BYTES), dtype=np.uint8)
    for part in row_blocks(rows, cols):
        rotated = rotate(np.asarray(weights[part], dtype=np.float32))
        if not np.isfinite(rotated).all():
            raise BadContainer(f"weights hold NaN, infinity or overflow; {NAME} encodes finite values only")
        blocks = rotated.reshape(-1, BLOCK)
        pieces = [
            _encode_blocks(blocks[start : start + _PIECE], closer=closer) for start in range(0, len(blocks), _PIECE)
        ]
        out[part] = np.concatenate(pieces).reshape(-1, cols // BLOCK, BLOCK_BYTES)
    return (out, np.array([TAG], dtype="<f4"))


def _encode_blocks(values: F32, *, closer: bool) -> NDArray[np.uint8]:
    """Rotated super-blocks `[n, 256]` to their bytes `[n, 98]`."""
    count = values.shape[0]
    out = np.empty((count, BLOCK_BYTES), dtype=np.uint8)
    rms = np.sqrt(np.mean(values * values, axis=1, dtype=np.float32))
    super_scale = (rms / np.float32(20) + np.float32(1e-12)).astype("<f2")
    out[:, SCALE_OFFSET:] = super_scale[:, None].view(np.uint8)
    magnitudes = np.abs(values).reshape(count, 8, 4, 8)
    negative = values.reshape(magnitudes.shape) < 0
    flipped = _odd_signs(negative, magnitudes)
    if closer:
        magnitudes = np.where(flipped, -magnitudes, magnitudes)
    codes, indices = _nearest(magnitudes.reshape(-1, 8, 8, 4), super_scale.astype(np.float32))
    out[:, :INDEX_BYTES] = indices.reshape(count, INDEX_BYTES)
    lanes = np.packbits(negative ^ flipped, axis=-1, bitorder="little")[..., 0] & np.uint8(127)
    words = (lanes.astype(np.uint32) << _LANE_SHIFTS).sum(axis=-1, dtype=np.uint32)
    words |= codes.astype(np.uint32) << np.uint32(28)
    out[:, INDEX_BYTES:SCALE_OFFSET] = words.astype("<u4").view(np.uint8).reshape(count, -1)
    return out


def _odd_signs(negative: NDArray[np.bool_], magnitudes: F32) -> NDArray[np.bool_]:
    """Which sign to flip in each lane of 8 with an odd number of negatives: that of the first smallest magnitude."""
    odd = negative.sum(axis=-1) % 2 == 1
    smallest = np.argmin(magnitudes, axis=-1)
    flipped: NDArray[np.bool_] = odd[..., None] & (np.arange(8) == smallest[..., None])
    return flipped


@lru_cache(maxsize=1)
def _norm_classes() -> tuple[F32, tuple[NDArray[np.intp], ...]]:
    """Distinct squared norms of the halved grid rows, ascending, and the rows of each: rows of one norm differ in their
    dot product alone, so one comparison per norm finds the nearest of 256."""
    norms = (_HALF_GRID * _HALF_GRID).sum(axis=1)
    distinct = np.unique(norms)
    return distinct, tuple(np.flatnonzero(norms == norm) for norm in distinct)


def _best_per_class(magnitudes: F32) -> tuple[F32, NDArray[np.uint8]]:
    """For vectors `[n, 4]`: twice the largest dot product per norm class and the first row with it, `[n, classes]`."""
    _, classes = _norm_classes()
    dots = np.ascontiguousarray((_HALF_GRID * np.float32(2)) @ magnitudes.T)
    best = np.empty((len(classes), magnitudes.shape[0]), dtype=np.float32)
    row_of = np.empty(best.shape, dtype=np.uint8)
    for number, rows in enumerate(classes):
        best[number] = dots[rows[0]]
        row_of[number] = rows[0]
        for row in rows[1:]:
            better = dots[row] > best[number]
            np.maximum(best[number], dots[row], out=best[number])
            np.putmask(row_of[number], better, row)
    return np.ascontiguousarray(best.T), np.ascontiguousarray(row_of.T)


def _nearest(magnitudes: F32, super_scale: F32) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Sub-scale code `[n, 8]` and grid rows `[n, 8, 8]` for magnitudes `[n, 8, 8, 4]`; first code on equal error."""
    count = magnitudes.shape[0]
    norms, _ = _norm_classes()
    twice_dot, row_of = _best_per_class(magnitudes.reshape(-1, 4))
    vector = np.arange(twice_dot.shape[0])
    best_error = np.full((count, 8), np.inf, dtype=np.float32)
    best_code = np.zeros((count, 8), dtype=np.uint8)
    best_index = np.zeros((count, 8, 8), dtype=np.uint8)
    score = np.empty_like(twice_dot)
    for code in range(16):
        scale = super_scale * np.float32(0.5 + code) * np.float32(0.5)
        np.multiply(np.repeat(scale, INDEX_BYTES)[:, None], norms, out=score)
        np.subtract(score, twice_dot, out=score)
        index = row_of[vector, np.argmin(score, axis=1)].reshape(count, 8, 8)
        off = np.take(_HALF_GRID, index, axis=0)
        off *= scale[:, None, None, None]
        np.subtract(magnitudes, off, out=off)
        error = np.square(off, out=off).reshape(count, 8, SUB_BLOCK).sum(axis=-1)
        better = error < best_error
        best_error[better] = error[better]
        best_code[better] = code
        best_index[better] = index[better]
    return best_code, best_index


def sample(rng: np.random.Generator, rows: int, cols: int, group_size: int) -> Planes:
    """Random grid rows, signs and codes; super-scales of both signs over three decades, dirty padding."""
    blocks = rng.integers(0, 256, size=(rows, ceil_div(cols, BLOCK), BLOCK_BYTES), dtype=np.uint8)
    scales = rng.choice(np.array([-0.02, 0.003, 0.4, 1.7]), size=blocks.shape[:2])
    scales *= rng.uniform(0.5, 2, size=blocks.shape[:2])
    blocks[..., SCALE_OFFSET:] = scales.astype("<f2")[..., None].view(np.uint8)
    return (blocks, np.array([TAG], dtype="<f4"))


FORMAT = Format(
    name=NAME,
    bits_per_weight=lambda cols, group_size: 8.0 * BLOCK_BYTES * ceil_div(cols, BLOCK) / cols,
    planes=PLANES,
    scale=ScaleGeometry(rows=1, cols=SUB_BLOCK, plane=-1),
    activation=ActivationGeometry(group=SUB_BLOCK, rotated=True),
    decode=decode,
    encode=encode,
    sample=sample,
    routed_only=True,
    constants={
        "E8Block": BLOCK,
        "E8SubBlock": SUB_BLOCK,
        "E8IndexBytes": INDEX_BYTES,
        "E8ScaleOffset": SCALE_OFFSET,
        "E8BlockBytes": BLOCK_BYTES,
        "E8RotationSeed": ROTATION_SEED,
        "E8RotationMultiplier": ROTATION_MULTIPLIER,
        "E8RotationMax": ROTATION_MAX,
    },
)
