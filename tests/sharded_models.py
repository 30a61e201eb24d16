"""The model of small_checkpoints shared out among processes, and its checkpoints."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fp8moe import GroupedExperts
from fp8moe.weights import save_fp8_checkpoint
from tests.small_checkpoints import Model

SHARD_SIZE = 60_000  # bytes of a file: some of the model's tensors are larger


def files_of(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def shard_experts(model, mesh):
    """What ExpertParallel makes of the parameters; of three experts on four ranks the last has none."""
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            for name, value in list(module.named_parameters()):
                sharded = distribute_tensor(value.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(module, name, nn.Parameter(sharded, requires_grad=value.requires_grad))
    return model


def shard_all(model, mesh, dim=0):
    """FSDP2's shards: of linears rows, of experts whole ones, with dim 1 a part of each."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda value: Shard(min(dim, value.dim() - 1)))
    return fully_shard(model, mesh=mesh)


def shard_both(model, mesh):
    """Experts on both axes of a mesh, all else on one of them."""
    shard_experts(model, mesh["ep"])
    return shard_all(model, mesh["dp"])


def save_whole(directory):
    """A model's checkpoint in many files, one with fused experts, and its state, which one process has saved."""
    torch.manual_seed(0)
    model = Model()
    save_fp8_checkpoint(model, directory / "whole", max_shard_size=SHARD_SIZE)
    save_fp8_checkpoint(model, directory / "whole-fused", experts="fused")
    save_file(model.state_dict(), directory / "whole.safetensors")
