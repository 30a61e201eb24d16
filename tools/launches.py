"""What calls would launch, recorded on a machine without a GPU: kernels, launch configurations, tensor maps, arguments.

The seam is the driver's, under `fp8moe.runtime.launch` and `fp8moe.runtime.jit.load`, through which every kernel is
launched: a user's call runs as it would on an H200, whatever the modules in between are called. The package is unfit
for other use afterwards, so this is for a process of its own.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver

from benchmarks.calls import Operands
from fp8moe.runtime import launch
from fp8moe.runtime.dry_run import DryRun, reserved

NUM_SMS = 132  # of the H200
_ATTRIBUTE_BYTES = 72  # of CUlaunchAttribute


class Untouched(Operands):
    """Operands whose memory is reserved and never written: those of a large model cost nothing."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return reserved(shape, dtype)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> torch.Tensor:
        return self.zeros(*shape, dtype=dtype)

    def uniform(self, *shape: int, mean: float) -> torch.Tensor:
        return self.zeros(*shape, dtype=torch.float32)

    def codes(self, *shape: int) -> torch.Tensor:
        return self.zeros(*shape, dtype=torch.float8_e4m3fn)

    def kv_cache(self, blocks: int, head_dim: int) -> torch.Tensor:
        return self.zeros(blocks, 64, 1, head_dim + 4, dtype=torch.uint8)


class _OnGpu:
    """A tensor that says it is on a GPU."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


class Recorder(DryRun):
    """From its making on, kernels of fp8moe are recorded, not launched, on tensors anywhere.

    calls: of each call of `record` its launches, in order, as JSON holds them; without addresses, so that they are the
        same in every process. A launch has the number of its kernel among `kernels`.
    """

    def __init__(self) -> None:
        self.calls: list[list[dict]] = []
        self._maps: dict[int, tuple[list, object]] = {}  # by the address of the descriptor, which is kept alive
        super().__init__(NUM_SMS)
        launch._prepare = lambda *arguments, **options: None
        launch.check = self._encode
        driver.cuTensorMapReplaceAddress = lambda descriptor, pointer: (driver.CUresult.CUDA_SUCCESS,)

    def record(self, call: Callable[[], object]) -> None:
        """Run a call and add what it launches to `calls`."""
        self.calls.append([])
        call()

    def substitutes(self) -> dict[Any, Any]:
        recorder, map_of_gpu_memory = self, launch.tensor_map

        class Launcher(launch.Launcher):
            def __init__(self, kernel: Any, *, args: tuple = (), **options: Any):
                super().__init__(kernel, args=args, **options)
                # As they are now: calls put in nothing but addresses.
                arguments = [recorder._argument(value) for value in args]
                self._description = {"kernel": kernel.handle, **_configuration(self._config), "arguments": arguments}

            def launch(self, stream: int) -> None:
                recorder.calls[-1].append(self._description)

        return super().substitutes() | {
            launch.Launcher: Launcher,
            launch.tensor_map: lambda tensor, **layout: map_of_gpu_memory(_OnGpu(tensor), **layout),
        }

    def _encode(self, function: Any, *args: Any) -> driver.CUtensorMap:
        """In place of a checked call of the driver that encodes a tensor map."""
        assert function is driver.cuTensorMapEncodeTiled, function
        kind, rank, _, *layout = args  # without the pointer
        descriptor = driver.CUtensorMap()
        numbers = [[int(n) for n in value] if isinstance(value, list) else int(value) for value in layout]
        self._maps[descriptor.getPtr()] = [int(kind), rank, *numbers], descriptor
        return descriptor

    def _argument(self, value: Any) -> list:
        """Layout and present value of a kernel's argument."""
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


def _configuration(made: driver.CUlaunchConfig) -> dict:
    return {
        "grid": [made.gridDimX, made.gridDimY, made.gridDimZ],
        "block": [made.blockDimX, made.blockDimY, made.blockDimZ],
        "shared": made.sharedMemBytes,
        "attributes": [ctypes.string_at(one.getPtr(), _ATTRIBUTE_BYTES).hex() for one in made.attrs],
    }
