"""Several processes of one group, on the CPU or on a GPU each."""

import os
import sys
from collections.abc import Callable, Iterable
from itertools import cycle, islice

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HOST = "127.0.0.1"

# NVLink multicast stays off: on some hosts a program that uses it harms others.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


GPUS = 4 if torch.cuda.device_count() >= 4 else 2
"""Processes of a test on several GPUs, one on each."""

# One process imports what takes seconds, and every process of a group is forked from it.
IMPORTED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "networkx"),
    *("transformers", "transformers.generation", "transformers.models.mixtral.modeling_mixtral"),
    *("transformers.trainer_utils", "transformers.models.auto.tokenization_auto"),  # from_pretrained imports them
    *("transformers.models.qwen3_moe.modeling_qwen3_moe", "transformers.models.deepseek_v3.modeling_deepseek_v3"),
    *("fp8moe", "fp8moe.decode", "fp8moe.hf", "fp8moe.commands.warmup"),
    *("pytest", "hypothesis"),
)
forkserver = mp.get_context("forkserver")
forkserver.set_forkserver_preload([*IMPORTED])


def on_gpus(*counts: int) -> tuple[int, ...]:
    """Numbers of tokens, in turn, for as many processes as `GPUS`."""
    return tuple(islice(cycle(counts), GPUS))


def in_processes(work: Callable, *arguments, world: int = 2, backend: str = "gloo"):
    """Calls work(*arguments), a function of a module, in `world` processes of one group."""
    store = meeting_place()
    start_processes(_run, (world, backend, store.port, work, arguments), world, fork=backend == "gloo")


def run_each(cases: Iterable[Callable], *arguments) -> None:
    """Errors say in which of them."""
    for case in cases:
        try:
            case(*arguments)
        except Exception as error:
            error.add_note(f"in {case.__name__}")
            raise


def start_processes(work: Callable, arguments: tuple, count: int, fork: bool = True):
    """Calls work(rank, *arguments) in so many processes, new ones or forked from one with everything imported."""
    mp.start_processes(work, arguments, nprocs=count, start_method="forkserver" if fork else "spawn")


def meeting_place() -> dist.TCPStore:
    """Through which processes find each other, while it lives. Its port is taken: no other program can get it first."""
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def _run(rank, world, backend, port, work, arguments):
    torch.set_num_threads(1)
    options = {}
    if backend == "nccl":
        os.environ.update(WITHOUT_MULTICAST)
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(backend, store=dist.TCPStore(HOST, port), rank=rank, world_size=world, **options)
    # Not where work raises: NCCL would wait for the other ranks, which then wait for this one.
    work(*arguments)
    if backend == "nccl":
        torch.cuda.synchronize()
    dist.destroy_process_group()
    # The interpreter does not end: a thread of gloo that frees a tensor meanwhile may abort the process
    # (pytorch/pytorch#179291).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
