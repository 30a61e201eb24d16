"""FP8Linear with master weights under FSDP2: two processes on the CPU against the unsharded layers."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8moe.layers import master
from fp8moe.layers.linear import FP8Linear
from tests.fsdp_processes import WORLD, close, quantizations, shard, train
from tests.processes import in_processes

MICRO_BATCHES = 2

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def compare(reshard):
    torch.manual_seed(0)
    plain = nn.Sequential(
        FP8Linear(144, 272, dtype=torch.float32, master_dtype=torch.float32),
        nn.SiLU(),
        FP8Linear(272, 48, dtype=torch.float32, master_dtype=torch.float32),
    )
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


def weights_made_where_they_are_sharded():
    with torch.device("meta"):
        model = nn.Sequential(FP8Linear(256, 256, dtype=torch.float32, master_dtype=torch.float32))
    shard(model, model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model[0].reset_parameters()
    for parameter in model.parameters():
        values = parameter.full_tensor()
        assert values.abs().max() <= 1 / 16 and values.std() > 0.02
    assert model(torch.ones(2, 256)).isfinite().all()


def work():
    for reshard in (True, False):
        compare(reshard)
    changes_without_an_optimizer()
    no_copy_outlives_what_was_gathered()
    weights_made_where_they_are_sharded()


def test_sharded_training_is_unsharded_training():
    in_processes(work)
