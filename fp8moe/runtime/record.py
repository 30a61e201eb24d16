"""Record the kernel launches of calls of fp8moe on any machine, without compiling a kernel or using a GPU."""

import ctypes
import math
import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8moe.runtime import config, jit, launch

if TYPE_CHECKING:
    from cuda.bindings.driver import CUlaunchConfig

_MAP_NORESERVE = 0x4000  # value of MAP_NORESERVE on Linux; the module mmap defines it from Python 3.13 on
_SMALL = 1 << 16  # bytes; tensors above this size get reserved memory
_ATTRIBUTE_BYTES = 72  # size of CUlaunchAttribute


def reserved(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that occupy no memory until they are written, so that a large model fits any machine."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def reserve_memory(module: nn.Module) -> None:
    """Replace the module's tensors on the meta device by `reserved` ones; tied tensors stay tied."""
    made: dict[int, torch.Tensor] = {}

    def filled(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        if id(value) not in made:
            memory = reserved(tuple(value.shape), value.dtype)
            made[id(value)] = nn.Parameter(memory, requires_grad=False) if isinstance(value, nn.Parameter) else memory
        return made[id(value)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers, vars(part)):
            tensors.update({name: filled(value) for name, value in tensors.items()})


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, which may make a `Recorder`, in a new process; return its result or raise its error.

    The function must be defined in a module other than ``__main__``, which the new process does not import. So the
    caller's script needs no ``if __name__ == "__main__"``. Ctrl-C interrupts only the calling process, which then kills
    the new one.
    """
    code = f"from {__name__} import _answer; _answer()"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "FP8MOE_BATCH_INVARIANT": str(int(config.settings.batch_invariant)),
    }
    # the new process inherits this mask, so Ctrl-C does not interrupt it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        answer, _ = process.communicate(pickle.dumps((function, arguments)))
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        raise RuntimeError("a process ended before its work did, perhaps for want of memory")
    result, error = pickle.loads(answer)
    if error is not None:
        raise error
    return result


def _answer() -> None:
    """Read a pickled function call from standard input, run it, and write only its result or error to stdout."""
    output = os.dup(1)
    os.dup2(2, 1)
    function, arguments = pickle.load(sys.stdin.buffer)
    try:
        answer = function(*arguments), None
    except Exception as error:
        answer = None, error
    with os.fdopen(output, "wb") as file:
        pickle.dump(answer, file)


class Recorder:
    """Runs calls of fp8moe on CPU tensors as if on a GPU of `num_sms` SMs; kernel launches are recorded, not made.

    It replaces the compiler, functions of the CUDA driver, and PyTorch's answers about the current GPU, so the process
    is unfit for other use afterwards. Kernels write no results; new memory is zeroed, as PyTorch may index by values
    in it.

    kernels: loaded kernels in order, each with its number.
    launches: launches in order, as JSON values: the number of the kernel, the launch configuration, and layout and
        value of each argument, without addresses, so that launches are equal in every process.
    """

    def __init__(self, num_sms: int) -> None:
        from cuda.bindings import driver

        self.kernels: dict[jit.KernelSpec, int] = {}
        self.launches: list[dict] = []
        # address of a descriptor -> (its recorded values, the descriptor itself, to keep it alive)
        self._maps: dict[int, tuple[list, object]] = {}
        config.settings = replace(config.settings, backend="record")
        jit.cubin = lambda spec: spec
        jit._load_cubin = self._load
        launch.Launcher.__init__ = self._built(launch.Launcher.__init__)
        launch._prepare = lambda kernel, smem, cluster_blocks: None
        launch._multiprocessors = lambda index: num_sms
        driver.cuTensorMapEncodeTiled = self._encode
        driver.cuTensorMapReplaceAddress = lambda descriptor, pointer: (driver.CUresult.CUDA_SUCCESS,)
        # No device is current, and making one current does nothing.
        torch._C._cuda_getDevice = lambda: None
        torch.cuda.device = nullcontext
        torch._C._cuda_getCurrentRawStream = lambda index: 0
        for owner, name in ((torch, "empty"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
            setattr(owner, name, _zeroed(getattr(owner, name)))

    def record(self, call: Callable[[], object]) -> list[dict]:
        """Run a call; return the kernel launches that it makes."""
        before = len(self.launches)
        call()
        return self.launches[before:]

    def _load(self, spec: jit.KernelSpec, name: str) -> SimpleNamespace:
        return SimpleNamespace(handle=self.kernels.setdefault(spec, len(self.kernels)))

    def _built(self, build: Callable[..., None]) -> Callable[..., None]:
        """Wrap `Launcher.__init__` so that launchers record their launches."""

        def built(launcher: launch.Launcher, kernel: Any, *, args: tuple = (), **options: Any) -> None:
            build(launcher, kernel, args=args, **options)
            # Record arguments when a launcher is built: later calls change only addresses, which are not recorded.
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
    """Describe a ctypes type: scalars by letter and size, arrays by length and item, structures by size and fields."""
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
