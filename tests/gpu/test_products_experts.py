"""The experts of a layer on a device equal the CPU's operation, bit for bit: kinds mixed in a layer, few and many rows.

Without a GPU the kernels are interpreted: TRITON_INTERPRET=1 is set before Triton is imported.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="GPU kernels need torch")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="GPU kernels need triton")

from gpu_experts import Kind, make_expert, on_the_cpu  # noqa: E402

from picaflor.backends.api import ExpertLayout  # noqa: E402
from picaflor.backends.cuda import experts as device_experts  # noqa: E402
from picaflor.backends.cuda import interpret, prepare  # noqa: E402
from picaflor.formats.base import F32  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, INNER, EXPERTS, TOP_K = 256, 96, 5, 3
G64, G16, I8 = ("int4-grouped", 64), ("int4-grouped", 16), ("int8-row", 0)
LAYERS: dict[str, list[Kind]] = {
    "g64": [(G64, G64, ("int4-grouped", 32))] * EXPERTS,
    "row": [(("int4-row", 0), ("int4-row", 0), ("int4-row", 0))] * EXPERTS,
    "e8": [(("e8-iq3-lattice", 0),) * 3] * EXPERTS,
    "rows": [
        (G64, ("int4-row", 0), ("int4-grouped", 128)),
        (("int4-row", 0), ("int4-grouped", 48), ("f32", 0)),
        (("f32", 0), ("bf16", 0), ("int4-row", 0)),
        (("int4-row", 0),) * 3,
        (G64, ("int4-row", 0), ("int4-grouped", 128)),
    ],
    "mixed": [
        (G64, G16, G64),
        (("int3-g64", 0), I8, ("mxfp4", 0)),
        (("bf16", 0), ("fp8-e4m3-b128", 0), ("int2-row", 0)),
        (G64, G16, G64),
        (I8, ("int2-row", 0), ("f16", 0)),
    ],
}

if interpret.active():
    interpret.round_once()


def compare(made: list[tuple[ExpertLayout, Any]], x: F32, ids: Any, weights: F32) -> None:
    """With and without the counters."""
    slots = [torch.from_numpy(np.array(slot)).to(DEVICE) for _, slot in made]
    layouts = [layout for layout, _ in made]
    expected = on_the_cpu(made, x, ids, weights, 2)
    table = device_experts.table_for(layouts, [slot.data_ptr() for slot in slots], DEVICE)
    room = device_experts.counters(ids.size, layouts[0].gate.rows, x.shape[1])
    arrived = torch.zeros(room, dtype=torch.int32, device=DEVICE)
    arguments = [torch.from_numpy(a).to(DEVICE) for a in (x, ids, weights)]
    for counters in (arrived, None):
        out = torch.full(x.shape, float("nan"), device=DEVICE)
        device_experts.expert_ffn(*arguments, table, out, "standard", arrived=counters)
        assert (out.cpu().numpy() == expected).all()
    assert not arrived.any()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("count", [1, 3, 13])
def test_experts_equal_the_cpu(layer: str, count: int) -> None:
    """Summed where one kind is in the layer, pair by pair where there are more."""
    made = [make_expert(number, kind, HIDDEN, INNER) for number, kind in enumerate(LAYERS[layer])]
    rng = np.random.default_rng(11)
    x = rng.standard_normal((count, HIDDEN)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(count)]).astype(np.int32)
    compare(made, x, ids, rng.random((count, TOP_K), np.float32))


def test_rows_that_lie_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a long prompt."""
    monkeypatch.setattr(prepare, "BY_ROW", 8)
    made = [make_expert(number, kind, HIDDEN, INNER) for number, kind in enumerate(LAYERS["mixed"])]
    rng = np.random.default_rng(14)
    x = rng.standard_normal((10, HIDDEN)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(10)]).astype(np.int32)
    compare(made, x, ids, rng.random((10, TOP_K), np.float32))


@pytest.mark.parametrize("trial", range(50) if torch.cuda.is_available() else (1, 3))
def test_three_experts_with_a_tail_and_a_row_member(trial: int) -> None:
    """Groups of 64 over 200 inputs end in one of 8; group sizes differ; one expert has a scale per row. 1 to 4 rows."""
    rng = np.random.default_rng([13, trial])
    sizes = rng.permutation([16, 32, 48, 64, 96, 128])
    kinds: list[Kind] = [
        (("int4-grouped", 64),) * 3,
        (("int4-grouped", int(sizes[0])), ("int4-grouped", int(sizes[1])), ("int4-grouped", int(sizes[2]))),
        (("int4-row", 0),) * 3,
    ]
    made = [make_expert(100 * trial + number, kind, 200, 72) for number, kind in enumerate(kinds)]
    count = 1 + trial % 4
    x = rng.standard_normal((count, 200)).astype(np.float32)
    x[:, 5] = 50  # an outlier in the first group
    ids = np.stack([rng.permutation(3) for _ in range(count)]).astype(np.int32)
    compare(made, x, ids, rng.random((count, 3), np.float32))


def test_missing_experts_are_left_to_others() -> None:
    """With `pairs` only experts that are on the device write; combine then adds in routing order."""
    made = [make_expert(number, kind, HIDDEN, INNER) for number, kind in enumerate(LAYERS["g64"])]
    slots = [torch.from_numpy(np.array(slot)).to(DEVICE) for _, slot in made]
    layouts = [layout for layout, _ in made]
    rng = np.random.default_rng(12)
    x = torch.from_numpy(rng.standard_normal((2, HIDDEN)).astype(np.float32)).to(DEVICE)
    ids = torch.tensor([[0, 3, 1], [4, 2, 0]], dtype=torch.int32, device=DEVICE)
    weights = torch.from_numpy(rng.random((2, TOP_K), np.float32)).to(DEVICE)
    here = [slot.data_ptr() if number % 2 == 0 else 0 for number, slot in enumerate(slots)]
    whole = torch.empty((2, HIDDEN), device=DEVICE)
    everything = device_experts.table_for(layouts, [slot.data_ptr() for slot in slots], DEVICE)
    device_experts.expert_ffn(x, ids, weights, everything, whole, "standard")
    pairs = torch.full((2, TOP_K, HIDDEN), float("nan"), device=DEVICE)
    out = torch.full((2, HIDDEN), 7.0, device=DEVICE)
    part = device_experts.table_for(layouts, here, DEVICE)
    device_experts.expert_ffn(x, ids, weights, part, out, "standard", pairs=pairs)
    assert (out == 7).all()
    assert torch.isnan(pairs).all(dim=2).cpu().tolist() == [[False, True, True], [False, False, False]]
    others = torch.full((2, TOP_K, HIDDEN), float("nan"), device=DEVICE)
    device_experts.expert_ffn(x, ids, weights, everything, out, "standard", pairs=others)
    device_experts.combine(torch.where(torch.isnan(pairs), others, pairs), weights, out)
    assert (out == whole).all()


def test_only_the_second_launch_of_experts_starts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one starts in its turn, so that all which the second one reads before it waits is there."""
    given: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: given.append(options)

    monkeypatch.setattr(device_experts, "overlaps", lambda: True)
    layouts = [make_expert(0, LAYERS["g64"][0], HIDDEN, INNER)[0]] * EXPERTS
    table = device_experts.table_for(layouts, [16] * EXPERTS, DEVICE)  # nothing is read there
    x, weights = torch.zeros(1, HIDDEN, device=DEVICE), torch.zeros(1, TOP_K, device=DEVICE)
    ids = torch.arange(TOP_K, dtype=torch.int32, device=DEVICE)[None]
    arrived = torch.zeros(device_experts.counters(TOP_K, INNER, HIDDEN), dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(device_experts, "_inner", Kernel())
    monkeypatch.setattr(device_experts, "_outer", Kernel())
    device_experts.expert_ffn(x, ids, weights, table, torch.empty_like(x), "standard", arrived=arrived)
    inner, outer = given
    assert inner["OVERLAP"]
    assert "launch_pdl" not in inner
    assert outer["OVERLAP"]
    assert outer["launch_pdl"]
