"""FP8Linear, a linear layer with FP8 weights, and replace_linears, which puts it in place of a model's nn.Linear."""

from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fp8moe.kernels.linear import linear
from fp8moe.quant.formats import BLOCK, ceil_div
from fp8moe.quant.quantize import INPUT_DTYPES, quantize_128x128


class FP8Linear(nn.Module):
    """``y = x @ W.T + bias`` with FP8 weights in 128x128 blocks and the input quantized 1x128 in each call.

    Takes the place of ``nn.Linear``: any leading dimensions, any number of features (not multiples of 128 too), output
    in the dtype of the input, which may be bfloat16, float16 or float32. The state dict is that of FP8 checkpoints:

        weight            (out_features, in_features) float8_e4m3fn
        weight_scale_inv  (ceil(out_features/128), ceil(in_features/128)) float32; value = weight * its block's scale
        bias              (out_features,) of ``dtype``

    Moving or casting the module (``.to()``, ``.half()``...) moves all three and casts the bias only. For inference:
    the forward accepts inputs that require gradients, a backward raises RuntimeError. Where in_features is not a
    multiple of 16 or out_features not of 8, each call makes padded copies of the weight.

    Args:
        in_features, out_features, bias, device: as in ``nn.Linear``, which the initialization follows too.
        dtype: bfloat16, float16 or float32, the dtype of the bias; TypeError for another.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ):
        super().__init__()
        if dtype not in INPUT_DTYPES:
            raise TypeError(f"dtype: expected torch.bfloat16, torch.float16 or torch.float32, got {dtype}")
        self.in_features = in_features
        self.out_features = out_features
        blocks = (ceil_div(out_features, BLOCK), ceil_div(in_features, BLOCK))
        self.weight = _frozen(torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn, device=device))
        self.weight_scale_inv = _frozen(torch.empty(blocks, dtype=torch.float32, device=device))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        )
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, scale_format: str = "float32") -> "FP8Linear":
        """The FP8 layer of ``linear``: its weight quantized, its bias (the same Parameter) kept.

        linear: nn.Linear with a bfloat16, float16 or float32 weight, on any device; TypeError otherwise.
        scale_format: of the weight scales, "float32" or "ue8m0" (powers of two).
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear: expected an nn.Linear, got {type(linear).__name__}")
        if linear.weight.dtype not in INPUT_DTYPES:
            raise TypeError(f"linear.weight: expected bfloat16, float16 or float32, got {linear.weight.dtype}")
        new = cls(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
        quantized = quantize_128x128(linear.weight.detach(), scale_format=scale_format)
        new.weight = _frozen(quantized.data)
        new.weight_scale_inv = _frozen(quantized.scale)
        new.bias = linear.bias
        return new.train(linear.training)

    def reset_parameters(self) -> None:
        """Initialize as ``nn.Linear`` does, then quantize."""
        dtype = torch.bfloat16 if self.bias is None else self.bias.dtype
        initial = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device=self.weight.device, dtype=dtype
        )
        quantized = quantize_128x128(initial.weight.detach())
        with torch.no_grad():
            self.weight.copy_(quantized.data)
            self.weight_scale_inv.copy_(quantized.scale)
            if self.bias is not None:
                self.bias.copy_(initial.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) bfloat16, float16 or float32 -> (..., out_features) in the same dtype."""
        return linear(x, self.weight, self.weight_scale_inv, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn, recurse=True):
        weight, scale = self.weight, self.weight_scale_inv

        def keep_dtype(value: Tensor) -> Tensor:
            if value is not weight and value is not scale:
                return fn(value)
            # What fn does to the dtype shows on an empty tensor, without a cast copy of the whole weight.
            probe = fn(value.new_empty(0))
            return fn(value) if probe.dtype == value.dtype else value.to(probe.device)

        return super()._apply(keep_dtype, recurse)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        # Copying would cast a higher-precision weight to FP8 without scaling it.
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.dtype != torch.float8_e4m3fn:
            errors.append(
                f"{prefix}weight: expected float8_e4m3fn, got {weight.dtype}; load it into an nn.Linear and use "
                "FP8Linear.from_linear or replace_linears"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)


def replace_linears(model: nn.Module, *, skip: Iterable[str] = ("lm_head",)) -> list[str]:
    """Put an `FP8Linear` in place of each nn.Linear inside ``model``, and return the qualified names replaced.

    skip: fnmatch patterns; a module stays if one matches its qualified name ("model.layers.0.mlp.gate_proj") or the
        last part of it ("gate_proj").

    Only modules of exactly the class nn.Linear are replaced: a subclass may compute something else. An nn.Linear whose
    weight another module owns too (an output layer tied to the embedding) stays: quantizing it would untie the two and
    cost memory. One nn.Linear under several names becomes one FP8Linear under the same names, unless a name is skipped.
    Hooks of a replaced module are dropped. Beside the model, memory holds one layer's FP8 copy at a time.

    Raises TypeError, with the model untouched, for a model that is itself an nn.Linear (use `FP8Linear.from_linear`),
    a ``skip`` that is a single string, or an nn.Linear of another dtype than bfloat16, float16 and float32.
    """
    if isinstance(model, nn.Linear):
        raise TypeError("model: an nn.Linear cannot be replaced in place; use FP8Linear.from_linear(model)")
    if isinstance(skip, str):
        raise TypeError(f"skip: expected a sequence of patterns, got the string {skip!r}; did you mean ({skip!r},)?")
    skip = tuple(skip)
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Linear and owners[id(module.weight)] == 1:
            names.setdefault(id(module), []).append(name)
    groups = [group for group in names.values() if not any(_matches(name, skip) for name in group)]
    for name, *_ in groups:
        dtype = model.get_submodule(name).weight.dtype
        if dtype not in INPUT_DTYPES:
            raise TypeError(f"{name}.weight: expected bfloat16, float16 or float32, got {dtype}")
    for group in groups:
        replacement = FP8Linear.from_linear(model.get_submodule(group[0]))
        for name in group:
            model.set_submodule(name, replacement)
    return [name for group in groups for name in group]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    last = name.rpartition(".")[2]
    return any(fnmatchcase(name, pattern) or fnmatchcase(last, pattern) for pattern in patterns)


def _frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)
