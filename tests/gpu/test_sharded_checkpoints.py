"""Checkpoints of a model shared out among two GPUs, over NCCL: the files of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fp8moe.integrations.checkpoints import load_fp8_checkpoint, save_fp8_checkpoint
from tests.processes import in_processes
from tests.sharded_models import SHARD_SIZE, files_of, save_whole, shard_all, shard_experts
from tests.small_checkpoints import Model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")]


def one_checkpoint(directory):
    mesh = init_device_mesh("cuda", (2,))
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
    in_processes(one_checkpoint, tmp_path, backend="nccl")
