"""What the store speaks about: tiers, expert keys, copies and their states.

Knows names and numbers; must not know files, memory or policies. Only `residency` changes a `Copy`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

TierKind = Literal["ram", "vram"]


class Tier(NamedTuple):
    """A kind of memory and the device that it belongs to (0 for the host)."""

    kind: TierKind
    device: int = 0


RAM = Tier("ram")
DISK_LAYOUT = "disk"
"""The layout of a copy whose bytes lie as the container's read plan puts them."""


class ExpertKey(NamedTuple):
    """One routed expert of the model."""

    layer: int
    expert: int


class State(Enum):
    """What may be done with a copy. `GONE` is final: a later copy of the same expert is another object."""

    __hash__ = object.__hash__  # members are looked up many times a token; Enum's own hash is Python code

    LOADING = "loading"
    READY = "ready"
    IN_USE = "in use"
    EVICTING = "evicting"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Copy:
    """One copy of an expert in one slot of a pool; identified by (key, tier, layout), told apart by `generation`.

    `writing`: a read or transfer may still write to the slot. `users` counts holders while in use.
    """

    key: ExpertKey
    tier: Tier
    layout: str
    pool: str
    slot: int
    generation: int
    state: State = State.LOADING
    users: int = 0
    writing: bool = field(default=True)
