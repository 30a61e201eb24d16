"""FP8Linear with master weights under FSDP2: two processes on the CPU against the unsharded layers."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fp8moe.layers.linear import FP8Linear
from tests.fsdp_processes import WORLD, close, in_processes, train

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
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
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


def work():
    for reshard in (True, False):
        compare(reshard)


def test_sharded_training_is_unsharded_training():
    in_processes(work)
