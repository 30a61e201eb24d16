"""GroupedExperts.forward_rows against forward: rows in the order of experts are tokens with one expert each."""

import pytest
import torch

from fp8moe.quant.quantize import quantize_1x128
from tests.experts_cases import VARIANTS, make, make_trained

GROUPS = torch.tensor([2, 7, 7, 14, 20], dtype=torch.int32)  # of 23 rows, of which five are no expert's
EXPERT = torch.tensor([-1] * 2 + [0] * 5 + [2] * 7 + [3] * 6 + [-1] * 3)[:, None]
ONES = torch.ones(23, 1)


def rows(dtype, hidden=144):
    return torch.randn(23, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_tokens_of_one_expert(variant, dtype):
    for sizes in ((144, 96), (131, 77)):
        layer, x = make(4, *sizes, **VARIANTS[variant]), rows(dtype, sizes[0])
        out = layer.forward_rows(x, GROUPS)
        assert out.dtype is dtype and torch.equal(out, layer(x, EXPERT, ONES))
        assert not out[EXPERT[:, 0] < 0].any()
        if dtype is torch.bfloat16:
            assert torch.equal(layer.forward_rows(quantize_1x128(x), GROUPS), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients(dtype):
    layer = make_trained(4)
    grad = torch.randn(23, 144, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = []
    for call in (lambda x: layer.forward_rows(x, GROUPS), lambda x: layer(x, EXPERT, ONES)):
        x = rows(dtype).requires_grad_()
        layer.zero_grad()
        out = call(x)
        out.backward(grad)
        with torch.no_grad():
            assert torch.equal(call(x), out)  # in training mode, as checkpointing needs it
        found.append([out.detach(), x.grad, *(value.grad for value in layer.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert all(value.any() for value in found[0])


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj", "down_proj_scale_inv"])
def test_fp8_weights_have_no_gradient(name):
    layer = make(4)
    getattr(layer, name).requires_grad_()
    out = layer.forward_rows(rows(torch.bfloat16).requires_grad_(), GROUPS)
    with pytest.raises(RuntimeError, match=r"fp8moe\.GroupedExperts\.forward_rows has no backward"):
        out.sum().backward()


def test_wrong_rows():
    layer = make(4)
    with pytest.raises(ValueError, match=r"rows: expected shape \(R, 144\) to match gate_up_proj .*, got \(23, 100\)"):
        layer.forward_rows(rows(torch.bfloat16, 100), GROUPS)
    with pytest.raises(ValueError, match=r"group_offsets: expected shape \(5,\), for 4 experts, got \(4,\)"):
        layer.forward_rows(rows(torch.bfloat16), GROUPS[:4])
    with pytest.raises(TypeError, match="rows: expected bfloat16, float16 or float32, got torch.int32"):
        layer.forward_rows(rows(torch.int32), GROUPS)
    trained = make_trained(4)
    with pytest.raises(RuntimeError, match=r"GroupedExperts has no .*torch.func"):
        torch.func.grad(lambda x: trained.forward_rows(x, GROUPS).sum())(rows(torch.float32))
