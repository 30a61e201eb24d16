"""Runs linears that read the same input as one GEMM, if their weights are adjacent in memory."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe.hf.fused.known_forwards import runs_as_written
from fp8moe.hf.linears import is_routed, refusal
from fp8moe.kernels.linear.forward import projection
from fp8moe.layers.linear import FP8Linear
from fp8moe.quant.formats import BLOCK, FP8Tensor, has_channel_scales


class Weights(NamedTuple):
    """The tensors of a linear in FP8, or of a plain one.

    data: (N, K) float8_e4m3fn, or of a plain linear in the dtype of its input. scale: (ceil(N/128), ceil(K/128)) or
    (N, 1) float32, None for a plain linear. bias: (N,) or None.
    """

    data: Tensor
    scale: Tensor | None
    bias: Tensor | None


def weights(module: nn.Module) -> Weights | None:
    """Return a module's tensors if it is an FP8 linear, without hooks, that fp8moe's kernels can run; else None."""
    if not runs_as_written(module) or getattr(module, "weight_scale_inv", None) is None:
        return None
    parts = Weights(module.weight, module.weight_scale_inv, module.bias)
    if type(module) is not FP8Linear:
        theirs = type(module).__module__ == "transformers.integrations.finegrained_fp8" and is_routed()
        block, static = getattr(module, "block_size", None), getattr(module, "activation_scale", None)
        if not theirs or refusal(parts.data, block, static) or parts.scale.dtype is not torch.float32:
            return None
    n, k = parts.data.shape
    return None if n % 8 or k % 16 else parts


def _plain(module: nn.Module) -> Weights | None:
    """Return a module's tensors if it is an nn.Linear, without hooks, whose tensors are ordinary ones; else None."""
    if type(module) is not nn.Linear or not runs_as_written(module):
        return None
    parts = Weights(module.weight, None, module.bias)
    ordinary = all(type(part) is nn.Parameter and type(part.data) is Tensor for part in parts if part is not None)
    return parts if ordinary else None


def are_fp8(modules: Iterable[nn.Module]) -> bool:
    """Return whether fp8moe runs all these linears in FP8, so that they need only the quantized input."""
    return all(weights(module) is not None for module in modules)


def project(x: FP8Tensor | Tensor, modules: Sequence[nn.Module], dtype: torch.dtype) -> list[Tensor]:
    """Apply linears to x (M, K); return results (M, N) in `dtype`. Adjacent weights share one GEMM.

    x: quantized where all linears are in FP8; else values in `dtype`, which the modules take as they are.
    """
    if isinstance(x, Tensor):
        parts = [_plain(module) for module in modules]
        whole = None if None in parts else joined(parts)
        if whole is None:
            return [module(x) for module in modules]
        out = F.linear(x, whole.data, whole.bias)
    else:
        parts = [weights(module) for module in modules]
        whole = joined(parts)
        if whole is None:
            return [_projection(x, part, dtype) for part in parts]
        out = _projection(x, whole, dtype)
    return list(out.split([len(part.data) for part in parts], dim=1))


def _projection(x: FP8Tensor, part: Weights, dtype: torch.dtype) -> Tensor:
    wide = torch.float32 if dtype is torch.float16 else dtype
    return projection(x, FP8Tensor(part.data, part.scale), part.bias, out_dtype=wide).to(dtype)


def joined(parts: Sequence[Weights], *, blocks: bool = True) -> Weights | None:
    """View the weights as those of one linear, without a copy; return None if they are not adjacent in memory.

    blocks: whether to require that every part but the last has a multiple of 128 rows, so that scale blocks line up in
    one ordinary GEMM. The SwiGLU GEMM, which knows both parts, does not need that.
    """
    if not _can_be_one(parts, blocks):
        return None
    whole = Weights(*(None if each[0] is None else _adjacent(each) for each in zip(*parts, strict=True)))
    missing = any(tensor is None and part is not None for tensor, part in zip(whole, parts[0], strict=True))
    return None if missing else whole


def _can_be_one(parts: Sequence[Weights], blocks: bool) -> bool:
    kinds = {(part.data.dtype, part.data.shape[1], part.bias is None, _has_blocks(part)) for part in parts}
    blocks = blocks and _has_blocks(parts[0])
    return len(kinds) == 1 and not (blocks and any(len(part.data) % BLOCK for part in parts[:-1]))


def _has_blocks(part: Weights) -> bool:
    return part.scale is not None and not has_channel_scales(part.data, part.scale)


def _adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """View contiguous tensors that follow each other in one storage as one tensor; return None for any others."""
    first = parts[0]
    storage, address = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if part.dtype is not first.dtype or part.shape[1:] != first.shape[1:] or not part.is_contiguous():
            return None
        if part.untyped_storage().data_ptr() != storage or part.data_ptr() != address:
            return None
        address += part.nbytes
    return first.detach().as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def pack(modules: Sequence[nn.Module], *, blocks: bool = True) -> bool:
    """Make the weights of linears adjacent in memory, with one allocation each for weights, scales and biases.

    Names, values and state dict do not change; during the call, memory holds these weights twice. Returns False, with
    nothing moved, if the linears differ in kind or, with `blocks` (see `joined`), if a size is not a multiple of 128.
    """
    parts = [weights(module) or _plain(module) for module in modules]
    if None in parts or not _can_be_one(parts, blocks):
        return False
    if joined(parts, blocks=blocks) is not None:
        return True
    for together in zip(*parts, strict=True):
        if together[0] is None:
            continue
        with torch.no_grad(), torch.inference_mode(False):
            whole = torch.cat([parameter.detach() for parameter in together])
            for parameter, part in zip(together, whole.split([len(part) for part in together]), strict=True):
                parameter.data = part
    return True
