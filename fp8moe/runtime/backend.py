"""Which backend runs an op: our CUDA kernels or the plain PyTorch reference."""

import importlib.util

import torch

from fp8moe.runtime import config
from fp8moe.runtime.architectures import ARCHITECTURES

# (settings.backend, device index) -> whether the CUDA kernels run there. If the kernels should run there but cannot, an
# error is raised and nothing is stored.
_decisions: dict[tuple[str, int], bool] = {}

_WAY_OUT = "set FP8MOE_BACKEND=auto or reference"


def use_cuda(*tensors: torch.Tensor) -> bool:
    """Return True if an op should run the CUDA kernels on these tensors, False if it should run the reference.

    `FP8MOE_BACKEND=auto` selects the kernels if every tensor is on a GPU that they support, `cuda` always, `reference`
    never. `record`, which `runtime.record` sets, selects them for CPU tensors. The caller checks that all tensors are
    on one device.

    Raises RuntimeError if the kernels are selected (by `cuda`, or by `auto` on a supported GPU) but cannot run. A
    missing NVRTC is noticed only when a kernel must be compiled.
    """
    backend = config.settings.backend
    if backend == "reference":
        return False
    for tensor in tensors:
        if not tensor.is_cuda:
            if backend == "cuda":
                raise RuntimeError(_no_cuda_tensor(tensor))
            return backend == "record"
        key = (backend, tensor.get_device())
        usable = _decisions.get(key)
        if usable is None:
            usable = _decisions[key] = _decide(*key)
        if not usable:
            return False
    return True


def _no_cuda_tensor(tensor: torch.Tensor) -> str:
    if torch.version.cuda is None:
        return f"FP8MOE_BACKEND=cuda, but PyTorch {torch.__version__} has no CUDA: install a CUDA build, or {_WAY_OUT}"
    if not torch.cuda.is_available():
        return f"FP8MOE_BACKEND=cuda, but PyTorch finds no usable NVIDIA GPU or driver here: {_WAY_OUT}"
    return f"FP8MOE_BACKEND=cuda, but a tensor is on {tensor.device}: move it to a Hopper GPU, or {_WAY_OUT}"


def _decide(backend: str, index: int) -> bool:
    # PyTorch for ROCm also calls its devices "cuda", and reports the same capability for some AMD GPUs.
    capability = torch.cuda.get_device_capability(index) if torch.version.cuda else None
    if capability not in [known.capability for known in ARCHITECTURES]:
        if backend == "cuda":
            raise RuntimeError(
                f"FP8MOE_BACKEND=cuda, but the kernels need a Hopper GPU (sm_90) and cuda:{index} is "
                f"{torch.cuda.get_device_name(index)}: {_WAY_OUT}"
            )
        return False
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        raise RuntimeError(
            f"the kernels for cuda:{index} need cuda-python, which is not installed: "
            "pip install cuda-python nvidia-cuda-nvrtc, or set FP8MOE_BACKEND=reference"
        )
    _check_driver()
    return True


def _check_driver() -> None:
    import cuda.bindings

    from fp8moe.runtime.driver import driver_version

    needed = int(cuda.bindings.__version__.split(".")[0])
    have = driver_version()
    if have[0] < needed:
        raise RuntimeError(
            f"the NVIDIA driver supports CUDA {have[0]}.{have[1]}, but the kernels are compiled for CUDA {needed}: "
            "update the driver, or set FP8MOE_BACKEND=reference"
        )
