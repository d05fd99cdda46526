"""Launches of attention: chunks of rows through blocks and their merge, with the absorbed products around them.

Knows kernels, buffers and planes; must not know families or recorders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from picaflor.backends.api import GQA, MLA, KVPlane, Rows
from picaflor.backends.recording import Run
from picaflor.backends.vulkan.attention import BLOCK_KEYS, MERGE, absorb_kernel, block_kernel, release_kernel
from picaflor.backends.vulkan.device import Buffer, Launch
from picaflor.backends.vulkan.program import Moment, SpaceAt, memory_of, stride_of, view
from picaflor.backends.vulkan.weights import HeldMatrix
from picaflor.backends.vulkan.wgsl import LANES
from picaflor.errors import UnsupportedKernel
from picaflor.formats.numeric import ceil_div

SCRATCH_BYTES: Final = 64 << 20
"""Most memory for the blocks of one chunk."""


@dataclass(frozen=True, slots=True)
class Room:
    """What attention needs of its recorder: the frame, where it has rows and pages, sizes, scratch memory."""

    frame: Buffer
    at: SpaceAt
    paging: dict[str, int]
    capacity: int
    max_rows: int
    most_bytes: int
    scratch: Callable[[str, int], Buffer]


@dataclass(frozen=True, slots=True)
class Heads:
    """One side of a score or of a sum: a plane, the part of a token that a head has, `width` values."""

    plane: KVPlane
    step: int
    width: int


@dataclass(frozen=True, slots=True)
class Query:
    """Queries: where they begin, from a row and a head to the next; `local`: rows count from the chunk's first."""

    memory: Buffer
    stride: int
    start: int
    step: int
    local: bool = False


def rounded(longest: int) -> int:
    """Positions that launches are made for: few different numbers, so that launches are used again."""
    return max(BLOCK_KEYS, 1 << (longest - 1).bit_length())


def attend_queries(room: Room, q: Rows, out: Rows, kind: GQA, selection: Rows | None) -> Run:
    """Grouped queries: each head meets the keys of its group."""
    keys = Heads(kind.keys, kind.head_dim, kind.head_dim)
    values = Heads(kind.values, kind.head_dim, kind.head_dim)
    blocks = _Blocks(room, kind.heads, kind.heads // kind.kv_heads, kind.scale, keys, values, selection)
    query = Query(memory_of(q), stride_of(q), q.start, kind.head_dim)

    def run(moment: Moment) -> None:
        for first in range(0, moment.count, blocks.chunk):
            blocks.launch(moment, first, query, None, memory_of(out), {**view("o", out), "o_first": 0})

    return run


def attend_latents(room: Room, q: Rows, out: Rows, kind: MLA, selection: Rows | None) -> Run:
    """Latents: queries go through kv_b first, what they get comes back through it."""
    held: HeldMatrix = kind.kv_b.handle
    latent = kind.latent.width
    keys = Heads(kind.latent, 0, latent)
    second = Heads(kind.rope_key, 0, kind.rope)
    blocks = _Blocks(room, kind.heads, 1, kind.scale, keys, keys, selection, second)
    nbytes = 4 * blocks.chunk * kind.heads * latent
    absorbed, found = room.scratch("absorbed queries", nbytes), room.scratch("latents", nbytes)
    stride = kind.heads * latent
    head = kind.nope + kind.rope
    query = Query(absorbed, stride, 0, latent, local=True)
    query2 = Query(memory_of(q), stride_of(q), q.start + kind.nope, head)
    launches: dict[int, tuple[Launch, Launch]] = {}

    def made(first: int) -> tuple[Launch, Launch]:
        (part, *others) = held.parts
        if others:
            raise UnsupportedKernel(f"{held.name}: attention needs it in one binding, which holds {room.most_bytes} B")
        reader = held.reader(vectors=False)
        common = {
            **held.shape.fields(""), "space": room.at.space, "first": first, "chunk": blocks.chunk,
            "heads": kind.heads, "nope": kind.nope, "per_head": kind.nope + kind.value, "latent": latent,
        }  # fmt: skip
        before = {**common, **view("q", q), "q_head": head}
        after = {**common, **view("o", out), "value": kind.value}
        return (
            Launch(absorb_kernel(reader), (memory_of(q), part.codes, part.scales, absorbed, room.frame), before),
            Launch(release_kernel(reader), (found, part.codes, part.scales, memory_of(out), room.frame), after),
        )

    def run(moment: Moment) -> None:
        for first in range(0, moment.count, blocks.chunk):
            if first not in launches:
                launches[first] = made(first)
            absorb, release = launches[first]
            count = min(blocks.chunk, moment.count - first)
            moment.stream.launch(absorb, count * kind.heads * ceil_div(latent, LANES))
            blocks.launch(moment, first, query, query2, found, {"o_stride": stride, "o_at": 0, "o_first": first})
            moment.stream.launch(release, count * kind.heads * ceil_div(kind.value, 4))

    return run


class _Blocks:
    """Blocks and merge for chunks of rows."""

    def __init__(self, room: Room, heads: int, share: int, scale: float, keys: Heads, values: Heads,
                 selection: Rows | None, second: Heads | None = None) -> None:  # fmt: skip
        self._room, self._heads, self._share, self._scale = room, heads, share, scale
        self._keys, self._values, self._second, self._selection = keys, values, second, selection
        most = ceil_div(rounded(room.capacity), BLOCK_KEYS)
        line = 4 * heads * most * (values.width + 2)
        self.chunk = max(1, min(room.max_rows, SCRATCH_BYTES // line))
        self._scratch = room.scratch("blocks of attention", self.chunk * line)
        self._launches: dict[tuple[int, int], tuple[Launch, Launch]] = {}

    def launch(self, moment: Moment, first: int, query: Query, query2: Query | None, out: Buffer,
               to: dict[str, int]) -> None:  # fmt: skip
        """Blocks and merge of the rows of a chunk, written to `out`."""
        blocks = ceil_div(rounded(moment.longest), BLOCK_KEYS)
        key = (first, blocks)
        if key not in self._launches:
            self._launches[key] = self._made(first, blocks, query, query2, out, to)
        block, merge = self._launches[key]
        count = min(self.chunk, moment.count - first)
        moment.stream.launch(block, count * self._heads * blocks)
        moment.stream.launch(merge, count * self._heads)

    def _made(self, first: int, blocks: int, query: Query, query2: Query | None, out: Buffer, to: dict[str, int]
              ) -> tuple[Launch, Launch]:  # fmt: skip
        room, keys, values = self._room, self._keys, self._values
        common = {
            "space": room.at.space, "first": first, "chunk": self.chunk, "blocks": blocks, "heads": self._heads,
            "v_width": values.width,
        }  # fmt: skip
        fields: dict[str, float] = {
            **common, **room.paging, "share": self._share, "q_first": first if query.local else 0,
            "q_stride": query.stride, "q_at": query.start, "q_head": query.step, "width": keys.width,
            "k_stride": keys.plane.width, "k_head": keys.step, "v_stride": values.plane.width, "v_head": values.step,
            "scale": self._scale,
        }  # fmt: skip
        buffers: list[Buffer] = [query.memory, keys.plane.handle, values.plane.handle, self._scratch, room.frame]
        if query2 is not None and self._second is not None:
            buffers += [query2.memory, self._second.plane.handle]
            fields |= {"q2_stride": query2.stride, "q2_at": query2.start, "q2_head": query2.step,
                       "width2": self._second.width, "k2_stride": self._second.plane.width}  # fmt: skip
        if self._selection is not None:
            buffers.append(memory_of(self._selection))
            fields |= view("sel", self._selection)
        kernel = block_kernel(query2 is not None, self._selection is not None)
        merged = {**common, "positions": room.at.positions, **to}
        return Launch(kernel, buffers, fields), Launch(MERGE, (self._scratch, out, room.frame), merged)
