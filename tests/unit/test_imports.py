"""Imports point one way (docs/design/contracts.md), and only runtime.plan loads a concrete backend, by name."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import picaflor

ROOT = Path(picaflor.__file__).parent
ORDER = (
    ("errors",),
    ("sizes", "device_memory", "option_kinds", "c_engine", "settings"),
    ("telemetry",),
    ("container",),
    ("formats",),
    ("backends.api",),
    ("store",),
    ("models",),
    ("runtime",),
    ("conformance",),
    ("convert",),
    ("server",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
BACKENDS = LEVEL["backends.api"]
PLAN = "runtime.plan"


def imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, module inside the package) of every import in `source`, those under TYPE_CHECKING and in functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["picaflor", *module.split(".")][: -node.level]
                base = ".".join([*package, base] if base else package)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def inside(name: str) -> str | None:
    """The dotted name below the package, None for what is not ours."""
    if name == "picaflor":
        return None
    return name.removeprefix("picaflor.") if name.startswith("picaflor.") else None


def room(module: str) -> str:
    """`store` for store.reader, `backends.api` for the contract, `backends.cpu` for a concrete backend."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "backends" else parts[0]


def edge_fault(module: str, target: str) -> str | None:
    """Why `module` must not import `target`; None where it may."""
    here, there = room(module), room(target)
    if here == there or there in ("_native", "__version__", "data"):
        return None
    if there.startswith("backends.") and there not in ("backends.api", "backends.table"):
        same = here.startswith("backends.")
        return None if same or module == PLAN else f"only {PLAN} and backends load {there}"
    level = BACKENDS if there.startswith("backends") else LEVEL.get(there)
    own = BACKENDS if here.startswith("backends") else LEVEL.get(here)
    if level is None or own is None:
        return f"{there if level is None else here} has no place in the order"
    return f"{there} comes after {here}" if level > own else None


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts)


def faults(source: str, module: str) -> list[str]:
    found = []
    for line, name in imports(source, module):
        target = inside(name)
        fault = edge_fault(module, target) if target else None
        if fault:
            found.append(f"{module}:{line} imports {name}: {fault}")
    return found


def test_imports_point_one_way() -> None:
    paths = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]
    assert len(paths) > 20
    found = [fault for path in paths for fault in faults(path.read_text(encoding="utf-8"), module_of(path))]
    assert not found, "\n" + "\n".join(found)


def test_the_package_itself_imports_nothing() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_every_module_has_a_docstring_and_a_second_sentence() -> None:
    short = []
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not source.strip():
            continue
        text = ast.get_docstring(ast.parse(source)) or ""
        if not text or (path.name != "__init__.py" and path.name != "__main__.py" and "\n" not in text):
            short.append(module_of(path))
    assert not short, f"no docstring that says what the file is and what it must not know: {', '.join(short)}"


@pytest.mark.parametrize(
    ("module", "code", "fault"),
    [
        ("errors", "from picaflor.settings import load", "settings comes after errors"),
        ("settings", "import picaflor.errors", None),
        ("settings", "from picaflor import telemetry", "telemetry comes after settings"),
        ("sizes", "from picaflor.settings import x", None),
        ("store.reader", "from picaflor.runtime import plan", "runtime comes after store"),
        ("store.reader", "def f():\n    from picaflor.models.base import Model", "models comes after store"),
        ("store.reader", "from picaflor.backends.api import Batch", None),
        ("formats.resolve", "from picaflor.backends.api import Batch", "backends.api comes after formats"),
        ("store.policy.auto", "from . import base", None),
        ("store.policy.auto", "from ...runtime import plan", "runtime comes after store"),
        ("runtime.plan", "from picaflor.backends.cpu import backend", None),
        (
            "runtime.engine",
            "from picaflor.backends.cpu import backend",
            "only runtime.plan and backends load backends.cpu",
        ),
        (
            "runtime.engine",
            "from picaflor.backends.reference import R",
            "only runtime.plan and backends load backends.r",
        ),
        ("runtime.engine", "from picaflor.backends.table import select", None),
        ("models.glm", "from picaflor.backends.table import select", None),
        ("container.index", "from picaflor.backends.table import select", "backends.table comes after container"),
        ("cli.run", "from picaflor.server.app import app", None),
        ("cli.run", "import numpy, picaflor.attic", "attic has no place in the order"),
        ("store.reader", "from picaflor import _native", None),
        ("cli.app", "from picaflor import __version__", None),
    ],
)
def test_the_rule_itself(module: str, code: str, fault: str | None) -> None:
    found = faults(textwrap.dedent(code), module)
    if fault is None:
        assert found == []
    else:
        assert len(found) == 1
        assert fault in found[0]
