"""What the store needs of a container: shards by number and their descriptors.

Knows paths and descriptors; must not know tensors or experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from picaflor.container.types import Shard


class ShardFiles(Protocol):
    """A container, or a copy of its files."""

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards, by index."""
        ...

    def handle(self, shard: int) -> AbstractContextManager[int]:
        """The shard's descriptor, open while the context lasts. Raises ReadFailed."""
        ...
