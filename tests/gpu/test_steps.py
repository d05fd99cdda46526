"""Steps of few rows that replay what was captured: the right batch is there each time, and what is wrong is refused.

Without a GPU a graph is a stand-in that launches the captured steps again, over the memory that it was captured with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gpu_support import cpu_logits, logits, opened, same_bits, torch

from picaflor.backends.api import Batch
from picaflor.backends.cuda import program
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.runner import Work

GLM = "tiny_glm_int4g64"


@dataclass
class Graph:
    """Does what a captured graph would do."""

    owner: Any
    frame: Any
    steps: Any
    brings: Any

    def replay(self) -> None:
        """Bring the batch where it was captured so, then all steps with the frame of the capture."""
        if self.brings is not None:
            self.owner._batches.send(self.brings)
        self.owner._put(self.frame, self.steps, None)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs where there is no GPU."""
    if torch.cuda.is_available():
        return

    def captured(owner: Any, frame: Any, steps: Any, clock: Any, brings: Any) -> Graph:
        assert clock is None
        return Graph(owner, frame, steps, brings)

    monkeypatch.setattr(program.CudaProgram, "_captured", captured)
    monkeypatch.setattr(program, "works_in_graphs", lambda: False)


def _captures(engine: Any) -> Any:
    found = engine.plan.forward.program
    found._batches.captures = True
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_sequences_that_take_turns_and_a_batch_that_is_refused() -> None:
    """All experts there: one graph, which brings the batch. A replayed step sees the tokens, positions and pages of its
    own batch; a wrong batch leaves all as it was."""
    texts = [np.array(ids, np.int32) for ids in ([3, 11], [7, 5])]
    expected = [cpu_logits(GLM, ids) for ids in texts]
    with opened(GLM, backend="cuda") as engine:
        captured = _captures(engine)
        sequences = [Sequence(), Sequence()]
        wrong = Batch(*(np.array(values, np.int32) for values in ([1], [0], [0], [[99999]], [0])))
        for step in range(2):
            for number, ids in enumerate(texts):
                rows = engine.runner.step([Work(sequences[number], ids[step : step + 1])])
                assert same_bits(rows, expected[number][step : step + 1])
                with pytest.raises(ValueError, match="page 99999 of sequence 0"):
                    captured.run(wrong, engine.runner._experts)
        assert captured.replays == 3 * 2
        first, *_ = next(iter(captured._graphs.values()))
        assert len(first.steps) == program.FIRST_STEPS
        assert len(captured._graphs) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_graphs_between_what_the_host_does() -> None:
    """Experts that are not there are computed by the host: two graphs per layer and one, behind the batch."""
    ids = np.array([3, 11, 7], np.int32)
    expected = cpu_logits(GLM, ids)
    with opened(GLM, backend="cuda") as engine:
        engine.plan.backend.tier.most_slots = 5
        captured = _captures(engine)
        assert same_bits(logits(engine, ids, chunk=1), expected)
        assert captured.replays == 2 * (2 * 2 + 1)
