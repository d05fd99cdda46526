"""A device whose memory is the host's: what lies there is in the host's ledger, and experts take what that leaves."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support import IDS, cpu_logits, logits, opened, same_bits

from picaflor.backends.cuda.backend import SCRATCH_BYTES, CudaBackend
from picaflor.runtime import plan as planning

GLM = "tiny_glm_int4g64"
ITEM = "on the device, in the same memory"


@pytest.fixture
def one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter stands for an integrated device; what this process holds is left out of the sums."""
    monkeypatch.setattr(CudaBackend, "shares_memory", True)
    monkeypatch.setattr(planning, "process_memory", lambda: None)


@pytest.mark.usefixtures("one_memory")
def test_experts_take_what_the_ledger_leaves() -> None:
    with opened(GLM, backend="cuda", ram_bytes=2 << 30) as engine:
        ledger = engine.plan.ledger
        backend: Any = engine.plan.backend
        items = {item.name: item.nbytes for item in ledger.items}
        resident = sum(plane.nbytes for plane in engine.plan.resident_memory)
        assert items[ITEM] >= SCRATCH_BYTES + resident + engine.plan.pool.pages * engine.plan.pool.page_tokens * 4
        assert set(ledger.slots.values()) == {1}  # they lie on the device, not in the host's slots too
        assert backend.free_bytes() == (2 << 30) - ledger.total_bytes
        logits(engine, IDS[:1])
        assert backend.tier.all_here
        stride, needed = backend.tier.stride, ledger.total_bytes
    with opened(GLM, backend="cuda", ram_bytes=needed + 5 * stride + stride // 2) as engine:
        tier: Any = engine.plan.backend
        assert same_bits(logits(engine, IDS[:2], chunk=1), cpu_logits(GLM, IDS[:2]))
        assert tier.tier.slots == 5
        assert tier.tier.slots * stride + engine.plan.ledger.total_bytes <= needed + 6 * stride


def test_a_device_with_memory_of_its_own_is_not_in_the_ledger() -> None:
    with opened(GLM, backend="cuda", ram_bytes=8 << 30) as engine:
        assert ITEM not in {item.name for item in engine.plan.ledger.items}
