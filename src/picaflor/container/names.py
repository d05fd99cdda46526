"""What the name of a matrix or a vector tells of its place in a model.

Knows how names are put together; must not know families, files or devices. Names are those that models ask for, which
begin with `model.` whatever a file puts there.
"""

from __future__ import annotations

import re

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The layer's number, None for what belongs to no layer (embedding, last norm, head)."""
    found = _LAYER.match(name)
    return None if found is None else int(found.group(1))
