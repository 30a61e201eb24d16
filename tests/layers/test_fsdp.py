"""Layers with master weights under FSDP2 and DistributedDataParallel: two processes on the CPU against one layer."""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8moe.layers import master
from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.linear import FP8Linear
from tests.processes import in_processes

WORLD, MICRO_BATCHES = 2, 2
MASTERS = {"dtype": torch.float32, "master_dtype": torch.float32}

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


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
def quantizations(gathered=True):
    """A list that every master that is quantized is added to, but for those that a compiler traces.

    gathered: by FSDP2. None has its transpose kept then: autograd keeps the copies of all layers.
    """
    weights, quantize = [], master._quantize

    def watched(*parts, both_ways=False):
        assert not (gathered and both_ways)
        weights.extend(part for part in parts if not isinstance(part, FakeTensor))
        return quantize(*parts, both_ways=both_ways)

    master._quantize = watched
    try:
        yield weights
    finally:
        master._quantize = quantize


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


def linears_train_as_unsharded(reshard):
    torch.manual_seed(0)
    plain = nn.Sequential(FP8Linear(144, 272, **MASTERS), nn.SiLU(), FP8Linear(272, 48, **MASTERS))
    sharded = copy.deepcopy(plain)
    shard(sharded, (sharded[0], sharded[2]), reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True) for model in (plain, sharded)]
    data = torch.randn(MICRO_BATCHES, WORLD, 32, 144)
    targets = torch.randn(MICRO_BATCHES, WORLD, 32, 48)
    losses = train(sharded, plain, optimizers, data, targets, steps=4, limit=0.1, quantized=[(48, 272), (272, 144)])
    assert losses[-1] < 0.95 * losses[0]

    # Loading shows in no version of the gathered weight, and is no step of an optimizer.
    x = data[0, dist.get_rank()]
    with torch.no_grad():
        close(sharded(x), plain(x))
        sharded.load_state_dict({name: value * 0.5 for name, value in sharded.state_dict().items()})
        plain.load_state_dict({name: value * 0.5 for name, value in plain.state_dict().items()})
        close(sharded(x), plain(x))


def linears():
    return nn.Sequential(*(FP8Linear(256, 256, False, master_dtype=torch.float32) for _ in range(3)))


def changes_without_an_optimizer():
    """Neither shows in the version of what is gathered: a step by hand, and weights copied from elsewhere."""
    torch.manual_seed(0)
    plain = linears()
    sharded = copy.deepcopy(plain)
    shard(sharded, sharded)
    x = torch.randn(32, 256)
    losses = []
    for _ in range(3):
        both = [model(x).square().mean() for model in (sharded, plain)]
        losses.append(both[1].item())
        assert abs(both[0].item() - losses[-1]) <= 1e-5 * losses[-1]
        for model, loss in zip((sharded, plain), both, strict=True):
            loss.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.sub_(weight.grad)
                    weight.grad = None
    assert losses[2] < losses[1] < losses[0]
    with torch.no_grad():
        before = sharded(x)
        for weight in sharded.parameters():
            weight.copy_(2 * weight)
        close(sharded(x), 8 * before)


def no_copy_outlives_what_was_gathered():
    model = linears()
    shard(model, model)
    with quantizations() as gathered:
        model(torch.randn(8, 256)).sum().backward()
    assert len(gathered) == 3
    for storage in (weight.untyped_storage() for weight in gathered):
        assert storage.nbytes() == 0 and not hasattr(storage, master._ATTRIBUTE)


class Block(nn.Module):
    """A router and its experts; I is no multiple of 128."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(144, 5)
        self.experts = GroupedExperts(num_experts=5, hidden_size=144, intermediate_size=96, **MASTERS)

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(2)
        return self.experts(x, index, weights).add_(x)


def experts_train_as_unsharded(reshard):
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block())
    sharded = copy.deepcopy(plain)
    shard(sharded, [block.experts for block in sharded], reshard_after_forward=reshard)
    # Not Adam, whose first steps enlarge what differs in the last bits.
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9) for model in (plain, sharded)]
    data = torch.randn(MICRO_BATCHES, WORLD, 48, 144)
    targets = torch.randn(MICRO_BATCHES, WORLD, 48, 144)
    quantized = [(5, 2, 96, 144)] * 2 + [(5, 144, 96)] * 2
    losses = train(sharded, plain, optimizers, data, targets, steps=3, limit=0.02, quantized=quantized)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        x = data[0, dist.get_rank()]
        close(sharded(x), plain(x))
        close(sharded.eval()(x), plain.eval()(x))


def mixed_precision():
    """Masters gathered in bfloat16, gradients reduced and weights stepped in float32."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block())
    sharded = copy.deepcopy(plain)
    shard(
        sharded,
        [block.experts for block in sharded],
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    x = torch.randn(48, 144)
    sharded(x).square().sum().backward()
    gathered = copy.deepcopy(plain).to(torch.bfloat16)
    gathered(x.bfloat16()).square().sum().backward()
    for ours, theirs in zip(sharded.parameters(), gathered.parameters(), strict=True):
        assert ours.dtype == ours.grad.dtype == torch.float32
        close(ours.grad, theirs.grad.float())


def weights_made_where_they_are_sharded():
    with torch.device("meta"):
        model = nn.Sequential(FP8Linear(144, 144, **MASTERS), Block())
    shard(model, [model[0], model[1].experts])
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model[0].reset_parameters()
    model[1].experts.reset_parameters()
    for module in (model[0], model[1].experts):
        for parameter in module.parameters():
            values, bound = parameter.full_tensor(), 144**-0.5 if parameter.shape[-1] == 144 else 96**-0.5
            assert values.abs().max() <= bound and values.std() > 0.4 * bound
    assert model[0](torch.ones(2, 144)).isfinite().all()


class Replica(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.block = FP8Linear(144, 144, **MASTERS), Block()

    def forward(self, x):
        return self.linear(x) + self.block(x)


def replicas():
    torch.manual_seed(0)
    plain = Replica()
    torch.manual_seed(dist.get_rank())  # rank 0's weights are those that count
    replica = Replica()
    parallel = DistributedDataParallel(replica)
    torch.manual_seed(1)
    data, targets = torch.randn(2, WORLD, 48, 144)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (plain, parallel)]
    start = copy.deepcopy(plain)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (parallel(data[dist.get_rank()]) - targets[dist.get_rank()]).square().mean().backward()
        for x, target in zip(data, targets, strict=True):
            ((plain(x) - target).square().mean() / WORLD).backward()
        for ours, theirs in zip(replica.parameters(), plain.parameters(), strict=True):
            close(ours.grad, theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs, before in zip(replica.parameters(), plain.parameters(), start.parameters(), strict=True):
        close(ours, theirs)
        assert not torch.equal(theirs, before)


def work():
    for reshard in (True, False):
        linears_train_as_unsharded(reshard)
        experts_train_as_unsharded(reshard)
    changes_without_an_optimizer()
    no_copy_outlives_what_was_gathered()
    mixed_precision()
    weights_made_where_they_are_sharded()
    replicas()


def test_training_in_two_processes_is_that_of_one():
    in_processes(work)
