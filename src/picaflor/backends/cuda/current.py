"""The current device, on which kernels, streams and events are made that name none.

Knows devices of torch; must not know what is done there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def current(device: Any) -> AbstractContextManager[Any]:
    """Makes a device the current one of this thread; does nothing for one that is the host."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)
