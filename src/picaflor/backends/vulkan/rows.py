"""Row operations in WGSL: norms, rotation of positions, sums, rows of a table, copies into the cache.

Knows contracts.md section 2; must not know models or devices. Rows of a buffer lie `stride` apart, from column `at`.
Rows that a kernel acts on are those of a space (all of a batch, or its outputs): `space` is where the frame has their
number, `tokens`, `sequences`, `positions` and `numbers` where it has theirs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from picaflor.backends.vulkan.decode import SIZES, Reader, helpers
from picaflor.backends.vulkan.wgsl import LANES, Kernel

_X: Final = ("x", "f32", "read_write")
_Y: Final = ("y", "f32", "read_write")
_OUT: Final = ("o", "f32", "read_write")
_FRAME: Final = ("frame", "i32", "read")
MOST_PAIRS: Final = 8
"""Pairs of one head that a lane rotates at most."""

_CHAINS: Final = f"""
var<workgroup> part: array<f32, {LANES}>;
fn tree(lid: u32) -> f32 {{
  workgroupBarrier();
  for (var n = 8u; n > 0u; n >>= 1u) {{
    if (lid < n) {{ part[lid] += part[lid + n]; }}
    workgroupBarrier();
  }}
  let total = part[0];
  workgroupBarrier();
  return total;
}}
"""
"""The tree over the sums of the first sixteen lanes, in `part`."""

_EACH: Final = f"""
  let across = (p.width + {LANES - 1}u) / {LANES}u;
  let row = wid / across;
  let i = wid % across * {LANES}u + lid;
  if (row >= u32(frame[p.space]) || i >= p.width) {{ return; }}
"""
"""One invocation per value of a row of `width`."""

RMSNORM: Final = Kernel(
    "rmsnorm",
    (_X, ("w", "f32", "read"), _OUT, _FRAME),
    ("space", "heads", "width", "x_stride", "x_at", "o_stride", "o_at", "eps:f32"),
    _CHAINS
    + f"""
fn run(wid: u32, lid: u32) {{
  let row = wid / p.heads;
  if (row >= u32(frame[p.space])) {{ return; }}
  let shift = wid % p.heads * p.width;
  let from_at = row * p.x_stride + p.x_at + shift;
  let to_at = row * p.o_stride + p.o_at + shift;
  var acc = 0.0;
  if (lid < 16u) {{ for (var i = lid; i < p.width; i += 16u) {{ let v = x[from_at + i]; acc = fm(v, v, acc); }} }}
  part[lid] = acc;
  let mean = div(tree(lid), f32(p.width));
  let r = div(1.0, root(mean + p.eps));
  for (var i = lid; i < p.width; i += {LANES}u) {{ o[to_at + i] = (x[from_at + i] * r) * w[i]; }}
}}
""",
)

LAYERNORM: Final = Kernel(
    "layernorm",
    (_X, ("w", "f32", "read"), ("b", "f32", "read"), _OUT, _FRAME),
    ("space", "width", "x_stride", "x_at", "o_stride", "o_at", "eps:f32"),
    _CHAINS
    + f"""
fn run(wid: u32, lid: u32) {{
  if (wid >= u32(frame[p.space])) {{ return; }}
  let from_at = wid * p.x_stride + p.x_at;
  let to_at = wid * p.o_stride + p.o_at;
  var acc = 0.0;
  if (lid < 16u) {{ for (var i = lid; i < p.width; i += 16u) {{ acc = acc + x[from_at + i]; }} }}
  part[lid] = acc;
  let mean = div(tree(lid), f32(p.width));
  acc = 0.0;
  if (lid < 16u) {{
    for (var i = lid; i < p.width; i += 16u) {{ let d = x[from_at + i] - mean; acc = fm(d, d, acc); }}
  }}
  part[lid] = acc;
  let r = div(1.0, root(div(tree(lid), f32(p.width)) + p.eps));
  for (var i = lid; i < p.width; i += {LANES}u) {{ o[to_at + i] = fm((x[from_at + i] - mean) * r, w[i], b[i]); }}
}}
""",
)

ROPE: Final = Kernel(
    "rope",
    (_X, ("table", "f32", "read"), _FRAME),
    ("space", "positions", "heads", "head_width", "start", "pairs", "interleaved", "x_stride", "x_at"),
    f"""
fn run(wid: u32, lid: u32) {{
  let row = wid / p.heads;
  if (row >= u32(frame[p.space])) {{ return; }}
  let at = row * p.x_stride + p.x_at + wid % p.heads * p.head_width + p.start;
  let line = u32(frame[p.positions + row]) * p.pairs;
  var first: array<f32, {MOST_PAIRS}>;
  var second: array<f32, {MOST_PAIRS}>;
  for (var k = 0u; k < {MOST_PAIRS}u; k++) {{
    let j = k * {LANES}u + lid;
    if (j < p.pairs) {{
      let a = x[at + select(j, 2u * j, p.interleaved == 1u)];
      let b = x[at + select(p.pairs + j, 2u * j + 1u, p.interleaved == 1u)];
      let c = table[2u * (line + j)];
      let s = table[2u * (line + j) + 1u];
      first[k] = fm(a, c, -(b * s));
      second[k] = fm(b, c, a * s);
    }}
  }}
  storageBarrier();
  for (var k = 0u; k < {MOST_PAIRS}u; k++) {{
    let j = k * {LANES}u + lid;
    if (j < p.pairs) {{
      x[at + j] = first[k];
      x[at + p.pairs + j] = second[k];
    }}
  }}
}}
""",
)
"""`table`: cos and sin, side by side, of each position and pair."""

ADD: Final = Kernel(
    "add",
    (_X, _Y, _FRAME),
    ("space", "width", "x_stride", "x_at", "y_stride", "y_at"),
    f"""
fn run(wid: u32, lid: u32) {{{_EACH}
  let at = row * p.x_stride + p.x_at + i;
  x[at] = x[at] + y[row * p.y_stride + p.y_at + i];
}}
""",
)

SILU_MUL: Final = Kernel(
    "silu_mul",
    (_X, _Y, _OUT, _FRAME),
    ("space", "width", "x_stride", "x_at", "y_stride", "y_at", "o_stride", "o_at"),
    f"""
fn run(wid: u32, lid: u32) {{{_EACH}
  o[row * p.o_stride + p.o_at + i] = silu(x[row * p.x_stride + p.x_at + i]) * y[row * p.y_stride + p.y_at + i];
}}
""",
)

GATHER: Final = Kernel(
    "gather",
    (_X, _OUT, _FRAME),
    ("space", "numbers", "width", "x_stride", "x_at", "o_stride", "o_at"),
    f"""
fn run(wid: u32, lid: u32) {{{_EACH}
  o[row * p.o_stride + p.o_at + i] = x[u32(frame[p.numbers + row]) * p.x_stride + p.x_at + i];
}}
""",
)

KV_WRITE: Final = Kernel(
    "kv_write",
    (_X, ("plane", "f32", "read_write"), _FRAME),
    ("space", "sequences", "positions", "pages", "pages_stride", "shift", "width", "x_stride", "x_at"),
    f"""
fn run(wid: u32, lid: u32) {{{_EACH}
  let position = u32(frame[p.positions + row]);
  let page = u32(frame[p.pages + u32(frame[p.sequences + row]) * p.pages_stride + (position >> p.shift)]);
  let token = (page << p.shift) + (position & ((1u << p.shift) - 1u));
  plane[token * p.width + i] = x[row * p.x_stride + p.x_at + i];
}}
""",
)


@lru_cache(maxsize=64)
def embed_kernel(reader: Reader) -> Kernel:
    """Rows of a table by token, from the part of it that begins at row `first`; a token outside it gives zeros."""
    body = f"""
fn run(wid: u32, lid: u32) {{{_EACH}
  let token = frame[p.tokens + row];
  let at = row * p.o_stride + p.o_at + i;
  if (token < 0 || token >= i32(p.table_rows)) {{
    if (p.first == 0u) {{ o[at] = 0.0; }}
    return;
  }}
  let line = u32(token) - p.first;
  if (u32(token) < p.first || line >= p.rows) {{ return; }}
  o[at] = element(0u, 0u, line, i);
}}
"""
    return Kernel(
        "embed",
        (("codes", "u32", "read"), ("scales", "u32", "read"), _OUT, _FRAME),
        (*SIZES, "space", "tokens", "first", "rows", "table_rows", "width", "o_stride", "o_at"),
        helpers({reader.format}) + reader.text() + body,
    )
