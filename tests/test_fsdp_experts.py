"""GroupedExperts with master weights under FSDP2: two processes on the CPU against the unsharded layers."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fp8moe.layers.experts import GroupedExperts
from tests.fsdp_processes import WORLD, close, shard, train
from tests.processes import in_processes

MICRO_BATCHES = 2

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


class Block(nn.Module):
    """A router and its experts; I is no multiple of 128."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(144, 5)
        sizes = dict(num_experts=5, hidden_size=144, intermediate_size=96)
        self.experts = GroupedExperts(**sizes, dtype=torch.float32, master_dtype=torch.float32)

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(2)
        return self.experts(x, index, weights).add_(x)


def compare(reshard):
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
        model = nn.Sequential(Block())
    shard(model, [block.experts for block in model])
    model.to_empty(device="cpu")
    model[0].experts.reset_parameters()
    for name in ("gate_up_proj", "down_proj"):
        values = getattr(model[0].experts, name).full_tensor()
        bound = values.shape[-1] ** -0.5
        assert 0.9 * bound < values.abs().max() <= bound


def work():
    for reshard in (True, False):
        compare(reshard)
    mixed_precision()
    weights_made_where_they_are_sharded()


def test_sharded_training_is_unsharded_training():
    in_processes(work)
