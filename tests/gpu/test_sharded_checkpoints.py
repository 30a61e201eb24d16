"""Checkpoints and new weights of a model on two or four GPUs, over NCCL: the files and bits of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fp8moe import refit
from fp8moe.weights import load_fp8_checkpoint, save_fp8_checkpoint
from tests.processes import GPUS, in_processes
from tests.sharded_models import SHARD_SIZE, files_of, save_whole, shard_all, shard_experts
from tests.small_checkpoints import Model, unquantized
from tests.weights.test_refit import masters
from tests.weights.test_sharded_checkpoints import decodes_and_runs_after_a_refit, equal, refits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")]


def one_checkpoint(directory):
    mesh = init_device_mesh("cuda", (GPUS,))
    for shard in (shard_experts, shard_all):
        torch.manual_seed(1)
        model = shard(Model().cuda(), mesh)
        load_fp8_checkpoint(model, directory / "whole-fused")
        assert model.layers[0].experts.down_proj.to_local().is_cuda
        save_fp8_checkpoint(model, directory / shard.__name__, max_shard_size=SHARD_SIZE)
        dist.barrier()
        assert files_of(directory / shard.__name__) == files_of(directory / "whole")


def test_a_sharded_model_has_the_checkpoint_of_one_process(tmp_path):
    save_whole(tmp_path)
    in_processes(one_checkpoint, tmp_path, world=GPUS, backend="nccl")


def new_weights(device):
    """From tensors, and from a trainer in FSDP2."""
    mesh = init_device_mesh(device, (GPUS,))
    for shard in (shard_experts, shard_all):
        model, expected, tensors = shard(Model().to(device), mesh), Model().to(device), unquantized(5)
        refits(model)
        refit(expected, tensors)
        refit(model, shard_all(masters(tensors).to(device), mesh))
        equal(model, expected.state_dict())


@pytest.mark.parametrize("work", [new_weights, decodes_and_runs_after_a_refit])
def test_new_weights_have_the_bits_of_one_process(work):
    in_processes(work, "cuda", world=GPUS, backend="nccl")
