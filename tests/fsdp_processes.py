"""Two processes on the CPU for the FSDP2 tests, and what they compare with unsharded layers."""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

from fp8moe.layers import master

WORLD = 2


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def close(sharded, plain):
    sharded, plain = full(sharded).detach(), plain.detach()
    assert sharded.shape == plain.shape and (sharded - plain).norm() <= 1e-5 * plain.norm()


def count_quantizations():
    """A list that every quantization of a master adds its shape to."""
    shapes, quantize = [], master.quantize_128x128

    def counted(weight):
        shapes.append(tuple(weight.shape))
        return quantize(weight)

    master.quantize_128x128 = counted
    return shapes


def _run(rank, port, work):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    try:
        work()
    finally:
        dist.destroy_process_group()


def in_processes(work):
    """Calls work(), a function of a module, in WORLD processes of one group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_run, (port, work), nprocs=WORLD)
