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
from picaflor.backends.cuda import interpret, matmul  # noqa: E402
from picaflor.formats.base import F32  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [(name, size) for name, form in formats.REGISTRY.items() for size in (form.group_sizes or (0,))]
IDS = [f"{name}-{size}" if size else name for name, size in CASES]
COLS = {"e8-iq3-lattice": (256, 200)}

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


@pytest.mark.parametrize(("name", "group"), CASES, ids=IDS)
@pytest.mark.parametrize("precision", ["fast", "standard", "exact"])
def test_products_equal_the_cpu(name: str, group: int, precision: str) -> None:
    """Rows alone, in a small batch and in a large one, with tails in both directions."""
    rng = np.random.default_rng(7)
    if formats.REGISTRY[name].activation.group == 0 and precision != "standard":
        precision = "standard"
    for rows, cols in ((37, 131), (5, 224), (3, 512)):
        planes = formats.REGISTRY[name].sample(rng, rows, cols, group)
        held = kernels.hold(name, planes, rows, cols, group)
        weight = device_formats.hold(name, (rows, cols), group, planes, DEVICE)
        x = activations(rng, 19, cols)
        expected = kernels.matmul(held, x, planes=kernels.PLANES[precision])
        for count in (1, 3, 19):
            out = torch.full((count, rows), float("nan"), device=DEVICE)
            matmul.matmul(torch.from_numpy(x[:count]).to(DEVICE), weight, out, precision)
            assert same_bits(out.cpu().numpy(), expected[:count]), (rows, cols, count)
