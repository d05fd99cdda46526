"""Triton's interpreter as a device: what it computes otherwise than a GPU is put right here.

Knows the interpreter; must not know operations. Used where TRITON_INTERPRET=1 is set before Triton is imported: in
tests, and to try the backend without a GPU. Its `fma` rounds the product before the sum; a device does not.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import triton
from numpy.typing import NDArray


def active() -> bool:
    """Whether kernels are interpreted."""
    return bool(triton.knobs.runtime.interpret)


def fused(x: NDArray[Any], y: NDArray[Any], z: NDArray[Any]) -> NDArray[Any]:
    """x * y + z rounded once, for float32: the float64 sum is rounded to odd before the cast."""
    with np.errstate(all="ignore"):
        product = np.multiply(x, y, dtype=np.float64)  # exact: 24 + 24 bits
        addend = np.asarray(z, np.float64)
        total = np.atleast_1d(product + addend)
        back = total - product
        error = (product - (total - back)) + (addend - back)
        even = (total.view(np.int64) & 1) == 0
        inexact = (error != 0) & even & np.isfinite(total)
        moved = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        out = np.where(inexact, moved, total).astype(np.float32)
    return out.reshape(np.broadcast_shapes(np.shape(x), np.shape(y), np.shape(z)))


@lru_cache(maxsize=1)
def round_once() -> None:
    """Let the interpreter's fma round once. Has an effect on interpreted kernels of this process only."""
    from triton.runtime import interpreter

    def create_fma(_: Any, x: Any, y: Any, z: Any) -> Any:
        if x.data.dtype != np.float32:
            raise TypeError(f"fma of {x.data.dtype}; the kernels fuse float32 only")
        return interpreter.TensorHandle(fused(x.data, y.data, z.data), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        """Bounds of loops are arrays of one element, which numpy from 2.4 on does not take for a number."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patch
