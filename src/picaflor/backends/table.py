"""The capability table: which backend runs which operation on which format, and the only place with a fallback.

Knows names of backends, operations and formats; must not know kernels, models or files.

A cell is native (a kernel of its own), composed (made of native cells, slower), waived (another cell is used instead,
with a reason) or refused (with a reason). There is no default: a cell that is not declared is an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from picaflor.errors import UnsupportedKernel, UsageError

State = Literal["native", "composed", "waived", "refused"]
Key = tuple[str, str, str]
NO_FORMAT = "-"
NAMED_CLASSES = 6
"""Most tensor classes that one notice names; it counts the rest."""
_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")


@dataclass(frozen=True, slots=True)
class Cell:
    """One (backend, operation, format); `format` is NO_FORMAT for operations that read no weights.

    `to`: for waived, the backend that does it instead. `reason`: for waived and refused. `cure`: for waived, what the
    user can do about it.
    """

    backend: str
    op: str
    format: str
    state: State
    to: str = ""
    reason: str = ""
    cure: str = ""

    def __post_init__(self) -> None:
        explained = self.state in ("waived", "refused")
        waived = self.state == "waived"
        if explained != bool(self.reason) or waived != bool(self.to) or waived != bool(self.cure):
            raise ValueError(
                f"cell {self.name}: waived needs an alternative, a reason and a cure, refused a reason, others none"
            )

    @property
    def name(self) -> str:
        """backend.op.format, or backend.op."""
        return ".".join(part for part in (self.backend, self.op, self.format) if part != NO_FORMAT)


@dataclass(slots=True)
class CapabilityTable:
    """All cells, and what was used of them.

    `engaged` counts per cell name how often a recorded operation got this cell, `fallbacks` how often another was used
    instead of it. `notice` gets one line for each fallback, once: when `announce` is called after a recording, so
    that the line can tell all tensors, or at once for calls that fail while running.
    """

    strict: bool = False
    notice: Callable[[str], None] | None = None
    engaged: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    _cells: dict[Key, Cell] = field(default_factory=dict)
    _spares: dict[str, str] = field(default_factory=dict)
    _disabled: dict[Key, str] = field(default_factory=dict)
    _pending: dict[Cell, list[str]] = field(default_factory=dict)
    _tensors: dict[str, dict[str, dict[str, None]]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def declare(self, cells: Iterable[Cell]) -> None:
        """Add cells. Raises ValueError if one is declared twice."""
        for cell in cells:
            key = (cell.backend, cell.op, cell.format)
            if key in self._cells:
                raise ValueError(f"cell {cell.name} is declared twice")
            self._cells[key] = cell

    def spare(self, backend: str, instead: str) -> None:
        """Let disabled cells of `backend` be done by `instead`, where that has a cell that is not disabled."""
        self._spares[backend] = instead

    def disable(self, patterns: Sequence[str]) -> None:
        """Take cells out of use: `backend.op` or `backend.op.format`. Raises UsageError for one that matches none."""
        for pattern in patterns:
            backend, _, rest = pattern.partition(".")
            op, _, format_name = rest.partition(".")
            keys = [key for key in self._cells if key[:2] == (backend, op) and format_name in ("", key[2])]
            if not keys:
                raise UsageError(f"--disable {pattern}: there is no such kernel; `picaflor capabilities` lists them")
            for key in keys:
                self._disabled.setdefault(key, pattern)

    def missing(self, formats: Iterable[str], ops: Sequence[str]) -> list[str]:
        """Names of the cells that no declared backend may lack and that nobody declared, in order of backend."""
        wanted = list(formats)
        backends = dict.fromkeys(key[0] for key in self._cells)
        return [
            f"{backend}.{op}.{name}"
            for backend in backends
            for op in ops
            for name in wanted
            if (backend, op, name) not in self._cells
        ]

    def cell(self, backend: str, op: str, format_name: str = NO_FORMAT) -> Cell:
        """The cell as it stands. Raises UnsupportedKernel where nothing was declared."""
        key = (backend, op, format_name)
        cell = self._cells.get(key)
        if cell is None:
            raise UnsupportedKernel(f"{backend} has no cell for {op} on {format_name}; {self._known(backend, op)}")
        pattern = self._disabled.get(key)
        if pattern is None or cell.state == "refused":
            return cell
        reason = "disabled by --disable"
        spare = self._spares.get(backend, "")
        if (spare, op, format_name) not in self._cells:
            return Cell(backend, op, format_name, "refused", reason=reason)
        return Cell(backend, op, format_name, "waived", spare, reason, cure=f"leave out --disable {pattern}")

    def surprises(self) -> list[str]:
        """Names of the cells that others stood in for though they were declared to run themselves."""
        waived = {cell.name for cell in self._cells.values() if cell.state == "waived"}
        return [name for name in self.fallbacks if name not in waived]

    def _known(self, backend: str, op: str) -> str:
        formats = [key[2] for key in self._cells if key[:2] == (backend, op)]
        return f"declared: {', '.join(formats)}" if formats else "it declares none for this operation"

    def route(self, op: str, format_name: str, backend: str) -> list[Cell]:
        """The cell asked for and those that it is waived to, in order; the last one runs or is refused.

        Nothing is counted. Raises UnsupportedKernel where a cell is not declared, or waived in a circle.
        """
        route = [self.cell(backend, op, format_name)]
        while route[-1].state == "waived":
            following = self.cell(route[-1].to, op, format_name)
            if following in route:
                raise UnsupportedKernel(f"{route[0].name} is waived in a circle")
            route.append(following)
        return route

    def select(self, op: str, format_name: str, backend: str, *, what: str = "") -> Cell:
        """The cell that will run. Raises UnsupportedKernel, naming `what` (a tensor), where there is none.

        The only place where another cell is taken than the one asked for; an error under `strict`.
        """
        *passed, cell = self.require(op, format_name, backend, what=what)
        for waived in passed:
            self.fallbacks[waived.name] += 1
            self._pending.setdefault(waived, []).append(what)
        self.engaged[cell.name] += 1
        if what and format_name != NO_FORMAT:
            self._tensors.setdefault(cell.backend, {}).setdefault(format_name, {})[what] = None
        return cell

    def require(self, op: str, format_name: str, backend: str, *, what: str = "") -> list[Cell]:
        """The route that `select` would take. Nothing is counted; raises what `select` raises."""
        *passed, cell = route = self.route(op, format_name, backend)
        subject = f"{what}: " if what else ""
        for waived in passed:
            if self.strict:
                raise UnsupportedKernel(f"{subject}{_waived(waived)} (an error under --strict; {waived.cure})")
        if cell.state == "refused":
            raise UnsupportedKernel(f"{subject}{cell.name} is refused: {cell.reason}; {self._usable(op)}")
        return route

    def beside(self, op: str, format_name: str, backend: str, *, what: str) -> None:
        """Count a cell of another backend that does a part of what was selected, as planned: no fallback. `what`: a
        class of tensors that it computes with."""
        self.engaged[Cell(backend, op, format_name, "native").name] += 1
        self._tensors.setdefault(backend, {}).setdefault(format_name, {})[what] = None

    def failed(
        self, backend: str, call: str, *, reason: str, instead: str, cure: str, calls: Sequence[str] = ()
    ) -> None:
        """A call of a selected kernel failed while running, and `instead` computes it: counted, told once by `reason`.

        `calls`: the kinds of calls that `reason` lets fail from now on; all of the backend's where none is given. The
        line names them, and every class of tensors, by format, that they were to compute with. Raises UnsupportedKernel
        under `strict`.
        """
        text = f"{backend}.{call} failed: {reason}"
        if self.strict:
            raise UnsupportedKernel(f"{text} (an error under --strict; {cure})")
        self.fallbacks[f"{backend}.{call}"] += 1
        if reason not in self._told:
            self._told.add(reason)
            used = ", ".join(
                f"{name} ({_classes(list(tensors), most=len(tensors))})"
                for name, tensors in self._tensors.get(backend, {}).items()
            )
            who = " and ".join(f"{backend}.{name}" for name in calls) or f"calls of {backend}"
            used = f"; {who} are used for {used}" if used else ""
            self._tell(f"{text}{used}; {instead} does this and all later such calls; to cure: {cure}")

    def announce(self) -> None:
        """Tell each fallback since the last call that was not told before: tensors, format, layers, cure; one line."""
        for waived, tensors in self._pending.items():
            if waived.name not in self._told:
                self._told.add(waived.name)
                self._tell(f"{_waived(waived)}; used for {_classes(tensors)}; to cure: {waived.cure}")
        self._pending.clear()

    def _tell(self, text: str) -> None:
        if self.notice is not None:
            self.notice(text)

    def _usable(self, op: str) -> str:
        usable = [cell.name for cell in self.cells() if cell.op == op and cell.state in ("native", "composed")]
        return f"usable: {', '.join(usable)}" if usable else "nothing can do it"

    def cells(self) -> list[Cell]:
        """All cells as they stand, in order of declaration: what `picaflor capabilities` prints."""
        return [self.cell(*key) for key in self._cells]


def _waived(cell: Cell) -> str:
    return f"{cell.name} is waived to {cell.to}: {cell.reason}"


def _classes(tensors: Sequence[str], *, most: int = NAMED_CLASSES) -> str:
    """Names that differ in their numbers only are one class: `layers.*.q_proj in 4 layers, lm_head`."""
    found: dict[str, set[str]] = {}
    for name in tensors:
        found.setdefault(_NUMBER.sub("*", name), set()).add(name)
    known = {name: members for name, members in found.items() if name}
    if not known:
        return f"{len(tensors)} operation{'s' * (len(tensors) > 1)}"
    shown = [
        f"{name} in {len(members)} layer{'s' * (len(members) > 1)}" if "*" in name else name
        for name, members in list(known.items())[:most]
    ]
    more = len(known) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
