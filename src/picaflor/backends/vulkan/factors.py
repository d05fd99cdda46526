"""One matrix inside a kernel: how a workgroup is cut up for its rows, and the text that multiplies them.

Knows readers of formats and prepared activations; must not know launches, experts, models or devices. Integers: lanes
take groups of inputs, then one lane per result adds the groups up in their order, whatever the tile. Floats: sixteen
lanes are the sixteen chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from picaflor.backends.vulkan.decode import SIZES, Reader, unbiased, vector_pairs
from picaflor.backends.vulkan.tiling import Tile, Tiling
from picaflor.backends.vulkan.wgsl import LANES, lines
from picaflor.formats.numeric import ceil_div

MOST_VECTORS: Final = 24
"""Vectors of codes that a lane has on their way at most."""
Binding = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Factor:
    """One matrix of a kernel: how it is read, how many planes of digits its activations have (0: float32), and its
    inputs per group where the kernel is made for that number alone (0: the uniform tells).

    `teams`: parts of a workgroup that take rows of their own. `steps`: groups that a lane reads at once. `twin`: there
    are two such matrices, whose results come side by side.
    """

    reader: Reader
    planes: int
    tile: Tile
    teams: int = 1
    steps: int = 1
    group: int = 0
    twin: bool = False

    @property
    def numbers(self) -> range:
        """Rows that a lane takes part in: those of its team, of the first matrix, then of the second."""
        return range(self.tile.rows // self.teams * (2 if self.twin else 1))

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


def factor_for(tiling: Tiling, tile: Tile, reader: Reader, planes: int, groups: int, group: int, together: int
               ) -> Factor:  # fmt: skip
    """How a matrix with so many groups side by side is computed in a tile."""
    if not planes:
        return Factor(reader, planes, tile)
    teams = tile.lanes // tile.share
    while 2 * groups <= tile.lanes // teams and tile.rows % (2 * teams) == 0:
        teams *= 2
    if not reader.wide:
        return Factor(reader, planes, tile, teams)
    rounds = ceil_div(groups, tile.lanes // teams)
    vectors = ceil_div(group, reader.at_once) * tile.rows // teams
    most = 1 if together > 1 else min(tiling.steps, max(1, MOST_VECTORS // vectors))
    steps = next(number for number in range(most, 0, -1) if rounds % number == 0)
    return Factor(reader, planes, tile, teams, steps, group)


def twins(tiling: Tiling, first: Factor, second: Factor) -> Factor | None:
    """Both as one, where they differ in nothing but their names and are of integers. Their shapes must be equal."""
    named = replace(second, reader=replace(second.reader, prefix=first.reader.prefix))
    if not tiling.twins or not first.planes or named != first:
        return None
    vectors = 2 * ceil_div(first.group, first.reader.at_once) * first.tile.rows // first.teams
    steps = [number for number in range(1, first.steps + 1) if first.steps % number == 0]
    return replace(first, twin=True, steps=max(n for n in steps if n == 1 or n * vectors <= MOST_VECTORS))


def product(factor: Factor, together: int) -> str:
    """`fn product(lid, first_row, last, codes_at, scales_at, s) -> f32`: to lane `lid` the result of row `lid /
    together` of the tile and row `s[lid % together]` of x. For a twin addresses and results are vec2."""
    return (_integer_product if factor.planes else _float_product)(factor, together)


def shared(factors: tuple[Factor, ...], together: int) -> str:
    """Memory of a workgroup that the products of a kernel use."""
    text = []
    whole = [factor for factor in factors if factor.planes]
    if whole:
        size = max(len(factor.numbers) * factor.teams * together * _stride(factor) for factor in whole)
        text.append(f"var<workgroup> terms: array<vec2<f32>, {size}>;\n")
    if len(whole) < len(factors):
        text.append(f"var<workgroup> part: array<f32, {together * LANES}>;\n")
    return "".join(text)


def _stride(factor: Factor) -> int:
    """From the terms of a result to those of the next, one more than there are, so that banks differ."""
    return factor.tile.lanes // factor.teams * factor.steps + 1


def _head(factor: Factor, together: int) -> str:
    at, out = ("vec2<u32>", "vec2<f32>") if factor.twin else ("u32", "f32")
    return (f"fn {factor.reader.prefix}product(lid: u32, first_row: u32, last: u32, codes_at: {at}, scales_at: {at}, "
            f"s: array<u32, {together}>) -> {out} {{")  # fmt: skip


def _of(factor: Factor, address: str, r: int) -> str:
    """The address of the matrix of a lane's row."""
    return f"{address}.{'xy'[r // (factor.tile.rows // factor.teams)]}" if factor.twin else address


def _integer_product(factor: Factor, together: int) -> str:
    x, rows, lanes = factor.reader.prefix, factor.tile.rows // factor.teams, factor.tile.lanes // factor.teams
    group, unit = _group(factor), 16 if factor.reader.wide else 4
    text = [_head(factor, together), f"let team = lid / {lanes}u; let lane = lid % {lanes}u;"]
    for r in factor.numbers:
        text.append(f"let row{r} = min(first_row + team * {rows}u + {r % rows}u, last);")
        text.append(f"let at{r} = {_of(factor, 'codes_at', r)} + row{r} * p.{x}row_bytes;")
    text.append(f"let line = p.{x}groups * ({group} / {unit}u);")
    text.append("var y = 0.0; var z = 0.0;" if factor.twin else "var y = 0.0;")
    text.append(f"for (var first = 0u; first < p.{x}groups; first += {lanes * factor.steps}u) {{")
    for step in range(factor.steps):
        text += _terms_of_a_group(factor, together, step)
    text.append("workgroupBarrier();")
    text += _chain(factor, together)
    text.append(f"workgroupBarrier();\n}}\nreturn {'vec2<f32>(y, z)' if factor.twin else 'y'};\n}}\n")
    return lines(text)


def _group(factor: Factor) -> str:
    return f"{factor.group}u" if factor.group else f"p.{factor.reader.prefix}group"


def _terms_of_a_group(factor: Factor, together: int, step: int) -> list[str]:
    """The lane's group of this step: its integer dots and products of scales, to the shared memory. A lane without a
    group does nothing, or where several steps are on their way the last group once more."""
    reader, x = factor.reader, factor.reader.prefix
    rows, lanes, planes = factor.tile.rows // factor.teams, factor.tile.lanes // factor.teams, factor.planes
    number, last = f"first + {step * lanes}u + lane", f"p.{x}groups - 1u"
    alone = factor.steps == 1
    text = [f"if ({number} < p.{x}groups) {{ let g = {number};" if alone else f"{{ let g = min({number}, {last});"]
    text += [f"var a{r}_{s}_{q} = 0;" for r in factor.numbers for s in range(together) for q in range(planes)]
    unit = 16 if reader.wide else 4
    text += [
        f"let d{s}_{q} = (s[{s}] * {planes}u + {q}u) * line + g * ({_group(factor)} / {unit}u);"
        for s in range(together)
        for q in range(planes)
    ]
    text += [f"let xs{s} = {x}steps[s[{s}] * p.{x}groups + g];" for s in range(together)]
    text += [
        f"let scale{r} = {x}scale({_of(factor, 'codes_at', r)}, {_of(factor, 'scales_at', r)}, row{r}, g);"
        for r in factor.numbers
    ]
    text += _vector_dots(factor, together) if reader.wide else _word_dots(factor, together)
    for r in factor.numbers:
        line = f"{r // rows * factor.tile.rows + r % rows}u + team * {rows}u"
        for s in range(together):
            place = f"(({line}) * {together}u + {s}u) * {_stride(factor)}u + {step * lanes}u + lane"
            text.append(f"terms[{place}] = vec2<f32>({_dot(r, s, planes)}, {x}meet(scale{r}, xs{s}));")
    return [*text, "}"]


def _word_dots(factor: Factor, together: int) -> list[str]:
    """Eight inputs at a time."""
    x, planes = factor.reader.prefix, factor.planes
    rows = factor.numbers
    text = [f"for (var j = 0u; j < p.{x}group / 8u; j++) {{"]
    text += [f"let c{r} = {x}pair(at{r}, g * (p.{x}group / 8u) + j);" for r in rows]
    for s in range(together):
        for q in range(planes):
            for k, axis in enumerate("xy"):
                text.append(f"let x{s}_{q}_{k} = {x}digits[d{s}_{q} + j * 2u + {k}u];")
                text += [f"a{r}_{s}_{q} += dot4I8Packed(c{r}.{axis}, x{s}_{q}_{k});" for r in rows]
    return [*text, "}"]


def _vector_dots(factor: Factor, together: int) -> list[str]:
    """Vectors of four words, all those of a group where they are few. Nibbles are taken as they lie, 0 to 15, and
    their bias times the sum of the digits is taken off: the same integers."""
    reader, planes = factor.reader, factor.planes
    rows = factor.numbers
    vectors = factor.group // reader.at_once
    at_once = vectors if vectors <= 4 else 2 - vectors % 2
    bias = unbiased(reader)
    text = [f"var b{s}_{q} = 0;" for s in range(together) for q in range(planes) if bias]
    if at_once < vectors:
        text.append(f"for (var j = 0u; j < {vectors}u; j += {at_once}u) {{")
    else:
        text.append("{ let j = 0u;")
    for v in range(at_once):
        text += [f"let v{r}_{v} = {reader.codes}[(at{r} >> 4u) + g * {vectors}u + j + {v}u];" for r in rows]
    for v in range(at_once):
        text += _one_vector(factor, together, v, bias)
    text.append("}")
    text += [
        f"a{r}_{s}_{q} -= {bias} * b{s}_{q};" for r in rows for s in range(together) for q in range(planes) if bias
    ]
    return text


def _one_vector(factor: Factor, together: int, v: int, bias: int) -> list[str]:
    reader, x = factor.reader, factor.reader.prefix
    rows = factor.numbers
    wide = reader.at_once // 16
    words = {r: vector_pairs(reader, f"v{r}_{v}") for r in rows}
    text = [f"let c{r}_{v}_{k} = {word};" for r in rows for k, word in enumerate(words[r])]
    for s in range(together):
        for q in range(factor.planes):
            for k in range(wide):
                name = f"x{s}_{q}_{v}_{k}"
                text.append(f"let {name} = {x}digits[d{s}_{q} + (j + {v}u) * {wide}u + {k}u];")
                for axis, word in enumerate("xyzw"):
                    digit = f"{name}.{word}"
                    if bias:
                        text.append(f"b{s}_{q} += dot4I8Packed(0x01010101u, {digit});")
                    text += [f"a{r}_{s}_{q} += dot4I8Packed(c{r}_{v}_{4 * k + axis}, {digit});" for r in rows]
    return text


def _dot(r: int, s: int, planes: int) -> str:
    names = [f"a{r}_{s}_{q}" for q in range(planes)]
    if planes == 1:
        return f"f32({names[0]})"
    low = f"f32(256 * {names[-2]} + {names[-1]})"
    return low if planes == 2 else f"fm(f32({names[0]}), 65536.0, {low})"


AT_ONCE: Final = 8
"""Terms that a chain reads before it adds them."""


def _chain(factor: Factor, together: int) -> Sequence[str]:
    """One lane per result: y = fma(dot, scales, y) over the groups in their order; z of a twin's second matrix."""
    held, results = factor.tile.lanes // factor.teams * factor.steps, factor.tile.rows * together
    chains = [("y", "lid"), ("z", f"(lid + {results}u)")][: 2 if factor.twin else 1]
    many = range(AT_ONCE)
    return (
        f"if (lid < {results}u) {{",
        f"let count = min({held}u, p.{factor.reader.prefix}groups - first);",
        *(f"let {y}_at = {line} * {_stride(factor)}u;" for y, line in chains),
        f"var k = 0u;\nfor (; k + {AT_ONCE}u <= count; k += {AT_ONCE}u) {{",
        *(f"let {y}{n} = terms[{y}_at + k + {n}u];" for n in many for y, _ in chains),
        *(f"{y} = fm({y}{n}.x, {y}{n}.y, {y});" for n in many for y, _ in chains),
        "}\nfor (; k < count; k++) {",
        *(f"let {y}n = terms[{y}_at + k]; {y} = fm({y}n.x, {y}n.y, {y});" for y, _ in chains),
        "}\n}",
    )


def _float_product(factor: Factor, together: int) -> str:
    x = factor.reader.prefix
    text = [_head(factor, together), "let lane = lid % 16u; let row = min(first_row + lid / 16u, last);"]
    text += [f"var a{s} = 0.0; let x{s} = s[{s}] * p.{x}x_stride + p.{x}x_at;" for s in range(together)]
    text.append(f"for (var i = lane; i < p.{x}cols; i += 16u) {{")
    text.append(f"let w = {x}element(codes_at, scales_at, row, i);")
    times = "weighted" if factor.reader.format in ("f32", "bf16") else "fm"
    text += [f"a{s} = {times}(w, {x}x[x{s} + i], a{s});" for s in range(together)]
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
