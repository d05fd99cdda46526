"""Products on a device equal the CPU's, bit for bit: every format, group size and precision, few and many rows.

Without a GPU the kernels are interpreted: TRITON_INTERPRET=1 is set before Triton is imported.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="GPU kernels need torch")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="GPU kernels need triton")

from picaflor import formats  # noqa: E402
from picaflor.backends.cpu import kernels  # noqa: E402
from picaflor.backends.cuda import formats as device_formats  # noqa: E402
from picaflor.backends.cuda import interpret, matmul, prepare, tiles  # noqa: E402
from picaflor.formats.base import F32  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [(name, size) for name, form in formats.REGISTRY.items() for size in (form.group_sizes or (0,))]
IDS = [f"{name}-{size}" if size else name for name, size in CASES]

if interpret.active():
    interpret.round_once()


def same_bits(a: F32, b: F32) -> bool:
    """Equal numbers; one NaN is as good as another."""
    return bool(((a == b) | (np.isnan(a) & np.isnan(b))).all())


def activations(rng: np.random.Generator, count: int, cols: int) -> F32:
    """Rows with outliers, tiny groups and zeros."""
    x = rng.standard_normal((count, cols)).astype(np.float32)
    x *= np.exp2(rng.integers(-6, 6, size=(count, 1))).astype(np.float32)
    x[:, cols // 3] *= 300
    x[0, : cols // 2] *= np.float32(1e-3)
    x[-1, -3:] = 0
    return x


def compare(name: str, group: int, precision: str, rows: int, cols: int, counts: tuple[int, ...]) -> None:
    """Rows alone and in batches against the CPU's kernels."""
    rng = np.random.default_rng(7)
    planes = formats.REGISTRY[name].sample(rng, rows, cols, group)
    held = kernels.hold(name, planes, rows, cols, group)
    weight = device_formats.hold(name, (rows, cols), group, planes, DEVICE)
    x = activations(rng, max(counts), cols)
    expected = kernels.matmul(held, x, planes=kernels.PLANES[precision])
    for count in counts:
        out = torch.full((count, rows), float("nan"), device=DEVICE)
        matmul.matmul(torch.from_numpy(x[:count]).to(DEVICE), weight, out, precision)
        assert same_bits(out.cpu().numpy(), expected[:count]), (rows, cols, count)


@pytest.mark.parametrize(("name", "group"), CASES, ids=IDS)
def test_products_equal_the_cpu(name: str, group: int) -> None:
    """Tails in both directions, and rows that can be read as words."""
    compare(name, group, "standard", 37, 131, (1, 19))
    compare(name, group, "standard", 5, 512, (1, 3))


@pytest.mark.parametrize(("name", "group"), [case for case in CASES if case[1] in (0, 64)])
@pytest.mark.parametrize("precision", ["fast", "exact"])
def test_other_precisions_equal_the_cpu(name: str, group: int, precision: str) -> None:
    """One and three planes."""
    if formats.REGISTRY[name].activation.group:
        compare(name, group, precision, 5, 224, (1, 9))


@pytest.mark.parametrize("name", ["int8-row", "int4-row", "int4-grouped"])
def test_rows_read_as_words_at_once(name: str) -> None:
    """Whole rows under way before the first product, and step by step: as both launches on a device do it."""
    rng = np.random.default_rng(9)
    rows, cols, group = 6, 1024, 64 if name == "int4-grouped" else 0
    planes = formats.REGISTRY[name].sample(rng, rows, cols, group)
    weight = device_formats.hold(name, (rows, cols), group, planes, DEVICE)
    x = activations(rng, 2, cols)
    expected = kernels.matmul(kernels.hold(name, planes, rows, cols, group), x, planes=2)
    needs = weight.needs("standard")
    assert needs is not None
    ready = prepare.prepare(torch.from_numpy(x).to(DEVICE), needs)
    for block, step, steps in ((2, 8, 2), (4, 4, 0), (2, 32, 1), (4, 2, 0)):
        out = torch.full((2, rows), float("nan"), device=DEVICE)
        tile = tiles.Tile(block, 1, step, steps, 16 % step == 0)
        matmul.launch_few(ready, weight, out, 2, tile)
        assert same_bits(out.cpu().numpy(), expected), (block, step, steps)


@pytest.mark.parametrize(("name", "group"), [("int4-grouped", 48), ("int3-g64", 0), ("e8-iq3-lattice", 0)])
def test_rows_that_lie_group_by_group(name: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a long prompt, in memory for more rows than there are."""
    monkeypatch.setattr(prepare, "BY_ROW", 9)
    monkeypatch.setattr(matmul, "BY_ROW", 9)
    compare(name, group, "standard", 70, 256, (11, 20))
    compare(name, group, "exact", 70, 256, (20,))
    rows = torch.from_numpy(activations(np.random.default_rng(1), 11, 256)).to(DEVICE)
    needs = device_formats.needs(name, group, "standard")
    assert needs is not None
    room = prepare.room_for(needs, 256, 30, rows.device)
    room.digits.fill_(99)
    _, _, row, step, _, scale_row, scale_step = prepare.prepare(rows, needs, into=room).tile(11)
    alone = prepare.prepare(rows[3:4], needs)
    digits, scales = room.digits.flatten(1)[1].cpu(), room.scales.flatten().cpu()
    for g in range(room.groups):
        start = 3 * row + g * step
        there = alone.digits[1, 0, g * needs.padded : (g + 1) * needs.padded].cpu()
        assert torch.equal(digits[start : start + needs.padded], there)
        assert scales[3 * scale_row + g * scale_step] == alone.scales[0, g].cpu()


@pytest.mark.parametrize(
    ("name", "group", "cols", "unroll"),
    [("int4-grouped", 64, 370, 1), ("int4-grouped", 64, 370, 2), ("mxfp4", 0, 384, 2)],
)
def test_tiles_of_rows_that_lie_by_group(
    name: str, group: int, cols: int, unroll: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tile ends behind the last row of both, the other does not; the last group has 50 inputs; the memory ends
    with the rows."""
    monkeypatch.setattr(prepare, "BY_ROW", 9)
    monkeypatch.setattr(matmul, "BY_ROW", 9)
    rng = np.random.default_rng(9)
    planes = formats.REGISTRY[name].sample(rng, 70, cols, group)
    weight = device_formats.hold(name, (70, cols), group, planes, DEVICE)
    x = activations(rng, 21, cols)
    expected = kernels.matmul(kernels.hold(name, planes, 70, cols, group), x, planes=kernels.PLANES["standard"])
    needs = device_formats.needs(name, group, "standard")
    assert needs is not None
    rows = prepare.prepare(torch.from_numpy(x).to(DEVICE), needs)
    out = torch.full((21, 70), float("nan"), device=DEVICE)
    matmul.launch_many(rows, weight, out, 21, tiles.ManyTile(64, 16, unroll, 2))
    assert same_bits(out.cpu().numpy(), expected)


@pytest.mark.parametrize("shared", [57344, 88704, 203392])
def test_tiles_fit_the_shared_memory(shared: int) -> None:
    """Of AMD's, of small and of large NVIDIA devices, for every group, precision and number of rows."""
    for padded in (64, 128, 192, 256):
        for planes in (1, 2, 3):
            for count in (2, 9, 17, 65, 512):
                tile = tiles.tile_of_many(count, 96, padded, planes, shared)
                assert tile.shared_bytes(padded, planes) <= shared
