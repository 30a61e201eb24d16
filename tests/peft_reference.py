"""Experts with low-rank additions in float64, and models to adapt, on any device."""

import torch
from torch import nn

from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.linear import FP8Linear
from tests.experts_cases import make
from tests.experts_training_reference import by_rows, quantized


def scaled(layer, factor):
    """Experts whose FP8 weights are so much larger."""
    for name in layer.weight_names[1::2]:
        getattr(layer, name).data.mul_(factor)
    return layer


def in_blocks(layer):
    """The same experts in FP8 blocks."""
    blocks = layer.in_format("fp8").to_empty(device=layer.down_proj.device)
    here = layer.local_weights().layer.in_blocks()
    for name, value in zip(blocks.weight_names, (*here.up, *here.down), strict=True):
        getattr(blocks, name).data.copy_(value)
    return blocks


def adapted(base=None, *, r=4, alpha=8, adapter="default", device="cpu", **options):
    """A LoRA layer in training mode around experts, with values in all factors."""
    from peft import LoraConfig, get_peft_model

    from fp8moe.peft import register

    base = (make() if base is None else base).to(device)
    model = nn.ModuleDict({"experts": base})
    targets = [f"experts.{name}" for name in (base.up_name, "down_proj")]
    config = LoraConfig(r=r, lora_alpha=alpha, target_parameters=targets, init_lora_weights=False, **options)
    torch.manual_seed(1)
    peft_model = get_peft_model(model, register(config, model), adapter_name=adapter, autocast_adapter_dtype=False)
    return peft_model.base_model.model["experts"].train()


def by_projection(layer):
    """The layers of the first projection and of the second, by the prefix of their parameters."""
    return {"base_layer.": layer.base_layer, "": layer}


def additions(layer, adapters=None):
    """B @ A of the active adapters by projection, (E, rows, columns) float64, and what they came from, by expert."""
    count = layer.get_base_layer().num_experts
    factors = {
        name: by_expert(name, value.detach().double(), count).requires_grad_()
        for name, value in layer.named_parameters()
        if "lora_" in name
    }
    names = layer.active_adapters if adapters is None else adapters

    def added(prefix, one):
        parts = ((factors[f"{prefix}lora_{x}.{name}.weight"] for x in "BA") for name in names)
        return sum(one.scaling[name] * (b @ a) for name, (b, a) in zip(names, parts, strict=True))

    return tuple(added(prefix, one) for prefix, one in by_projection(layer).items()), factors


def by_expert(name, value, count):
    """A factor, or its gradient, (E, ...)."""
    return value.unflatten(0, (count, -1)) if "lora_A" in name else value


def expected(layer, x, index, weights, grad, *, dropped=None, mask=None, as_in_fp8=False):
    """The result and all gradients in float64, from the dequantized weights.

    dropped: by what x is multiplied for the first adapters; mask: the same for the rows of experts before the second.
    as_in_fp8: with the inputs of the FP8 products quantized, and the result of GEMM 1 in bfloat16, both of which
    gradients take for the identity.
    """

    def quantize(value):
        return value + (by_rows(value.detach()) - value).detach() if as_in_fp8 else value

    base = layer.get_base_layer()
    ups, downs = quantized(base)
    (up_added, down_added), factors = additions(layer)
    ups = ups.flatten(1, 2)
    x, weights = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    out, row = torch.zeros(x.shape, dtype=torch.float64, device=x.device), 0
    rows, adapter_input = quantize(x), x if dropped is None else x * dropped.double()
    for expert in range(base.num_experts):
        tokens, k = torch.where(index == expert)
        projected = rows[tokens] @ ups[expert].T + adapter_input[tokens] @ up_added[expert].T
        if as_in_fp8:
            projected = projected + (projected.detach().bfloat16() - projected).detach()
        h = base.activation(projected)
        h_mask = 1 if mask is None else mask[row : row + len(tokens), : h.shape[1]].double()
        row += len(tokens)
        y = quantize(h) @ downs[expert].T + (h * h_mask) @ down_added[expert].T
        out = out.index_add(0, tokens, weights[tokens, k, None] * y)
    leaves = {"x": x, "routing": weights} | factors
    found = torch.autograd.grad(out, tuple(leaves.values()), grad.double(), allow_unused=True)
    return out.detach(), {name: value for name, value in zip(leaves, found, strict=True) if value is not None}


def run(layer, x, index, weights, grad):
    """The result of a forward and all gradients, by the same names."""
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    layer.zero_grad()
    out = layer(x, index, weights)
    out.backward(grad)
    count = layer.get_base_layer().num_experts
    factors = {name: by_expert(name, value.grad, count) for name, value in layer.named_parameters() if "lora_" in name}
    return out.detach(), {"x": x.grad, "routing": weights.grad} | factors


class Model(nn.Module):
    """A linear and experts behind a router, two for each token, with residuals."""

    def __init__(self, device="cpu", hidden_size=144, intermediate_size=80, **options):
        super().__init__()
        torch.manual_seed(0)
        self.proj = FP8Linear(hidden_size, hidden_size, bias=False, device=device)
        self.gate = nn.Linear(hidden_size, 4, dtype=torch.bfloat16, device=device)
        sizes = {"num_experts": 4, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
        self.experts = GroupedExperts(**sizes, device=device, **options)

    def forward(self, x):
        x = x + self.proj(x)
        weights, index = self.gate(x).float().softmax(-1).topk(2)
        return x + self.experts(x, index, weights)
