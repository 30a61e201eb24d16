"""fp8moe's calls as they run on a GPU, on a machine without one: kernels are noted, not compiled or launched.

The seam is that of `runtime.launch` and `runtime.jit.load`, through which every kernel is launched: a call runs as it
would on a GPU, whatever the modules in between are called. The package is unfit for other use afterwards, so this is
for a process of its own.
"""

import math
import mmap
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from fp8moe.runtime import backend, config, jit, launch

_MAP_NORESERVE = 0x4000  # of Linux; the module mmap has the name from Python 3.13 on
_SMALL = 1 << 16  # bytes


def reserved(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory that takes no room until it is written: those of a large model cost nothing."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class DryRun:
    """From its making on, calls of fp8moe on tensors anywhere run as on a GPU of `num_sms` SMs, but for their kernels.

    kernels: the specs of those that would be launched, in the order in which they are loaded, each with its number.

    What a kernel would write is left as it is, and new memory is zero: PyTorch may index by it.
    """

    def __init__(self, num_sms: int) -> None:
        self.kernels: dict[jit.KernelSpec, int] = {}
        config.settings = replace(config.settings, backend="auto")
        _replace(self.substitutes())
        launch._multiprocessors = lambda index: num_sms
        for owner, name in ((torch, "empty"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
            setattr(owner, name, _zeroed(getattr(owner, name)))

    def substitutes(self) -> dict[Any, Any]:
        """What takes the place of what, in all modules of fp8moe."""
        return {
            launch.Launcher: _Launcher,
            launch.tensor_map: lambda tensor, **layout: _TensorMap(),
            launch.device_guard: lambda index: nullcontext(),
            launch.current_stream: lambda index: 0,
            jit.load: self._load,
            backend.use_cuda: lambda *tensors: True,
        }

    def _load(self, spec: jit.KernelSpec) -> SimpleNamespace:
        return SimpleNamespace(handle=self.kernels.setdefault(spec, len(self.kernels)))


class _Launcher:
    def __init__(self, kernel: Any, **options: Any):
        self.lock = threading.Lock()

    def launch(self, stream: int) -> None:
        pass


class _TensorMap:
    def replace_address(self, pointer: int) -> None:
        pass


def _replace(substitutes: dict[Any, Any]) -> None:
    """Put each substitute wherever a module of fp8moe has the original."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "fp8moe":
            for name, value in list(vars(module).items()):
                for original, substitute in substitutes.items():
                    if value is original:
                        setattr(module, name, substitute)


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
