"""FlashAttention-3's forward for prompts, where the optional package fa3-fwd is installed.

It takes causal attention without padding. All other attention, and all attention where the package is not installed,
runs as if this file did not exist.
"""

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from fp8moe.runtime import config
from fp8moe.runtime.backend import use_cuda

NAME = "FlashAttention-3"
MODULE = "fa3_fwd_interface"
DTYPES = (torch.bfloat16,)  # fa3-fwd is built without float16 and without sliding windows
HEAD_SIZES = (64, 96, 128, 192, 256)  # of its kernels


class BrokenInstallation(RuntimeError):
    """Raised if fa3-fwd is installed but cannot be imported."""


def refusal(like: Tensor, size: int) -> str | None:
    """Return why prompts do not run in FlashAttention-3, or None if they do.

    like: any tensor on the device and of the dtype of queries, keys and values. size: the number of a head's values.
    Raises BrokenInstallation.
    """
    if not _has_kernels(like):
        return f"it does not run on {like.device}"
    if like.dtype not in DTYPES:
        return f"it does not take {like.dtype}"
    if size not in HEAD_SIZES:
        return f"it does not take heads of {size} values"
    if config.settings.batch_invariant:
        return "results are batch invariant"
    return "fa3-fwd is not installed" if _interface() is None else None


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `attend` computes the attention of these tensors. Raises BrokenInstallation."""
    tensors = query, key, value
    if torch.compiler.is_compiling() or any(x.requires_grad for x in tensors):
        return False
    alike = all((x.dtype, x.shape[-1]) == (query.dtype, query.shape[-1]) for x in tensors)
    return alike and refusal(query, query.shape[-1]) is None


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Compute causal attention, (B, T, heads, D): the last query sees all keys, each query before it one key less.

    query: (B, heads, T, D). key, value: (B, key heads, at least T, D). scale: None for 1 / sqrt(D).
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    result = _interface().flash_attn_func(query, key, value, softmax_scale=scale, causal=True)
    return result[0] if isinstance(result, tuple) else result  # some versions return the logsumexp too


def _has_kernels(like: Tensor) -> bool:
    """Return whether the tensor is on a GPU of fa3-fwd's kernels, and fp8moe runs its own there."""
    return like.is_cuda and use_cuda(like)


@functools.cache
def _interface() -> ModuleType | None:
    """Import fa3-fwd; return None if it is not installed."""
    try:
        return importlib.import_module(MODULE)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == MODULE:
            return None
        raise BrokenInstallation(
            f"fa3-fwd is installed, but cannot be imported ({type(error).__name__}: {error}); install a version for "
            f"PyTorch {torch.__version__}, or uninstall it: prompts then run in PyTorch's attention"
        ) from error
