"""Weight formats in WGSL: one element as a float, and for integer codes eight of them as packed bytes with their scale.

Knows the formats' definitions, whose numbers it takes; must not know operations or devices. Bytes lie as in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from picaflor.backends.vulkan.wgsl import lines
from picaflor.formats import REGISTRY, e8_iq3, fp8_b128, int2_row, int3_g64, int4_row, mxfp4
from picaflor.formats.numeric import ceil_div

PLANES: Final = {"fast": 1, "standard": 2, "exact": 3}
"""int8 planes of a prepared activation for each precision."""
NIBBLES: Final = ("int4-row", "int4-grouped", "mxfp4")
"""Formats whose bytes hold an even input low and an odd one high: digits lie in that order."""
WORD_BYTES: Final = 16
"""Rows and addresses at multiples of this are read in vectors of four words."""
_WIDE: Final[Mapping[str, int]] = {"int4-row": 32, "int4-grouped": 32, "int8-row": 16}
"""Inputs that lie in one vector of four words."""
SIZES: Final = ("row_bytes", "groups", "group")
"""Fields of the uniform for each matrix: bytes of a row, scales or runs side by side, inputs of a run."""


@dataclass(frozen=True, slots=True)
class Needs:
    """How activations are prepared for a matrix; matrices with equal needs share prepared rows.

    `halves`: of each 8 inputs the digits of the even ones come first.
    """

    group: int
    planes: int
    rotated: bool
    halves: bool


def group_of(format_name: str, group_size: int) -> int:
    """Inputs with one activation scale; 0 for float formats."""
    group = REGISTRY[format_name].activation.group
    return group_size if group == -1 else group


def needs(format_name: str, group_size: int, precision: str) -> Needs | None:
    """What activations a format meets at a precision; None: float32 as they are."""
    group = group_of(format_name, group_size)
    if not group:
        return None
    return Needs(group, PLANES[precision], REGISTRY[format_name].activation.rotated, format_name in NIBBLES)


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers that a kernel gets of a matrix in its uniform."""

    row_bytes: int
    groups: int
    group: int

    def fields(self, prefix: str) -> dict[str, int]:
        """By the uniform's names."""
        return {f"{prefix}{name}": int(getattr(self, name)) for name in SIZES}


def shape_of(format_name: str, cols: int, group_size: int) -> Shape:
    """The numbers of a matrix with rows of `cols`."""
    spec = REGISTRY[format_name]
    group = group_of(format_name, group_size)
    across = group or (spec.scale.cols if spec.scale.cols > 0 else cols)
    return Shape(spec.planes[0].nbytes(1, cols, group_size), ceil_div(cols, across), group)


@dataclass(frozen=True, slots=True)
class Reader:
    """Functions that read one matrix. `prefix` of their names; `codes` and `scales`: names of the buffers of u32 (of
    vec4<u32> where `wide`). `aligned`: rows of codes start at multiples of four bytes; `scales_aligned` likewise.
    """

    format: str
    prefix: str
    codes: str
    scales: str
    wide: bool
    aligned: bool
    scales_aligned: bool

    @property
    def integer(self) -> bool:
        """Whether activations are stored as digits for it."""
        return REGISTRY[self.format].activation.group != 0

    @property
    def at_once(self) -> int:
        """Inputs of one step of a product: those of a vector, or eight."""
        return _WIDE[self.format] if self.wide else 8

    def text(self) -> str:
        """All functions: `byte`, `word`, `scale`, `meet` (a scale times a number), and `element` or `pair`."""
        x, codes = self.prefix, self.codes
        parts = [
            _loads(f"{x}c_", codes, wide=self.wide, aligned=self.aligned),
            _loads(f"{x}s_", self.scales, wide=self.wide and self.scales == codes, aligned=self.scales_aligned),
            _scale(self),
        ]
        if self.integer:
            product = "powers(u32(scale), v)" if self.format == "mxfp4" else "scale * v"
            parts.append(f"fn {x}meet(scale: f32, v: f32) -> f32 {{ return {product}; }}\n")
        if not REGISTRY[self.format].activation.rotated:
            body = _ELEMENTS[self.format].replace("@", x)
            parts.append(f"fn {x}element(codes_at: u32, scales_at: u32, row: u32, col: u32) -> f32 {{\n{body}\n}}\n")
        if self.integer:
            parts.append(nibbles(x))
            parts.append(f"fn {x}pair(at: u32, j: u32) -> vec2<u32> {{\n{_PAIRS[self.format].replace('@', x)}\n}}\n")
        return "".join(parts)


def wide(format_name: str, group: int, row_bytes: int, *addresses: int) -> bool:
    """Whether rows can be read in vectors: whole vectors in a run, and every row starts at one."""
    inputs = _WIDE.get(format_name)
    if inputs is None or group % 32:
        return False
    return not any(number % WORD_BYTES for number in (row_bytes, *addresses))


def aligned(format_name: str, *numbers: int) -> bool:
    """Whether words of codes lie at multiples of four bytes, for these lengths of rows and addresses."""
    inside = e8_iq3.BLOCK_BYTES if format_name == e8_iq3.NAME else 0
    return not any(number % 4 for number in (inside, *numbers))


def helpers(formats: set[str]) -> str:
    """Functions that readers of these formats call."""
    parts = [_COMMON]
    if "mxfp4" in formats:
        parts.append(_MXFP4)
    if "f16" in formats or "e8-iq3-lattice" in formats:
        parts.append(_F16)
    if "fp8-e4m3-b128" in formats:
        parts.append(_FP8)
    return "".join(parts)


def _loads(prefix: str, buffer: str, *, wide: bool, aligned: bool) -> str:
    def word(index: str) -> str:
        return f"{buffer}[({index}) >> 2u][({index}) & 3u]" if wide else f"{buffer}[{index}]"

    whole = f"  return {word('at >> 2u')};"
    if not aligned:
        whole = lines(
            (
                "  let shift = (at & 3u) * 8u;",
                f"  let low = {word('at >> 2u')};",
                "  if (shift == 0u) { return low; }",
                f"  let index = (at >> 2u) + 1u;\n  let high = {word('index')};",
                "  return (low >> shift) | (high << (32u - shift));",
            )
        )
    return (
        f"fn {prefix}word(at: u32) -> u32 {{\n{whole}\n}}\n"
        f"fn {prefix}byte(at: u32) -> u32 {{\n"
        f"  let index = at >> 2u;\n  return ({word('index')} >> ((at & 3u) * 8u)) & 255u;\n}}\n"
    )


def _scale(reader: Reader) -> str:
    x, spec = reader.prefix, REGISTRY[reader.format]
    head = f"fn {x}scale(codes_at: u32, scales_at: u32, row: u32, g: u32) -> f32 {{\n"
    if spec.scale.plane == -1 and not reader.integer:
        return ""
    if reader.format == "e8-iq3-lattice":
        body = _E8_SCALE.replace("@", x)
    elif reader.format == "mxfp4":
        body = f"  return f32({x}s_byte(scales_at + row * p.{x}groups + g));"
    else:
        if spec.scale.rows > 1:
            index = f"(row / {spec.scale.rows}u) * p.{x}groups + g"
        else:
            index = "row" if spec.scale.cols == 0 else f"row * p.{x}groups + g"
        body = f"  return bitcast<f32>({x}s_word(scales_at + 4u * ({index})));"
    return f"{head}{body}\n}}\n"


_COMMON: Final = """
fn less(v: u32, bias: u32) -> u32 { return ((v | 0x80808080u) - bias) ^ 0x80808080u; }
fn crumbs(b: u32) -> u32 { return (b | (b << 6u) | (b << 12u) | (b << 18u)) & 0x03030303u; }
fn bits4(b: u32) -> u32 { return (b * 0x00204081u) & 0x01010101u; }
fn signed(v: u32, bits: u32) -> i32 { return bitcast<i32>(v << (32u - bits)) >> (32u - bits); }
"""

_MAGNITUDES: Final = mxfp4.DOUBLED[:8]
_MXFP4: Final = f"""
fn fp4(nibble: u32) -> u32 {{
  let words = vec2<u32>({sum(v << 8 * k for k, v in enumerate(_MAGNITUDES[:4]))}u, \
{sum(v << 8 * k for k, v in enumerate(_MAGNITUDES[4:]))}u);
  let m = (select(words.x, words.y, (nibble & 4u) != 0u) >> ((nibble & 3u) * 8u)) & 255u;
  return select(m, (256u - m) & 255u, nibble >= 8u);
}}
fn fp4x4(v: u32) -> u32 {{
  return fp4(v & 15u) | (fp4((v >> 8u) & 15u) << 8u) | (fp4((v >> 16u) & 15u) << 16u) | (fp4((v >> 24u) & 15u) << 24u);
}}
fn powers(e: u32, v: f32) -> f32 {{  // v * 2^(e - 128); that power itself may be too small for a device
  if (e == 255u) {{ return bitcast<f32>(0x7fc00000u | (e & 1u)); }}
  let half = e >> 1u;
  return (v * bitcast<f32>((half + 63u) << 23u)) * bitcast<f32>((e - half + 63u) << 23u);
}}
fn fp4_value(m: i32, e: u32) -> f32 {{  // below the smallest normal number the bits are the integer
  let k = u32(abs(m)) << (21u + min(e, 2u));
  if (e < 2u && k < 0x800000u) {{ return bitcast<f32>(k | select(0u, 0x80000000u, m < 0)); }}
  return powers(e, f32(m));
}}
"""
_F16: Final = """
fn f16_value(h: u32) -> f32 {
  let sign = (h & 0x8000u) << 16u;
  let e = (h >> 10u) & 31u;
  let m = h & 1023u;
  if (e == 0u) { return bitcast<f32>(bitcast<u32>(f32(m) * 5.9604644775390625e-8) | sign); }
  return bitcast<f32>(sign | (select(e + 112u, 255u, e == 31u) << 23u) | (m << 13u));
}
"""
_FP8: Final = """
fn e4m3(c: u32) -> f32 {
  let sign = (c & 128u) << 24u;
  let e = (c >> 3u) & 15u;
  let m = c & 7u;
  if ((c & 127u) == 127u) { return bitcast<f32>(0x7fc00000u | sign); }
  if (e == 0u) { return bitcast<f32>(bitcast<u32>(f32(m) * 0.001953125) | sign); }
  return bitcast<f32>(sign | ((e + 120u) << 23u) | (m << 20u));
}
"""
_HALF: Final = """  let at = codes_at + row * p.@row_bytes + 2u * col;
  let h = @c_byte(at) | (@c_byte(at + 1u) << 8u);
"""
_NIBBLE: Final = f"""  let b = @c_byte(codes_at + row * p.@row_bytes + col / 2u);
  let v = f32(i32((b >> (4u * (col & 1u))) & 15u) - {int4_row.BIAS});
"""

_ELEMENTS: Final[Mapping[str, str]] = {
    "f32": "  return bitcast<f32>(@c_word(codes_at + row * p.@row_bytes + 4u * col));",
    "bf16": _HALF + "  return bitcast<f32>(h << 16u);",
    "f16": _HALF + "  return f16_value(h);",
    "int8-row": "  let v = signed(@c_byte(codes_at + row * p.@row_bytes + col), 8u);\n"
    "  return f32(v) * @scale(codes_at, scales_at, row, 0u);",
    "int4-row": _NIBBLE + "  return v * @scale(codes_at, scales_at, row, 0u);",
    "int4-grouped": _NIBBLE + "  return v * @scale(codes_at, scales_at, row, col / p.@group);",
    "int2-row": "  let b = @c_byte(codes_at + row * p.@row_bytes + col / 4u);\n"
    f"  let v = f32(i32((b >> (2u * (col & 3u))) & 3u) - {int2_row.BIAS});\n"
    "  return v * @scale(codes_at, scales_at, row, 0u);",
    "int3-g64": f"  let at = codes_at + row * p.@row_bytes + (col / {int3_g64.GROUP}u) * {int3_g64.BLOCK_BYTES}u;\n"
    f"  let k = col % {int3_g64.GROUP}u;\n"
    "  let low = (@c_byte(at + k / 4u) >> (2u * (k & 3u))) & 3u;\n"
    f"  let high = (@c_byte(at + {int3_g64.LOW_BYTES}u + k / 8u) >> (k & 7u)) & 1u;\n"
    f"  let v = f32(i32(low | (high << 2u)) - {int3_g64.BIAS});\n"
    f"  return v * @scale(codes_at, scales_at, row, col / {int3_g64.GROUP}u);",
    "mxfp4": "  let b = @c_byte(codes_at + row * p.@row_bytes + col / 2u);\n"
    "  let m = signed(fp4((b >> (4u * (col & 1u))) & 15u), 8u);\n"
    f"  return fp4_value(m, u32(@scale(codes_at, scales_at, row, col / {mxfp4.GROUP}u)));",
    "fp8-e4m3-b128": "  let v = e4m3(@c_byte(codes_at + row * p.@row_bytes + col));\n"
    f"  return v * @scale(codes_at, scales_at, row, col / {fp8_b128.BLOCK}u);",
}
"""float32 of one weight: code times scale, rounded once."""


def _packed(value: int) -> str:
    return f"{value * 0x01010101:#010x}u"


_E8_SCALE: Final = f"""  let at = codes_at + row * p.@row_bytes + (g / 8u) * {e8_iq3.BLOCK_BYTES}u;
  let d = f16_value(@c_byte(at + {e8_iq3.SCALE_OFFSET}u) | (@c_byte(at + {e8_iq3.SCALE_OFFSET + 1}u) << 8u));
  let code = @c_byte(at + {e8_iq3.INDEX_BYTES + 3}u + 4u * (g % 8u)) >> 4u;
  return ((d * (0.5 + f32(code))) * 0.5) * 0.5;"""

_PAIRS: Final[Mapping[str, str]] = {
    "int8-row": "  return vec2<u32>(@c_word(at + 8u * j), @c_word(at + 8u * j + 4u));",
    "int4-row": "  return @nibbles(@c_word(at + 4u * j));",
    "int4-grouped": "  return @nibbles(@c_word(at + 4u * j));",
    "int2-row": "  let at_j = at + 2u * j;\n"
    f"  return vec2<u32>(less(crumbs(@c_byte(at_j)), {_packed(int2_row.BIAS)}), "
    f"less(crumbs(@c_byte(at_j + 1u)), {_packed(int2_row.BIAS)}));",
    "int3-g64": f"  let block = at + (j / 8u) * {int3_g64.BLOCK_BYTES}u;\n"
    f"  let high = @c_byte(block + {int3_g64.LOW_BYTES}u + j % 8u);\n"
    "  let low = vec2<u32>(crumbs(@c_byte(block + 2u * (j % 8u))), crumbs(@c_byte(block + 2u * (j % 8u) + 1u)));\n"
    f"  return vec2<u32>(less(low.x | (bits4(high & 15u) << 2u), {_packed(int3_g64.BIAS)}), "
    f"less(low.y | (bits4(high >> 4u) << 2u), {_packed(int3_g64.BIAS)}));",
    "mxfp4": "  let w = @c_word(at + 4u * j);\n"
    "  return vec2<u32>(fp4x4(w & 0x0f0f0f0fu), fp4x4((w >> 4u) & 0x0f0f0f0fu));",
    "e8-iq3-lattice": f"  let block = at + (j / 32u) * {e8_iq3.BLOCK_BYTES}u;\n"
    "  let k = j % 32u;\n"
    f"  let word = @c_word(block + {e8_iq3.INDEX_BYTES}u + 4u * (k / 4u));\n"
    "  let seven = (word >> (7u * (k % 4u))) & 127u;\n"
    "  let signs = seven | ((countOneBits(seven) & 1u) << 7u);\n"
    "  let m = vec2<u32>(lattice[@c_byte(block + 2u * k)], lattice[@c_byte(block + 2u * k + 1u)]);\n"
    "  let mask = vec2<u32>(bits4(signs & 15u) * 255u, bits4(signs >> 4u) * 255u);\n"
    "  let minus = vec2<u32>((0x80808080u - m.x) ^ 0x80808080u, (0x80808080u - m.y) ^ 0x80808080u);\n"
    "  return (m & ~mask) | (minus & mask);",
}
"""Codes of eight inputs, from input 8 j of the row at `at`, as two words of four signed bytes."""


def unbiased(reader: Reader) -> int:
    """What the words of `vector_pairs` are too large by in each code."""
    return 0 if reader.format == "int8-row" else int4_row.BIAS


def vector_pairs(reader: Reader, vector: str) -> list[str]:
    """For wide rows: the words of codes of a vector in the order of their digits, too large by `unbiased`."""
    words = [f"{vector}.{axis}" for axis in "xyzw"]
    if reader.format == "int8-row":
        return words
    return [half for w in words for half in (f"{w} & 0x0f0f0f0fu", f"({w} >> 4u) & 0x0f0f0f0fu")]


def nibbles(prefix: str) -> str:
    """The function that splits four bytes of biased nibbles."""
    bias = _packed(int4_row.BIAS)
    return (
        f"fn {prefix}nibbles(w: u32) -> vec2<u32> {{\n"
        f"  return vec2<u32>(less(w & 0x0f0f0f0fu, {bias}), less((w >> 4u) & 0x0f0f0f0fu, {bias}));\n}}\n"
    )
