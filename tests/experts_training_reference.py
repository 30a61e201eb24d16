"""What the backward of GroupedExperts is compared with, and how, on any device."""

import torch

from fp8moe.quant.quantize import dequantize, quantize_1x128, quantize_128x1, quantize_128x128


def backward(layer, x, index, weights, grad):
    """The result of a forward, and gradients by name: x, routing, up and down where the layer has masters."""
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    layer.zero_grad()
    out = layer(x, index, weights)
    out.backward(grad)
    named = {"x": x, "routing": weights, "up": getattr(layer, layer.up_name), "down": layer.down_proj}
    return out.detach(), {name: value.grad for name, value in named.items() if value.requires_grad}


class Block(torch.nn.Module):
    """Experts behind a router, two for each token, with a residual."""

    def __init__(self, experts):
        super().__init__()
        torch.manual_seed(0)
        self.gate = torch.nn.Linear(experts.hidden_size, experts.num_experts, device=experts.down_proj.device)
        self.experts = experts

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, index, weights)


def gradients(block, call, x):
    """By name, of a loss of ``call(x)``: those of x and of the block's parameters that require one."""
    block.zero_grad()
    x = x.detach().requires_grad_()
    call(x).square().sum().backward()
    return {"x": x.grad} | {name: value.grad for name, value in block.named_parameters() if value.requires_grad}


def quantized(layer):
    """The dequantized FP8 copies in float64: (E, 1 or 2, I, H) and (E, H, I)."""
    size = layer.intermediate_size
    up = getattr(layer, layer.up_name)
    if up.dtype == torch.float8_e4m3fn:
        scale = getattr(layer, f"{layer.up_name}_scale_inv")
        up = up.unflatten(1, (-1, size)), scale.unflatten(1, (-1, -(-size // 128)))
        down = layer.down_proj, layer.down_proj_scale_inv
    else:
        up, down = quantize_128x128(up.unflatten(1, (-1, size))), quantize_128x128(layer.down_proj)
    return dequantize(up, dtype=torch.float64), dequantize(down, dtype=torch.float64)


def by_rows(value):
    return dequantize(quantize_1x128(value.float()), dtype=torch.float64)


def by_columns(value):
    return dequantize(quantize_128x1(value.float()), dtype=torch.float64).T


def in_blocks(value):
    return dequantize(quantize_128x128(value.float()), dtype=torch.float64)


def straight_through(layer, x, index, weights, grad):
    """Gradients by float64 autograd through the quantized forward, with quantization and the rounding of GEMM 1's
    result counted as the identity.
    """
    ups, downs = (value.requires_grad_() for value in quantized(layer))
    x, weights = x.double().requires_grad_(), weights.double().requires_grad_()

    def quantize(value):
        return value + (by_rows(value.detach()) - value).detach()

    rows, out = quantize(x), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(layer.num_experts):
        tokens, k = torch.where(index == expert)
        projected = rows[tokens] @ ups[expert].flatten(0, 1).T
        projected = projected + (projected.detach().bfloat16() - projected).detach()
        h = quantize(layer.activation(projected))
        out = out.index_add(0, tokens, weights[tokens, k, None] * (h @ downs[expert].T))
    grads = torch.autograd.grad(out, (x, weights, ups, downs), grad.double())
    return dict(zip(("x", "routing", "up", "down"), (*grads[:2], grads[2].flatten(1, 2), grads[3]), strict=True))


def recipe(layer, x, index, weights, grad):
    """The same operands quantized at the same places as in the layer, expert by expert in float64."""
    ups, downs = quantized(layer)
    size, wide = layer.intermediate_size, x.dtype != torch.bfloat16
    expected = {
        "x": torch.zeros(x.shape, dtype=torch.float64, device=x.device),
        "routing": torch.zeros(weights.shape, dtype=torch.float64, device=x.device),
        "up": torch.zeros_like(ups),
        "down": torch.zeros_like(downs),
    }
    for expert in range(layer.num_experts):
        tokens, k = torch.where(index == expert)
        up, down, weight = ups[expert].flatten(0, 1), downs[expert], weights[tokens, k, None].float()
        projected = (by_rows(x[tokens]) @ up.T).bfloat16().float().requires_grad_()
        h = layer.activation(projected)
        d_h = (by_rows(grad[tokens]) @ down).bfloat16().float()
        (d_projected,) = torch.autograd.grad(h, projected, weight * d_h)
        h = h.detach()
        expected["routing"][tokens, k] = (h.double() * d_h).sum(-1)
        h = weight * h
        if layer.activation.is_swiglu:
            h, d_projected = h.bfloat16(), d_projected.bfloat16()
        parts = d_projected.unflatten(1, (-1, size))
        dx = by_rows(parts).flatten(1) @ up
        expected["x"].index_add_(0, tokens, dx if wide else dx.bfloat16().double())
        expected["down"][expert] = by_columns(grad[tokens]).T @ in_blocks(h)
        for i, part in enumerate(parts.unbind(1)):
            expected["up"][expert, i] = by_columns(part).T @ in_blocks(x[tokens])
    return expected | {"up": expected["up"].flatten(1, 2)}


def equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
