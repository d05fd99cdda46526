"""One GPU through wgpu: which one, what it can do, its buffers, and kernels waiting to be submitted together.

Knows wgpu; must not know operations, formats or models. Devices, pipelines and what a probe found out are kept for the
whole process: a backend that is opened again compiles nothing again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
import wgpu
from numpy.typing import NDArray
from wgpu.backends.wgpu_native.extras import set_instance_extras

from picaflor.backends.vulkan.tiling import Tiling
from picaflor.backends.vulkan.wgsl import LANES, Kernel, grid
from picaflor.errors import OutOfBudget, UnsupportedKernel
from picaflor.sizes import format_bytes

MOST_BINDING_BYTES: Final = (2 << 30) - 256
"""Most bytes of one binding, whatever the device says: byte addresses and sizes are 32 bits in places below wgpu."""
PIECE_BYTES: Final = 256 << 20
"""After so many bytes of copies to the device they are waited for: until then each lies in memory a second time."""
SLACK_BYTES: Final = 64
"""Readable behind every buffer's contents."""
_WANTED_FEATURES: Final = ("shader-f64",)
_WANTED_LIMITS: Final = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-storage-buffers-per-shader-stage",
    "max-compute-workgroup-storage-size",
)
_ORDER: Final = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "Other", "Unknown", "CPU")
"""Kinds of adapters, the preferred first; a rasteriser on the CPU is taken only where there is nothing else."""
_MEMORY: Final = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST

Buffer = Any
"""A buffer of wgpu."""


@dataclass(slots=True, eq=False)
class Gpu:
    """A device of wgpu. `software`: a rasteriser on the CPU. `fusion`: how products and sums are fused (wgsl.FUSIONS).
    `most_bytes`: of one buffer. `tiling`: how products are cut up, asked when a kernel is first made.
    """

    name: str
    driver: str
    software: bool
    device: Any
    most_bytes: int
    fusion: str = "plain"
    tiling: Tiling = field(default_factory=Tiling)
    _pipelines: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    _waiting: int = 0

    def buffer(self, nbytes: int, what: str) -> Buffer:
        """Zeroed memory for so many bytes and a few more. Raises OutOfBudget where one binding cannot hold them."""
        size = -(-(nbytes + SLACK_BYTES) // 16) * 16
        if size > self.most_bytes:
            raise OutOfBudget(
                f"{what} takes {format_bytes(nbytes)}, one binding of {self.name} holds "
                f"{format_bytes(self.most_bytes)}: lower --ctx or --prefill-chunk"
            )
        return self.device.create_buffer(size=size, usage=_MEMORY)

    def filled(self, values: NDArray[Any], what: str) -> Buffer:
        """A buffer with these bytes."""
        buffer = self.buffer(values.nbytes, what)
        self.write(buffer, 0, values)
        return buffer

    def write(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Copy to a buffer; complete for all that is submitted from now on. `offset` is a multiple of 4."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        whole = raw.nbytes // 4 * 4
        for start in range(0, whole, PIECE_BYTES):
            piece = raw[start : min(start + PIECE_BYTES, whole)]
            self.device.queue.write_buffer(buffer, offset + start, piece)
            self._waiting += piece.nbytes
            if self._waiting >= PIECE_BYTES:
                self.device.queue.submit([])
                self.read(buffer, 0, 4)
                self._waiting = 0
        if whole < raw.nbytes:
            tail = np.zeros(4, np.uint8)
            tail[: raw.nbytes - whole] = raw[whole:]
            self.device.queue.write_buffer(buffer, offset + whole, tail)

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of a buffer, after all that was submitted."""
        return np.frombuffer(self.device.queue.read_buffer(buffer, offset, nbytes), np.uint8)

    def pipeline(self, kernel: Kernel) -> tuple[Any, Any]:
        """The compiled kernel and the layout of its bindings."""
        source = kernel.source(self.fusion)
        if source not in self._pipelines:
            self._pipelines[source] = self._compiled(kernel, source)
        return self._pipelines[source]

    def _compiled(self, kernel: Kernel, source: str) -> tuple[Any, Any]:
        entries = [
            {
                "binding": number,
                "visibility": wgpu.ShaderStage.COMPUTE,
                "buffer": {"type": "read-only-storage" if access == "read" else "storage"},
            }
            for number, (_, _, access) in enumerate(kernel.bindings)
        ]
        uniform = {"binding": len(entries), "visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": "uniform"}}
        layout = self.device.create_bind_group_layout(entries=[*entries, uniform])
        whole = self.device.create_pipeline_layout(bind_group_layouts=[layout])
        module = self.device.create_shader_module(label=kernel.name, code=source)
        stage = {"module": module, "entry_point": "main"}
        return self.device.create_compute_pipeline(layout=whole, compute=stage), layout


@dataclass(slots=True, eq=False)
class Launch:
    """A kernel with its buffers, in the order of its bindings, and the values of its uniform. Bound at first use."""

    kernel: Kernel
    buffers: Sequence[Buffer]
    values: Mapping[str, float]
    _bound: tuple[Any, Any] | None = None

    def bound(self, gpu: Gpu) -> tuple[Any, Any]:
        """Pipeline and bind group."""
        if self._bound is None:
            pipeline, layout = gpu.pipeline(self.kernel)
            packed = self.kernel.pack(self.values)
            packed += bytes(-len(packed) % 16)
            uniform = gpu.device.create_buffer_with_data(data=packed, usage=wgpu.BufferUsage.UNIFORM)
            entries = [
                {"binding": number, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
                for number, buffer in enumerate((*self.buffers, uniform))
            ]
            self._bound = pipeline, gpu.device.create_bind_group(layout=layout, entries=entries)
        return self._bound


class Stream:
    """Launches in order, submitted together."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.submits = 0
        self._encoder: Any = None
        self._pass: Any = None

    def launch(self, launch: Launch, workgroups: int) -> None:
        """Put a launch behind the others."""
        if workgroups < 1:
            return
        pipeline, group = launch.bound(self.gpu)
        if self._pass is None:
            self._encoder = self.gpu.device.create_command_encoder()
            self._pass = self._encoder.begin_compute_pass()
        self._pass.set_pipeline(pipeline)
        self._pass.set_bind_group(0, group)
        self._pass.dispatch_workgroups(*grid(workgroups))

    def submit(self) -> None:
        """Give the device all launches since the last call."""
        commands = self.finish()
        if commands is not None:
            self.gpu.device.queue.submit([commands])
            self.submits += 1

    def drop(self) -> None:
        """Forget the launches since the last submit."""
        self.finish()

    def finish(self) -> Any:
        """The launches since the last submit as one buffer of commands, None where there are none."""
        if self._pass is None:
            return None
        self._pass.end()
        commands = self._encoder.finish()
        self._pass, self._encoder = None, None
        return commands


def adapters() -> list[Any]:
    """Adapters of Vulkan, the preferred first. Raises UnsupportedKernel where there is none."""
    try:
        _vulkan_alone()
        every = wgpu.gpu.enumerate_adapters_sync()
    except (RuntimeError, OSError) as error:
        raise UnsupportedKernel(f"backend vulkan cannot start: {' '.join(str(error).split())}") from error
    found = [adapter for adapter in every if adapter.info["backend_type"] == "Vulkan"]
    if not found:
        raise UnsupportedKernel("backend vulkan cannot start: no adapter of Vulkan (is a driver installed?)")
    return sorted(found, key=lambda adapter: _ORDER.index(_kind(adapter)))


@lru_cache(maxsize=1)
def _vulkan_alone() -> None:
    """No other interface is started: others look for displays and complain. Must come before any other use of wgpu."""
    set_instance_extras(backends=["Vulkan"])


def _kind(adapter: Any) -> str:
    kind = str(adapter.info["adapter_type"])
    return kind if kind in _ORDER else "Unknown"


@lru_cache(maxsize=1)
def open_gpu() -> Gpu:
    """The preferred adapter's device. Raises UnsupportedKernel with the reason."""
    adapter = adapters()[0]
    limits = {name: value for name, value in adapter.limits.items() if name in _WANTED_LIMITS}
    features = [name for name in _WANTED_FEATURES if name in adapter.features]
    try:
        device = adapter.request_device_sync(required_features=features, required_limits=limits)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UnsupportedKernel(f"backend vulkan cannot start: {adapter.info['device']}: {reason}") from error
    most = min(MOST_BINDING_BYTES, limits["max-storage-buffer-binding-size"], limits["max-buffer-size"])
    gpu = Gpu(
        name=str(adapter.info["device"]),
        driver=str(adapter.info["description"]),
        software=_kind(adapter) == "CPU",
        device=device,
        most_bytes=most // 256 * 256,
    )
    gpu.fusion = _fusion(gpu, "shader-f64" in features)
    return gpu


_PROBE: Final = Kernel(
    "probe",
    (("x", "f32", "read"), ("y", "f32", "read_write")),
    ("count",),
    f"""
fn run(wid: u32, lid: u32) {{
  let i = wid * {LANES}u + lid;
  if (i < p.count) {{ y[i] = fm(x[3u * i], x[3u * i + 1u], x[3u * i + 2u]); }}
}}
""",
)


def _fusion(gpu: Gpu, float64: bool) -> str:
    """What `fma` does here: a few thousand products and sums, some of which differ where the product is rounded."""
    count = 4096
    given = np.random.default_rng(7).standard_normal((count, 3)).astype(np.float32)
    wide = given.astype(np.float64)
    right = (wide[:, 0] * wide[:, 1] + wide[:, 2]).astype(np.float32)
    out = gpu.buffer(4 * count, "a probe")
    stream = Stream(gpu)
    stream.launch(Launch(_PROBE, (gpu.filled(given, "a probe"), out), {"count": count}), count // LANES)
    stream.submit()
    if np.array_equal(gpu.read(out, 0, 4 * count).view(np.float32), right):
        return "fused"
    return "float64" if float64 else "plain"
