"""Gradients of masters that are added to a sum: those that autograd would get, which then gets no values."""

import pytest
import torch

from fp8moe.kernels.experts.backward import experts_training, train_rows
from fp8moe.kernels.experts.operands import Masters, RowOperands
from fp8moe.kernels.linear.training import linear_training
from fp8moe.quant.quantize import quantize_128x128
from tests.errors import relative_error
from tests.experts_cases import inputs, make_trained

EXPERTS = 4


def sums_of(master, shift):
    """A sum of random values for a master, which begins `shift` elements behind a multiple of 16 bytes."""
    memory = torch.randn(master.numel() + shift, dtype=torch.float32, device=master.device)
    return memory[shift:].view(master.shape)


def gradients(run, masters, grad, shift=None):
    """The gradients of float32 stand-ins of the masters; with a shift, what has been added to their sums."""
    standing = [master.detach().float().requires_grad_() for master in masters]
    before = []
    if shift is not None:
        for each in standing:
            each.grad_sum = sums_of(each, shift)
            before.append(each.grad_sum.clone())
    out = run(*standing)
    found = torch.autograd.grad(out, standing, grad, retain_graph=True)
    if shift is None:
        return out, found
    assert all(
        one.stride() == (0,) * one.dim() and one.shape == like.shape for one, like in zip(found, standing, strict=True)
    )
    added = [each.grad_sum - old for each, old in zip(standing, before, strict=True)]
    for each, old in zip(standing, before, strict=True):
        each.grad_sum.copy_(old)
    again = torch.autograd.grad(out, standing, grad, retain_graph=True)
    assert len(again) == len(added)
    assert all((each.grad_sum - old).equal(one) for each, old, one in zip(standing, before, added, strict=True))
    with pytest.raises(RuntimeError, match="there is no double backward"):
        torch.autograd.grad(out, standing, grad, create_graph=True)
    return out, added


def agree(run, masters, grad, shift):
    plain, expected = gradients(run, masters, grad)
    out, found = gradients(run, masters, grad, shift)
    assert out.equal(plain)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-5 if other.any() else not one.any()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("sizes", [(256, 128), (200, 72)], ids=["whole", "padded"])
@pytest.mark.parametrize("gated", [True, False])
def test_experts(sizes, gated, shift, device):
    layer = make_trained(EXPERTS, *sizes, gated=gated, activation="silu" if gated else "relu2", device=device)
    x, index, routing, grad = inputs(40, EXPERTS, 2, sizes[0], device=device)
    index = index.clamp(max=EXPERTS - 2)  # none for the last expert
    weights = layer.local_weights()
    masters = weights.masters[:2]
    agree(lambda *made: experts_training(x, index, routing, weights.layer, Masters(*made)), masters, grad, shift)
    offsets = torch.tensor([0, 11, 11, 30, 40], dtype=torch.int32, device=device)
    operands = RowOperands(x, None, offsets, weights.layer, torch.bfloat16)
    agree(lambda *made: train_rows(operands, Masters(*made)), masters, grad, shift)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("shape", [(256, 128), (75, 131)], ids=["whole", "padded"])
def test_linear(shape, shift, device):
    n, k = shape
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=device)
    copy, bias = quantize_128x128(weight), torch.randn(n, device=device)
    x, grad = (torch.randn(3, 30, size, dtype=torch.bfloat16, device=device) for size in (k, n))
    agree(lambda master: linear_training(x, *copy, bias, master), [weight], grad, shift)


def test_a_sum_of_no_rows(device):
    weight = torch.randn(256, 128, dtype=torch.bfloat16, device=device)
    copy, x = quantize_128x128(weight), torch.randn(0, 128, dtype=torch.bfloat16, device=device)
    agree(
        lambda master: linear_training(x, *copy, None, master),
        [weight],
        torch.zeros(0, 256, device=device, dtype=x.dtype),
        0,
    )
