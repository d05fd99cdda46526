"""Kernels in WGSL: their text from named bindings and fields, and the arithmetic of the contract that they share.

Knows WGSL and numbers; must not know devices, operations or formats. docs/design/contracts.md section 2 defines each
sequence. `fm` is the fused product and sum: the device's own where a probe has found that it rounds once, else float64
where the device has it, else as the device does it (`FUSIONS`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

LANES: Final = 64
"""Invocations of a workgroup, where a kernel says nothing else."""
WIDE_GRID: Final = 32768
"""Workgroups side by side in the first dimension of a grid; more lie in the second one."""

FUSIONS: Final[Mapping[str, str]] = {
    "fused": "fn fm(a: f32, b: f32, c: f32) -> f32 { return fma(a, b, c); }",
    "float64": "fn fm(a: f32, b: f32, c: f32) -> f32 { return f32(f64(a) * f64(b) + f64(c)); }",
    "plain": "fn fm(a: f32, b: f32, c: f32) -> f32 { return fma(a, b, c); }",
}
"""Ways of a fused product and sum; `plain` rounds twice."""

_CORRECTED: Final = """
fn div(a: f32, b: f32) -> f32 {
  let q = a / b;
  let scale = select(1.0, 5.421010862427522e-20, abs(b) > 1.8446744073709552e19);  // 2^-64: 1 / b stays a normal number
  let c = b * scale;
  let better = fm(fm(-q, c, a * scale), 1.0 / c, q);
  return select(q, better, finite(better) && finite(b));
}
fn root(x: f32) -> f32 {
  let r = sqrt(x);
  let better = fm(fm(-r, r, x), 0.5 / r, r);
  return select(r, better, finite(better));
}
"""
"""One step of Newton: what a device divides to within a few units becomes the nearest float nearly always."""
_AS_IT_IS: Final = """
fn div(a: f32, b: f32) -> f32 { return a / b; }
fn root(x: f32) -> f32 { return sqrt(x); }
"""

_MATH: Final = """
fn finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }
fn unordered(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }
fn exp_(x: f32) -> f32 {
  if (unordered(x)) { return x; }
  if (x < -87.5) { return 0.0; }
  let y = min(x, 88.5);
  let n = round(y * 1.44269502162933349609375);
  var r = fm(-n, 0.693145751953125, y);
  r = fm(-n, 1.42860676533018704503775e-06, r);
  var p = fm(r, 0.001381447073072195, 0.008368778973817825);
  p = fm(p, r, 0.04166839271783829);
  p = fm(p, r, 0.1666651964187622);
  p = fm(p, r, 0.4999999403953552);
  p = fm(p, r, 1.0);
  p = fm(p, r, 1.0);
  let whole = i32(n);
  let half = whole >> 1u;
  let first = bitcast<f32>(u32(half + 127) << 23u);
  let second = bitcast<f32>(u32(whole - half + 127) << 23u);
  return (p * first) * second;
}
fn sigmoid(z: f32) -> f32 { return div(1.0, 1.0 + exp_(0.0 - z)); }
fn silu(z: f32) -> f32 { return div(z, 1.0 + exp_(0.0 - z)); }
// fm(w, x, c), also where w is below the smallest normal number and a device would take it for zero
fn weighted(w: f32, x: f32, c: f32) -> f32 {
  let bits = bitcast<u32>(w);
  if ((bits & 0x7f800000u) != 0u || (bits & 0x7fffffu) == 0u) { return fm(w, x, c); }
  let m = f32(bits & 0x7fffffu) * 2.6469779601696886e-23;  // 2^-75; the other 2^-74 is in x
  return fm(select(m, -m, bits >= 0x80000000u), x * 5.293955920339377e-23, c);
}
fn relu(z: f32) -> f32 {  // by its bits: a compiler may take a comparison for one that drops NaN
  return select(z, 0.0, bitcast<u32>(z) >= 0x80000000u && !unordered(z));
}
fn rank(x: f32) -> u32 {
  if (unordered(x)) { return 0u; }
  let bits = select(bitcast<u32>(x), 0u, (bitcast<u32>(x) & 0x7fffffffu) == 0u);
  return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
}
"""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One shader. `bindings`: (name, element type, access `read` or `read_write`). `fields`: of the uniform `p`, u32
    but for names that end in `:f32`. `body`: declarations and `fn run(wid: u32, lid: u32)`, `wid` being the number of
    the workgroup and `lid` that of the invocation in it, of `lanes`."""

    name: str
    bindings: tuple[tuple[str, str, str], ...]
    fields: tuple[str, ...]
    body: str
    lanes: int = LANES

    def source(self, fusion: str) -> str:
        """The shader's text for a way of `fm`."""
        parts = [FUSIONS[fusion], _MATH, _CORRECTED if fusion == "fused" else _AS_IT_IS]
        for number, (name, kind, access) in enumerate(self.bindings):
            parts.append(f"@group(0) @binding({number}) var<storage, {access}> {name}: array<{kind}>;\n")
        typed = (field.partition(":") for field in self.fields)
        members = ", ".join(f"{name}: {kind or 'u32'}" for name, _, kind in typed)
        parts.append(f"struct P {{ {members} }};\n")
        parts.append(f"@group(0) @binding({len(self.bindings)}) var<uniform> p: P;\n")
        parts.append(self.body)
        parts.append(
            f"@compute @workgroup_size({self.lanes})\n"
            "fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {\n"
            f"  run(group.x + group.y * {WIDE_GRID}u, lid);\n}}\n"
        )
        return "".join(parts)

    def pack(self, values: Mapping[str, float]) -> bytes:
        """The uniform's bytes. Raises KeyError for a field without a value."""
        out = b""
        for field in self.fields:
            name, _, kind = field.partition(":")
            out += struct.pack("<f", values[name]) if kind else struct.pack("<I", int(values[name]))
        return out


def grid(workgroups: int) -> tuple[int, int, int]:
    """A grid with at least so many workgroups, within what every device has in each dimension."""
    return (workgroups, 1, 1) if workgroups <= WIDE_GRID else (WIDE_GRID, -(-workgroups // WIDE_GRID), 1)


def lines(parts: Sequence[str]) -> str:
    """Statements, one a line."""
    return "\n".join(parts)
