"""Experts for callers that hold the weights: routed tokens, rows by expert and the masked layout, and their errors."""

import pytest
import torch

import fp8moe
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts.operands import Layer, TokenOperands
from fp8moe.kernels.experts.operator import experts_of_tokens
from tests import experts_cases
from tests.gemm_cases import int32

EXPERTS, HIDDEN, SIZE, TOKENS, TOP_K = 6, 144, 48, 9, 2


def operands(tokens=TOKENS, hidden=HIDDEN, size=SIZE, seed=0):
    """x, top_k_index, top_k_weights, up and down."""
    generator = torch.Generator().manual_seed(seed)
    layer = experts_cases.make(EXPERTS, hidden, size, seed=seed)
    up, up_scale, down, down_scale = (getattr(layer, name).detach() for name in layer.weight_names)
    weights, index = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    return x, index, weights, fp8moe.FP8Tensor(up, up_scale), fp8moe.FP8Tensor(down, down_scale)


def some(weight, experts):
    return fp8moe.FP8Tensor(weight.data[experts], weight.scale[experts])


@pytest.mark.parametrize("hidden,size", [(HIDDEN, SIZE), (131, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equals_the_whole_layer(hidden, size, dtype):
    x, index, weights, up, down = operands(hidden=hidden, size=size)
    x = x.to(dtype)
    expected, _ = experts_of_tokens(TokenOperands(x, index, weights, Layer(up, down, Activation())))
    assert torch.equal(fp8moe.experts(x, index, weights, up, down), expected)
    out = torch.full_like(expected, torch.nan)
    assert fp8moe.experts(x, index.int(), weights, up, tuple(down), out=out) is out and torch.equal(out, expected)


def test_quantized_tokens_give_the_same():
    x, *others = operands()
    expected = fp8moe.experts(x, *others)
    quantized = fp8moe.quantize_1x128(x)
    assert torch.equal(fp8moe.experts(quantized, *others), expected)
    row_major = (quantized.data, quantized.scale.contiguous())
    assert torch.equal(fp8moe.experts(row_major, *others, out=torch.empty_like(expected)), expected)


def test_a_range_of_experts_and_a_map():
    x, index, weights, up, down = operands()
    index[0, 0] = -1
    whole = fp8moe.experts(x.float(), index, weights, up, down)
    parts = []
    for here in ([0, 1], [2, 3, 4, 5]):
        part = fp8moe.experts(
            x.float(), index, weights, some(up, here), some(down, here), first_expert=here[0], num_experts=EXPERTS
        )
        table = torch.full((EXPERTS,), -1, dtype=torch.int32)
        shuffled = here[::-1]
        table[shuffled] = torch.arange(len(here), dtype=torch.int32)
        mapped = fp8moe.experts(x.float(), index, weights, some(up, shuffled), some(down, shuffled), expert_map=table)
        assert torch.equal(mapped, part)
        parts.append(part)
    assert torch.allclose(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-4)
    no_expert = index.clone()
    no_expert[:] = EXPERTS + 100
    assert (fp8moe.experts(x, no_expert, weights, up, down, expert_map=table.fill_(0)) == 0).all()


def test_rows():
    x, _, _, up, down = operands()
    offsets = int32([1, 1, 4, 4, 6, 8, 8])
    expected = fp8moe.experts_rows(x, offsets, up, down)
    assert expected.dtype is torch.bfloat16 and (expected[[0, 8]] == 0).all()
    one = fp8moe.experts(x[1:4], torch.ones(3, 1, dtype=torch.int64), torch.ones(3, 1), up, down)
    assert torch.equal(expected[1:4], one)
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.full(x.shape, 7, dtype=dtype)
        assert fp8moe.experts_rows(fp8moe.quantize_1x128(x), offsets, up, down, out=out) is out
        assert torch.equal(out[1:8].bfloat16(), expected[1:8]) and (out[[0, 8]] == 7).all()


@pytest.mark.parametrize("activation", [Activation(), Activation(limit=1.0), Activation.from_key("gelu")], ids=str)
@pytest.mark.parametrize("size", [SIZE, 40])
def test_masked(activation, size):
    _, _, _, up, down = operands(size=size)
    x = fp8moe.quantize_1x128(torch.randn(EXPERTS, 4, HIDDEN).bfloat16())
    masked_m = int32([0, 1, 2, 3, 4, 9])
    result = fp8moe.experts_masked(x, masked_m, up, down, activation=activation, expected_m=2)
    out = torch.empty(EXPERTS, 4, HIDDEN)
    assert fp8moe.experts_masked(x, masked_m, up, down, activation=activation, out=out) is out
    for expert, count in enumerate(masked_m.clamp(max=4).tolist()):
        offsets = int32([0] * (expert + 1) + [count] * (EXPERTS - expert))
        rows = fp8moe.FP8Tensor(x.data[expert], x.scale[expert])
        expected = fp8moe.experts_rows(rows, offsets, up, down, activation=activation)[:count]
        assert torch.equal(result[expert, :count], expected) and torch.equal(out[expert, :count].bfloat16(), expected)


def test_nothing_to_do():
    x, index, weights, up, down = operands(tokens=0)
    assert fp8moe.experts(x, index, weights, up, down).shape == (0, HIDDEN)
    empty = fp8moe.FP8Tensor(up.data[:, :0], up.scale[:, :0]), fp8moe.FP8Tensor(down.data[..., :0], down.scale[..., :0])
    x, index, weights, *_ = operands()
    assert (fp8moe.experts(x, index, weights, *empty, out=torch.ones_like(x)) == 0).all()
    assert (fp8moe.experts_rows(x, int32([0, 9, 9, 9, 9, 9, 9]), *empty, out=torch.ones_like(x)) == 0).all()


def test_errors():
    x, index, weights, up, down = operands()

    def message(error, pattern, **changes):
        given = {"x": x, "top_k_index": index, "top_k_weights": weights, "up": up, "down": down} | changes
        with pytest.raises(error, match=pattern):
            fp8moe.experts(**given)

    table = torch.zeros(EXPERTS, dtype=torch.int32)
    message(ValueError, "^first_expert: expected None beside expert_map, got 2", first_expert=2, expert_map=table)
    message(TypeError, "^expert_map: expected int32, got torch.int64", expert_map=table.long())
    message(ValueError, "^expert_map: expected an entry for each of all experts, got none", expert_map=table[:0])
    message(ValueError, "^expert_map: expected an entry for each .*, got 1 for [0-9]+ experts", expert_map=table[:1])
    message(ValueError, "^first_expert: expected that the 6 experts here are among 7", first_expert=2, num_experts=7)
    message(ValueError, r"^out: expected shape \(9, 144\), got \(9, 143\)", out=x[:, 1:])
    message(ValueError, "^out: expected a contiguous tensor", out=torch.empty(HIDDEN, TOKENS).t())
    message(ValueError, "^out: expected memory of its own, got a tensor that overlaps x", out=x)
    message(TypeError, "^out: expected bfloat16, float16 or float32, got torch.int32", out=torch.empty_like(x).int())
    message(
        RuntimeError, "fp8moe.experts: out= has no automatic", x=x.clone().requires_grad_(), out=torch.empty_like(x)
    )
    with pytest.raises(RuntimeError, match="fp8moe.experts has no backward"):
        fp8moe.experts(x.clone().requires_grad_(), index, weights, up, down).sum().backward()
    odd = fp8moe.quantize_1x128(torch.randn(EXPERTS, 4, 136).bfloat16())
    with pytest.raises(ValueError, match=r"^x.data: expected an H that is a multiple of 16, got \(6, 4, 136\)"):
        fp8moe.experts_masked(odd, int32([1] * EXPERTS), up, down)
    few = fp8moe.quantize_1x128(torch.randn(2, 4, HIDDEN).bfloat16())
    with pytest.raises(ValueError, match=r"^x.data: expected the rows of 6 experts, got \(2, 4, 144\)"):
        fp8moe.experts_masked(few, int32([1, 1]), up, down)
