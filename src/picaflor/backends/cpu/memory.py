"""Memory for weights: anonymous mappings that a kernel may read a little beyond.

Knows the operating system; must not know formats, files or operations.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

SLACK_BYTES = 64
HUGE_PAGE_BYTES = 2 << 20


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory `[nbytes]`, page-aligned, that costs nothing until it is written; 64 more bytes are readable.

    Large blocks ask for huge pages, which the system may refuse without harm. Raises ValueError below 0.
    """
    if nbytes < 0:
        raise ValueError(f"cannot allocate {nbytes} bytes")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes + SLACK_BYTES, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if nbytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)[:nbytes]


def release(array: NDArray[np.uint8]) -> int:
    """Give the memory of an array that `allocate` made back to the system: it reads as zeros until it is written again.

    Returns its bytes, 0 where the memory is not of that kind or the system cannot take it.
    """
    owner: object = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return 0
    owner.madvise(mmap.MADV_DONTNEED)
    return array.nbytes
