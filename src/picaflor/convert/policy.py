"""Which format each class of weights is written in.

Knows the classes of `models.base` and formats by name; must not know files or tensors' bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from picaflor import formats
from picaflor.errors import UsageError
from picaflor.models.base import Kind

DEFAULT_FORMAT = "int4-grouped"
DEFAULT_GROUP_SIZE = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """A format, and its group size (0 where the format fixes it)."""

    format: str
    group_size: int


def encodable() -> tuple[str, ...]:
    """Names of the formats that can be written."""
    return tuple(name for name, item in formats.REGISTRY.items() if item.encode is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Formats by class; the defaults are what every published container of this kind uses.

    `experts`: routed experts. `resident`: attention, dense layers, shared experts. `kv_b`: the matrix of attention that
    turns latents into keys and values, None: as `resident`. `tables`: embedding and head.
    `indexer`, and `draft`: every matrix of the draft layer, whose input projection has halves that differ 20-fold and
    loses one of them in four bits a row. Routers and vectors are always f32. Raises UsageError for a format that
    cannot be written there and for a group size that the readers do not know.
    """

    experts: str = DEFAULT_FORMAT
    resident: str = DEFAULT_FORMAT
    tables: str = "int8-row"
    indexer: str = "int8-row"
    draft: str = "int8-row"
    group_size: int = DEFAULT_GROUP_SIZE
    kv_b: str | None = None

    def __post_init__(self) -> None:
        names = {
            "routed experts": self.experts,
            "resident matrices": self.resident,
            "kv_b": self.kv_b or self.resident,
            "embedding and head": self.tables,
            "the indexer": self.indexer,
            "the draft layer": self.draft,
        }
        for place, name in names.items():
            if name not in encodable():
                raise UsageError(f"format {name!r} for {place}: accepted: {', '.join(encodable())}")
            found = formats.get(name)
            if found.routed_only and place != "routed experts":
                raise UsageError(f"format {name} for {place}: it is for routed experts only")
            if found.group_sizes and self.group_size not in found.group_sizes:
                accepted = ", ".join(map(str, found.group_sizes))
                raise UsageError(f"--group-size {self.group_size}: {name} is read in groups of {accepted}")

    def choose(self, kind: Kind, *, draft: bool) -> Choice:
        """The choice for a matrix of a class; `draft`: it belongs to the draft layer."""
        name = self._name(kind, draft)
        return Choice(name, self.group_size if formats.get(name).group_sizes else 0)

    def _name(self, kind: Kind, draft: bool) -> str:
        if kind == "router":
            return "f32"
        if draft or kind == "draft":
            return self.draft
        match kind:
            case "expert":
                return self.experts
            case "embedding" | "head":
                return self.tables
            case "indexer":
                return self.indexer
            case "kv_b":
                return self.kv_b or self.resident
            case "attention" | "dense" | "shared":
                return self.resident
