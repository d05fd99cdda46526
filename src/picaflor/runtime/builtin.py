"""Where the model that comes with the package lies.

Must not know what is in it.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from picaflor.errors import BadContainer

NAME = "tiny-glm (built-in)"


def folder() -> Path:
    """The built-in model's folder. Raises BadContainer where the package was installed without it."""
    path = Path(str(files("picaflor"))) / "data" / "tiny-glm"
    if not (path / "config.json").is_file():
        raise BadContainer(f"{path}: the built-in model is not part of this installation; name a model's directory")
    return path
