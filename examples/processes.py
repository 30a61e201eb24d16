"""Training in several processes, one for each GPU: experts spread over them, everything else sharded by FSDP2."""

import os
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from fp8moe import GroupedExperts
from fp8moe.distributed import ExpertParallel


class Processes(NamedTuple):
    """The rank of this process among `world` processes, and their mesh, None for a single process."""

    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None

    def part(self, values: Tensor) -> Tensor:
        """Return this process's equal part of values (B, ...)."""
        return values.chunk(self.world)[self.rank]

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the processes."""
        total = value.clone()
        if self.mesh is not None:
            dist.all_reduce(total)
        return total / self.world

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        flags = torch.tensor([flag], dtype=torch.int32)
        if self.mesh is not None:
            dist.all_reduce(flags)  # on the CPU, without waiting for the GPU
        return bool(flags)

    def shard(self, model: nn.Module, layers: nn.ModuleList | nn.Sequential) -> None:
        """Spread GroupedExperts over the processes; shard the other parameters, gathering one layer at a time."""
        if self.mesh is None:
            return
        experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
        for module in experts:
            parallelize_module(module, self.mesh, ExpertParallel())
        weights = [weight for module in experts for weight in module.parameters()]
        for weight in weights:  # FSDP2 takes the mean over the processes, ExpertParallel the sum
            weight.register_hook(lambda gradient: gradient / self.world)
        for module in (*layers, model):
            fully_shard(module, mesh=self.mesh, ignored_params=set(weights))

    def finish(self) -> None:
        """Leave the group when all processes are here."""
        if self.mesh is not None:
            dist.barrier()
            dist.destroy_process_group()


def start(count: int, device: str) -> tuple[Processes, torch.device]:
    """Join the processes that torchrun has started. Raises SystemExit unless there are `count`."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world != count:
        raise SystemExit(f"--ep {count} in {world} processes: torchrun --nproc-per-node {count} starts as many")
    if world == 1:
        return Processes(), torch.device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    place = torch.device(device)
    if device == "cuda":
        place = torch.device(device, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    return Processes(dist.get_rank(), world, init_device_mesh(device, (world,))), place


def exit_with(status: int) -> None:
    """End this process; one of several processes ends without finalizing Python, where a thread of gloo that frees a
    tensor would abort it (pytorch/pytorch#179291)."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)
