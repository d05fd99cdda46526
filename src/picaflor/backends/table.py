"""The capability table: which backend runs which operation on which format, and the only place with a fallback.

Knows names of backends, operations and formats; must not know kernels, models or files.

A cell is native (a kernel of its own), composed (made of native cells, slower), waived (another cell is used instead,
with a reason) or refused (with a reason). There is no default: a cell that is not declared is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from picaflor.errors import UnsupportedKernel, UsageError

State = Literal["native", "composed", "waived", "refused"]
Key = tuple[str, str, str]
NO_FORMAT = "-"


@dataclass(frozen=True, slots=True)
class Cell:
    """One (backend, operation, format); `format` is NO_FORMAT for operations that read no weights.

    `to`: for waived, the backend that does it instead. `reason`: for waived and refused.
    """

    backend: str
    op: str
    format: str
    state: State
    to: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        explained = self.state in ("waived", "refused")
        if explained != bool(self.reason) or (self.state == "waived") != bool(self.to):
            raise ValueError(
                f"cell {self.name}: waived needs an alternative and a reason, refused a reason, others none"
            )

    @property
    def name(self) -> str:
        """backend.op.format, or backend.op."""
        return ".".join(part for part in (self.backend, self.op, self.format) if part != NO_FORMAT)


@dataclass(slots=True)
class CapabilityTable:
    """All cells, and what was used of them.

    `engaged` counts per (operation, format) how often a cell was selected, `fallbacks` per cell name how often another
    was used instead; `notice` gets one line for each fallback, once.
    """

    strict: bool = False
    notice: Callable[[str], None] | None = None
    engaged: Counter[tuple[str, str]] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    _cells: dict[Key, Cell] = field(default_factory=dict)
    _disabled: set[Key] = field(default_factory=set)

    def declare(self, cells: Iterable[Cell]) -> None:
        """Add cells. Raises ValueError if one is declared twice."""
        for cell in cells:
            key = (cell.backend, cell.op, cell.format)
            if key in self._cells:
                raise ValueError(f"cell {cell.name} is declared twice")
            self._cells[key] = cell

    def disable(self, patterns: Sequence[str]) -> None:
        """Take cells out of use: `backend.op` or `backend.op.format`. Raises UsageError for one that matches none."""
        for pattern in patterns:
            backend, _, rest = pattern.partition(".")
            op, _, format_name = rest.partition(".")
            keys = [key for key in self._cells if key[:2] == (backend, op) and format_name in ("", key[2])]
            if not keys:
                raise UsageError(f"--disable {pattern}: there is no such kernel; `picaflor capabilities` lists them")
            self._disabled.update(keys)

    def cell(self, backend: str, op: str, format_name: str = NO_FORMAT) -> Cell:
        """The cell as it stands. Raises UnsupportedKernel where nothing was declared."""
        cell = self._cells.get((backend, op, format_name))
        if cell is None:
            raise UnsupportedKernel(f"{backend} has no cell for {op} on {format_name}; {self._known(backend, op)}")
        if (backend, op, format_name) in self._disabled:
            return Cell(backend, op, format_name, "refused", reason="disabled by --disable")
        return cell

    def _known(self, backend: str, op: str) -> str:
        formats = [key[2] for key in self._cells if key[:2] == (backend, op)]
        return f"declared: {', '.join(formats)}" if formats else "it declares none for this operation"

    def select(self, op: str, format_name: str, backend: str, *, what: str = "") -> Cell:
        """The cell that will run. Raises UnsupportedKernel, naming `what` (a tensor), where there is none.

        The only place where another cell is taken than the one asked for; an error under `strict`.
        """
        cell = self.cell(backend, op, format_name)
        subject = f"{what}: " if what else ""
        seen = {cell.name}
        while cell.state == "waived":
            text = f"{subject}{cell.name} is waived to {cell.to}: {cell.reason}"
            if self.strict:
                raise UnsupportedKernel(f"{text} (an error under --strict)")
            if not self.fallbacks[cell.name] and self.notice is not None:
                self.notice(text)
            self.fallbacks[cell.name] += 1
            cell = self.cell(cell.to, op, format_name)
            if cell.name in seen:
                raise UnsupportedKernel(f"{subject}{cell.name} is waived in a circle")
            seen.add(cell.name)
        if cell.state == "refused":
            raise UnsupportedKernel(f"{subject}{cell.name} is refused: {cell.reason}; {self._usable(op)}")
        self.engaged[op, format_name] += 1
        return cell

    def _usable(self, op: str) -> str:
        usable = [cell.name for cell in self.cells() if cell.op == op and cell.state in ("native", "composed")]
        return f"usable: {', '.join(usable)}" if usable else "nothing can do it"

    def cells(self) -> list[Cell]:
        """All cells as they stand, in order of declaration: what `picaflor capabilities` prints."""
        return [self.cell(*key) for key in self._cells]
