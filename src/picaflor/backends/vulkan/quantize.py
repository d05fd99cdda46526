"""Activations to digits in WGSL: rotation, one scale per group, one to three int8 planes, by integers alone.

Knows contracts.md section 2, Activations; must not know weights. No shader has float64 everywhere and a division may be
off by units, so `x * (Q / m)` is rounded as float64 would round it, with mantissas as integers: the same digits and
scales on every device. Digits lie as `[rows][planes][groups * group]` bytes, the top plane first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from picaflor.backends.vulkan.decode import Needs
from picaflor.backends.vulkan.wgsl import LANES, Kernel

LARGEST: Final = {1: 127, 2: 127 * 256 + 127, 3: 127 * 65536}
"""The largest integer that an activation becomes, by number of planes."""

_INTEGERS: Final = """
const Q: u32 = @Qu;
const Q_SHIFT: u32 = @SHIFTu;
fn times(a: u32, b: u32) -> vec2<u32> {  // (high, low) of a product of two numbers below 2^25
  let low = (a & 0xffffu) * (b & 0xffffu);
  let one = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
  let two = (a & 0xffffu) * (b >> 16u) + (one & 0xffffu);
  return vec2<u32>((a >> 16u) * (b >> 16u) + (one >> 16u) + (two >> 16u), (two << 16u) | (low & 0xffffu));
}
// (quotient, rest) of a number below 2^48, whose low half is given, by d below 2^25; `near` is nearly the quotient.
fn divided(low: u32, d: u32, near: f32) -> vec2<u32> {
  var q = u32(near);
  var r = bitcast<i32>(low - q * d);
  let off = i32(floor(f32(r) / f32(d)));
  q += bitcast<u32>(off);
  r -= off * i32(d);
  if (r < 0) { q -= 1u; r += i32(d); }
  if (r >= i32(d)) { q += 1u; r -= i32(d); }
  return vec2<u32>(q, u32(r));
}
fn above(a: vec2<u32>, b: vec2<u32>) -> bool { return a.x > b.x || (a.x == b.x && a.y > b.y); }
// A value that lies exactly between two integers: -1, 0, 1 as float64's rounding of Q / m takes it below, at or above.
fn leaning(mx: u32, mm: u32) -> i32 {
  var head = Q;
  for (; head < mm; head <<= 1u) {}
  for (; head >= 2u * mm; head >>= 1u) {}  // Q / m in [1, 2), exact: only zeros are shifted out
  var rest = head - mm;
  for (var k = 0u; k < 52u; k++) {
    rest <<= 1u;
    rest = select(rest, rest - mm, rest >= mm);
  }
  let up = 2u * rest > mm;
  let off = times(mx, select(rest, mm - rest, up));
  let large = !above(vec2<u32>(mm >> 8u, mm << 24u), times(mx, head));
  let half_unit = select(vec2<u32>(mm >> 10u, mm << 22u), vec2<u32>(mm >> 9u, mm << 23u), large);
  return select(0, select(-1, 1, up), above(off, half_unit));
}
fn quantized(bits: u32, most: u32) -> i32 {
  let e = (bits >> 23u) & 255u;
  let d = ((most >> 23u) & 255u) - e;
  if (most < 0x0da24260u || most >= 0x7f800000u || e == 0u || d > 24u) { return 0; }  // 0x0da24260 is 1e-30
  let mx = (bits & 0x7fffffu) | 0x800000u;
  let mm = (most & 0x7fffffu) | 0x800000u;
  let parts = divided(mx * Q, mm, f32(mx) * f32(Q) / f32(mm));
  let whole = parts.x;
  let rest = parts.y;
  var q = whole >> d;
  let below = whole & ((1u << d) - 1u);
  var side = 0;  // of the middle between q and q + 1
  if (d == 0u) {
    side = select(select(0, 1, 2u * rest > mm), -1, 2u * rest < mm);
  } else {
    let middle = 1u << (d - 1u);
    side = select(select(select(0, 1, rest > 0u), 1, below > middle), -1, below < middle);
  }
  if (side == 0) {
    side = leaning(mx, mm);
    side = select(side, select(-1, 1, (q & 1u) == 1u), side == 0);
  }
  q += select(0u, 1u, side > 0);
  return select(i32(q), -i32(q), bits >= 0x80000000u);
}
fn step_bits(most: u32) -> u32 {  // m / Q, rounded once
  if (most >= 0x7f800000u) { return 0x7fc00000u; }
  if (most < 0x0da24260u) { return 0u; }
  let mm = (most & 0x7fffffu) | 0x800000u;
  let divisor = Q << Q_SHIFT;
  let one = mm >= divisor;
  let start = select(mm << 1u, mm, one);
  let parts = divided(start << 23u, divisor, f32(start) / f32(divisor) * 8388608.0);
  var whole = parts.x;
  let rest = 2u * parts.y;
  let up = rest > divisor || (rest == divisor && (whole & 1u) == 1u);
  whole += select(0u, 1u, up);
  let exponent = (most >> 23u) + Q_SHIFT - 23u - select(1u, 0u, one);
  return (exponent << 23u) + (whole - 0x800000u);
}
"""

_BODY: Final = """
var<workgroup> biggest: array<atomic<u32>, 16>;
fn run(wid: u32, lid: u32) {
  let words = p.group / 4u;
  let at_once = LANESu / words;
  let mine = lid / words;
  let w = lid % words;
  let unit = wid * at_once + mine;
  let live = mine < at_once && unit < u32(frame[p.space]) * p.times * p.groups;
  let row = unit / p.groups;
  let g = unit % p.groups;
  if (lid < 16u) { atomicStore(&biggest[lid], 0u); }
  workgroupBarrier();
  var v = vec4<u32>(0u);
  if (live) {
    for (var k = 0u; k < 4u; k++) {
      let i = g * p.group + PLACE;
      if (i < p.cols) { v[k] = bitcast<u32>(x[row * p.x_stride + p.x_at + i]); }
    }
    let a = v & vec4<u32>(0x7fffffffu);
    atomicMax(&biggest[mine], max(max(a.x, a.y), max(a.z, a.w)));
  }
  workgroupBarrier();
  if (!live) { return; }
  let most = atomicLoad(&biggest[mine]);
  var q = vec4<i32>(quantized(v.x, most), quantized(v.y, most), quantized(v.z, most), quantized(v.w, most));
  let line = p.groups * words;
  let at = row * PLANESu * line + g * words + w;
  for (var plane = PLANESu; plane > 0u; plane--) {
    let low = vec4<u32>(q) & vec4<u32>(255u);
    digits[at + (plane - 1u) * line] = low.x | (low.y << 8u) | (low.z << 16u) | (low.w << 24u);
    q = (q + vec4<i32>(128)) >> vec4<u32>(8u);
  }
  if (w == 0u) { steps[row * p.groups + g] = step_bits(most); }
}
"""


@lru_cache(maxsize=64)
def prepare_kernel(needs: Needs) -> Kernel:
    """Digits and scales of rows of x. A workgroup takes as many whole groups as it has room for."""
    largest = LARGEST[needs.planes]
    integers = _INTEGERS.replace("@Q", str(largest)).replace("@SHIFT", str(24 - largest.bit_length()))
    place = "8u * (w / 2u) + 2u * k + (w & 1u)" if needs.halves else "4u * w + k"
    body = _BODY.replace("PLANES", str(needs.planes)).replace("LANES", str(LANES)).replace("PLACE", place)
    return Kernel(
        "prepare",
        (("x", "f32", "read_write"), ("digits", "u32", "read_write"), ("steps", "u32", "read_write"),
         ("frame", "i32", "read")),
        ("space", "times", "x_stride", "x_at", "cols", "group", "groups"),
        integers + body,
    )  # fmt: skip


def groups_at_once(group: int) -> int:
    """Groups that a workgroup prepares."""
    return LANES // (group // 4)


_ROTATE: Final = """
fn run(wid: u32, lid: u32) {
  let row = wid / p.blocks;
  if (row >= u32(frame[p.space]) * p.times) { return; }
  let start = table[2u * (wid % p.blocks)];
  let size = table[2u * (wid % p.blocks) + 1u];
  let here = row * p.cols + start;
  let signs = 2u * p.blocks + start;
  for (var j = lid; j < size; j += LANESu) {
    turned[here + j] = x[row * p.x_stride + p.x_at + start + j] * bitcast<f32>(table[signs + j]);
  }
  for (var stride = 1u; stride < size; stride <<= 1u) {
    storageBarrier();
    for (var k = lid; k < size / 2u; k += LANESu) {
      let j = here + (k / stride) * 2u * stride + k % stride;
      let a = turned[j];
      let b = turned[j + stride];
      turned[j] = a + b;
      turned[j + stride] = a - b;
    }
  }
  storageBarrier();
  for (var j = lid; j < size; j += LANESu) {
    turned[here + j] = turned[here + j] * bitcast<f32>(table[signs + p.cols + j]);
  }
}
"""
ROTATE: Final = Kernel(
    "rotate",
    (
        ("x", "f32", "read_write"),
        ("turned", "f32", "read_write"),
        ("table", "u32", "read"),
        ("frame", "i32", "read"),
    ),
    ("space", "times", "x_stride", "x_at", "cols", "blocks"),
    _ROTATE.replace("LANES", str(LANES)),
)
"""The signed Walsh-Hadamard rotation of rows. `table`: (start, size) of each block, then signs, then factors."""
