"""Attention in WGSL: blocks of 256 positions, their merge, the absorbed products of latent attention, the indexer.

Knows contracts.md section 2; must not know models or devices. Rows are taken in chunks: `first` is a chunk's first row,
buffers of its own begin there. One text serves grouped queries and latents: a head's query meets `width` values of its
key and, for latents, `width2` of a second key; its values are `v_width` wide.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from picaflor.backends.vulkan.decode import SIZES, Reader, helpers
from picaflor.backends.vulkan.wgsl import LANES, Kernel

BLOCK_KEYS: Final = 256
_FRAME: Final = ("frame", "i32", "read")
PAGING: Final = ("sequences", "positions", "pages", "pages_stride", "shift")
"""Fields that lead from a row and a position to a token of a plane."""

_TOKEN: Final = """
fn token_of(row: u32, position: u32) -> u32 {
  let page = u32(frame[p.pages + u32(frame[p.sequences + row]) * p.pages_stride + (position >> p.shift)]);
  return (page << p.shift) + (position & ((1u << p.shift) - 1u));
}
"""
_LOCAL: Final = """
  let row = p.first + local;
  if (local >= p.chunk || row >= u32(frame[p.space])) { return; }
"""


def _scores(second: bool) -> str:
    """Scores of up to 64 keys: four teams of sixteen chains, then one lane per key."""
    more = """
        var b = 0.0;
        for (var i = lane; i < p.width2; i += 16u) { b = fm(q2[q2_row + i], keys2[token * p.k2_stride + i], b); }
        part2[key * 16u + lane] = b;""" if second else ""  # fmt: skip
    total = "tree(lid) + tree2(lid)" if second else "tree(lid)"
    return f"""
  for (var begin = 0u; begin < n; begin += 64u) {{
    for (var t = 0u; t < 16u; t++) {{
      let key = t * 4u + lid / 16u;
      let lane = lid % 16u;
      if (begin + key < n) {{
        let token = tokens[begin + key];
        var a = 0.0;
        for (var i = lane; i < p.width; i += 16u) {{ a = fm(q[q_row + i], keys[token * p.k_stride + k_head + i], a); }}
        part[key * 16u + lane] = a;{more}
      }}
    }}
    workgroupBarrier();
    if (begin + lid < n) {{ weights[begin + lid] = ({total}) * p.scale; }}
    workgroupBarrier();
  }}
"""


def _tree(name: str, sums: str) -> str:
    """A function that adds up the sixteen chains of a key that lie in the array `sums`."""
    return f"""
fn {name}(key: u32) -> f32 {{
  var t: array<f32, 8>;
  for (var j = 0u; j < 8u; j++) {{ t[j] = {sums}[key * 16u + j] + {sums}[key * 16u + j + 8u]; }}
  for (var j = 0u; j < 4u; j++) {{ t[j] = t[j] + t[j + 4u]; }}
  return (t[0] + t[2]) + (t[1] + t[3]);
}}
"""


@lru_cache(maxsize=8)
def block_kernel(second: bool, selected: bool) -> Kernel:
    """One block of one head of one row: largest score, sum of weights, weighted values (`2 + v_width` in scratch).

    A block without keys has -1 for its sum.
    """
    find = """
  let count = selection[row * p.sel_stride + p.sel_at];
  if (count >= 0) {
    var low = 0u;
    var size = u32(count);
    for (; size > 0u;) {
      let middle = low + size / 2u;
      let before = u32(selection[row * p.sel_stride + p.sel_at + 1u + middle]) < start;
      low = select(low, middle + 1u, before);
      size = select(size / 2u, size - size / 2u - 1u, before);
    }
    n = 0u;
    for (; low + n < u32(count); n++) {
      if (u32(selection[row * p.sel_stride + p.sel_at + 1u + low + n]) >= start + 256u) { break; }
    }
    from_at = row * p.sel_stride + p.sel_at + 1u + low;
    chosen = true;
  }
""" if selected else ""  # fmt: skip
    position = "select(start + k, u32(selection[from_at + min(k, n - 1u)]), chosen)" if selected else "start + k"
    q2_row = "  let q2_row = row * p.q2_stride + p.q2_at + head * p.q2_head;\n" if second else ""
    body = f"""
var<workgroup> part: array<f32, 1024>;
var<workgroup> part2: array<f32, 1024>;
var<workgroup> weights: array<f32, {BLOCK_KEYS}>;
var<workgroup> tokens: array<u32, {BLOCK_KEYS}>;
{_TOKEN}{_tree("tree", "part")}{_tree("tree2", "part2")}
fn run(wid: u32, lid: u32) {{
  let block = wid % p.blocks;
  let head = wid / p.blocks % p.heads;
  let local = wid / p.blocks / p.heads;
{_LOCAL}
  let start = block * {BLOCK_KEYS}u;
  let visible = u32(frame[p.positions + row]) + 1u;
  if (start >= visible) {{ return; }}
  var n = min(visible - start, {BLOCK_KEYS}u);
  var from_at = 0u;
  var chosen = false;
{find}
  let at = ((local * p.heads + head) * p.blocks + block) * (p.v_width + 2u);
  if (n == 0u) {{
    if (lid == 0u) {{ scratch[at + 1u] = -1.0; }}
    return;
  }}
  let q_row = (row - p.q_first) * p.q_stride + p.q_at + head * p.q_head;
{q2_row}  let k_head = head / p.share * p.k_head;
  for (var k = lid; k < n; k += {LANES}u) {{ tokens[k] = token_of(row, {position}); }}
  workgroupBarrier();
{_scores(second)}
  var most = weights[0];
  for (var k = lid; k < n; k += {LANES}u) {{ most = max(most, weights[k]); }}
  part[lid] = most;
  workgroupBarrier();
  for (var k = 0u; k < {LANES}u; k++) {{ most = max(most, part[k]); }}
  workgroupBarrier();
  for (var k = lid; k < n; k += {LANES}u) {{ weights[k] = exp_(weights[k] - most); }}
  workgroupBarrier();
  if (lid < 16u) {{
    var sum = 0.0;
    for (var k = lid; k < n; k += 16u) {{ sum = sum + weights[k]; }}
    part[lid] = sum;
  }}
  workgroupBarrier();
  if (lid == 0u) {{
    scratch[at] = most;
    scratch[at + 1u] = tree(0u);
  }}
  let v_head = head / p.share * p.v_head;
  for (var j = lid; j < p.v_width; j += {LANES}u) {{
    var acc = 0.0;
    for (var k = 0u; k < n; k++) {{ acc = fm(weights[k], values[tokens[k] * p.v_stride + v_head + j], acc); }}
    scratch[at + 2u + j] = acc;
  }}
}}
"""
    bindings = [("q", "f32", "read_write"), ("keys", "f32", "read"), ("values", "f32", "read"),
                ("scratch", "f32", "read_write"), _FRAME]  # fmt: skip
    fields = ["space", "first", "chunk", "blocks", "heads", "share", "q_first", "q_stride", "q_at", "q_head", "width",
              "k_stride", "k_head", "v_width", "v_stride", "v_head", "scale:f32", *PAGING]  # fmt: skip
    if second:
        bindings += [("q2", "f32", "read_write"), ("keys2", "f32", "read")]
        fields += ["q2_stride", "q2_at", "q2_head", "width2", "k2_stride"]
    if selected:
        bindings.append(("selection", "i32", "read_write"))
        fields += ["sel_stride", "sel_at"]
    return Kernel("attention_block", tuple(bindings), tuple(fields), body)


MERGE: Final = Kernel(
    "attention_merge",
    (("scratch", "f32", "read_write"), ("o", "f32", "read_write"), _FRAME),
    ("space", "first", "chunk", "blocks", "heads", "v_width", "positions", "o_first", "o_stride", "o_at"),
    f"""
fn run(wid: u32, lid: u32) {{
  let head = wid % p.heads;
  let local = wid / p.heads;
{_LOCAL}
  let blocks = u32(frame[p.positions + row]) / {BLOCK_KEYS}u + 1u;
  let line = (local * p.heads + head) * p.blocks;
  for (var j = lid; j < p.v_width; j += {LANES}u) {{
    var m = 0.0;
    var l = 0.0;
    var a = 0.0;
    var some = false;
    for (var b = 0u; b < blocks; b++) {{
      let at = (line + b) * (p.v_width + 2u);
      let m_b = scratch[at];
      let l_b = scratch[at + 1u];
      let a_b = scratch[at + 2u + j];
      if (l_b == -1.0) {{ continue; }}
      if (some) {{
        let both = max(m, m_b);
        let c = exp_(m - both);
        let c_b = exp_(m_b - both);
        l = fm(l, c, l_b * c_b);
        a = fm(a, c, a_b * c_b);
        m = both;
      }} else {{
        m = m_b;
        l = l_b;
        a = a_b;
        some = true;
      }}
    }}
    o[(row - p.o_first) * p.o_stride + p.o_at + head * p.v_width + j] = div(a, l);
  }}
}}
""",
)


@lru_cache(maxsize=32)
def absorb_kernel(reader: Reader) -> Kernel:
    """qabs[head, j] = sum over d of q_nope[d] * W[head * (nope + value) + d, j], d ascending."""
    body = f"""
fn run(wid: u32, lid: u32) {{
  let across = (p.latent + {LANES - 1}u) / {LANES}u;
  let j = wid % across * {LANES}u + lid;
  let head = wid / across % p.heads;
  let local = wid / across / p.heads;
{_LOCAL}
  if (j >= p.latent) {{ return; }}
  let at = row * p.q_stride + p.q_at + head * p.q_head;
  var acc = 0.0;
  for (var d = 0u; d < p.nope; d++) {{ acc = fm(q[at + d], element(0u, 0u, head * p.per_head + d, j), acc); }}
  o[(local * p.heads + head) * p.latent + j] = acc;
}}
"""
    return Kernel(
        "attention_absorb",
        (("q", "f32", "read_write"), ("codes", "u32", "read"), ("scales", "u32", "read"), ("o", "f32", "read_write"),
         _FRAME),
        (*SIZES, "space", "first", "chunk", "heads", "nope", "per_head", "latent", "q_stride", "q_at", "q_head"),
        helpers({reader.format}) + reader.text() + body,
    )  # fmt: skip


@lru_cache(maxsize=32)
def release_kernel(reader: Reader) -> Kernel:
    """out[head, v] = chain16(W[head * (nope + value) + nope + v, :], c[head])."""
    body = f"""
var<workgroup> part: array<f32, 1024>;
{_tree("tree", "part")}
fn run(wid: u32, lid: u32) {{
  let across = (p.value + 3u) / 4u;
  let v = wid % across * 4u + lid / 16u;
  let head = wid / across % p.heads;
  let local = wid / across / p.heads;
{_LOCAL}
  let line = head * p.per_head + p.nope + min(v, p.value - 1u);
  let at = (local * p.heads + head) * p.latent;
  var acc = 0.0;
  for (var i = lid % 16u; i < p.latent; i += 16u) {{ acc = fm(element(0u, 0u, line, i), c[at + i], acc); }}
  part[lid] = acc;
  workgroupBarrier();
  if (lid % 16u == 0u && v < p.value) {{
    o[row * p.o_stride + p.o_at + head * p.value + v] = tree(lid / 16u);
  }}
}}
"""
    return Kernel(
        "attention_release",
        (("c", "f32", "read_write"), ("codes", "u32", "read"), ("scales", "u32", "read"), ("o", "f32", "read_write"),
         _FRAME),
        (*SIZES, "space", "first", "chunk", "heads", "nope", "value", "per_head", "latent", "o_stride", "o_at"),
        helpers({reader.format}) + reader.text() + body,
    )  # fmt: skip


INDEX_SCORES: Final = Kernel(
    "index_scores",
    (
        ("q", "f32", "read_write"),
        ("weights", "f32", "read_write"),
        ("keys", "f32", "read"),
        ("scores", "f32", "read_write"),
        _FRAME,
    ),
    ("space", "first", "chunk", "keys_across", "line", "heads", "width", "top_k", "inv_dim:f32", "inv_heads:f32",
     "q_stride", "q_at", "w_stride", "w_at", *PAGING),
    f"""
var<workgroup> part: array<f32, 1024>;
{_TOKEN}{_tree("tree", "part")}
fn run(wid: u32, lid: u32) {{
  let position = wid % p.keys_across * 4u + lid / 16u;
  let local = wid / p.keys_across;
{_LOCAL}
  let visible = u32(frame[p.positions + row]) + 1u;
  if (visible <= p.top_k || wid % p.keys_across * 4u >= visible) {{ return; }}
  let key = token_of(row, min(position, visible - 1u)) * p.width;
  var total = 0.0;
  for (var head = 0u; head < p.heads; head++) {{
    var acc = 0.0;
    let at = row * p.q_stride + p.q_at + head * p.width;
    for (var i = lid % 16u; i < p.width; i += 16u) {{ acc = fm(q[at + i], keys[key + i], acc); }}
    part[lid] = acc;
    workgroupBarrier();
    let z = tree(lid / 16u) * p.inv_dim;
    workgroupBarrier();
    total = fm(weights[row * p.w_stride + p.w_at + head], relu(z), total);
  }}
  if (lid % 16u == 0u && position < visible) {{ scores[local * p.line + position] = total * p.inv_heads; }}
}}
""",
)  # fmt: skip

CHOOSE_POSITIONS: Final = Kernel(
    "choose_positions",
    (("scores", "f32", "read_write"), ("o", "i32", "read_write"), _FRAME),
    ("space", "first", "chunk", "line", "top_k", "positions", "o_stride", "o_at"),
    f"""
var<workgroup> found: atomic<u32>;
var<workgroup> over: array<atomic<u32>, 2>;
var<workgroup> even: array<atomic<u32>, 2>;
fn counted(at: u32, visible: u32, least: u32, lid: u32) -> u32 {{
  if (lid == 0u) {{ atomicStore(&found, 0u); }}
  workgroupBarrier();
  var mine = 0u;
  for (var i = lid; i < visible; i += {LANES}u) {{ mine += select(0u, 1u, rank(scores[at + i]) >= least); }}
  atomicAdd(&found, mine);
  workgroupBarrier();
  let all = atomicLoad(&found);
  workgroupBarrier();
  return all;
}}
fn before(low: u32, high: u32, lid: u32) -> u32 {{
  let below = select(low & ((1u << (lid & 31u)) - 1u), low, lid >= 32u);
  return countOneBits(below) + select(0u, countOneBits(high & ((1u << (lid & 31u)) - 1u)), lid >= 32u);
}}
fn run(wid: u32, lid: u32) {{
  let local = wid;
{_LOCAL}
  let to_at = row * p.o_stride + p.o_at;
  let visible = u32(frame[p.positions + row]) + 1u;
  if (visible <= p.top_k) {{
    if (lid == 0u) {{ o[to_at] = -1; }}
    return;
  }}
  let at = local * p.line;
  var threshold = 0u;  // grows bit by bit to the rank of the top_k-th largest
  for (var bit = 0u; bit < 32u; bit++) {{
    let tried = threshold | (1u << (31u - bit));
    threshold = select(threshold, tried, counted(at, visible, tried, lid) >= p.top_k);
  }}
  var above = 0u;
  if (threshold != 0xffffffffu) {{ above = counted(at, visible, threshold + 1u, lid); }}
  let ties = p.top_k - above;
  var taken = 0u;
  var met = 0u;
  for (var begin = 0u; begin < visible; begin += {LANES}u) {{
    let i = begin + lid;
    if (lid < 2u) {{ atomicStore(&over[lid], 0u); atomicStore(&even[lid], 0u); }}
    workgroupBarrier();
    let r = rank(scores[at + min(i, visible - 1u)]);
    let equal = i < visible && r == threshold;
    if (equal) {{ atomicOr(&even[lid >> 5u], 1u << (lid & 31u)); }}
    workgroupBarrier();
    let low = atomicLoad(&even[0]);
    let high = atomicLoad(&even[1]);
    let take = i < visible && (r > threshold || (equal && met + before(low, high, lid) < ties));
    if (take) {{ atomicOr(&over[lid >> 5u], 1u << (lid & 31u)); }}
    workgroupBarrier();
    let low_taken = atomicLoad(&over[0]);
    let high_taken = atomicLoad(&over[1]);
    if (take) {{ o[to_at + 1u + taken + before(low_taken, high_taken, lid)] = i32(i); }}
    taken += countOneBits(low_taken) + countOneBits(high_taken);
    met += countOneBits(low) + countOneBits(high);
    workgroupBarrier();
  }}
  if (lid == 0u) {{ o[to_at] = i32(p.top_k); }}
}}
""",
)


@lru_cache(maxsize=16)
def router_kernel(score: str, experts: int, groups: int, bias: bool, normalise: bool) -> Kernel:
    """Experts of a row and their weights, in routing order (`RouterSpec`)."""
    size = experts // groups
    if score == "softmax":
        scored = f"""
  var top = bitcast<f32>(0xff800000u | (lid & 0u));
  for (var e = lid; e < {experts}u; e += {LANES}u) {{ let z = logits[at + e]; if (z > top) {{ top = z; }} }}
  part[lid] = top;
  workgroupBarrier();
  for (var k = 0u; k < {LANES}u; k++) {{ top = max(top, part[k]); }}
  workgroupBarrier();
  for (var e = lid; e < {experts}u; e += {LANES}u) {{ scores[e] = exp_(logits[at + e] - top); }}
  workgroupBarrier();
  if (lid < 16u) {{
    var sum = 0.0;
    for (var e = lid; e < {experts}u; e += 16u) {{ sum = sum + scores[e]; }}
    part[lid] = sum;
  }}
  workgroupBarrier();
  for (var n = 8u; n > 0u; n >>= 1u) {{ if (lid < n) {{ part[lid] += part[lid + n]; }} workgroupBarrier(); }}
  let total = part[0];
  for (var e = lid; e < {experts}u; e += {LANES}u) {{ scores[e] = div(scores[e], total); }}
"""
    else:
        scored = f"""
  for (var e = lid; e < {experts}u; e += {LANES}u) {{ scores[e] = sigmoid(logits[at + e]); }}
"""
    choice = "scores[e] + bias[e]" if bias else "scores[e]"
    grouped = f"""
  for (var g = lid; g < {groups}u; g += {LANES}u) {{
    var first = bitcast<f32>(0xff800000u | (lid & 0u));
    var second = first;
    for (var e = g * {size}u; e < (g + 1u) * {size}u; e++) {{
      let c = {choice};
      if (c > first) {{ second = first; first = c; }} else if (c > second) {{ second = c; }}
    }}
    group_order[g] = rank({"first + second" if size > 1 else "first"}) + 1u;
  }}
  workgroupBarrier();
  if (lid == 0u) {{
    for (var i = 0u; i < p.top_groups; i++) {{
      var best = 0u;
      for (var g = 1u; g < {groups}u; g++) {{ if (group_order[g] > group_order[best]) {{ best = g; }} }}
      group_order[best] = 0u;
      kept[best] = 1u;
    }}
  }}
  workgroupBarrier();
  for (var e = lid; e < {experts}u; e += {LANES}u) {{ if (kept[e / {size}u] == 0u) {{ order[e] = 0u; }} }}
  workgroupBarrier();
""" if groups > 1 else ""  # fmt: skip
    body = f"""
var<workgroup> part: array<f32, {LANES}>;
var<workgroup> scores: array<f32, {experts}>;
var<workgroup> order: array<u32, {experts}>;
var<workgroup> group_order: array<u32, {groups}>;
var<workgroup> kept: array<u32, {groups}>;
var<workgroup> best_order: array<u32, {LANES}>;
var<workgroup> best_of: array<u32, {LANES}>;
fn run(wid: u32, lid: u32) {{
  if (wid >= u32(frame[p.space])) {{ return; }}
  let at = wid * p.x_stride + p.x_at;
  for (var g = lid; g < {groups}u; g += {LANES}u) {{ kept[g] = 0u; }}
{scored}
  workgroupBarrier();
  for (var e = lid; e < {experts}u; e += {LANES}u) {{ order[e] = rank({choice}) + 1u; }}
  workgroupBarrier();
{grouped}
  var sum = 0.0;
  for (var k = 0u; k < p.top_k; k++) {{
    var best = 0u;
    var mine = min(lid, {experts - 1}u);
    for (var e = lid; e < {experts}u; e += {LANES}u) {{ if (order[e] > best) {{ best = order[e]; mine = e; }} }}
    best_order[lid] = best;
    best_of[lid] = mine;
    workgroupBarrier();
    for (var n = {LANES // 2}u; n > 0u; n >>= 1u) {{
      if (lid < n) {{
        let other = best_order[lid + n];
        if (other > best_order[lid] || (other == best_order[lid] && best_of[lid + n] < best_of[lid])) {{
          best_order[lid] = other;
          best_of[lid] = best_of[lid + n];
        }}
      }}
      workgroupBarrier();
    }}
    let e = best_of[0];
    workgroupBarrier();
    if (lid == 0u) {{
      order[e] = 0u;
      ids[wid * p.ids_stride + p.ids_at + k] = i32(e);
      weights[wid * p.w_stride + p.w_at + k] = scores[e];
    }}
    sum = sum + scores[e];
    workgroupBarrier();
  }}
  storageBarrier();
  for (var k = lid; k < p.top_k; k += {LANES}u) {{
    let w_k = wid * p.w_stride + p.w_at + k;
    weights[w_k] = {"div(weights[w_k], sum + 1e-20)" if normalise else "weights[w_k]"} * p.scale;
  }}
}}
"""
    bindings = [("logits", "f32", "read_write"), ("ids", "i32", "read_write"), ("weights", "f32", "read_write"), _FRAME]
    if bias:
        bindings.append(("bias", "f32", "read"))
    fields = ("space", "top_k", "top_groups", "x_stride", "x_at", "ids_stride", "ids_at", "w_stride", "w_at",
              "scale:f32")  # fmt: skip
    return Kernel("router", tuple(bindings), fields, body)
