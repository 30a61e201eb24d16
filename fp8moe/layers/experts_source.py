"""Reads the weights and the activation of experts modules of fp8moe and of transformers models.

Modules and activations are recognised by attributes, without importing transformers. The activation is then verified
against results of the module's own functions.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fp8moe.kernels.activation import FUNCTIONS, Activation
from fp8moe.kernels.experts.operands import Biases
from fp8moe.layers.linear import check_linear
from fp8moe.layers.parameters import check_not_sharded, is_sharded, local
from fp8moe.layers.replaced import check_no_hooks, check_only_weights
from fp8moe.quant.checks import check_scale_format
from fp8moe.quant.formats import BLOCK, FP8Tensor, ceil_div, has_channel_scales
from fp8moe.quant.quantize import dequantize, quantize_128x128
from fp8moe.runtime.checks import FLOATING, describe

_SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)
# names of one expert's linears: gate (if any), up and down
_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_PROBES = 4096  # number of values per expert on which activations are compared
# probe values are sinh(u) with |u| <= 42: up to 9e17, so that their products are in the range of bfloat16
_LARGEST = 42


@dataclass(frozen=True)
class Weight:
    """The weights of one projection for all experts: down, up, or gate and up stacked.

    parts: for each expert on this rank its matrices (rows, columns) from top to bottom, either Tensors in a floating
        dtype or, if quantized already, FP8Tensors.
    shape: (matrices, rows, columns) of one expert; matrices is 2 for gate and up, otherwise 1.
    trains: whether masters made from these weights require a gradient.
    fused: the same weights as one tensor (E, matrices * rows, columns), a DTensor if sharded. It is the module's own
        parameter if that parameter has this memory layout, and None for weights from an nn.ModuleList.
    """

    parts: list[list[Tensor | FP8Tensor]]
    shape: tuple[int, int, int]
    device: torch.device
    trains: bool
    fused: Tensor | FP8Tensor | None = None

    def quantize(self, scale_format: str) -> FP8Tensor:
        """Return FP8 data (E, matrices * rows, columns) and scale; no scale block spans two matrices.

        Quantizes one expert at a time, to save memory. Raises ValueError if block and channel scales are mixed.
        """
        if isinstance(self.fused, FP8Tensor):
            return self.fused
        matrices, rows, columns = self.shape
        blocks = ceil_div(rows, BLOCK), ceil_div(columns, BLOCK)
        kinds = {isinstance(part, FP8Tensor) and has_channel_scales(*part) for parts in self.parts for part in parts}
        if len(kinds) > 1:
            raise ValueError("module: expected scales of blocks for all experts, or of channels for all, got both")
        if True in kinds:
            blocks = rows, 1
        count = len(self.parts)
        data = torch.empty((count, matrices * rows, columns), dtype=torch.float8_e4m3fn, device=self.device)
        scale = torch.empty((count, matrices * blocks[0], blocks[1]), dtype=torch.float32, device=self.device)
        check_scale_format(scale_format)
        for expert, parts in enumerate(self.parts if self.device.type != "meta" else ()):  # meta tensors have no values
            for i, part in enumerate(parts):
                if isinstance(part, Tensor):
                    part = quantize_128x128(part.detach(), scale_format=scale_format)
                data[expert, i * rows : (i + 1) * rows].copy_(part.data)
                scale[expert, i * blocks[0] : (i + 1) * blocks[0]].copy_(part.scale)
        return FP8Tensor(self.sharded(data), self.sharded(scale))

    def master(self, dtype: torch.dtype) -> nn.Parameter:
        """Return unquantized weights (E, matrices * rows, columns) of this dtype.

        The result is ``fused`` itself if ``fused`` is a Parameter of this dtype, otherwise a new Parameter.
        """
        if isinstance(self.fused, nn.Parameter) and self.fused.dtype == dtype:
            return self.fused
        matrices, rows, columns = self.shape
        weight = torch.empty((len(self.parts), matrices * rows, columns), dtype=dtype, device=self.device)
        for expert, parts in zip(weight, self.parts, strict=True):
            for out, part in zip(expert.split(rows), parts, strict=True):
                out.copy_(part.detach() if isinstance(part, Tensor) else dequantize(part))
        return nn.Parameter(self.sharded(weight), requires_grad=self.trains)

    def sharded(self, values: Tensor) -> Tensor:
        """Return ``values`` (E, ...) of this rank's experts, as a DTensor if the weights are sharded DTensors."""
        like = self.fused.data if isinstance(self.fused, FP8Tensor) else self.fused
        if like is None or not is_sharded(like):
            return values
        from torch.distributed.tensor import DTensor

        shape = torch.Size((like.shape[0], *values.shape[1:]))
        stride = torch.empty(shape, dtype=values.dtype, device="meta").stride()
        return DTensor.from_local(values, like.device_mesh, like.placements, shape=shape, stride=stride)


@dataclass(frozen=True)
class ExpertsSource:
    """What `read` found in an experts module.

    up: the first projection (gate and up where gated). down: the second projection.
    biases: the biases of both projections; DTensors if the weights are DTensors.
    reordered: whether the module stores transposed weights, or interleaved rows of gate and up.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    up: Weight
    down: Weight
    biases: Biases = Biases()
    reordered: bool = False


def read(module: nn.Module) -> ExpertsSource:
    """Read one of the modules that `GroupedExperts.from_experts` lists; raise TypeError or ValueError for any other.

    Hooks of the module itself are left for the caller to check: where the module stays in use, as in transformers, its
    hooks go on running.
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


def _read_fused(module: nn.Module) -> ExpertsSource:
    gated = getattr(module, "has_gate", hasattr(module, "gate_up_proj"))
    up_name = "gate_up_proj" if gated else "up_proj"
    _check_fused(module, up_name)
    up, down = getattr(module, up_name), module.down_proj
    if not isinstance(up, Tensor):
        raise TypeError(f"module.{up_name}: expected a parameter, got {type(up).__name__}")
    if up.dim() != 3 or down.dim() != 3:
        raise ValueError(f"module: expected weights (E, rows, columns), got {tuple(up.shape)}, {tuple(down.shape)}")
    quantized = torch.float8_e4m3fn in (up.dtype, down.dtype)
    transposed = getattr(module, "is_transposed", False)
    interleaved = not getattr(module, "is_concatenated", True)
    if quantized and (transposed or interleaved):
        raise ValueError("module: transposed or interleaved FP8 weights; expected gate rows then up rows")
    if transposed:
        up, down = (value.detach().transpose(1, 2) for value in (up, down))
    elif interleaved:
        up = up.detach()
    count, hidden, size = down.shape
    projections = 2 if gated else 1
    if up.shape != (count, projections * size, hidden):
        raise ValueError(
            f"module.{up_name}: expected shape {(count, projections * size, hidden)} to match down_proj "
            f"(E, H, I) = {(count, hidden, size)}, got {tuple(up.shape)}"
        )
    weights = []
    for name, fused, matrices in ((up_name, up, projections), ("down_proj", down, 1)):
        _, rows, columns = fused.shape
        trains = quantized or getattr(module, name).requires_grad
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
            parts = [
                [expert[first::matrices] for first in range(matrices)] if interleaved else list(expert.chunk(matrices))
                for expert in local(fused.detach()).unbind()
            ]
        weights.append(Weight(parts, (matrices, rows // matrices, columns), up.device, trains, fused))
    biases = _biases(module, {up_name: up, "down_proj": down})
    if interleaved and biases.up_bias is not None:
        in_turns = biases.up_bias.detach().unflatten(1, (size, projections))
        biases = biases._replace(up_bias=in_turns.transpose(1, 2).flatten(1))
    for name, child in module.named_children():
        check_no_hooks(f"module.{name}", child)
    activation = getattr(module, "activation", None)
    # a GroupedExperts stores an Activation; for other modules it is derived from their attributes
    if not isinstance(activation, Activation):
        activation = _activation_of(module, gated)
        _verify_fused(module, activation, size, interleaved)
    return ExpertsSource(count, hidden, size, activation, *weights, biases, transposed or interleaved)


def _biases(module: nn.Module, weights: dict[str, Tensor]) -> Biases:
    """Return the biases of both projections, or None for both.

    weights: maps the name of each projection to its weights (E, rows, columns).

    Raises ValueError for a wrong shape, dtype or sharding, and for a bias of one projection only.
    """
    biases = {name: getattr(module, f"{name}_bias", None) for name in weights}
    for name, bias in biases.items():
        if bias is None:
            continue
        expected = weights[name].shape[:2]
        if bias.shape != expected or bias.dtype not in FLOATING:
            raise ValueError(
                f"module.{name}_bias: expected shape {tuple(expected)} in bfloat16, float16 or float32, got "
                f"{describe(bias)}"
            )
        _check_whole_experts(f"module.{name}_bias", bias, weights["down_proj"])
    missing = [f"{name}_bias" for name, bias in biases.items() if bias is None]
    if len(missing) == 1:
        raise ValueError(f"module: expected biases of both projections or of none, got no {missing[0]}")
    return Biases(*biases.values())


def _check_whole_experts(name: str, weight: Tensor, down: Tensor) -> None:
    """Raise ValueError unless the weight has the same placements as down_proj and is not split within experts."""
    placements, expected = (getattr(value, "placements", None) for value in (weight, down))
    if placements != expected:
        raise ValueError(f"{name}: expected placements {expected}, as of down_proj, got {placements}")
    if local(weight).shape[1:] != weight.shape[1:]:
        raise ValueError(
            f"{name}: expected whole experts on each rank, sharded by the first dimension, got {placements}"
        )


def _check_fused(module: nn.Module, up_name: str) -> None:
    """Raise ValueError for experts in four bits and for other settings and parameters that are not supported."""
    if getattr(module, "weight_format", "fp8") != "fp8":
        raise ValueError(
            f"module: expected experts in FP8 or unquantized, got weight_format {module.weight_format!r}: experts in "
            "four bits are not converted"
        )
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError("module: expected no norm after each expert")
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        raise ValueError(f"module: expected dynamic activation scales, got {module.activation_scheme!r}")
    block_size = getattr(module, "block_size", (BLOCK, BLOCK))
    if block_size is None or tuple(block_size) != (BLOCK, BLOCK):
        raise ValueError(f"module: expected weight blocks of {BLOCK}x{BLOCK}, got {block_size}")
    known = {up_name, "down_proj"}
    known |= {f"{name}_{part}" for name in known for part in ("scale_inv", "bias")}
    extra = sorted(name for name, _ in module.named_parameters() if name not in known)
    if extra:
        raise ValueError(f"module: expected the parameters {up_name} and down_proj, and their biases, got also {extra}")


def _read_list(module: nn.ModuleList) -> ExpertsSource:
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
    activation = _activation_of(module[0], gated)
    for i, expert in enumerate(module):
        _verify_mlp(f"module[{i}]", expert, names, activation)
    weights = (_weight_of_list(parts) for parts in (up, down))
    return ExpertsSource(len(module), *shape, activation, *weights)


def _weight_of_list(parts: list[list[Tensor | FP8Tensor]]) -> Weight:
    first, *_ = values = [part if isinstance(part, Tensor) else part.data for expert in parts for part in expert]
    trains = any(value.dtype == torch.float8_e4m3fn or value.requires_grad for value in values)
    return Weight(parts, (len(parts[0]), *first.shape), first.device, trains)


def _linear(name: str, linear: nn.Module | None) -> Tensor | FP8Tensor:
    """Return the weight of a linear layer, an FP8Tensor if quantized.

    Raises TypeError or ValueError for any other module.
    """
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
    """Check FP8 weights (..., matrices * rows, columns) and their scale; return both, with a float32 scale."""
    if weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name}: expected float8_e4m3fn like the other projection, got {weight.dtype}")
    if not isinstance(scale, Tensor) or scale.dtype not in _SCALE_DTYPES:
        raise TypeError(
            f"{name}: expected scales weight_scale_inv in float32 or float8_e8m0fnu, got "
            f"{scale.dtype if isinstance(scale, Tensor) else scale}"
        )
    *lead, rows, columns = weight.shape
    expected = (*lead, matrices * ceil_div(rows // matrices, BLOCK), ceil_div(columns, BLOCK))
    if scale.shape != expected and not has_channel_scales(weight, scale):
        raise ValueError(
            f"{name}: expected scales of shape {expected}, blocks of {BLOCK}x{BLOCK} of each projection by itself, got "
            f"{tuple(scale.shape)}; build the experts from the unquantized weights instead"
        )
    return FP8Tensor(weight.detach(), scale.detach().float())


def _activation_of(module: nn.Module, gated: bool) -> Activation:
    """Return the activation that a module's attributes describe, silu without an act_fn. The caller must verify it."""
    act_fn = getattr(module, "act_fn", None)
    name = "silu" if act_fn is None else _function_name(act_fn)
    if not gated:
        return Activation(name=name, gated=False)
    limit, alpha = (
        next((getattr(module, name) for name in names if getattr(module, name, None) is not None), None)
        for names in (("swiglu_limit", "limit"), ("swiglu_alpha", "alpha"))
    )
    return Activation(None if limit is None or math.isinf(limit) else limit, alpha, name)


def _verify_fused(module: nn.Module, activation: Activation, size: int, interleaved: bool) -> None:
    """Raise ValueError unless fused experts of transformers apply this activation to gate and up.

    size: number of columns of gate, and also of up. interleaved: whether the module's function expects their columns
    alternating.
    """
    apply = getattr(module, "_apply_gate", None) if activation.gated else None
    if apply is None:
        if not hasattr(module, "act_fn"):
            functions = "neither act_fn nor _apply_gate" if activation.gated else "no act_fn"
            raise ValueError(f"module: cannot tell its activation, it has {functions}")
        return
    probe = _probe(_rows(size), 2 * size, "cpu", seed=0)
    given = probe.unflatten(1, (2, size)).transpose(1, 2).flatten(1) if interleaved else probe
    if not _close(_run("module", apply, given), activation(probe), probe[:, size:]):
        raise ValueError(f"module: its activation is none of those that GroupedExperts has; closest is {activation}")


@torch.no_grad()
def _verify_mlp(name: str, expert: nn.Module, names: tuple[str, ...], activation: Activation) -> None:
    """Raise ValueError unless an expert computes ``down(activation(gate(x), up(x)))``.

    names: the names of the expert's linears, down last. A copy of the expert runs with these linears replaced by
    stand-ins that return values of all magnitudes. So the check takes little time, detects every limit of the
    activation whatever the weights are, and needs no GPU for FP8 weights.
    """
    size, hidden = getattr(expert, names[0]).weight.shape
    device = getattr(expert, names[0]).weight.device
    device = torch.device("cpu") if device.type == "meta" else device
    rows = _rows(size)
    x = _probe(rows, hidden, device, seed=0)
    *projections, down = (
        _StandIn(_probe(rows, width, device, seed), features)
        for seed, (width, features) in enumerate([(size, hidden)] * (len(names) - 1) + [(hidden, size)], start=1)
    )
    twin = copy.copy(expert)
    twin._modules = expert._modules | dict(zip(names, (*projections, down), strict=True))
    out = _run(name, partial(type(expert).forward, twin), x)
    if not (down.ran_once and all(linear.ran_once and _close(linear.input, x) for linear in projections)):
        raise ValueError(f"{name}: expected {names} to run once each, all but the last on the input as it is")
    projected = torch.cat([linear.output for linear in projections], dim=-1)
    if not _close(down.input, activation(projected), projections[-1].output):
        raise ValueError(f"{name}: its activation is none of those that GroupedExperts has; closest is {activation}")
    if not _close(out, down.output):
        raise ValueError(f"{name}: expected the result of {names[-1]} to be returned as it is")


class _StandIn(nn.Linear):
    """Replaces a linear layer in `_verify_mlp`: returns a given output and records the inputs."""

    def __init__(self, output: Tensor, in_features: int):
        super().__init__(in_features, output.shape[-1], bias=False, device="meta", dtype=output.dtype)
        self.output = output
        self.inputs = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return self.output

    @property
    def ran_once(self) -> bool:
        return len(self.inputs) == 1

    @property
    def input(self) -> Tensor:
        return self.inputs[0]


def _function_name(act_fn: Callable[[Tensor], Tensor]) -> str:
    if not (isinstance(act_fn, nn.Module) and any(True for _ in act_fn.parameters())):
        x = torch.linspace(-_LARGEST, _LARGEST, 2 * _PROBES, dtype=torch.float32, device="cpu").sinh()
        result = _run("module", act_fn, x)
        for name, function in FUNCTIONS.items():
            if isinstance(result, Tensor) and torch.allclose(result, function(x), rtol=1e-4, atol=1e-5):
                return name
    raise ValueError(f"module: expected an activation among {', '.join(FUNCTIONS)}, got {describe(act_fn)}")


def _run(name: str, function: Callable[[Tensor], object], x: Tensor) -> object:
    try:
        return function(x)
    except Exception as error:  # the module's own code may raise anything
        raise ValueError(f"{name}: cannot tell its activation, its function fails: {error!r}") from error


def _rows(size: int) -> int:
    """Return how many rows of `size` values to compare: about `_PROBES` values, at most 64 rows."""
    return min(64, math.ceil(_PROBES / size))


def _probe(rows: int, columns: int, device: torch.device | str, seed: int) -> Tensor:
    """Return random values (rows, columns) of both signs, their magnitudes log-uniform up to 9e17."""
    generator = torch.Generator("cpu").manual_seed(seed)
    uniform = torch.rand((rows, columns), generator=generator, dtype=torch.float32, device="cpu")
    return (uniform.mul(2 * _LARGEST) - _LARGEST).sinh().to(device)


def _close(result: Tensor, expected: Tensor, factor: Tensor | None = None) -> bool:
    """Whether two tensors are equal within 1% plus 1e-5 or, with a `factor`, within 1% plus 1e-5 * (1 + |factor|)."""
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return False
    tolerance = 1e-2 * expected.abs() + 1e-5 * (1 if factor is None else 1 + factor.abs())
    return bool(((result == expected) | ((result - expected).abs() <= tolerance)).all())
