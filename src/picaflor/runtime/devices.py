"""Which devices the system shows, what of their software is missing, and what `--backend auto` says of them.

Knows backends by name and what they import; must not import any of it, and must not know models.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

PARTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"cuda": ("torch", "triton"), "rocm": ("torch", "triton"), "vulkan": ("wgpu",)}
)
"""What a backend of a device imports."""
LINUX: Final = MappingProxyType({"cuda": Path("/dev/nvidia0"), "rocm": Path("/dev/kfd")})
WINDOWS: Final = MappingProxyType({"vulkan": Path("C:/Windows/System32/vulkan-1.dll")})
DEVICE_FILES: Final[Mapping[str, Path]] = WINDOWS if sys.platform == "win32" else LINUX
"""What the system shows where a driver for such devices is loaded. On Windows there is no build of Triton, but every
maker's driver brings Vulkan."""
MEASURED: Final = ("cuda", "rocm")
"""What `tune` compares with the CPU: backends that give its bits, so that a token does not tell which one ran."""
INSTALL: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cuda": "pip install picaflor[cuda]",
        "rocm": "pip install torch --index-url https://download.pytorch.org/whl/rocm6.4",
        "vulkan": "pip install picaflor[vulkan]",
        "metal": "pip install picaflor[apple]",
    }
)
"""What brings a backend's software. Torch for AMD is a build of its own, in an index of each ROCm's,
which no extra can name."""


def missing_parts(backend: str) -> list[str]:
    """What a backend imports and this system does not have."""
    return [part for part in PARTS[backend] if importlib.util.find_spec(part) is None]


def usable_devices(devices: Mapping[str, Path] = DEVICE_FILES) -> list[str]:
    """Backends that `tune` compares, with a driver and all that they import."""
    return [name for name in MEASURED if name in devices and devices[name].exists() and not missing_parts(name)]


def automatic_choice(
    devices: Mapping[str, Path] = DEVICE_FILES, *, measured: tuple[str, float] | None = None, chosen: str = "cpu"
) -> str:
    """What `--backend auto` chose and why, where there was a choice: in words, empty where the CPU is all there is.

    `measured`: a backend and its speed by the CPU's.
    """
    name = next((name for name, path in devices.items() if path.exists()), "")
    if not name:
        return ""
    if measured is not None:
        told = f"tune measured {measured[0]} at {measured[1]:.2f} times the CPU's speed"
        if chosen != "cpu":
            return f"--backend auto is {chosen}: {told}"
        return f"--backend auto is the CPU: {told}" + ", the CPU is faster here" * (measured[1] < 1)
    missing = missing_parts(name)
    verb = "is" if len(missing) == 1 else "are"
    first = f" once {' and '.join(missing)} {verb} installed ({INSTALL[name]})" if missing else ""
    why = "no run has measured which is faster (picaflor tune does)"
    if name not in MEASURED:
        why = f"a token of {name} may differ where two are equally likely, so it is taken by name only"
    return f"--backend auto is the CPU: {why}; --backend {name} uses the GPU{first}"
