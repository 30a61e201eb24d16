"""Layers sharded by FSDP2 in two processes on the CPU, and what they are compared with: unsharded layers."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fp8moe.layers import master

WORLD = 2


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def close(sharded, plain):
    sharded, plain = full(sharded).detach(), plain.detach()
    assert sharded.shape == plain.shape and (sharded - plain).norm() <= 1e-5 * plain.norm()


def shard(model, layers, **options):
    """fully_shard of some layers of a model, and of the model."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, **options)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@contextmanager
def quantizations():
    """A list that every master that is quantized is added to, but for those that a compiler traces."""
    weights, quantize = [], master.quantize_128x128

    def watched(weight):
        if not isinstance(weight, FakeTensor):
            weights.append(weight)
        return quantize(weight)

    master.quantize_128x128 = watched
    try:
        yield weights
    finally:
        master.quantize_128x128 = quantize


def train(sharded, plain, optimizers, data, targets, *, steps, limit, quantized):
    """Steps of both, each of some micro-batches, that must agree; this process has its part of data and targets.

    optimizers: of sharded and plain. data, targets: (micro-batches, WORLD, ...). limit: what gradients are clipped to.
    quantized: shapes of the masters, each quantized once for the forward and the backward of what was gathered.
    Returns the losses of this process.
    """
    rank = dist.get_rank()
    losses = []

    def loss_of(model, batch, part):
        return (model(data[batch, part]) - targets[batch, part]).square().mean()

    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with quantizations() as weights:
            for batch in range(len(data)):
                loss = loss_of(sharded, batch, rank)
                loss.backward()
                losses.append(loss.item())
        assert sorted(tuple(weight.shape) for weight in weights) == sorted(quantized * len(data))
        for batch in range(len(data)):
            for part in range(WORLD):
                expected = loss_of(plain, batch, part)
                (expected / WORLD).backward()
                if part == rank:
                    assert abs(losses[batch - len(data)] - expected.item()) <= 1e-5 * expected.item()
        for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
            close(ours.grad, theirs.grad)
            assert theirs.grad.any()
        norms = [full(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)) for model in (sharded, plain)]
        assert norms[1] > limit
        close(*norms)
        for optimizer in optimizers:
            optimizer.step()
        # Both go on from the same bits: a last place apart, a value may round to another FP8 code.
        with torch.no_grad():
            for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
                close(ours, theirs)
                theirs.copy_(full(ours))
    return losses
