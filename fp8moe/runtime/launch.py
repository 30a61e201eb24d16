"""Launching kernels from the host: tensor maps, streams, devices, launchers, and the cache of launch plans."""

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from fp8moe.runtime import config
from fp8moe.runtime.driver import DriverError, check, cuda_core, loading_code
from fp8moe.runtime.sm90 import MAX_BLOCKS_PER_PORTABLE_CLUSTER

if TYPE_CHECKING:
    from cuda.bindings.driver import CUlaunchAttribute, CUlaunchConfig, CUtensorMap
    from cuda.core import Kernel

Dim3 = int | tuple[int, ...]

_DEFAULT_SMEM = 48 << 10  # static and dynamic shared memory of a block together that need no permission

_TMA_TYPES = {  # dtypes of more than one byte -> the driver's name
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.float32: "FLOAT32",
    torch.int32: "INT32",
    torch.int64: "INT64",
}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}


class TensorMap:
    """A TMA descriptor in host memory, made by `tensor_map`. It holds the tensor's address, and no reference to it."""

    def __init__(self, descriptor: "CUtensorMap", pointer: int):
        from cuda.bindings import driver

        self._replace = driver.cuTensorMapReplaceAddress
        self._descriptor = descriptor
        self._pointer = pointer

    @property
    def address(self) -> int:
        """The address of the descriptor itself."""
        return self._descriptor.getPtr()

    def replace_address(self, pointer: int) -> None:
        """Point the map at other device memory. Raises RuntimeError unless `pointer` is a multiple of 16."""
        if pointer != self._pointer:
            (status,) = self._replace(self._descriptor, pointer)
            if status:
                raise DriverError("cuTensorMapReplaceAddress", status.name)
            self._pointer = pointer


def tensor_map(
    tensor: Tensor,
    *,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 0,
    l2_promotion: int = 256,
) -> TensorMap:
    """Make a TMA descriptor, on the current device, over the memory of a CUDA tensor from its first element on.

    Elements outside `shape` read as zeros and are not written.

    tensor: one byte per element (mapped as uint8), bfloat16, float16, float32, int32 or int64; 16-byte aligned.
    shape, strides, box: in elements, outermost dimension first, 1 to 5 dimensions. The innermost stride is 1, the
        others are multiples of 16 bytes; the stride of a dimension of size 1 is ignored. A box has 1 to 256 elements
        per dimension; its innermost dimension is a multiple of 16 bytes, and at most the swizzle width.
    swizzle: 0, 32, 64 or 128 bytes. l2_promotion: 0, 64, 128 or 256 bytes fetched into L2 at a time.

    Raises ValueError if the layout cannot be mapped or reaches past the tensor's storage, or the tensor is not on a
    GPU; TypeError for a dtype that TMA does not know.
    """
    kind = "UINT8" if tensor.element_size() == 1 else _TMA_TYPES.get(tensor.dtype)
    if kind is None:
        raise TypeError(f"tensor is {tensor.dtype}; a tensor map takes one byte or {', '.join(map(str, _TMA_TYPES))}")
    strides = _map_strides(tensor, shape, strides)
    _check_box(box, len(shape), tensor.element_size(), swizzle)
    if l2_promotion not in _PROMOTIONS:
        raise ValueError(f"l2_promotion is {l2_promotion}; it must be one of {tuple(_PROMOTIONS)}")
    pointer = tensor.data_ptr()
    if not (tensor.is_cuda or config.settings.backend == "record") or pointer % 16:
        raise ValueError(
            f"tensor is on {tensor.device} at {pointer:#x}; a map takes GPU memory at a multiple of 16 bytes"
        )

    from cuda.bindings import driver

    # The driver wants the innermost dimension first, and strides in bytes, without the innermost.
    size = tensor.element_size()
    descriptor = check(
        driver.cuTensorMapEncodeTiled,
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
        len(shape),
        pointer,
        [driver.cuuint64_t(n) for n in reversed(shape)],
        [driver.cuuint64_t(stride * size) for stride in reversed(strides[:-1])],
        [driver.cuuint32_t(n) for n in reversed(box)],
        [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[swizzle]}"),
        getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{_PROMOTIONS[l2_promotion]}"),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return TensorMap(descriptor, pointer)


def _map_strides(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides that TMA accepts: the given strides, with valid replacements in dimensions of size 1.

    Raises ValueError if TMA cannot map the layout.
    """
    if not 1 <= len(shape) <= 5 or len(strides) != len(shape):
        raise ValueError(f"shape {shape} and strides {strides} must have the same 1 to 5 dimensions")
    if min(shape) < 1 or max(shape) > 1 << 32:
        raise ValueError(f"shape is {shape}; each dimension must be between 1 and 2**32")
    if min(strides) < 0 or (strides[-1] != 1 and shape[-1] != 1):
        raise ValueError(f"strides are {strides}; they must not be negative, and the innermost must be 1")
    size = tensor.element_size()
    granule = 16 // size
    used = tuple(granule if n == 1 else s for n, s in zip(shape[:-1], strides[:-1], strict=True))
    for stride in used:
        if stride % granule or stride * size >= 1 << 40:
            raise ValueError(f"strides are {strides}; outer ones must be multiples of {granule} elements (16 bytes)")
    used += (1,)
    # TMA does not know where the storage ends, so check that here.
    end = tensor.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(shape, used, strict=True))
    if end * size > tensor.untyped_storage().nbytes():
        raise ValueError(f"shape {shape} with strides {strides} reaches past the storage of the tensor")
    return used


def _check_box(box: tuple[int, ...], rank: int, element_size: int, swizzle: int) -> None:
    if swizzle not in _SWIZZLES:
        raise ValueError(f"swizzle is {swizzle}; it must be one of {tuple(_SWIZZLES)}")
    if len(box) != rank or min(box) < 1 or max(box) > 256:
        raise ValueError(f"box is {box}; it must have {rank} dimensions of 1 to 256 elements")
    width = box[-1] * element_size
    if width % 16 or (swizzle and width > swizzle):
        limit = f", at most the swizzle of {swizzle}" if swizzle else ""
        raise ValueError(f"box is {box}: {width} bytes in its innermost dimension, not a multiple of 16{limit}")


def current_stream(device_index: int) -> int:
    """Return the handle of PyTorch's current stream on a device, under graph capture too."""
    return torch._C._cuda_getCurrentRawStream(device_index)


class _BoundDevices(threading.local):
    """The devices whose context this thread has already made current."""

    def __init__(self) -> None:
        self.indices: set[int] = set()


_bound = _BoundDevices()
_no_guard = nullcontext()


def device_guard(device_index: int) -> AbstractContextManager[Any]:
    """Return a context manager that makes a device current. It costs next to nothing for the current device."""
    if torch._C._cuda_getDevice() != device_index:
        return torch.cuda.device(device_index)
    if device_index not in _bound.indices:
        # In a new thread PyTorch's device is set but no context is current, and the driver API needs one.
        cuda_core().Device(device_index).set_current()
        _bound.indices.add(device_index)
    return _no_guard


@functools.cache
def _multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def num_sms(device_index: int) -> int:
    """Return how many SMs a kernel may occupy on a device: all, or FP8MOE_NUM_SMS if that is fewer."""
    limit = config.settings.num_sms
    count = _multiprocessors(device_index)
    return count if limit is None else min(limit, count)


def resident_blocks(blocks_per_sm: int, device_index: int) -> int:
    """Return the grid size of a persistent kernel: the number of thread blocks that run at the same time."""
    return blocks_per_sm * num_sms(device_index)


class Launcher:
    """A kernel with its launch configuration and arguments: built once, launched many times, on one device.

    Build and launch it with that device current (`device_guard`). It keeps no tensors alive.

    kernel: from `jit.load`.
    grid: blocks (not clusters), an int or up to three ints (x, y, z). block: threads per block, likewise.
    cluster: blocks per cluster, likewise; it must divide the grid. More than 8 blocks are not portable, but allowed.
    smem: dynamic shared memory per block in bytes.
    pdl: start before the previous kernel in the stream has finished (programmatic dependent launch). This kernel must
        then execute griddepcontrol.wait before it reads or writes what the previous kernel writes.
    args: one per kernel parameter: a `TensorMap` for a `const __grid_constant__ CUtensorMap`, otherwise a ctypes object
        of the declared type, such as a `ctypes.c_int64` for a pointer. Each launch reads the objects' current values:
        hold `lock` while you change them and launch.

    Raises ValueError if the cluster does not divide the grid, RuntimeError if the device has less shared memory or the
    driver cannot load the kernel.
    """

    def __init__(
        self,
        kernel: "Kernel",
        *,
        grid: Dim3,
        block: Dim3,
        cluster: Dim3 | None = None,
        smem: int = 0,
        pdl: bool = False,
        args: Sequence[Any] = (),
    ):
        from cuda.bindings import driver

        self.lock = threading.Lock()
        self._config = _launch_config(_dim3(grid), _dim3(block), _dim3(cluster or 1), smem, pdl)
        _prepare(kernel, smem, cluster_blocks=math.prod(_dim3(cluster or 1)))
        self._launch = driver.cuLaunchKernelEx
        self._function = driver.CUfunction(int(kernel.handle))  # the driver accepts a CUkernel here
        self._pointers = (ctypes.c_void_p * len(args))(*map(_address, args))
        self._parameters = ctypes.addressof(self._pointers)
        self._alive = kernel, args

    def launch(self, stream: int) -> None:
        """Enqueue the kernel on a stream. Raises RuntimeError if the driver refuses the launch."""
        self._config.hStream = stream
        (status,) = self._launch(self._config, self._function, self._parameters, 0)
        if status:
            raise DriverError("cuLaunchKernelEx", status.name)


class PointerLauncher:
    """A `Launcher` whose launches differ only in pointers. Call it with the tensors that the pointers point to.

    kernel, options: as for `Launcher`.
    pointers: number of leading kernel parameters that are pointers.
    args: the remaining parameters. All elements of a c_int64 array are pointers too, and so are the first
        ``_pointers_`` fields of a structure whose class has that attribute.
    """

    def __init__(self, kernel: "Kernel", *, pointers: int = 0, args: Sequence[Any] = (), **options: Any):
        # Setting all pointers through one array takes less time than setting them one by one.
        first = (ctypes.c_int64 * pointers)()
        parameters = [ctypes.c_int64.from_buffer(first, 8 * i) for i in range(pointers)]
        counted = [(arg, _pointers_in(arg)) for arg in args]
        views = [first, *((ctypes.c_int64 * count).from_buffer(arg) for arg, count in counted)]
        self._views = [view for view in views if len(view)]
        self._count = sum(map(len, self._views))
        self._launcher = Launcher(kernel, args=(*parameters, *args), **options)

    def __call__(self, first: Tensor, *others: Tensor | None) -> None:
        """Enqueue the kernel on PyTorch's current stream, on the device of `first`.

        first, others: the tensors that the pointers point to, in the order of the parameters; None for a null pointer.
        """
        index = first.get_device()
        with device_guard(index):
            addresses = (0 if operand is None else operand.data_ptr() for operand in others)
            self.launch(current_stream(index), first.data_ptr(), *addresses)

    def launch(self, stream: int, *addresses: int) -> None:
        """Enqueue the kernel on a stream of the current device, for operands at these addresses.

        Raises ValueError for a wrong number of addresses, RuntimeError if the driver refuses the launch.
        """
        if len(addresses) != self._count:
            raise ValueError(f"expected {self._count} addresses, got {len(addresses)}")
        launcher = self._launcher
        with launcher.lock:
            if len(self._views) == 1:
                self._views[0][:] = addresses
            else:
                rest = iter(addresses)
                for view in self._views:
                    view[:] = tuple(islice(rest, len(view)))
            launcher.launch(stream)


def _pointers_in(argument: Any) -> int:
    return len(argument) if isinstance(argument, ctypes.Array) else getattr(argument, "_pointers_", 0)


def _address(argument: Any) -> int:
    return argument.address if isinstance(argument, TensorMap) else ctypes.addressof(argument)


def _dim3(size: Dim3) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return (*sizes, 1, 1)[:3]


def _launch_config(
    grid: tuple[int, int, int], block: tuple[int, int, int], cluster: tuple[int, int, int], smem: int, pdl: bool
) -> "CUlaunchConfig":
    from cuda.bindings import driver

    if any(blocks % size for blocks, size in zip(grid, cluster, strict=True)):
        raise ValueError(f"grid is {grid} blocks, which clusters of {cluster} blocks do not divide")
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = smem
    attributes = []
    if cluster != (1, 1, 1):
        attributes.append(attribute := _attribute("CLUSTER_DIMENSION"))
        size = attribute.value.clusterDim
        size.x, size.y, size.z = cluster
    if pdl:
        attributes.append(attribute := _attribute("PROGRAMMATIC_STREAM_SERIALIZATION"))
        attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def _attribute(name: str) -> "CUlaunchAttribute":
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    return attribute


_prepare_lock = threading.Lock()


def _prepare(kernel: "Kernel", smem: int, cluster_blocks: int) -> None:
    """Load the kernel on the current device, and raise its limits on shared memory and cluster size if necessary."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute
    handle = kernel.handle
    device = check(driver.cuCtxGetDevice)
    with _prepare_lock, loading_code():
        needs = []
        static = check(driver.cuKernelGetAttribute, attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle, device)
        if static + smem > _DEFAULT_SMEM:
            needs.append((attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem))
        if cluster_blocks > MAX_BLOCKS_PER_PORTABLE_CLUSTER:
            needs.append((attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        for name, value in needs:
            # Never lower a limit: another launcher of the same kernel may need more.
            current = check(driver.cuKernelGetAttribute, name, handle, device)
            check(driver.cuKernelSetAttribute, name, max(current, value), handle, device)
        # The driver loads lazily: load here, as the first launch may be under capture.
        check(driver.cuFuncLoad, check(driver.cuKernelGetFunction, handle))


# ---- the cache of launch plans ----

_MAX_PLANS = 4096  # maximum number of kept plans; large, because almost every prefill step has a new number of tokens
_PLAIN = frozenset((int, bool, float, str, type(None), tuple, torch.Size, torch.dtype))

_plans: dict[Hashable, Any] = {}
_plans_lock = threading.Lock()

Arguments = ParamSpec("Arguments")
Plan = TypeVar("Plan")


class planned(Generic[Arguments, Plan]):
    """Decorate a function that builds a launch plan, such as a launcher: each plan is built once and kept.

    The function's first argument is the index of a device, which is current while the function runs. The key of a plan
    consists of the current settings and the function's arguments. A tensor, alone or in a NamedTuple, enters the key as
    its shape, strides, dtype and device; a NamedTuple with a method `layouts` enters as the result of that method. At
    most 4096 plans are kept for all functions together; beyond that number, the oldest plan is dropped. Safe to call
    from several threads.
    """

    def __init__(self, build: Callable[Arguments, Plan]):
        self._build = build
        functools.update_wrapper(self, build)

    def __call__(self, *args: Arguments.args, **options: Arguments.kwargs) -> Plan:
        """Return the plan for these arguments; build it if there is none."""
        layouts = _layouts((*args, *options, *options.values()))
        plan = self.look_up(*layouts)
        if plan is None:
            with device_guard(_device_index(*args)):
                plan = self._build(*args, **options)
            with _plans_lock:
                if len(_plans) >= _MAX_PLANS:
                    del _plans[next(iter(_plans))]
                _plans[self._key(layouts)] = plan
        return plan

    def find(self, *args: Any) -> Plan | None:
        """Return the plan for these positional arguments, or None if it has not been built."""
        return self.look_up(*_layouts(args))

    def look_up(self, *layouts: Hashable) -> Plan | None:
        """Return the plan for arguments with these layouts (`layout_of`), or None. Quicker than `find`."""
        return _plans.get(self._key(layouts))

    def _key(self, layouts: Iterable[Hashable]) -> Hashable:
        settings = config.settings
        return (self, settings.backend, settings.num_sms, settings.batch_invariant, *layouts)


def _device_index(device_index: int, *others: object) -> int:
    return device_index


def layout_of(tensor: Tensor) -> tuple[Hashable, ...]:
    """Return the properties of a tensor that are part of a plan's key."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def _layouts(values: Iterable[Any]) -> list:
    """Return the properties of arguments that are part of a plan's key."""
    layouts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            layouts.append((value.shape, value.stride(), value.dtype, value.get_device()))
        elif kind in _PLAIN:
            layouts.append(value)
        elif hasattr(kind, "layouts"):
            layouts.append(value.layouts())
        elif isinstance(value, tuple):
            layouts += kind, *_layouts(value)
        else:
            layouts.append(layout_of(value) if isinstance(value, Tensor) else value)
    return layouts
