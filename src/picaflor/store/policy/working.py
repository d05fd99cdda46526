"""The working set: slots that all layers share, for experts that got none of their own layer's.

Knows keys only; must not know what they name, slots' memory, clocks or files. The store and its shadows share it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class WorkingSet(Generic[Key]):
    """Who lies in the shared slots, and who leaves first: what a policy declined, oldest first, then the others.

    So a stream of experts that are not worth a slot does not push out what only found its layer's slots in use.
    """

    def __init__(self) -> None:
        self._declined: dict[Key, None] = {}
        self._others: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self._declined) + len(self._others)

    def __contains__(self, key: Key) -> bool:
        return key in self._others or key in self._declined

    def add(self, key: Key, *, declined: bool) -> None:
        """A new one, the youngest of its kind."""
        (self._declined if declined else self._others)[key] = None

    def touch(self, key: Key) -> None:
        """It was asked for again: the youngest of those that leave last."""
        self.remove(key)
        self._others[key] = None

    def remove(self, key: Key) -> None:
        """Raises KeyError if it is not there."""
        if key in self._declined:
            del self._declined[key]
        else:
            del self._others[key]

    def oldest(self, evictable: Callable[[Key], bool]) -> Key | None:
        """The evictable one that leaves first."""
        found = next(filter(evictable, self._declined), None)
        return found if found is not None else next(filter(evictable, self._others), None)
