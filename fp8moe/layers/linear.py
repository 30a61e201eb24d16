"""FP8Linear, a linear layer for FP8 inference and training, and replace_linears, which puts it into a model."""

import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fp8moe.kernels.linear.forward import apply as linear
from fp8moe.kernels.linear.training import linear_training
from fp8moe.layers.master import MasterModule, check_master, check_master_dtype, quantized
from fp8moe.layers.parameters import check_not_parametrized, check_not_sharded, frozen
from fp8moe.layers.replaced import as_patterns, check_no_casts, check_no_hooks, check_only_weights, check_skip, matches
from fp8moe.layers.wrapped import check_replaceable, names_inside, unwrapped
from fp8moe.quant.checks import check_scale_format
from fp8moe.quant.formats import BLOCK, ceil_div, has_channel_scales
from fp8moe.quant.quantize import quantize_128x128, quantize_channels
from fp8moe.runtime.autograd import check_derivatives, recorded
from fp8moe.runtime.checks import FLOATING, check_dtype, check_floating, check_int, check_tensor


class FP8Linear(MasterModule):
    """A linear layer, ``x @ W.T + bias``, with FP8 weights in 128x128 blocks and the input quantized 1x128 per call.

    It replaces ``nn.Linear``, for any leading dimensions and any number of features (not only multiples of 128). Input
    and output are bfloat16, float16 or float32. The state dict has the names and layout of FP8 checkpoints:

        weight            (out_features, in_features) float8_e4m3fn
        weight_scale_inv  (ceil(out_features/128), ceil(in_features/128)) float32; value = weight * its block's scale
        bias              (out_features,) of ``dtype``

    Moving or casting the module (``.to()``, ``.half()``...) moves all three tensors and casts only the bias. Weight and
    scale are frozen. Input and bias get gradients, which LoRA needs; they are computed in FP8. If in_features is not a
    multiple of 16, or out_features is not a multiple of 8, each call makes padded copies of the weight.

    With a ``master_dtype`` the layer is trained. Its weight is then an ordinary parameter of that dtype, and its state
    dict has the keys of ``nn.Linear``. The first call after an optimizer's step makes an FP8 copy of the weight, one
    byte per element, which is used until the next step. Forward, input gradient and weight gradient run in FP8 with
    float32 sums (DeepSeek-V3, arXiv:2412.19437, section 3.3); `fp8moe.kernels.linear.training` describes the memory
    kept for the backward. The backward raises RuntimeError if the weight has changed in place since the forward, and
    for second derivatives. ``from_linear(trained)`` makes the layer for inference.

    A change of the weight that neither its version counter nor an optimizer's step shows (docs/training.md lists such
    changes) takes effect at the next step, switch between train and eval mode, ``load_state_dict``, or call of
    `fp8moe.layers.master.invalidate`.

    Args:
        in_features, out_features, bias, device: as in ``nn.Linear``. The initialization is also that of ``nn.Linear``.
            Raises TypeError for a size that is not an int, ValueError for a negative size.
        dtype: the dtype of the bias, bfloat16, float16 or float32; TypeError for others.
        master_dtype: bfloat16 or float32 for a weight to train, None for a frozen FP8 weight; TypeError for others.
        weight_scales: "block", or "channel" for one scale per output channel: a weight_scale_inv (out_features, 1), as
            in FP8 checkpoints of compressed-tensors. Channel scales multiply the accumulators. They are for inference
            only: ValueError with a master_dtype, RuntimeError in the backward.
    """

    weight_names = ("weight", "weight_scale_inv")
    _ways_out = (
        "load it into an nn.Linear and use FP8Linear.from_linear or replace_linears",
        "load it into an FP8Linear without a master_dtype",
    )

    weight: nn.Parameter
    weight_scale_inv: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        master_dtype: torch.dtype | None = None,
        weight_scales: str = "block",
    ):
        super().__init__()
        check_master_dtype(master_dtype)
        check_floating(dtype)
        self.in_features = in_features
        self.out_features = out_features
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            check_int(name, size)
            if size < 0:
                raise ValueError(f"{name}: expected 0 or more, got {size}")
        blocks = (ceil_div(out_features, BLOCK), ceil_div(in_features, BLOCK))
        self._register_weight("weight", (out_features, in_features), blocks, device, master_dtype, weight_scales)
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        )
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls, linear: nn.Module, *, scale_format: str = "float32", master_dtype: torch.dtype | None = None
    ) -> "FP8Linear":
        """Make an FP8Linear from ``linear``: the weight is quantized, or kept as the master; the bias is shared.

        linear: nn.Linear with a bfloat16, float16 or float32 weight, on any device, or an FP8Linear with a
            master_dtype. Raises TypeError for others, such as a subclass with its own forward; ValueError for hooks, a
            replaced forward, adapters, parametrizations and DTensors.
        scale_format: format of frozen weight scales, "float32" or "ue8m0" (powers of two). ValueError for others, and
            for "ue8m0" with a master_dtype.
        master_dtype: bfloat16 or float32 for a layer to train. The weight is then the Parameter of ``linear`` itself,
            which existing optimizers keep updating, or a new one if the dtype differs. It requires a gradient if the
            weight of ``linear`` does.
        """
        check_master_dtype(master_dtype)
        check_linear("linear", linear)
        check_no_hooks("linear", linear)
        weight = linear.weight
        check_dtype("linear.weight", weight, *FLOATING)
        if master_dtype is not None and scale_format != "float32":
            raise ValueError(f"scale_format: expected 'float32' with a master_dtype, got {scale_format!r}")
        new = cls(linear.in_features, linear.out_features, bias=False, device="meta", master_dtype=master_dtype)
        check_not_sharded("linear.weight", weight)
        if master_dtype is None and weight.is_meta:
            check_scale_format(scale_format)  # quantize nothing: `new` already has meta tensors of the right shapes
        elif master_dtype is None:
            data, scale = quantize_128x128(weight.detach(), scale_format=scale_format)
            new.weight, new.weight_scale_inv = frozen(data), frozen(scale)
        elif weight.dtype == master_dtype:
            new.weight = weight
        else:
            new.weight = nn.Parameter(weight.detach().to(master_dtype), requires_grad=weight.requires_grad)
        new.bias = linear.bias
        return new.train(linear.training)

    @property
    def trainable(self) -> bool:
        """Whether the weight is a master, made with a ``master_dtype``."""
        return self.weight_scale_inv is None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize weight and bias as ``nn.Linear`` does; quantize the weight unless it is a master."""
        if self.weight.is_meta:
            return
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        if self.trainable:
            self.weight.uniform_(-bound, bound)
        else:
            dtype = torch.bfloat16 if self.bias is None else self.bias.dtype
            initial = torch.empty(self.weight.shape, dtype=dtype, device=self.weight.device).uniform_(-bound, bound)
            channels = has_channel_scales(self.weight, self.weight_scale_inv)
            data, scale = (quantize_channels if channels else quantize_128x128)(initial)
            self.weight.copy_(data)
            self.weight_scale_inv.copy_(scale)
        if self.bias is not None:
            self.bias.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (..., out_features) for x (..., in_features) bfloat16, float16 or float32.

        The output has the dtype of x.

        Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, RuntimeError under
        forward-mode differentiation and the derivatives of torch.func.
        """
        scale = self.weight_scale_inv
        check_tensor("x", x)
        weight = self.weight
        if scale is not None:
            check_not_parametrized("fp8moe.FP8Linear", self)
            return linear(x, weight, scale, self.bias)
        return linear_of_master(x, weight, self.bias)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{text}, master_dtype={self.weight.dtype}" if self.trainable else text


def linear_of_master(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, receiver: Tensor | None = None
) -> Tensor:
    """Return ``x @ weight.T + bias`` with x and weight in FP8, differentiably.

    This is the forward of `FP8Linear` for modules of other libraries, which inherit from `MasterModule`.

    x: (..., K) bfloat16, float16 or float32. weight: (N, K) bfloat16 or float32, a parameter of a `MasterModule`; its
        FP8 copy is kept until the weight changes. bias: (N,) or None.
    receiver: (N, K), the tensor that gets the gradient in place of the weight, in its own floating dtype; its values
        are not read. None for the weight itself.
    Returns (..., N) in the dtype of x. Raises as `FP8Linear` does.
    """
    check_derivatives("fp8moe.FP8Linear", x, weight, bias)
    check_master("fp8moe.FP8Linear: weight", weight, FLOATING)
    copy = quantized(weight, backward=recorded(x))
    if recorded(weight):
        return linear_training(x, *copy, bias, weight if receiver is None else receiver)
    return linear(x, *copy, bias)


def check_linear(name: str, module: nn.Module) -> None:
    """Raise TypeError unless `module` computes ``x @ weight.T + bias``, ValueError if it has further parameters.

    Hooks are checked by `fp8moe.layers.replaced.check_no_hooks`.
    """
    if not isinstance(module, nn.Linear | FP8Linear):
        kind = type(module)  # with its module, as peft's layers are called Linear, too
        raise TypeError(f"{name}: expected an nn.Linear, got {kind.__module__}.{kind.__qualname__}")
    if type(module).forward not in (nn.Linear.forward, FP8Linear.forward):
        raise TypeError(f"{name}: expected the forward of nn.Linear, got that of {type(module).__name__}")
    check_only_weights(name, module)


def replace_linears(
    model: nn.Module, *, skip: Iterable[str] = ("lm_head",), master_dtype: torch.dtype | None = None
) -> list[str]:
    """Replace each nn.Linear inside ``model`` with an `FP8Linear`; return the qualified names of replaced modules.

    skip: fnmatch patterns. A module is not replaced if a pattern matches its qualified name
        ("model.layers.0.mlp.gate_proj") or the last part of that name ("gate_proj").
    master_dtype: bfloat16 or float32 for layers to train, which keep Parameters of that dtype (see
        `FP8Linear.from_linear`). None for frozen FP8 weights; then each FP8Linear with a master is replaced too.

    Only modules of exactly the class nn.Linear are replaced: a subclass may compute something else. Two kinds of
    nn.Linear are not replaced. The first shares its weight with another module, such as an output layer tied to the
    embedding: quantizing the weight would untie the two modules and cost memory. The second is a linear of an
    nn.TransformerEncoderLayer, which reads the weights of its linears itself in eval mode. One nn.Linear under several
    names becomes one FP8Linear under the same names, unless a name is skipped. The extra memory at any time is the FP8
    copy of one layer.

    In a model that torch.compile has wrapped, the linears of the model inside are replaced.

    All errors are raised before the model is changed. TypeError: for a model that is not a module or is itself a linear
    (use `FP8Linear.from_linear`), a ``skip`` that is a single string, an nn.Linear in a dtype other than bfloat16,
    float16 and float32, or a wrong master_dtype. ValueError: for an nn.Linear with hooks or a replaced forward, which
    would no longer run; for an nn.Linear whose input an enclosing module casts to the weight's dtype (T5's wo); for a
    DTensor weight; for an nn.Linear that is compiled by itself; for a model wrapped by DistributedDataParallel, FSDP1
    or peft (replace linears first); and for a pattern that matches no module and is not a default pattern.
    """
    check_master_dtype(master_dtype)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    check_replaceable("model", model)
    model = unwrapped("model", model)
    if isinstance(model, nn.Linear | FP8Linear):
        kind = type(model).__name__
        raise TypeError(f"model: the {kind} itself cannot be replaced in place; use FP8Linear.from_linear(model)")
    skip = as_patterns("skip", skip)
    own = names_inside(model, [name for name, _ in model.named_modules(remove_duplicate=False)])
    check_skip(type(model).__name__, own.values(), skip)
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    names: dict[int, list[str]] = {}
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    read_elsewhere = {child for encoder in encoders for child in encoder.children()}
    for name, module in model.named_modules(remove_duplicate=False):
        trained = master_dtype is None and type(module) is FP8Linear and module.trainable
        replaceable = (trained or type(module) is nn.Linear) and module not in read_elsewhere
        if replaceable and owners[id(module.weight)] == 1:
            names.setdefault(id(module), []).append(name)
    groups = [group for group in names.values() if not any(matches(own[name], skip) for name in group)]
    for name, *_ in groups:
        module = model.get_submodule(name)
        if own[name] == own[name.rpartition(".")[0]]:
            raise ValueError(f"{own[name]}: expected a linear to replace, got a compiled one; compile it afterwards")
        check_dtype(f"{name}.weight", module.weight, *FLOATING)
        check_not_sharded(f"{name}.weight", module.weight)
        check_no_hooks(name, module)
        if master_dtype is None:
            check_no_casts(model, name)
    for group in groups:
        replacement = FP8Linear.from_linear(model.get_submodule(group[0]), master_dtype=master_dtype)
        for name in group:
            model.set_submodule(name, replacement)
    return [own[name] for group in groups for name in group]
