"""What the backward of FP8Linear is compared with, and how, on any device."""

import torch
from torch.utils.checkpoint import checkpoint

from fp8moe.quant.quantize import dequantize, quantize_1x128, quantize_128x1, quantize_128x128


def gradients(call, x, grad, parameters):
    """The result of ``call(x)``, and the gradients of x and parameters, which have none before and after."""
    parameters = list(parameters)
    x = x.detach().requires_grad_()
    out = call(x)
    out.backward(grad)
    grads = [x.grad, *(parameter.grad for parameter in parameters)]
    for parameter in parameters:
        parameter.grad = None
    return out.detach(), grads


def exact(x, grad, weight):
    """Gradients of x and weight in float64 over the operands that the layer quantizes."""
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    d_x = dequantize(quantize_1x128(grad), dtype=torch.float64) @ dequantize(weight, dtype=torch.float64)
    grad_columns, x = (dequantize(value, dtype=torch.float64) for value in (quantize_128x1(grad), quantize_128x128(x)))
    return d_x, grad_columns @ x


def train(model, x, target, limit, *, lr, **options):
    """30 steps of AdamW, gradients accumulated over the micro-batches of x and target and clipped to limit.

    Returns for each step the loss of the last micro-batch, and the norm of the gradients before they were clipped.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **options)
    losses, norms = [], []
    for _ in range(30):
        optimizer.zero_grad()
        for batch, wanted in zip(x, target, strict=True):
            loss = (model(batch) - wanted).float().square().mean() / len(x)
            loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms


def assert_follows(losses, expected):
    """Those of the unquantized model, which learns."""
    assert expected[-1] < 0.9 * expected[0]
    for ours, theirs in zip(losses, expected, strict=True):
        assert abs(ours - theirs) < 0.01 * theirs


def same(actual, expected):
    return all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def check_checkpointing(first, second, operands, reentrant, backend=None):
    """Results and gradients of two layers over (x, grad) have the bits of those that are not computed again."""
    parameters = [*first.parameters(), *second.parameters()]

    def block(x):
        return second(first(x).relu())

    def call(x):
        return checkpoint(block, x, use_reentrant=reentrant)

    run = torch.compile(call, fullgraph=True, backend=backend) if backend else call
    expected = gradients(block, *operands, parameters)
    for _ in range(2):
        out, grads = gradients(run, *operands, parameters)
        assert torch.equal(out, expected[0]) and same(grads, expected[1])
