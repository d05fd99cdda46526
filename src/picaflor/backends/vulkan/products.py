"""Products in WGSL: matrices, and routed experts whose gate and up share a launch; one piece of text computes them all.

Knows how one matrix's product is written (factors.py); must not know models or devices. A workgroup computes a tile of
rows of a matrix for up to eight rows of x.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from picaflor.backends.vulkan.decode import helpers
from picaflor.backends.vulkan.factors import Binding, Factor, product, shared
from picaflor.backends.vulkan.tiling import Tile
from picaflor.backends.vulkan.wgsl import LANES, Kernel

MOST_TOGETHER: Final = 8
"""Rows of x that a workgroup computes at most."""


def _functions(factors: tuple[Factor, ...], together: int) -> str:
    formats = {factor.reader.format for factor in factors}
    parts = [helpers(formats), shared(factors, together)]
    for factor in factors:
        parts.append(factor.reader.text())
        parts.append(product(factor, together))
    return "".join(parts)


def _lattice(factors: tuple[Factor, ...]) -> tuple[Binding, ...]:
    grids = any(factor.reader.format == "e8-iq3-lattice" for factor in factors)
    return (("lattice", "u32", "read"),) if grids else ()


def _rows_of(numbers: list[str]) -> str:
    return f"array<u32, {len(numbers)}>({', '.join(numbers)})"


def _rows_at_once(tile: Tile, together: int) -> str:
    """Text that finds the first row of the matrix and the rows of x. One row alone: nothing is read to find it."""
    if together == 1:
        return f"""  let count = 1u;
  let row = wid * {tile.rows}u;
  let first = 0u;
  if (row >= p.rows) {{ return; }}
  let s = array<u32, 1>(0u);"""
    numbers = _rows_of([f"min(first + {s}u, count - 1u)" for s in range(together)])
    return f"""  let count = u32(frame[p.space]);
  let columns = (count + {together - 1}u) / {together}u;
  let row = wid / max(columns, 1u) * {tile.rows}u;
  let first = wid % max(columns, 1u) * {together}u;
  if (count == 0u || row >= p.rows) {{ return; }}
  let s = {numbers};"""


@lru_cache(maxsize=512)
def matmul_kernel(factor: Factor, together: int) -> Kernel:
    """out = x @ W.T for all rows of a space, `together` of them in a workgroup."""
    reader, tile = factor.reader, factor.tile
    body = (
        _functions((factor,), together)
        + f"""
fn run(wid: u32, lid: u32) {{
{_rows_at_once(tile, together)}
  let y = product(lid, row, p.rows - 1u, 0u, 0u, s);
  let r = row + lid / {together}u;
  let c = first + lid % {together}u;
  if (lid < {tile.rows * together}u && r < p.rows && c < count) {{ y_out[c * p.out_stride + p.out_at + r] = y; }}
}}
"""
    )
    kind = "vec4<u32>" if reader.wide else "u32"
    bindings = (
        *factor.bindings, ("codes", kind, "read"), ("scales", "u32", "read"), ("y_out", "f32", "read_write"),
        ("frame", "i32", "read"), *_lattice((factor,)),
    )  # fmt: skip
    return Kernel("matmul", bindings, (*factor.fields, "space", "rows", "out_stride", "out_at"), body, tile.lanes)


_PLACES: Final = ("space", "top_k", "experts", "where_at", "rows")


def _pick(tile: Tile, together: int, tiled: bool, per_row: bool) -> str:
    """Text that finds the pairs of a workgroup, the expert's address and the rows of x; leaves where nothing is."""
    number = "pair{} / p.top_k" if per_row else "pair{}"
    if tiled:
        found = """  if (unit >= tiles[0]) { return; }
  let expert = tiles[1u + 3u * unit];
  let start = tiles[2u + 3u * unit];
  let end = tiles[3u + 3u * unit];
""" + "".join(f"  let pair{s} = order[min(start + {s}u, end - 1u)];\n" for s in range(together))
        live = f"start + lid % {together}u < end"
    else:
        found = """  let pairs_of_all = u32(frame[p.space]) * p.top_k;
  let pair0 = unit;
  let expert = bitcast<u32>(ids[pair0]);
  if (unit >= pairs_of_all || expert >= p.experts) { return; }
"""
        live = "true"
    return f"""  let across = (p.rows + {tile.rows - 1}u) / {tile.rows}u;
  let unit = wid / across;
  let row = wid % across * {tile.rows}u;
{found}  let slot = places[p.where_at + expert];
  if (slot == 0u) {{ return; }}
  let base = (slot - 1u) * 256u;
  let s = {_rows_of([number.format(s) for s in range(together)])};
  let pairs = {_rows_of([f"pair{s}" for s in range(together)])};
  let r = row + lid / {together}u;
  let live = lid < {tile.rows * together}u && r < p.rows && {live};
"""


def _expert_bindings(factors: tuple[Factor, ...], out: str, tiled: bool) -> tuple[Binding, ...]:
    kind = "vec4<u32>" if factors[0].reader.wide else "u32"
    given = (("tiles", "u32", "read"), ("order", "u32", "read")) if tiled else (("ids", "i32", "read_write"),)
    activations = tuple(binding for factor in factors for binding in factor.bindings)
    return (
        *activations, ("bank", kind, "read"), ("places", "u32", "read"), *given, (out, "f32", "read_write"),
        ("frame", "i32", "read"), *_lattice(factors),
    )  # fmt: skip


_SEPARATE: Final = """  let a = g_product(lid, row, p.rows - 1u, base + p.g_codes_at, base + p.g_scales_at, s);
  let b = u_product(lid, row, p.rows - 1u, base + p.u_codes_at, base + p.u_scales_at, s);"""
_AT_ONCE: Final = """  let codes_at = vec2<u32>(base) + vec2<u32>(p.g_codes_at, p.u_codes_at);
  let scales_at = vec2<u32>(base) + vec2<u32>(p.g_scales_at, p.u_scales_at);
  let both = g_product(lid, row, p.rows - 1u, codes_at, scales_at, s);
  let a = both.x; let b = both.y;"""


@lru_cache(maxsize=512)
def inner_kernel(gate: Factor, up: Factor | None, together: int, tiled: bool) -> Kernel:
    """h[pair] = silu(gate(x)) * up(x) for pairs (row, choice) whose expert lies in this bank. Without `up`, `gate` is a
    twin of both matrices."""
    factors = (gate,) if up is None else (gate, up)
    body = (
        _functions(factors, together)
        + f"""
fn run(wid: u32, lid: u32) {{
{_pick(gate.tile, together, tiled, per_row=True)}
{_AT_ONCE if up is None else _SEPARATE}
  if (live) {{ h[pairs[lid % {together}u] * p.rows + r] = silu(a) * b; }}
}}
"""
    )
    addresses = tuple(f"{x}_{plane}_at" for x in "gu" for plane in ("codes", "scales"))
    fields = (*(field for factor in factors for field in factor.fields), *addresses, *_PLACES)
    return Kernel("experts_inner", _expert_bindings(factors, "h", tiled), fields, body, gate.tile.lanes)


@lru_cache(maxsize=512)
def outer_kernel(down: Factor, together: int, tiled: bool) -> Kernel:
    """results[pair] = down(h[pair]) for pairs whose expert lies in this bank."""
    body = (
        _functions((down,), together)
        + f"""
fn run(wid: u32, lid: u32) {{
{_pick(down.tile, together, tiled, per_row=False)}
  let y = d_product(lid, row, p.rows - 1u, base + p.d_codes_at, base + p.d_scales_at, s);
  if (live) {{ results[pairs[lid % {together}u] * p.rows + r] = y; }}
}}
"""
    )
    fields = (*down.fields, "d_codes_at", "d_scales_at", *_PLACES)
    return Kernel("experts_outer", _expert_bindings((down,), "results", tiled), fields, body, down.tile.lanes)


COMBINE: Final = Kernel(
    "combine",
    (
        ("results", "f32", "read_write"),
        ("weights", "f32", "read_write"),
        ("ids", "i32", "read_write"),
        ("y_out", "f32", "read_write"),
        ("frame", "i32", "read"),
    ),
    ("space", "top_k", "experts", "width", "out_stride", "out_at"),
    f"""
fn run(wid: u32, lid: u32) {{
  let across = (p.width + {LANES - 1}u) / {LANES}u;
  let row = wid / across;
  let o = wid % across * {LANES}u + lid;
  if (row >= u32(frame[p.space]) || o >= p.width) {{ return; }}
  var acc = 0.0;
  for (var k = 0u; k < p.top_k; k++) {{
    let pair = row * p.top_k + k;
    let known = bitcast<u32>(ids[pair]) < p.experts;
    acc = fm(weights[pair], select(bitcast<f32>(0x7fc00000u + (pair & 1u)), results[pair * p.width + o], known), acc);
  }}
  y_out[row * p.out_stride + p.out_at + o] = acc;
}}
""",
)
"""The weighted sum of a row's results, in routing order; NaN where a choice is no expert."""


@lru_cache(maxsize=16)
def tiles_kernel(experts: int, together: int) -> Kernel:
    """Pairs by expert, cut into tiles of up to `together`: their number, then (expert, start, end) of each."""
    body = f"""
var<workgroup> counts: array<atomic<u32>, {experts}>;
fn run(wid: u32, lid: u32) {{
  let total = u32(frame[p.space]) * p.top_k;
  for (var e = lid; e < {experts}u; e += {LANES}u) {{ atomicStore(&counts[e], 0u); }}
  workgroupBarrier();
  for (var i = lid; i < total; i += {LANES}u) {{
    let e = bitcast<u32>(ids[i]);
    if (e < {experts}u) {{ atomicAdd(&counts[e], 1u); }}
  }}
  workgroupBarrier();
  if (lid == 0u) {{
    var start = 0u;
    var n = 0u;
    for (var e = 0u; e < {experts}u; e++) {{
      let end = start + atomicLoad(&counts[e]);
      atomicStore(&counts[e], start);
      for (; start < end; n++) {{
        let stop = min(start + {together}u, end);
        tiles[1u + 3u * n] = e;
        tiles[2u + 3u * n] = start;
        tiles[3u + 3u * n] = stop;
        start = stop;
      }}
    }}
    tiles[0] = n;
  }}
  workgroupBarrier();
  for (var i = lid; i < total; i += {LANES}u) {{
    let e = bitcast<u32>(ids[i]);
    if (e < {experts}u) {{ order[atomicAdd(&counts[e], 1u)] = i; }}
  }}
}}
"""
    bindings = (
        ("ids", "i32", "read_write"), ("tiles", "u32", "read_write"), ("order", "u32", "read_write"),
        ("frame", "i32", "read"),
    )  # fmt: skip
    return Kernel("experts_tiles", bindings, ("space", "top_k"), body)
