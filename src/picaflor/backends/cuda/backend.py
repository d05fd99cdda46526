"""The GPU backends `cuda` and `rocm`: one Triton source, memory and streams from torch.

Knows devices, capabilities and recorders; must not know families, files or the expert store. `open_backend` fails with
the reason where no device can be used; nothing else is then tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import triton

from picaflor.backends.api import DeviceRates, ExpertProvider, ExpertTraffic, Precision, Vector, Weight
from picaflor.backends.cells import HOST
from picaflor.backends.cpu.backend import CpuBackend
from picaflor.backends.cuda import capabilities, interpret, rates
from picaflor.backends.cuda.capabilities import Name
from picaflor.backends.cuda.current import current
from picaflor.backends.cuda.exchange import HostExperts
from picaflor.backends.cuda.recorder import CudaRecorder
from picaflor.backends.cuda.sampling import Drawing
from picaflor.backends.cuda.several import SeveralBackend, device_in_words
from picaflor.backends.cuda.tier import ExpertTier
from picaflor.backends.cuda.weights import Matrices
from picaflor.backends.device import DeviceBackend
from picaflor.backends.host import HostTwin
from picaflor.backends.table import CapabilityTable
from picaflor.device_memory import DeviceMemory
from picaflor.errors import OutOfBudget, UnsupportedKernel, UsageError
from picaflor.formats.base import F32
from picaflor.sizes import format_bytes

PRECISIONS: Final = ("fast", "standard", "exact")
INTERPRETER: Final = "interpreter"
"""The `isa` of a backend whose kernels Triton interprets on the CPU."""

LEAST_TRITON: Final = (3, 5)
"""Before it, kernels that call themselves do not compile."""
INTERPRETED: Final = 4
"""As many devices does the interpreter play."""
ALL: Final = "all"
FIRST: Final = "auto"


def find_device(backend: Name, number: int = 0) -> tuple[Any, str]:
    """The torch device of a backend and its architecture. Raises UnsupportedKernel with the reason."""
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        raise UnsupportedKernel(
            f"backend {backend} cannot start: Triton {triton.__version__} cannot compile its kernels; accepted: "
            f"{least} and later, which torch from 2.9 on brings"
        )
    if interpret.active():
        interpret.round_once()
        return torch.device("cpu"), INTERPRETER
    built = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "neither"
    if built != backend:
        raise UnsupportedKernel(f"backend {backend} cannot start: torch {torch.__version__} is built for {built}")
    if not torch.cuda.is_available():
        raise UnsupportedKernel(f"backend {backend} cannot start: {_no_device()}")
    device = torch.device("cuda", number)
    found = torch.cuda.get_device_properties(device)
    arch = str(found.gcnArchName).partition(":")[0] if built == "rocm" else f"sm_{found.major}{found.minor}"
    if built == "cuda" and (found.major, found.minor) < (8, 0):
        raise UnsupportedKernel(f"backend cuda cannot start: {found.name} is {arch}; accepted: sm_80 and later")
    return device, arch


def chosen_devices(backend: Name, device: str) -> list[int]:
    """The numbers that `--device` means: `auto` is the first. Raises UsageError for one that is not there, and what
    `find_device` raises."""
    find_device(backend)
    count = INTERPRETED if interpret.active() else torch.cuda.device_count()
    if device in (FIRST, ALL):
        return list(range(1 if device == FIRST else count))
    numbers = [int(number) for number in device.split(",")]
    if outside := [number for number in numbers if number >= count]:
        there = ", ".join(f"{number} ({device_name(backend, number)})" for number in range(count))
        raise UsageError(f"--device {device}: backend {backend} has no device {outside[0]}; there are {there}")
    return numbers


def device_name(backend: Name, number: int) -> str:
    """What its maker calls a device."""
    device, arch = find_device(backend, number)
    return arch if device.type == "cpu" else str(torch.cuda.get_device_properties(device).name)


def other_devices(backend: Name, number: int = 0) -> str:
    """The devices beside one of a backend, by number and name; empty where there are none."""
    count = len(chosen_devices(backend, ALL))
    return ", ".join(f"{other} ({device_name(backend, other)})" for other in range(count) if other != number)


def device_memory(backend: Name) -> tuple[str, int, int]:
    """The name of a backend's device and its free and all bytes. Raises UnsupportedKernel as `find_device`."""
    device, arch = find_device(backend)
    if device.type == "cpu":
        raise UnsupportedKernel(f"backend {backend}: the {arch} has no memory of its own")
    free, total = torch.cuda.mem_get_info(device)
    return str(torch.cuda.get_device_properties(device).name), int(free), int(total)


def _no_device() -> str:
    """Why torch sees no device, in its own words."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch sees no device: {str(error).split('. ')[0].split(chr(10))[0]}"
    return "torch sees no device"


SCRATCH_BYTES: Final = 1 << 29
"""Left free on the device for attention's scores, prepared rows and products under way."""
EXPERT_ROOM: Final = 1.02
"""Slots are as wide as the widest expert and its padding."""
DEVICE_SHARE: Final = 0.92
"""Part of the device's free memory that is used where `--vram` does not say."""


class CudaBackend(DeviceBackend):
    """One device, by its `number`, and one precision.

    `reload` brings back to the host what `take` gave away, `released` bytes, by the addresses of planes: it is called
    before the host computes on.
    `graphs`: whether what is recorded from now on may be captured. Raises UsageError for a precision that there is not,
    UnsupportedKernel where no device can be used.
    """

    name: Name
    tells_ahead = True
    """What the next layer will probably want is told to a provider that reads ahead."""

    def __init__(
        self,
        *,
        backend: Name = "cuda",
        number: int = 0,
        threads: int | None = None,
        precision: Precision = "standard",
        table: CapabilityTable | None = None,
        fail_after: int | None = None,
        vram_bytes: int | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise UsageError(f"--precision {precision}: this version has {', '.join(PRECISIONS)}")
        self.name = backend
        self.number = number
        self.device, self.isa = find_device(backend, number)
        self._matrices: Matrices
        declared = capabilities.declare(CapabilityTable(), backend) if table is None else table
        super().__init__(Matrices(self.device), declared, threads=threads, precision=precision, fail_after=fail_after)
        self._drawing = Drawing(self.device, table=self.table, backend=backend, guard=self._guard)
        self.graphs = True
        self._vram_bytes = vram_bytes
        self._granted: int | None = None
        self._notice = notice
        host = HostExperts(self.threads, precision, self._host_computes)
        self.tier = ExpertTier(self.device, precision, free=self.free_bytes, notice=self._tell, host=host)
        self.reload: Callable[[Collection[int]], None] | None = None
        self.released = 0
        memory = self.memory()
        if told := memory.notice(vram_bytes) if memory is not None else "":
            self._tell(told)

    def memory(self) -> DeviceMemory | None:
        """The device's own memory now; None for the interpreter, which has none."""
        if self.device.type == "cpu":
            return None
        name = str(torch.cuda.get_device_properties(self.device).name)
        return DeviceMemory(name, *torch.cuda.mem_get_info(self.device))

    @property
    def shares_memory(self) -> bool:
        """Whether the device has no memory but the host's: what lies there counts once, in the host's ledger."""
        return self.device.type != "cpu" and bool(torch.cuda.get_device_properties(self.device).is_integrated)

    def fixed_bytes(self, resident_bytes: int) -> int:
        """Bytes of the device beside experts, when matrices of so many bytes will be there."""
        return max(0, resident_bytes - self._matrices.nbytes) + self.vram_used() + SCRATCH_BYTES

    def grant(self, nbytes: int) -> None:
        """Experts may take so many bytes of a memory that is the host's too."""
        self._granted = nbytes

    @property
    def described(self) -> str:
        """The device in words: name, architecture, memory, what drives it."""
        versions = f"torch {torch.__version__}, Triton {triton.__version__}"
        if self.device.type == "cpu":
            return f"{self.isa} of Triton on the CPU, no device ({versions})"
        free, total = torch.cuda.mem_get_info(self.device)
        name = torch.cuda.get_device_properties(self.device).name
        words = f"{name}, {self.isa}, {format_bytes(free)} of {format_bytes(total)} free ({versions})"
        others = other_devices(self.name, self.number)
        return words + f"; it is device {self.number}, --device also takes {others}" * bool(others)

    def take(self, weights: Sequence[Weight]) -> None:
        """Copy matrices whose bytes are there to the device now and give the host's memory back."""
        if self.reload is None:
            raise RuntimeError("the host's bytes are given away, and nothing could bring them back")
        for weight in weights:
            self.released += self._matrices.take(weight.handle)

    def vector(self, name: str, values: F32) -> Vector:
        """Hold a copy of a parameter vector."""
        copied = torch.from_numpy(np.array(values, np.float32)).to(self.device)
        return Vector(name, len(values), copied)

    def recorder(self, *, max_rows: int, max_outputs: int, page_tokens: int, pages: int) -> CudaRecorder:
        """Start recording; buffers have `max_rows` rows, each KV plane `pages` pages of `page_tokens` tokens.

        Raises UnsupportedKernel where no token may be drawn from what will be computed.
        """
        self._drawing.require()
        sizes = {"max_rows": max_rows, "max_outputs": max_outputs, "page_tokens": page_tokens, "pages": pages}
        recorder = CudaRecorder(
            backend=self.name,
            device=self.device,
            precision=self.precision,
            table=self.table,
            tier=self.tier,
            twin=self.twin(**sizes),
            host=partial(self._stand_in, **sizes),
            keep=self._matrices.keep,
            guard=self._guard,
            ready=self._ready,
            drawing=self._drawing,
            captures=self.graphs and self.device.type != "cpu" and self._fail_after is None,
            max_rows=max_rows,
            max_outputs=max_outputs,
            page_tokens=page_tokens,
            pages=pages,
        )
        self._recorders.append(recorder)
        return recorder

    def values(self, vector: Vector) -> F32:
        """A parameter vector, on the host."""
        values: F32 = vector.handle.cpu().numpy()
        return values

    def _stand_in(self, **sizes: int) -> HostTwin:
        """For one operation that is the host's: it has the bytes of its matrices, and needs no other's."""
        twin = self.twin(**sizes)
        twin.open = super().on_host
        return twin

    def on_host(self) -> CpuBackend:
        """The CPU backend, with all that it needs back in the host's memory."""
        if self.released and self.reload is not None:
            self.reload(self._matrices.addresses)
            self.released = 0
        return super().on_host()

    def sample(self, logits: F32, *, temperature: float, top_p: float, uniform: float) -> int:
        """One token from logits `[vocabulary]` of the host, on the device; argmax at temperature 0 or below."""
        with current(self.device):
            return self._drawing.sample(logits, temperature=temperature, top_p=top_p, uniform=uniform)

    def workspace_bytes(self) -> int:
        """Bytes of host memory that running takes: where experts do not all fit, what is on its way between the host
        and the device; all other buffers are on the device."""
        return self.tier.host_bytes(self.free_bytes())

    def traffic(self) -> ExpertTraffic:
        """What was asked of the experts on the device so far."""
        counters = self.tier.counters
        return ExpertTraffic(
            counters.hits, counters.sent, counters.sent_bytes, self.tier.held, counters.host, counters.host_bytes
        )

    def measure_rates(self) -> DeviceRates:
        """Bytes per second of the device's memory and of the way there, measured now."""
        with current(self.device):
            return rates.measure(self.device)

    def takes_experts(self, resident_bytes: int, expert_bytes: int) -> bool:
        """Whether all experts fit on the device beside matrices of so many bytes, with a reserve for their slots."""
        waiting = max(0, resident_bytes - self._matrices.nbytes)
        return expert_bytes * EXPERT_ROOM <= self.free_bytes() - waiting

    def reserve(self, resident_bytes: int) -> None:
        """Matrices of so many bytes are to come, buffers and pages are there. Raises OutOfBudget, before any is read,
        where they leave no room to work in."""
        waiting = max(0, resident_bytes - self._matrices.nbytes)
        there = self.vram_used()
        memory = self.memory()
        if self._vram_bytes is not None:
            usable = self._vram_bytes - there
        elif memory is not None:
            usable = int(memory.free * DEVICE_SHARE)
        else:
            return
        if waiting + SCRATCH_BYTES > usable:
            told = memory.others() if memory is not None else ""
            raise OutOfBudget(
                f"backend {self.name}: {format_bytes(waiting)} of matrices and {format_bytes(SCRATCH_BYTES)} to work in"
                f" are needed on the device before any expert, {format_bytes(max(0, usable))} are left beside "
                f"{format_bytes(there)} of buffers and cache" + f"; {told}" * bool(told)
                + ": raise --vram, lower --ctx or --prefill-chunk, or leave the device out"
            )  # fmt: skip

    def free_bytes(self) -> int:
        """What is left for experts when all else is there: dense weights, pages and work come first."""
        if self._vram_bytes is not None:
            found = self._vram_bytes - self.vram_used() - SCRATCH_BYTES
        elif self.device.type == "cpu":
            found = 1 << 62
        else:
            free, _ = torch.cuda.mem_get_info(self.device)
            found = int(free * DEVICE_SHARE) - SCRATCH_BYTES
        return max(0, found if self._granted is None else min(found, self._granted))

    def _ready(self, experts: ExpertProvider | None) -> None:
        """What must be on the device before a program runs."""
        self._matrices.copy_all()
        self.tier.prepare(experts)

    def _host_computes(self, layer: int, formats: Sequence[str]) -> None:
        """The CPU computes what the device does not have of a layer: its kernels are counted, by format."""
        for name in formats:
            self.table.beside("expert_ffn", name, HOST, what=f"experts of layer {layer}")

    def _tell(self, text: str) -> None:
        if self._notice is not None:
            self._notice(text)


def open_backend(
    *,
    backend: Name = "cuda",
    threads: int | None = None,
    precision: Precision = "standard",
    isa: str = "auto",
    disable: Sequence[str] = (),
    strict: bool = False,
    notice: Callable[[str], None] | None = None,
    fail_after: int | None = None,
    vram_bytes: int | None = None,
    device: str = FIRST,
) -> CudaBackend | SeveralBackend:
    """The backend as options describe it. `isa` names instruction sets of the CPU and changes nothing here; `device` is
    `auto`, `all` or numbers with commas; `vram_bytes` bounds each device.

    Raises UsageError, and UnsupportedKernel where no device can be used.
    """
    numbers = chosen_devices(backend, device)
    table = capabilities.declare(CapabilityTable(strict=strict, notice=notice), backend)
    table.disable(disable)

    def opened(number: int, tell: Callable[[str], None] | None) -> CudaBackend:
        return CudaBackend(
            backend=backend,
            number=number,
            threads=threads,
            precision=precision,
            table=table,
            fail_after=fail_after,
            vram_bytes=vram_bytes,
            notice=tell,
        )

    if len(numbers) == 1:
        return opened(numbers[0], notice)
    return SeveralBackend([opened(number, named(device_in_words(number), notice)) for number in numbers])


def named(name: str, notice: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """A notice that begins with what it is about."""
    return None if notice is None else lambda text: notice(f"{name}: {text}")
