"""Several devices as one backend: each has some layers with their experts and pages of the cache.

Knows backends of single devices and layer numbers; must not know kernels, families or files. What belongs to a layer is
bound on that layer's device; embedding, last norm and head are bound where an operation needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import DeviceRates, ExpertTraffic, Vector, Weight
from picaflor.backends.cpu.memory import allocate
from picaflor.backends.cuda.place import LayerNeeds, spread
from picaflor.backends.cuda.recorder import CudaRecorder
from picaflor.backends.cuda.several_program import naming
from picaflor.backends.cuda.several_recorder import SeveralRecorder
from picaflor.backends.table import Cell
from picaflor.container.names import layer_of
from picaflor.formats.base import F32
from picaflor.sizes import format_bytes

if TYPE_CHECKING:
    from picaflor.backends.cuda.backend import CudaBackend


class LayerBytes(Protocol):
    """Bytes by layer, and what the devices of the first and of the last layer hold besides."""

    fixed: Mapping[int, int]
    experts: Mapping[int, int]
    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class Floating:
    """The handle of what belongs to no placed layer (that of a draft head that is not used is not placed either):
    `bind(backend)` gives it to a device, `parts` are those that have it."""

    bind: Callable[[CudaBackend], Any]
    parts: dict[int, Any] = field(default_factory=dict)


class SeveralBackend:
    """Devices in the order of the layers that they get. `place` says which device a layer lies on, before anything of
    it is bound. All devices share one table and one precision, and `fail_after` counts their calls together."""

    on_device = True
    tells_ahead = True
    """What the next layer will probably want is told where both lie on one device."""

    def __init__(self, backends: Sequence[CudaBackend]) -> None:
        first = backends[0]
        self.backends = tuple(backends)
        self.name = first.name
        self._names = [device_in_words(backend.number) for backend in backends]
        self.isa = " + ".join(dict.fromkeys(backend.isa for backend in backends))
        self.threads, self.precision, self.table = first.threads, first.precision, first.table
        self._places: dict[int, int] = {}
        self._planes: list[dict[int, int]] = [{} for _ in backends]
        self._experts = [0] * len(backends)
        for backend in backends:
            backend.counted = [one.calls for one in backends]

    # ---- where layers lie ----

    def place(self, sizes: LayerBytes) -> str:
        """Share the layers out by these sizes and by the devices' free memory; the result in words.

        Raises OutOfBudget where matrices and cache fit in no way.
        """
        layers = sorted(sizes.fixed)
        needs = [LayerNeeds(sizes.fixed[layer], sizes.experts.get(layer, 0)) for layer in layers]
        rooms = [backend.free_bytes() for backend in self.backends]
        ranges = spread(needs, rooms, first=sizes.first, last=sizes.last)
        self._places = {layers[at]: device for device, places in enumerate(ranges) for at in places}
        self._experts = [sum(needs[at].experts for at in places) for places in ranges]
        told = [
            f"{_in_words(self.layers(place))} on {name}" if ranges[place] else f"{name} is not used"
            for place, name in enumerate(self._names)
        ]
        return f"--device {','.join(str(backend.number) for backend in self.backends)}: {', '.join(told)}"

    def layers(self, device: int) -> list[int]:
        """The layers of a device, by its place among `backends`."""
        return [layer for layer, place in self._places.items() if place == device]

    def _device(self, layer: int | None) -> int:
        if layer is None or layer not in self._places:
            raise ValueError(f"layer {layer} lies on no device; placed are {sorted(self._places) or 'none'}")
        return self._places[layer]

    # ---- what is held ----

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeroed host memory, untouched until written, with 64 more readable bytes behind it."""
        return allocate(nbytes)

    def weight(
        self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Sequence[NDArray[Any]]
    ) -> Weight:
        """Hold a matrix `[rows, cols]` on its layer's device, or wherever it will be needed.

        Raises UnsupportedKernel for a format that this backend does not know, ValueError for planes of the wrong size.
        """
        layer = layer_of(name)

        def bind(backend: CudaBackend) -> Weight:
            kept = self._planes[self.backends.index(backend)]
            kept.update((plane.ctypes.data, plane.nbytes) for plane in planes)
            return backend.weight(name, format_name, shape, group_size, planes)

        if layer in self._places:
            return bind(self.backends[self._places[layer]])
        self.table.cell(self.name, "matmul", format_name)
        return Weight(name, format_name, *shape, group_size, Floating(bind))

    def vector(self, name: str, values: F32) -> Vector:
        """Hold a copy of a parameter vector, likewise."""
        layer = layer_of(name)
        kept = np.array(values, np.float32)
        if layer in self._places:
            return self.backends[self._places[layer]].vector(name, kept)
        return Vector(name, len(kept), Floating(lambda backend: backend.vector(name, kept)))

    def _held(self, word: Weight | Vector, device: int) -> Any:
        """A matrix or vector as a device has it."""
        handle = word.handle
        if not isinstance(handle, Floating):
            return word
        if device not in handle.parts:
            handle.parts[device] = handle.bind(self.backends[device])
        return handle.parts[device]

    def take(self, weights: Sequence[Weight]) -> None:
        """Copy matrices whose bytes are there to their devices now, and then give the host's memory back."""
        parts: list[list[Weight]] = [[] for _ in self.backends]
        for weight in weights:
            if isinstance(weight.handle, Floating):
                for device, held in weight.handle.parts.items():
                    parts[device].append(held)
            else:
                parts[self._device(layer_of(weight.name))].append(weight)
        for held in (held for part in parts for held in part):
            _ = held.handle.device  # all copies before any byte is given back: a tied head may lie on another device
        for backend, part in zip(self.backends, parts, strict=True):
            backend.take(part)

    @property
    def reload(self) -> Callable[[Collection[int]], None] | None:
        """What brings back to the host what `take` gave away."""
        return self.backends[0].reload

    @reload.setter
    def reload(self, call: Callable[[Collection[int]], None] | None) -> None:
        for backend in self.backends:
            backend.reload = call

    @property
    def released(self) -> int:
        """Bytes of the host that `take` gave back."""
        return sum(backend.released for backend in self.backends)

    # ---- running ----

    def recorder(self, *, max_rows: int, max_outputs: int, page_tokens: int, pages: int) -> SeveralRecorder:
        """Start recording; buffers have `max_rows` rows, each KV plane `pages` pages of `page_tokens` tokens."""

        def start(device: int) -> CudaRecorder:
            return self.backends[device].recorder(
                max_rows=max_rows, max_outputs=max_outputs, page_tokens=page_tokens, pages=pages
            )

        return SeveralRecorder(place=self._device, open=start, held=self._held, names=self._names)

    def sample(self, logits: F32, *, temperature: float, top_p: float, uniform: float) -> int:
        """One token from logits `[vocabulary]`, as one device does it."""
        return self.backends[0].sample(logits, temperature=temperature, top_p=top_p, uniform=uniform)

    # ---- what is told ----

    @property
    def described(self) -> str:
        """All devices in words."""
        return "; ".join(f"{name}: {one.described}" for name, one in zip(self._names, self.backends, strict=True))

    def shares(self) -> tuple[str, ...]:
        """What each device has, in words: layers, experts there of all that its layers have, bytes."""
        return tuple(
            f"{backend.number}: {_in_words(self.layers(place))}; {tier.held} of {tier.experts} experts, "
            f"{format_bytes(backend.vram_used() + tier.slots * tier.stride)}"
            for place, (backend, tier) in enumerate((backend, backend.tier) for backend in self.backends)
        )

    @property
    def calls(self) -> Counter[str]:
        """Steps that ran on the devices, by operation."""
        return sum((backend.calls for backend in self.backends), Counter())

    @property
    def graphs(self) -> bool:
        """Whether what is recorded from now on may be captured."""
        return all(backend.graphs for backend in self.backends)

    @graphs.setter
    def graphs(self, may: bool) -> None:
        for backend in self.backends:
            backend.graphs = may

    def isa_of(self, cell: Cell) -> str:
        """What the kernels behind a selected cell run on."""
        return self.isa if cell.backend == self.name else self.backends[0].isa_of(cell)

    def workspace_bytes(self) -> int:
        """Bytes of host memory that running takes."""
        return sum(backend.workspace_bytes() for backend in self.backends)

    def kv_bytes(self) -> int:
        """Bytes of key-value pages that have been written to so far, on all devices."""
        return sum(backend.kv_bytes() for backend in self.backends)

    def vram_used(self) -> int:
        """Bytes of all devices that matrices, buffers and pages take; experts are not counted."""
        return sum(backend.vram_used() for backend in self.backends)

    def traffic(self) -> ExpertTraffic:
        """What was asked of the experts on all devices so far."""
        each = [astuple(backend.traffic()) for backend in self.backends]
        return ExpertTraffic(*map(sum, zip(*each, strict=True)))

    def measure_rates(self) -> DeviceRates:
        """The lowest rate of any device: they compute one after the other, so that their rates do not add up."""
        each = [backend.measure_rates() for backend in self.backends]
        return DeviceRates(min(one.memory for one in each), min(one.link for one in each))

    def takes_experts(self, resident_bytes: int, expert_bytes: int) -> bool:
        """Whether all experts fit on the devices of their layers, `expert_bytes` in all. Each device knows the matrices
        that it was given, so `resident_bytes` is not needed."""
        total = max(1, sum(self._experts))
        return all(
            backend.takes_experts(sum(planes.values()), expert_bytes * experts // total)
            for backend, planes, experts in zip(self.backends, self._planes, self._experts, strict=True)
        )

    def reserve(self, resident_bytes: int) -> None:
        """Raises OutOfBudget, before any matrix is read, where those of a device leave it no room to work in. Each
        device knows the matrices that it was given, so `resident_bytes` is not needed."""
        for name, backend, planes in zip(self._names, self.backends, self._planes, strict=True):
            with naming(name):
                backend.reserve(sum(planes.values()))


def device_in_words(number: int) -> str:
    """What lines about a device call it."""
    return f"device {number}"


def _in_words(layers: Sequence[int]) -> str:
    """A range of layers; empty is "no layer"."""
    if not layers:
        return "no layer"
    first, last = layers[0], layers[-1]
    return f"layer {first}" if first == last else f"layers {first} to {last}"
