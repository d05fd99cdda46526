"""Rows of activations as integer-coded matrices meet them, and the launches that make them.

Knows buffers and the kernels of quantize.py; must not know matrices, models or files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from picaflor.backends.vulkan.decode import Needs
from picaflor.backends.vulkan.device import Buffer, Gpu, Launch, Stream
from picaflor.backends.vulkan.quantize import ROTATE, groups_at_once, prepare_kernel
from picaflor.formats.e8_iq3 import rotation_blocks, rotation_signs
from picaflor.formats.numeric import ceil_div

NewBuffer = Callable[[int, str], Buffer]
"""Makes a buffer of so many bytes; the text says what for."""


@dataclass(frozen=True, slots=True)
class Source:
    """Float rows: `times` of them for each row of the space that `frame` has at `space`."""

    memory: Buffer
    stride: int
    start: int
    frame: Buffer
    space: int
    times: int = 1

    def fields(self) -> dict[str, int]:
        """For a uniform."""
        return {"x_stride": self.stride, "x_at": self.start, "space": self.space, "times": self.times}


class Prepared:
    """Room for `rows` prepared rows of `cols` inputs. `digits` int8 `[rows, planes, groups * group]`, `steps` float32
    `[rows, groups]`."""

    def __init__(self, gpu: Gpu, needs: Needs, cols: int, rows: int, source: Source, new: NewBuffer) -> None:
        self.needs = needs
        self.groups = ceil_div(cols, needs.group)
        self.digits = new(rows * needs.planes * self.groups * needs.group, "digits")
        self.steps = new(4 * rows * self.groups, "steps")
        self._source = source
        self._rotate: Launch | None = None
        x, values = source.memory, source.fields()
        self._blocks = 0
        if needs.rotated:
            x = new(4 * rows * cols, "rotated rows")
            blocks = rotation_blocks(cols)
            self._blocks = len(blocks)
            table = gpu.filled(_rotation(cols), "a rotation")
            self._rotate = Launch(
                ROTATE, (source.memory, x, table, source.frame), {**values, "cols": cols, "blocks": len(blocks)}
            )
            values = {**values, "x_stride": cols, "x_at": 0}
        self._prepare = Launch(
            prepare_kernel(needs),
            (x, self.digits, self.steps, source.frame),
            {**values, "cols": cols, "group": needs.group, "groups": self.groups},
        )

    def make(self, stream: Stream, count: int) -> None:
        """Prepare the rows of a space of `count`."""
        rows = count * self._source.times
        if self._rotate is not None:
            stream.launch(self._rotate, rows * self._blocks)
        stream.launch(self._prepare, ceil_div(rows * self.groups, groups_at_once(self.needs.group)))


def _rotation(cols: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """(start, size) of each block, signs of all inputs, factors of all inputs."""
    blocks = rotation_blocks(cols)
    signs = np.concatenate([rotation_signs(size) for _, size in blocks]).astype(np.float32)
    factors = np.concatenate([np.full(size, np.float32(1) / np.sqrt(np.float32(size))) for _, size in blocks])
    floats = np.concatenate([signs, factors.astype(np.float32)]).view(np.uint32)
    return np.concatenate([np.array(blocks, np.uint32).reshape(-1), floats])
