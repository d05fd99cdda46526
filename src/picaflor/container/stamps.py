"""Discovery-time rules of the `colibri.fmt` metadata: which tensor claims which format name.

Knows metadata strings; must not know what the names mean. Whether a name exists and agrees with the sizes is decided
where formats are resolved. Source: docs/container.md, "Stamps".
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from picaflor.container.strict_json import show, show_path
from picaflor.container.types import Shard
from picaflor.errors import BadContainer

STAMP_KEY = "colibri.fmt"
RULES_KEY = "picaflor.formats"
MAX_STAMPS = 4096


def collect_stamps(shards: Iterable[Shard]) -> dict[str, str]:
    """Merge the stamps of all shards: exact tensor name -> format name.

    Identical claims collapse. Raises BadContainer naming the shard: text that is no JSON object, a value that is no
    string, two different claims for one tensor, more than MAX_STAMPS names in the container.
    """
    stamps: dict[str, str] = {}
    origin: dict[str, Shard] = {}
    for shard in shards:
        text = shard.metadata.get(STAMP_KEY)
        if text is None:
            continue
        where = show_path(shard.path)
        for name, claim in _claims(text, where):
            if not isinstance(claim, str):
                raise BadContainer(
                    f"{where}: {STAMP_KEY}: tensor {show(name)}: expected a format name, found {show(claim)}"
                )
            earlier = stamps.setdefault(name, claim)
            first = origin.setdefault(name, shard)
            if earlier != claim:
                raise BadContainer(
                    f"{where}: {STAMP_KEY}: tensor {show(name)} is stamped {show(claim)} here and {show(earlier)} in "
                    f"{show_path(first.path)}; expected one claim"
                )
            if len(stamps) > MAX_STAMPS:
                raise BadContainer(
                    f"{where}: {STAMP_KEY}: more than {MAX_STAMPS} stamped tensors in this container, at most "
                    f"{MAX_STAMPS} are accepted"
                )
    return stamps


def collect_rules(shards: Iterable[Shard]) -> tuple[tuple[Shard, str], ...]:
    """The raw text of `picaflor.formats` of every shard that has it."""
    return tuple((shard, shard.metadata[RULES_KEY]) for shard in shards if RULES_KEY in shard.metadata)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON value")


def _claims(text: str, where: str) -> list[tuple[str, object]]:
    """Name and claim pairs of one stamp text, repeated names included."""

    class _Pairs(list[tuple[str, object]]):
        """An object's pairs, told apart from a JSON array."""

    try:
        value = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0][:160]
        raise BadContainer(f"{where}: {STAMP_KEY}: not valid JSON: {reason}") from None
    if not isinstance(value, _Pairs):
        raise BadContainer(f"{where}: {STAMP_KEY}: expected a JSON object of format names, found {show(value)}")
    return value
