"""Layers with master weights under DistributedDataParallel: two processes on the CPU against one."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.linear import FP8Linear
from tests.fsdp_processes import WORLD, close
from tests.processes import in_processes

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        masters = {"dtype": torch.float32, "master_dtype": torch.float32}
        self.gate = nn.Linear(144, 5)
        self.linear = FP8Linear(144, 144, **masters)
        self.experts = GroupedExperts(num_experts=5, hidden_size=144, intermediate_size=96, **masters)

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(2)
        return self.linear(x) + self.experts(x, index, weights)


def work():
    torch.manual_seed(0)
    plain = Block()
    torch.manual_seed(dist.get_rank())  # rank 0's weights are those that count
    replica = Block()
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


def test_gradients_are_the_means_over_the_ranks():
    in_processes(work)
