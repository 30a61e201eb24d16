"""Launching kernels from the host: tensor maps, streams, devices, and a launcher that is cheap to call.

A launch plan (kept by each kernel family, per kernel, shape and device) is a `Launcher` and a few tensor maps. A call
then does little::

    with device_guard(index):
        map_a.replace_address(a)
        launcher.launch(current_stream(index), map_a, out.data_ptr(), rows)
        map_a.replace_address(anchor(index))

A map keeps the tensor that it was last given alive, so a plan that outlives the call points its maps back at `anchor`.
The launch has copied its arguments by then. A plan is not to be used by two threads at once: the maps are its own.
"""

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from fp8moe import config

if TYPE_CHECKING:
    from cuda.core import Kernel, Stream, TensorMapDescriptor

Dim3 = int | tuple[int, ...]

_DEFAULT_SMEM = 48 << 10
_PORTABLE_CLUSTER = 8

_TMA_TYPES = {
    torch.uint8: "UINT8",
    torch.float8_e4m3fn: "UINT8",
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.float32: "FLOAT32",
    torch.int32: "INT32",
}
_SWIZZLES = {0: "NONE", 32: "SWIZZLE_32B", 64: "SWIZZLE_64B", 128: "SWIZZLE_128B"}
_PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}


def tensor_map(
    tensor: torch.Tensor,
    *,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 0,
    l2_promotion: int = 256,
) -> "TensorMapDescriptor":
    """A TMA descriptor over the memory of a CUDA tensor, from the tensor's first element on.

    Elements outside `shape` read as zero and are not written. Call it with the tensor's device current
    (`device_guard`). `replace_address(tensor)` of the result moves it to another tensor of the same layout.

    Args:
        tensor: uint8, float8_e4m3fn (mapped as uint8), bfloat16, float16, float32 or int32; 16-byte aligned.
        shape, strides, box: in elements, outermost dimension first, 1 to 5 dimensions. The innermost stride is 1, the
            others are multiples of 16 bytes (that of a dimension of size 1 is of no consequence and may be anything).
            A box has 1 to 256 elements per dimension and a multiple of 16 bytes in the innermost one, not more than
            the swizzle width if there is one. It may be larger than the shape.
        swizzle: 0, 32, 64 or 128 bytes.
        l2_promotion: 0, 64, 128 or 256 bytes fetched into L2 at a time.

    Raises:
        ValueError: the layout cannot be mapped, or reaches past the tensor's storage.
        TypeError: a dtype that TMA does not know.
    """
    from cuda.core._tensor_map import TensorMapDataType, TensorMapL2Promotion, TensorMapSwizzle
    from cuda.core.utils import StridedMemoryView

    if tensor.dtype not in _TMA_TYPES:
        raise TypeError(f"tensor is {tensor.dtype}; a tensor map takes {', '.join(map(str, _TMA_TYPES))}")
    strides = _map_strides(tensor, shape, strides)
    _check_box(box, len(shape), tensor.element_size(), swizzle)
    if l2_promotion not in _PROMOTIONS:
        raise ValueError(f"l2_promotion is {l2_promotion}; it must be one of {tuple(_PROMOTIONS)}")
    if tensor.dtype == torch.float8_e4m3fn:
        tensor = tensor.view(torch.uint8)  # cuda.core does not know the dtype
    view = StridedMemoryView.from_any_interface(torch.as_strided(tensor.detach(), shape, strides), stream_ptr=-1)
    return view.as_tensor_map(
        box_dim=tuple(box),
        # Given by name: cuda.core has no numpy dtype for bfloat16 and fp8.
        data_type=TensorMapDataType[_TMA_TYPES[tensor.dtype]],
        swizzle=TensorMapSwizzle[_SWIZZLES[swizzle]],
        l2_promotion=TensorMapL2Promotion[_PROMOTIONS[l2_promotion]],
    )


def _map_strides(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides to map, valid for TMA in dimensions of size 1 too; raises ValueError for what cannot be mapped."""
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
    # as_strided checks this as well, but as a RuntimeError that does not name the argument.
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


@functools.cache
def anchor(device_index: int) -> torch.Tensor:
    """A tensor of 16 bytes to point idle tensor maps at, so that they keep no tensor of a caller alive.

    It lives as long as the process, so it is not taken from PyTorch's allocator: the first call may be made under a
    graph capture, whose memory pool is not to hold it.
    """
    from cuda.bindings import driver

    from fp8moe.kernels.driver import check, relaxed_capture

    with device_guard(device_index), relaxed_capture():
        pointer = int(check(driver.cuMemAlloc, 16))
        interface = {"data": (pointer, False), "shape": (16,), "strides": None, "typestr": "|u1", "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=f"cuda:{device_index}")


@functools.lru_cache(maxsize=1024)
def _stream(device_index: int, handle: int) -> "Stream":
    from cuda.core import Stream

    return Stream.from_handle(handle)


def current_stream(device_index: int) -> "Stream":
    """PyTorch's current stream on a device, wrapped once per stream. Follows `torch.cuda.stream` and graph capture."""
    return _stream(device_index, torch._C._cuda_getCurrentRawStream(device_index))


class _BoundDevices(threading.local):
    """The devices whose context this thread has made current before."""

    def __init__(self) -> None:
        self.indices: set[int] = set()


_bound = _BoundDevices()
_no_guard = nullcontext()


def device_guard(device_index: int) -> AbstractContextManager[Any]:
    """Make a device current within a `with` block. Next to free when it is already."""
    if torch._C._cuda_getDevice() != device_index:
        return torch.cuda.device(device_index)
    if device_index not in _bound.indices:
        # In a new thread PyTorch's device is set but no context is current yet, and the driver API needs one.
        from cuda.core import Device

        Device(device_index).set_current()
        _bound.indices.add(device_index)
    return _no_guard


@functools.cache
def _multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def num_sms(device_index: int) -> int:
    """SMs that a kernel may occupy on a device: all of them, or FP8MOE_NUM_SMS if that is fewer."""
    limit = config.settings.num_sms
    count = _multiprocessors(device_index)
    return count if limit is None else min(limit, count)


class Launcher:
    """A kernel with its launch configuration, built once and launched many times, on one device.

    Build it and launch it with that device current (`device_guard`).

    Args:
        kernel: from `jit.load`.
        grid: blocks (not clusters), an int or up to three ints (x, y, z).
        block: threads per block, likewise.
        cluster: blocks per cluster, likewise; it must divide the grid. More than 8 blocks is not portable, and allowed.
        smem: dynamic shared memory per block in bytes.
        pdl: let the launch start before the kernel ahead of it in the stream has finished (programmatic dependent
            launch); the kernel must then execute griddepcontrol.wait before it touches that kernel's results.

    Raises:
        ValueError: the cluster does not divide the grid.
        RuntimeError: the device does not have that much shared memory, or the driver cannot load the kernel.
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
    ):
        from cuda.core import LaunchConfig, launch

        blocks, cluster_blocks = _dim3(grid), _dim3(cluster or 1)
        _prepare(kernel, smem, cluster_blocks[0] * cluster_blocks[1] * cluster_blocks[2])
        self._kernel = kernel
        self._launch = launch
        self._config = LaunchConfig(
            grid=clusters_in(blocks, cluster_blocks),
            cluster=None if cluster is None else cluster_blocks,
            block=_dim3(block),
            shmem_size=smem,
            programmatic_stream_serialization=pdl,
        )

    def launch(self, stream: "Stream", *args: Any) -> None:
        """Enqueue the kernel.

        Args:
            stream: from `current_stream`.
            args: one per kernel parameter, with the size that the kernel declares: a Python int is always 8 bytes (a
                pointer, `tensor.data_ptr()`, or an int64), `ctypes.c_int32` an int, `ctypes.c_uint32` and so on,
                `ctypes.c_float` a float (a Python float is a double), a tensor map a `const __grid_constant__
                CUtensorMap`. A Python bool counts as an int. ctypes objects may be kept and reused.
        """
        self._launch(stream, self._config, self._kernel, *args)


def _dim3(size: Dim3) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return (*sizes, 1, 1)[:3]


def clusters_in(blocks: tuple[int, int, int], cluster: tuple[int, int, int]) -> tuple[int, int, int]:
    """The grid in clusters, which is how cuda.core counts it. A cluster of one block leaves it as it is."""
    if any(b % c for b, c in zip(blocks, cluster, strict=True)):
        raise ValueError(f"grid is {blocks} blocks, which clusters of {cluster} blocks do not divide")
    return tuple(b // c for b, c in zip(blocks, cluster, strict=True))


_prepare_lock = threading.Lock()


def _prepare(kernel: "Kernel", smem: int, cluster_blocks: int) -> None:
    """Load the kernel on the current device, and allow it what it needs beyond the defaults."""
    from cuda.bindings import driver

    from fp8moe.kernels.driver import check, loading_code

    attribute = driver.CUfunction_attribute
    needs = []
    if smem > _DEFAULT_SMEM:
        needs.append((attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem))
    if cluster_blocks > _PORTABLE_CLUSTER:
        needs.append((attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    handle = kernel.handle
    device = check(driver.cuCtxGetDevice)
    with _prepare_lock, loading_code():
        for name, value in needs:
            # Only ever raised: another launcher of the same kernel may need more.
            if check(driver.cuKernelGetAttribute, name, handle, device) < value:
                check(driver.cuKernelSetAttribute, name, value, handle, device)
        # The driver loads lazily; do it here rather than in the first launch, which may be under capture.
        check(driver.cuFuncLoad, check(driver.cuKernelGetFunction, handle))
