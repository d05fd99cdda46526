"""Int4 products of other programs, when they are installed: llama.cpp's ggml, onnxruntime and PyTorch.

Each rival holds random matrices of one shape, more than a cache holds, in the form that it wants them, and multiplies
all of them with the same rows of x through its own public interface. Must not know how ours are computed.

Measured is one pass over all matrices: what each does to x included, their dispatch per matrix included, loading and
repacking of weights not. ggml computes one graph with a product per matrix, onnxruntime one model with a node per
matrix, PyTorch one call per matrix from Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from picaflor.formats.base import F32

GROUP_SIZE: Final = 64
GGML_F32: Final = 0
GGML_TYPES: Final = {"Q4_0": (2, 32, 18), "Q4_K": (12, 256, 144)}
"""Name: (number of the type, weights of a block, bytes of a block)."""


class Rival(Protocol):
    """Matrices held by another program."""

    name: str
    nbytes: int
    """Stored bytes of all matrices: codes, scales and zero points."""
    count: int
    """Matrices."""

    def run(self, x: F32) -> None:
        """Multiply every matrix with x `[n, cols]`, an array that `ready` has seen."""
        ...

    def ready(self, x: F32, threads: int) -> None:
        """Prepare what depends on the number of rows and of threads; not timed."""
        ...


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """The ggml library that llama-cpp-python brings. Raises ImportError where it is not installed or lacks a part."""

    def __init__(self) -> None:
        package = import_module("llama_cpp")
        folder = Path(str(package.__file__)).parent / "lib"
        found = {part: sorted(folder.glob(f"*{part}.so")) for part in ("ggml-base", "ggml-cpu", "ggml")}
        missing = [part for part, paths in found.items() if not paths]
        if missing:
            raise ImportError(f"llama_cpp has no shared library {', '.join(missing)} in {folder}")
        self._libraries = [ctypes.CDLL(str(found[part][0])) for part in ("ggml-base", "ggml-cpu", "ggml")]
        self.version = str(package.__version__)
        self._silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *words: None)
        self.call("ggml_log_set", None, [type(self._silent), ctypes.c_void_p])(self._silent, None)
        self.call("ggml_backend_load_all", None, [])()
        self.backend = self.call("ggml_backend_cpu_init")()
        if not self.backend:
            raise ImportError("ggml has no CPU backend")

    def call(self, name: str, result: Any = ctypes.c_void_p, arguments: Sequence[Any] | None = None) -> Any:
        """A function of the library; arguments are pointers where nothing is said."""
        for library in self._libraries:
            if hasattr(library, name):
                function = getattr(library, name)
                function.restype = result
                if arguments is not None:
                    function.argtypes = list(arguments)
                return function
        raise ImportError(f"ggml has no function {name}")

    def buffer_type(self, *, repack: bool) -> Any:
        """Where weights live: as stored, or in the form that its CPU kernels prefer."""
        pointer = ctypes.c_void_p
        if not repack:
            return self.call("ggml_backend_cpu_buffer_type")()
        device = self.call("ggml_backend_get_device", pointer, [pointer])(self.backend)
        registry = self.call("ggml_backend_dev_backend_reg", pointer, [pointer])(device)
        find = self.call("ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p])
        address = find(registry, b"ggml_backend_dev_get_extra_bufts")
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(pointer), pointer)(address)(device)
        name = self.call("ggml_backend_buft_name", ctypes.c_char_p, [pointer])
        index = 0
        while kinds[index]:
            if name(kinds[index]) == b"CPU_REPACK":
                return kinds[index]
            index += 1
        raise ImportError("ggml has no repacked form of weights here")


class GgmlMatrices:
    """Matrices of one ggml type. `repack`: in the form that llama.cpp chooses when it loads a model."""

    def __init__(self, ggml: Ggml, kind: str, rows: int, cols: int, count: int, *, repack: bool) -> None:
        self._ggml = ggml
        self.name = f"llama.cpp {kind}{' repacked' if repack else ''}"
        number, weights, size = GGML_TYPES[kind]
        self._cols, self.count = cols, count
        self._made_for = 0
        self._results: tuple[Any, Any] | None = None
        each = rows * cols // weights * size
        self.nbytes = count * each
        pointer, long = ctypes.c_void_p, ctypes.c_int64
        self._context = self._new_context(count)
        new = ggml.call("ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, long, long])
        self._tensors = [new(self._context, number, cols, rows) for _ in range(count)]
        allocate = ggml.call("ggml_backend_alloc_ctx_tensors_from_buft", pointer, [pointer, pointer])
        if not allocate(self._context, ggml.buffer_type(repack=repack)):
            raise MemoryError(f"{self.name}: no memory for {self.nbytes} bytes")
        data = _ggml_blocks(kind, rows * cols // weights)
        fill = ggml.call("ggml_backend_tensor_set", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t])
        for tensor in self._tensors:
            fill(tensor, data.ctypes.data, 0, each)

    def _new_context(self, tensors: int) -> Any:
        init = self._ggml.call("ggml_init", ctypes.c_void_p, [_InitParams])
        return init(_InitParams((tensors + 16) * 512 + (1 << 20), None, True))

    def ready(self, x: F32, threads: int) -> None:
        """One graph with a product per matrix, kept while the number of rows stays."""
        ggml, pointer = self._ggml, ctypes.c_void_p
        ggml.call("ggml_backend_cpu_set_n_threads", None, [pointer, ctypes.c_int])(ggml.backend, threads)
        if self._made_for != len(x):
            self._make_graph(x)
            self._made_for = len(x)

    def _make_graph(self, x: F32) -> None:
        ggml, pointer, long = self._ggml, ctypes.c_void_p, ctypes.c_int64
        if self._results is not None:
            buffer, context = self._results
            ggml.call("ggml_backend_buffer_free", None, [pointer])(buffer)
            ggml.call("ggml_free", None, [pointer])(context)
        context = self._new_context(3 * len(self._tensors))
        new = ggml.call("ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, long, long])
        rows = new(context, GGML_F32, self._cols, len(x))
        multiply = ggml.call("ggml_mul_mat", pointer, [pointer, pointer, pointer])
        products = [multiply(context, tensor, rows) for tensor in self._tensors]
        make = ggml.call("ggml_new_graph_custom", pointer, [pointer, ctypes.c_size_t, ctypes.c_bool])
        self._graph = make(context, 2 * len(products) + 16, False)
        expand = ggml.call("ggml_build_forward_expand", None, [pointer, pointer])
        for product in products:
            expand(self._graph, product)
        buffer = ggml.call("ggml_backend_alloc_ctx_tensors", pointer, [pointer, pointer])(context, ggml.backend)
        self._results = (buffer, context)
        fill = ggml.call("ggml_backend_tensor_set", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t])
        fill(rows, x.ctypes.data, 0, x.nbytes)
        self._compute = ggml.call("ggml_backend_graph_compute", ctypes.c_int, [pointer, pointer])

    def run(self, x: F32) -> None:
        """Compute the graph of the last `ready`."""
        if self._compute(self._ggml.backend, self._graph) != 0:
            raise RuntimeError(f"{self.name}: ggml could not compute the graph")


def _ggml_blocks(kind: str, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random blocks whose half floats are small and finite."""
    _, _, size = GGML_TYPES[kind]
    blocks = np.random.default_rng(4).integers(0, 256, (count, size), dtype=np.uint8)
    halves = 1 if kind == "Q4_0" else 2
    blocks[:, : 2 * halves] = np.frombuffer(np.array([0.01] * halves, np.float16).tobytes(), np.uint8)
    return blocks


class OnnxMatrices:
    """MatMulNBits nodes, int4 by 64 with float32 scales, accuracy level 4: int8 activations, its fastest."""

    def __init__(self, rows: int, cols: int, count: int) -> None:
        self._runtime = import_module("onnxruntime")
        self._onnx = import_module("onnx")
        self.name = f"onnxruntime MatMulNBits {GROUP_SIZE}"
        self._rows, self._cols, self.count = rows, cols, count
        blocks = -(-cols // GROUP_SIZE)
        self.nbytes = count * rows * blocks * (GROUP_SIZE // 2 + 4)
        self._model = self._make(blocks)
        self._sessions: dict[int, Any] = {}

    def _make(self, blocks: int) -> bytes:
        helper, numpy_helper = self._onnx.helper, self._onnx.numpy_helper
        rng = np.random.default_rng(5)
        nodes, weights, outputs = [], [], []
        for index in range(self.count):
            codes = rng.integers(0, 256, (self._rows, blocks, GROUP_SIZE // 2), dtype=np.uint8)
            scales = rng.random(self._rows * blocks, dtype=np.float32) / 100
            weights += [
                numpy_helper.from_array(codes, f"codes{index}"),
                numpy_helper.from_array(scales, f"scales{index}"),
            ]
            nodes.append(
                helper.make_node(
                    "MatMulNBits",
                    ["x", f"codes{index}", f"scales{index}"],
                    [f"y{index}"],
                    domain="com.microsoft",
                    K=self._cols,
                    N=self._rows,
                    bits=4,
                    block_size=GROUP_SIZE,
                    accuracy_level=4,
                )
            )
            outputs.append(helper.make_tensor_value_info(f"y{index}", 1, ["n", self._rows]))
        graph = helper.make_graph(
            nodes, "products", [helper.make_tensor_value_info("x", 1, ["n", self._cols])], outputs, weights
        )
        sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model: bytes = helper.make_model(graph, opset_imports=sets, ir_version=10).SerializeToString()
        return model

    def ready(self, x: F32, threads: int) -> None:
        """A session per number of threads: they are fixed when it is made."""
        if threads not in self._sessions:
            options = self._runtime.SessionOptions()
            options.intra_op_num_threads = threads
            options.inter_op_num_threads = 1
            self._sessions.clear()
            self._sessions[threads] = self._runtime.InferenceSession(
                self._model, options, providers=["CPUExecutionProvider"]
            )
        self._session = self._sessions[threads]

    def run(self, x: F32) -> None:
        """All nodes, one after the other."""
        self._session.run(None, {"x": x})


class TorchMatrices:
    """PyTorch's packed int4 by 64 with bfloat16 scales, zero points and activations."""

    def __init__(self, rows: int, cols: int, count: int) -> None:
        torch = import_module("torch")
        self._torch = torch
        self.name = f"PyTorch int4pack {GROUP_SIZE}"
        generator = torch.Generator().manual_seed(6)
        codes = torch.randint(0, 16, (rows, cols), dtype=torch.int32, generator=generator)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = torch.rand((cols // GROUP_SIZE, rows, 2), generator=generator).to(torch.bfloat16) / 100
        self._weights = [(packed.clone(), scales.clone()) for _ in range(count)]
        self.count = count
        self.nbytes = count * (packed.numel() * packed.element_size() + scales.numel() * 2)

    def ready(self, x: F32, threads: int) -> None:
        """Its number of threads is the process's."""
        self._torch.set_num_threads(threads)
        self._x = self._torch.from_numpy(x).to(self._torch.bfloat16)

    def run(self, x: F32) -> None:
        """One call per matrix."""
        multiply = self._torch.ops.aten._weight_int4pack_mm_for_cpu
        for packed, scales in self._weights:
            multiply(self._x, packed, GROUP_SIZE, scales)


def installed(rows: int, cols: int, total_bytes: int) -> tuple[list[Rival], list[str]]:
    """(every rival that is installed, with matrices of this shape; a line for each that is not)."""
    rivals: list[Rival] = []
    absent: list[str] = []

    def attempt(what: str, make: Callable[[], Sequence[Rival]]) -> None:
        try:
            rivals.extend(make())
        except (ImportError, AttributeError) as error:
            absent.append(f"{what}: {error}")

    def count_of(bits: float) -> int:
        return max(2, round(total_bytes / (rows * cols * bits / 8)))

    def ggml_matrices() -> list[Rival]:
        ggml = Ggml()
        return [
            GgmlMatrices(ggml, kind, rows, cols, count_of(4.5), repack=repack)
            for kind in GGML_TYPES
            if cols % GGML_TYPES[kind][1] == 0
            for repack in (True, False)
        ]

    attempt("llama-cpp-python", ggml_matrices)
    attempt("onnxruntime", lambda: [OnnxMatrices(rows, cols, count_of(4.5))])
    if cols % GROUP_SIZE == 0:
        attempt("torch", lambda: [TorchMatrices(rows, cols, count_of(4.5))])
    return rivals, absent
