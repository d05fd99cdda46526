"""Element types of cache pages: the registry.

Knows page formats by name; must not know attention, pages or devices.
"""

from __future__ import annotations

from picaflor.errors import UnknownFormat
from picaflor.formats.kv import f32
from picaflor.formats.kv.base import KVFormat

REGISTRY: dict[str, KVFormat] = {module.FORMAT.name: module.FORMAT for module in (f32,)}


def get(name: str) -> KVFormat:
    """The page format of that name. Raises UnknownFormat naming the accepted ones."""
    try:
        return REGISTRY[name]
    except KeyError:
        raise UnknownFormat(f"unknown cache page format {name!r}; known: {', '.join(REGISTRY)}") from None
