"""Products in WGSL: matrices, and routed experts whose gate and up share a launch; one piece of text computes them all.

Knows readers of formats and prepared activations; must not know models or devices. A workgroup computes four rows of a
matrix for up to eight rows of x. Integers: lanes take groups, then one lane per result adds the groups up in their
order. Floats: sixteen lanes are the sixteen chains.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from picaflor.backends.vulkan.decode import SIZES, Reader, helpers, vector_pairs
from picaflor.backends.vulkan.wgsl import LANES, Kernel, lines

TILE_ROWS: Final = 4
"""Rows of a matrix that a workgroup computes."""
MOST_TOGETHER: Final = 8
"""Rows of x that a workgroup computes at most."""
Binding = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Factor:
    """One matrix of a kernel: how it is read, and how many planes of digits its activations have (0: float32).

    `teams`: parts of a workgroup that take rows of their own, for matrices with few groups.
    """

    reader: Reader
    planes: int
    teams: int

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """Its activations."""
        x = self.reader.prefix
        if not self.planes:
            return ((f"{x}x", "f32", "read_write"),)
        return ((f"{x}digits", "vec4<u32>" if self.reader.wide else "u32", "read"), (f"{x}steps", "f32", "read"))

    @property
    def fields(self) -> tuple[str, ...]:
        """Of the uniform."""
        x = self.reader.prefix
        return (*(x + name for name in SIZES), x + "cols", x + "x_stride", x + "x_at")


def teams_for(groups: int, together: int) -> int:
    """Parts of a workgroup: no lane without a group where it can be, and room for all sums."""
    least = 4 if together > 4 else 2 if together > 2 else 1
    return max(least, 4 if groups <= 20 else 2 if groups <= 40 else 1)


def _integer_product(factor: Factor, together: int) -> str:
    reader, planes, teams = factor.reader, factor.planes, factor.teams
    x, rows, lanes = reader.prefix, TILE_ROWS // teams, LANES // teams
    sums = [(r, s, q) for r in range(rows) for s in range(together) for q in range(planes)]
    unit = 16 if reader.wide else 4
    text = [f"fn {x}product(lid: u32, first_row: u32, last: u32, codes_at: u32, scales_at: u32, "
            f"s: array<u32, {together}>) -> f32 {{",
            f"let team = lid / {lanes}u; let lane = lid % {lanes}u;"]  # fmt: skip
    for r in range(rows):
        text.append(f"let row{r} = min(first_row + team * {rows}u + {r}u, last);")
        text.append(f"let at{r} = codes_at + row{r} * p.{x}row_bytes;")
    text.append(f"let line = p.{x}groups * p.{x}group / {unit}u;")
    text.append("var y = 0.0;")
    text.append(f"for (var first = 0u; first < p.{x}groups; first += {lanes}u) {{ let g = first + lane;")
    text.append(f"if (g < p.{x}groups) {{")
    text += [f"var a{r}_{s}_{q} = 0;" for r, s, q in sums]
    text += [
        f"let d{s}_{q} = (s[{s}] * {planes}u + {q}u) * line + g * (p.{x}group / {unit}u);"
        for s in range(together)
        for q in range(planes)
    ]
    step = reader.at_once
    text.append(f"for (var j = 0u; j < p.{x}group / {step}u; j++) {{")
    for r in range(rows):
        if reader.wide:
            load, words = vector_pairs(reader, f"(at{r} >> 4u) + g * (p.{x}group / {step}u) + j", f"v{r}")
            text.append(load)
            text += [f"let c{r}_{k} = {word};" for k, word in enumerate(words)]
        else:
            text.append(f"let c{r} = {x}pair(at{r}, g * (p.{x}group / 8u) + j);")
            text += [f"let c{r}_{k} = c{r}.{axis};" for k, axis in enumerate("xy")]
    words_of_step = step // 4
    for s in range(together):
        for q in range(planes):
            for k in range(words_of_step):
                if reader.wide and k % 4 == 0:
                    text.append(f"let x{s}_{q}_{k // 4} = {x}digits[d{s}_{q} + j * {words_of_step // 4}u + {k // 4}u];")
                digit = f"x{s}_{q}_{k // 4}.{'xyzw'[k % 4]}" if reader.wide else f"x{s}_{q}_{k}"
                if not reader.wide:
                    text.append(f"let {digit} = {x}digits[d{s}_{q} + j * 2u + {k}u];")
                text += [f"a{r}_{s}_{q} += dot4I8Packed(c{r}_{k}, {digit});" for r in range(rows)]
    text.append("}")
    text += [f"let xs{s} = {x}steps[s[{s}] * p.{x}groups + g];" for s in range(together)]
    for r in range(rows):
        text.append(f"let scale{r} = {x}scale(codes_at, scales_at, row{r}, g);")
        for s in range(together):
            place = f"((team * {rows}u + {r}u) * {together}u + {s}u) * {lanes + 1}u + lane"
            text.append(f"terms[{place}] = vec2<f32>({_dot(r, s, planes)}, scale{r} * xs{s});")
    text.append("}\nworkgroupBarrier();")
    text.append(f"if (lid < {TILE_ROWS * together}u) {{ let count = min({lanes}u, p.{x}groups - first);")
    text.append(
        f"for (var k = 0u; k < count; k++) {{ let t = terms[lid * {lanes + 1}u + k]; y = fm(t.x, t.y, y); }} }}"
    )
    text.append("workgroupBarrier();\n}\nreturn y;\n}\n")
    return lines(text)


def _dot(r: int, s: int, planes: int) -> str:
    names = [f"a{r}_{s}_{q}" for q in range(planes)]
    if planes == 1:
        return f"f32({names[0]})"
    low = f"f32(256 * {names[-2]} + {names[-1]})"
    return low if planes == 2 else f"fm(f32({names[0]}), 65536.0, {low})"


def _float_product(factor: Factor, together: int) -> str:
    x = factor.reader.prefix
    text = [f"fn {x}product(lid: u32, first_row: u32, last: u32, codes_at: u32, scales_at: u32, "
            f"s: array<u32, {together}>) -> f32 {{",
            "let lane = lid % 16u; let row = min(first_row + lid / 16u, last);"]  # fmt: skip
    text += [f"var a{s} = 0.0; let x{s} = s[{s}] * p.{x}x_stride + p.{x}x_at;" for s in range(together)]
    text.append(f"for (var i = lane; i < p.{x}cols; i += 16u) {{")
    text.append(f"let w = {x}element(codes_at, scales_at, row, i);")
    text += [f"a{s} = fm(w, {x}x[x{s} + i], a{s});" for s in range(together)]
    text.append("}")
    text += [f"part[{s * LANES}u + lid] = a{s};" for s in range(together)]
    text.append("workgroupBarrier();")
    text.append("for (var n = 8u; n > 0u; n >>= 1u) { if (lane < n) {")
    text += [f"part[{s * LANES}u + lid] += part[{s * LANES}u + lid + n];" for s in range(together)]
    text.append("}\nworkgroupBarrier();\n}")
    text.append(
        f"let y = part[min(lid % {together}u * {LANES}u + (lid / {together}u) * 16u, {together * LANES - 1}u)];"
    )
    text.append("workgroupBarrier();\nreturn y;\n}\n")
    return lines(text)


def _shared(factors: tuple[Factor, ...], together: int) -> str:
    text = []
    whole = [factor for factor in factors if factor.planes]
    if whole:
        size = max(TILE_ROWS * together * (LANES // factor.teams + 1) for factor in whole)
        text.append(f"var<workgroup> terms: array<vec2<f32>, {size}>;\n")
    if len(whole) < len(factors):
        text.append(f"var<workgroup> part: array<f32, {together * LANES}>;\n")
    return "".join(text)


def _functions(factors: tuple[Factor, ...], together: int) -> str:
    formats = {factor.reader.format for factor in factors}
    parts = [helpers(formats), _shared(factors, together)]
    for factor in factors:
        parts.append(factor.reader.text())
        parts.append((_integer_product if factor.planes else _float_product)(factor, together))
    return "".join(parts)


def _lattice(factors: tuple[Factor, ...]) -> tuple[Binding, ...]:
    grids = any(factor.reader.format == "e8-iq3-lattice" for factor in factors)
    return (("lattice", "u32", "read"),) if grids else ()


def _rows_of(numbers: list[str]) -> str:
    return f"array<u32, {len(numbers)}>({', '.join(numbers)})"


@lru_cache(maxsize=512)
def matmul_kernel(factor: Factor, together: int) -> Kernel:
    """out = x @ W.T for all rows of a space, `together` of them in a workgroup."""
    reader = factor.reader
    numbers = _rows_of([f"min(first + {s}u, count - 1u)" for s in range(together)])
    body = (
        _functions((factor,), together)
        + f"""
fn run(wid: u32, lid: u32) {{
  let count = u32(frame[p.space]);
  let columns = (count + {together - 1}u) / {together}u;
  let row = wid / max(columns, 1u) * {TILE_ROWS}u;
  let first = wid % max(columns, 1u) * {together}u;
  if (count == 0u || row >= p.rows) {{ return; }}
  let s = {numbers};
  let y = product(lid, row, p.rows - 1u, 0u, 0u, s);
  let r = row + lid / {together}u;
  let c = first + lid % {together}u;
  if (lid < {TILE_ROWS * together}u && r < p.rows && c < count) {{ y_out[c * p.out_stride + p.out_at + r] = y; }}
}}
"""
    )
    kind = "vec4<u32>" if reader.wide else "u32"
    bindings = (
        *factor.bindings, ("codes", kind, "read"), ("scales", "u32", "read"), ("y_out", "f32", "read_write"),
        ("frame", "i32", "read"), *_lattice((factor,)),
    )  # fmt: skip
    return Kernel("matmul", bindings, (*factor.fields, "space", "rows", "out_stride", "out_at"), body)


_PLACES: Final = ("space", "top_k", "experts", "where_at", "rows")


def _pick(together: int, tiled: bool, per_row: bool) -> str:
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
        found = """  if (unit >= u32(frame[p.space]) * p.top_k) { return; }
  let pair0 = unit;
  let expert = bitcast<u32>(ids[pair0]);
  if (expert >= p.experts) { return; }
"""
        live = "true"
    return f"""  let across = (p.rows + {TILE_ROWS - 1}u) / {TILE_ROWS}u;
  let unit = wid / across;
  let row = wid % across * {TILE_ROWS}u;
{found}  let slot = places[p.where_at + expert];
  if (slot == 0u) {{ return; }}
  let base = (slot - 1u) * 256u;
  let s = {_rows_of([number.format(s) for s in range(together)])};
  let pairs = {_rows_of([f"pair{s}" for s in range(together)])};
  let r = row + lid / {together}u;
  let live = lid < {TILE_ROWS * together}u && r < p.rows && {live};
"""


def _expert_bindings(factors: tuple[Factor, ...], out: str, tiled: bool) -> tuple[Binding, ...]:
    kind = "vec4<u32>" if factors[0].reader.wide else "u32"
    given = (("tiles", "u32", "read"), ("order", "u32", "read")) if tiled else (("ids", "i32", "read_write"),)
    activations = tuple(binding for factor in factors for binding in factor.bindings)
    return (
        *activations, ("bank", kind, "read"), ("places", "u32", "read"), *given, (out, "f32", "read_write"),
        ("frame", "i32", "read"), *_lattice(factors),
    )  # fmt: skip


@lru_cache(maxsize=512)
def inner_kernel(gate: Factor, up: Factor, together: int, tiled: bool) -> Kernel:
    """h[pair] = silu(gate(x)) * up(x) for pairs (row, choice) whose expert lies in this bank."""
    factors = (gate, up)
    body = (
        _functions(factors, together)
        + f"""
fn run(wid: u32, lid: u32) {{
{_pick(together, tiled, per_row=True)}
  let a = g_product(lid, row, p.rows - 1u, base + p.g_codes_at, base + p.g_scales_at, s);
  let b = u_product(lid, row, p.rows - 1u, base + p.u_codes_at, base + p.u_scales_at, s);
  if (live) {{ h[pairs[lid % {together}u] * p.rows + r] = silu(a) * b; }}
}}
"""
    )
    addresses = tuple(f"{x}_{plane}_at" for x in "gu" for plane in ("codes", "scales"))
    fields = (*gate.fields, *up.fields, *addresses, *_PLACES)
    return Kernel("experts_inner", _expert_bindings(factors, "h", tiled), fields, body)


@lru_cache(maxsize=512)
def outer_kernel(down: Factor, together: int, tiled: bool) -> Kernel:
    """results[pair] = down(h[pair]) for pairs whose expert lies in this bank."""
    body = (
        _functions((down,), together)
        + f"""
fn run(wid: u32, lid: u32) {{
{_pick(together, tiled, per_row=False)}
  let y = d_product(lid, row, p.rows - 1u, base + p.d_codes_at, base + p.d_scales_at, s);
  if (live) {{ results[pairs[lid % {together}u] * p.rows + r] = y; }}
}}
"""
    )
    fields = (*down.fields, "d_codes_at", "d_scales_at", *_PLACES)
    return Kernel("experts_outer", _expert_bindings((down,), "results", tiled), fields, body)


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
