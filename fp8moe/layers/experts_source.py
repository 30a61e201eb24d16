"""Reads experts modules, ours and those of transformers models: their weights, however stored, and their activation.

Modules are recognised by their attributes, and activations by what they compute (`experts_activation`): nothing here
needs transformers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8moe.kernels.activation import Activation
from fp8moe.layers.experts_activation import activation_of, verify_fused, verify_mlp
from fp8moe.layers.linear import check_linear
from fp8moe.layers.parameters import check_not_sharded, is_sharded, local
from fp8moe.layers.replaced import check_no_hooks, check_only_weights
from fp8moe.quant.formats import BLOCK, FP8Tensor, ceil_div
from fp8moe.quant.quantize import dequantize, quantize_128x128
from fp8moe.runtime.checks import FLOATING

_SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)
_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # of the linears of one expert


@dataclass(frozen=True)
class Weight:
    """One projection of all experts, or gate and up one after the other.

    parts: for each expert on this rank its matrices (rows, columns) from top to bottom, in a floating dtype; or,
        quantized already, their FP8Tensor.
    shape: (matrices, rows, columns) of an expert. trains: whether masters made of the weights require a gradient.
    fused: all of it as one (E, matrices * rows, columns) where it lies so in memory, DTensors where it is sharded.
    """

    parts: list[list[Tensor | FP8Tensor]]
    shape: tuple[int, int, int]
    device: torch.device
    trains: bool
    fused: Tensor | FP8Tensor | None = None

    def quantize(self, scale_format: str) -> FP8Tensor:
        """data (E, matrices * rows, columns) and scale, every matrix with blocks of its own. One expert at a time."""
        if isinstance(self.fused, FP8Tensor):
            return self.fused
        matrices, rows, columns = self.shape
        blocks = ceil_div(rows, BLOCK), ceil_div(columns, BLOCK)
        count = len(self.parts)
        data = torch.empty((count, matrices * rows, columns), dtype=torch.float8_e4m3fn, device=self.device)
        scale = torch.empty((count, matrices * blocks[0], blocks[1]), dtype=torch.float32, device=self.device)
        for expert, parts in enumerate(self.parts):
            for i, part in enumerate(parts):
                if isinstance(part, Tensor):
                    part = quantize_128x128(part.detach(), scale_format=scale_format)
                data[expert, i * rows : (i + 1) * rows].copy_(part.data)
                scale[expert, i * blocks[0] : (i + 1) * blocks[0]].copy_(part.scale)
        return FP8Tensor(self._sharded(data), self._sharded(scale))

    def master(self, dtype: torch.dtype) -> nn.Parameter:
        """The weights (E, matrices * rows, columns) unquantized: ``fused`` itself, if a parameter of that dtype."""
        if isinstance(self.fused, nn.Parameter) and self.fused.dtype == dtype:
            return self.fused
        matrices, rows, columns = self.shape
        weight = torch.empty((len(self.parts), matrices * rows, columns), dtype=dtype, device=self.device)
        for expert, parts in zip(weight, self.parts, strict=True):
            for out, part in zip(expert.split(rows), parts, strict=True):
                out.copy_(part.detach() if isinstance(part, Tensor) else dequantize(part))
        return nn.Parameter(self._sharded(weight), requires_grad=self.trains)

    def _sharded(self, values: Tensor) -> Tensor:
        """``values`` (E, ...) of the experts on this rank, as a DTensor sharded like the weights, if they are."""
        like = self.fused.data if isinstance(self.fused, FP8Tensor) else self.fused
        if like is None or not is_sharded(like):
            return values
        from torch.distributed.tensor import DTensor

        shape = torch.Size((like.shape[0], *values.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(values, like.device_mesh, like.placements, shape=shape, stride=stride)


@dataclass(frozen=True)
class Source:
    """What an experts module is made of. up: the first projection (gate and up where gated); down: the second."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    up: Weight
    down: Weight


def read(module: nn.Module) -> Source:
    """See `GroupedExperts.from_experts`. Raises TypeError or ValueError for a module that cannot be taken over.

    Hooks of the module itself are for the caller to check: where it goes on running, as under transformers, so do they.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected an experts module, got {type(module).__name__}")
    if isinstance(module, nn.ModuleList):
        return _read_list(module)
    if isinstance(getattr(module, "down_proj", None), Tensor):
        return _read_fused(module)
    raise TypeError(
        f"module: expected fused experts (parameters gate_up_proj or up_proj, and down_proj) or an nn.ModuleList of "
        f"one-expert MLPs, got {type(module).__name__}"
    )


def _read_fused(module: nn.Module) -> Source:
    gated = getattr(module, "has_gate", hasattr(module, "gate_up_proj"))
    up_name = "gate_up_proj" if gated else "up_proj"
    _check_fused(module, up_name)
    up, down = getattr(module, up_name), module.down_proj
    if not isinstance(up, Tensor):
        raise TypeError(f"module.{up_name}: expected a parameter, got {type(up).__name__}")
    if up.dim() != 3 or down.dim() != 3:
        raise ValueError(f"module: expected weights (E, rows, columns), got {tuple(up.shape)}, {tuple(down.shape)}")
    count, hidden, size = down.shape
    projections = 2 if gated else 1
    if up.shape != (count, projections * size, hidden):
        raise ValueError(
            f"module.{up_name}: expected shape {(count, projections * size, hidden)} to match down_proj "
            f"(E, H, I) = {(count, hidden, size)}, got {tuple(up.shape)}"
        )
    quantized = torch.float8_e4m3fn in (up.dtype, down.dtype)
    weights = []
    for name, matrices in ((up_name, projections), ("down_proj", 1)):
        fused = getattr(module, name)
        _check_whole_experts(f"module.{name}", fused, down)
        if quantized:
            fused = _quantized(f"module.{name}", fused, getattr(module, f"{name}_scale_inv", None), matrices)
            _check_whole_experts(f"module.{name}_scale_inv", fused.scale, down)
            held = zip(*map(local, fused), strict=True)
            chunks = [[value.chunk(matrices) for value in expert] for expert in held]
            parts = [[FP8Tensor(*part) for part in zip(*expert, strict=True)] for expert in chunks]
        else:
            _check_dtype(f"module.{name}", fused)
            if getattr(module, f"{name}_scale_inv", None) is not None:
                raise TypeError(
                    f"module.{name}: expected float8_e4m3fn beside its scales, got {fused.dtype}: a cast turned FP8 "
                    "weights into others without their scales; load them again"
                )
            parts = [list(expert.chunk(matrices)) for expert in local(fused.detach()).unbind()]
        _, rows, columns = getattr(module, name).shape
        shape = matrices, rows // matrices, columns
        weights.append(Weight(parts, shape, up.device, quantized or fused.requires_grad, fused))
    for name, child in module.named_children():
        check_no_hooks(f"module.{name}", child)
    activation = activation_of(module, gated)
    verify_fused(module, activation, size)
    return Source(count, hidden, size, activation, *weights)


def _check_whole_experts(name: str, weight: Tensor, down: Tensor) -> None:
    """ValueError unless the weight is sharded as down_proj is, if at all, and by experts."""
    placements, expected = (getattr(value, "placements", None) for value in (weight, down))
    if placements != expected:
        raise ValueError(f"{name}: expected placements {expected}, as of down_proj, got {placements}")
    if local(weight).shape[1:] != weight.shape[1:]:
        raise ValueError(
            f"{name}: expected whole experts on each rank, sharded by the first dimension, got {placements}"
        )


def _check_fused(module: nn.Module, up_name: str) -> None:
    """Refuse experts modules of transformers that compute something else, or store weights in another layout."""
    if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        raise ValueError("module: transposed or interleaved weights, as in GPT-OSS; expected gate rows then up rows")
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError("module: expected no norm after each expert")
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        raise ValueError(f"module: expected dynamic activation scales, got {module.activation_scheme!r}")
    block_size = getattr(module, "block_size", (BLOCK, BLOCK))
    if block_size is None or tuple(block_size) != (BLOCK, BLOCK):
        raise ValueError(f"module: expected weight blocks of {BLOCK}x{BLOCK}, got {block_size}")
    known = {up_name, "down_proj"}
    known |= {f"{name}_scale_inv" for name in known}
    extra = sorted(name for name, _ in module.named_parameters() if name not in known)
    if extra:
        raise ValueError(f"module: expected the parameters {up_name} and down_proj, no biases, got also {extra}")


def _read_list(module: nn.ModuleList) -> Source:
    if not len(module):
        raise ValueError("module: expected at least one expert, got an empty nn.ModuleList")
    names = next((names for names in _NAMES if hasattr(module[0], names[2])), _NAMES[0])
    gated = hasattr(module[0], names[0])
    names = names if gated else names[1:]
    up, down, shape = [], [], None
    for i, expert in enumerate(module):
        check_no_hooks(f"module[{i}]", expert)
        linears = [_linear(f"module[{i}].{name}", getattr(expert, name, None)) for name in names]
        shapes = [tuple((value if isinstance(value, Tensor) else value.data).shape) for value in linears]
        shape = shape or shapes[-1]
        if shapes[-1] != shape or any(other != shape[::-1] for other in shapes[:-1]):
            raise ValueError(
                f"module[{i}]: expected (out, in) sizes {shape[::-1]} and {shape} for {names}, got {shapes}"
            )
        extra = sorted(name for name, _ in expert.named_parameters() if name.partition(".")[0] not in names)
        if extra:
            raise ValueError(f"module[{i}]: expected the parameters of {names} only, got also {extra}")
        up.append(linears[:-1])
        down.append(linears[-1:])
    if len({isinstance(value, Tensor) for parts in up + down for value in parts}) > 1:
        raise ValueError("module: expected experts that are all quantized or none")
    activation = activation_of(module[0], gated)
    for i, expert in enumerate(module):
        verify_mlp(f"module[{i}]", expert, names, activation)
    weights = (_weight_of_list(parts) for parts in (up, down))
    return Source(len(module), *shape, activation, *weights)


def _weight_of_list(parts: list[list[Tensor | FP8Tensor]]) -> Weight:
    first, *_ = values = [part if isinstance(part, Tensor) else part.data for expert in parts for part in expert]
    trains = any(value.dtype == torch.float8_e4m3fn or value.requires_grad for value in values)
    return Weight(parts, (len(parts[0]), *first.shape), first.device, trains)


def _linear(name: str, linear: nn.Module | None) -> Tensor | FP8Tensor:
    """The weight of a linear layer, quantized or not."""
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise TypeError(f"{name}: expected a linear layer, got {type(linear).__name__}")
    check_not_sharded(f"{name}.weight", weight)
    if getattr(linear, "bias", None) is not None:
        raise ValueError(f"{name}: expected no bias")
    if getattr(linear, "activation_scheme", "dynamic") != "dynamic":
        raise ValueError(f"{name}: expected dynamic activation scales, got {linear.activation_scheme!r}")
    check_only_weights(name, linear)
    if weight.dtype == torch.float8_e4m3fn:
        return _quantized(name, weight, getattr(linear, "weight_scale_inv", None), 1)
    _check_dtype(name, weight)
    check_linear(name, linear)
    return weight


def _check_dtype(name: str, weight: Tensor) -> None:
    if weight.dtype not in FLOATING:
        raise TypeError(f"{name}: expected bfloat16, float16, float32 or float8_e4m3fn weights, got {weight.dtype}")


def _quantized(name: str, weight: Tensor, scale: Tensor | None, matrices: int) -> FP8Tensor:
    """Weights (..., matrices * rows, columns) with their scales in float32."""
    if weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name}: expected float8_e4m3fn like the other projection, got {weight.dtype}")
    if not isinstance(scale, Tensor) or scale.dtype not in _SCALE_DTYPES:
        raise TypeError(
            f"{name}: expected scales weight_scale_inv in float32 or float8_e8m0fnu, got "
            f"{scale.dtype if isinstance(scale, Tensor) else scale}"
        )
    *lead, rows, columns = weight.shape
    expected = (*lead, matrices * ceil_div(rows // matrices, BLOCK), ceil_div(columns, BLOCK))
    if scale.shape != expected:
        raise ValueError(
            f"{name}: expected scales of shape {expected}, blocks of {BLOCK}x{BLOCK} of each projection by itself, got "
            f"{tuple(scale.shape)}; build the experts from the unquantized weights instead"
        )
    return FP8Tensor(weight.detach(), scale.detach().float())
