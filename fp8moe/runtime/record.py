"""Which kernels calls of fp8moe launch, and how, found on any machine: nothing is compiled or runs on a GPU."""

import ctypes
import math
import mmap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from fp8moe.runtime import config, jit, launch

if TYPE_CHECKING:
    from cuda.bindings.driver import CUlaunchConfig

_MAP_NORESERVE = 0x4000  # of Linux; the module mmap has the name from Python 3.13 on
_SMALL = 1 << 16  # bytes
_ATTRIBUTE_BYTES = 72  # of CUlaunchAttribute


def reserved(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory that takes no room until it is written: those of a large model cost nothing."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class Recorder:
    """From its making on, calls of fp8moe on tensors of the CPU run as on a GPU of `num_sms` SMs, but for the kernels.

    It replaces what lies under the package: the compiler, the functions of the CUDA driver, and PyTorch's answers about
    the current GPU. The process is unfit for other use afterwards. What a kernel would write is left as it is, and new
    memory is zero: PyTorch may index by it.

    kernels: those that were loaded, in their order, each with its number.
    launches: in their order, as JSON holds them: the number of the kernel, the configuration, and of each argument
        layout and value, without addresses, so that they are equal in every process.
    """

    def __init__(self, num_sms: int) -> None:
        from cuda.bindings import driver

        self.kernels: dict[jit.KernelSpec, int] = {}
        self.launches: list[dict] = []
        self._maps: dict[int, tuple[list, object]] = {}  # by the address of the descriptor, which is kept alive
        config.settings = replace(config.settings, backend="record")
        jit.cubin = lambda spec: spec
        jit._load_cubin = self._load
        launch.Launcher.__init__ = self._built(launch.Launcher.__init__)
        launch._prepare = lambda kernel, smem, cluster_blocks: None
        launch._multiprocessors = lambda index: num_sms
        driver.cuTensorMapEncodeTiled = self._encode
        driver.cuTensorMapReplaceAddress = lambda descriptor, pointer: (driver.CUresult.CUDA_SUCCESS,)
        torch._C._cuda_getDevice = lambda: None  # none is current, and
        torch.cuda.device = nullcontext  # to make one so does nothing
        torch._C._cuda_getCurrentRawStream = lambda index: 0
        for owner, name in ((torch, "empty"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
            setattr(owner, name, _zeroed(getattr(owner, name)))

    def record(self, call: Callable[[], object]) -> list[dict]:
        """The launches of a call."""
        before = len(self.launches)
        call()
        return self.launches[before:]

    def _load(self, spec: jit.KernelSpec, name: str) -> SimpleNamespace:
        return SimpleNamespace(handle=self.kernels.setdefault(spec, len(self.kernels)))

    def _built(self, build: Callable[..., None]) -> Callable[..., None]:
        """`Launcher.__init__` whose launcher notes its launches."""

        def built(launcher: launch.Launcher, kernel: Any, *, args: tuple = (), **options: Any) -> None:
            build(launcher, kernel, args=args, **options)
            # The arguments as they are now: calls put in nothing but addresses.
            configuration = _described(launcher._config)
            noted = {"kernel": kernel.handle, **configuration, "arguments": [*map(self._argument, args)]}
            launcher._launch = lambda *_: (self.launches.append(noted),)

        return built

    def _encode(self, kind: Any, rank: int, pointer: int, *layout: Any) -> tuple:
        from cuda.bindings import driver

        descriptor = driver.CUtensorMap()
        numbers = [[int(n) for n in value] if isinstance(value, list) else int(value) for value in layout]
        self._maps[descriptor.getPtr()] = [int(kind), rank, *numbers], descriptor
        return driver.CUresult.CUDA_SUCCESS, descriptor

    def _argument(self, value: Any) -> list:
        if isinstance(value, launch.TensorMap):
            return ["tensor map", *self._maps[value.address][0]]
        return [_layout(type(value)), bytes(value).hex()]


def _layout(kind: type) -> str | list:
    """A ctypes type: a letter and a size; of an array its elements, of a structure size and fields with offsets."""
    if issubclass(kind, ctypes.Array):
        return [kind._length_, _layout(kind._type_)]
    if not issubclass(kind, ctypes.Structure):
        return f"{kind._type_}{ctypes.sizeof(kind)}"
    fields = [[name, getattr(kind, name).offset, _layout(of)] for name, of, *_ in kind._fields_]
    return [ctypes.sizeof(kind), *fields]


def _described(made: "CUlaunchConfig") -> dict:
    return {
        "grid": [made.gridDimX, made.gridDimY, made.gridDimZ],
        "block": [made.blockDimX, made.blockDimY, made.blockDimZ],
        "shared": made.sharedMemBytes,
        "attributes": [ctypes.string_at(one.getPtr(), _ATTRIBUTE_BYTES).hex() for one in made.attrs],
    }


def _zeroed(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocated(*args: Any, **options: Any) -> torch.Tensor:
        if str(options.get("device")) == "meta":
            return allocate(*args, **options)
        layout = allocate(*args, **options | {"device": "meta"})
        nbytes = layout.untyped_storage().nbytes()
        if nbytes > _SMALL:
            return reserved((nbytes // layout.itemsize,), layout.dtype).as_strided(layout.shape, layout.stride())
        tensor = allocate(*args, **options)
        return tensor if tensor.is_meta else tensor.zero_()

    return allocated
