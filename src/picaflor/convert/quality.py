"""What encoding did to the weights: error by class, and runs of weights that were rounded away.

Knows arrays and formats; must not know files or families.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.convert.plan import PlannedMatrix
from picaflor.formats import e8_iq3
from picaflor.formats.base import F32, Format, Planes
from picaflor.formats.numeric import grouped

RUN = 64
# Above this share of lost runs a matrix is named in a warning.
LOST_SHARE = 0.05


@dataclass(slots=True)
class ClassQuality:
    """Sums over the matrices of one class. A run of 64 weights is lost when it was not zero and became all zero."""

    tensors: int = 0
    squared_error: float = 0.0
    squared_weights: float = 0.0
    runs: int = 0
    lost_runs: int = 0
    worst_error: float = 0.0
    worst_name: str = ""

    @property
    def relative_rms_error(self) -> float:
        """Root of the squared error over the squared weights."""
        return math.sqrt(self.squared_error / self.squared_weights) if self.squared_weights else 0.0

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "tensors_measured": self.tensors,
            "relative_rms_error": self.relative_rms_error,
            "lost_runs": self.lost_runs,
            "runs": self.runs,
            "worst_error": self.worst_error,
            "worst_tensor": self.worst_name,
        }


class Quality:
    """Collects matrices, from any thread and in any order; the sums are the same for every order."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[PlannedMatrix, ClassQuality]] = {}
        self._lock = threading.Lock()

    def measure(self, matrix: PlannedMatrix) -> MatrixQuality:
        """A meter for one matrix; call it per block, then `done`."""
        return MatrixQuality(self, matrix)

    def add(self, matrix: PlannedMatrix, found: ClassQuality) -> None:
        """Take over one matrix's sums."""
        with self._lock:
            self._found[matrix.spec.name] = (matrix, found)

    @property
    def classes(self) -> dict[str, ClassQuality]:
        """The sums by class, over matrices in order of name."""
        classes: dict[str, ClassQuality] = {}
        for name, (matrix, found) in sorted(self._found.items()):
            total = classes.setdefault(matrix.group, ClassQuality())
            error = found.relative_rms_error
            total.tensors += 1
            total.squared_error += found.squared_error
            total.squared_weights += found.squared_weights
            total.runs += found.runs
            total.lost_runs += found.lost_runs
            if error > total.worst_error or not total.worst_name:
                total.worst_error, total.worst_name = error, name
        return classes

    @property
    def warnings(self) -> list[str]:
        """One line per matrix that lost more than 5 % of its runs."""
        return [
            f"{name}: {found.lost_runs} of {found.runs} runs of {RUN} weights became all zero in "
            f"{matrix.choice.format}; a smaller group or int8-row keeps them"
            for name, (matrix, found) in sorted(self._found.items())
            if found.lost_runs > LOST_SHARE * found.runs
        ]


class MatrixQuality:
    """The meter of one matrix."""

    def __init__(self, quality: Quality, matrix: PlannedMatrix) -> None:
        self._quality = quality
        self._matrix = matrix
        self._sums = ClassQuality()

    def __call__(self, weights: F32, planes: Planes) -> None:
        """Compare a block with what its planes decode to."""
        form: Format = self._matrix.form
        rows, cols = weights.shape
        decoded = form.decode(planes, rows, cols, self._matrix.choice.group_size)
        wanted = e8_iq3.rotate(weights) if form.activation.rotated else weights
        difference = np.subtract(decoded, wanted, dtype=np.float64)
        self._sums.squared_error += float(np.einsum("ij,ij->", difference, difference))
        exact = wanted.astype(np.float64)
        self._sums.squared_weights += float(np.einsum("ij,ij->", exact, exact))
        alive, kept = _runs(wanted), _runs(decoded)
        self._sums.runs += int(np.count_nonzero(alive))
        self._sums.lost_runs += int(np.count_nonzero(alive & ~kept))

    def done(self) -> None:
        """Add the matrix to its class."""
        self._quality.add(self._matrix, self._sums)


def _runs(values: F32) -> NDArray[np.bool_]:
    """Which runs of RUN weights `[rows, runs]` are not all zero."""
    eights: NDArray[np.uint64] = grouped(values != 0, RUN).view(np.uint64)
    alive: NDArray[np.bool_] = np.bitwise_or.reduce(eights, axis=2) != 0
    return alive
