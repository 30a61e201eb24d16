"""A model that no card of a node holds: `python -m benchmarks.node [--ranks N]`, which starts a process for each GPU.

Qwen3-235B-A22B's sizes with random weights in FP8, decoded by `GraphDecoder`. The experts are spread over the ranks,
and each rank has all other weights.

- `decode`: `ms` is the time of a step, of the slowest rank. `batch`: the sequences of all ranks. If there are fewer
  than ranks, every rank has them all and the experts' method is "replicated"; otherwise each rank has its part of them,
  and the method is "gather". `floor_ms`: the bytes that a rank must read over the bandwidth of a copy: its weights
  without the embedding, those of its experts that the batch uses under even routing, its keys and values.
- `prefill`: time of prompts and the choice of one token; `tokens_s` counts the prompt tokens of all ranks.
- `gb`: gigabytes of weights on each rank.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks import report, roofline
from benchmarks.decode import MANY, ROOM, seconds, step_seconds
from benchmarks.distributed import change, generator, largest, start_ranks
from benchmarks.report import ROOT, tables_of, write_json
from benchmarks.whole_models import CONFIGS, build
from fp8moe import GroupedExperts
from fp8moe.decode import GraphDecoder
from fp8moe.distributed import ExpertParallel
from fp8moe.layers.parameters import is_sharded, local

MODEL = "qwen3-235b-a22b"
BATCHES, PROMPT = (1, 8, 64), 512
PREFILLS = ((2, 512), (4, 4096))
COLUMNS = {
    "decode": ("batch", "method", "ms", "floor_ms", "x_floor", "tokens_s"),
    "prefill": ("batch", "prompt", "ms", "tokens_s"),
}


def spread(model: nn.Module, mesh: DeviceMesh) -> None:
    """Spread the experts over the mesh. ValueError if a GPU of this rank has less memory than its weights need."""
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            parallelize_module(module, mesh, ExpertParallel(method="gather", uniform=True))
    need, have = sum(local(value).nbytes for value in model.parameters()), torch.cuda.mem_get_info()[0]
    if need > have:
        raise ValueError(f"{MODEL}: {need / 1e9:.0f} GB of weights on each rank, its GPU has {have / 1e9:.0f} GB free")


def read_bytes(model: Any, batch: int) -> float:
    """Return the bytes of weights that a rank must read in a step of `batch` sequences, under even routing."""
    config = model.config
    used = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** batch
    embedding = model.get_input_embeddings().weight
    return sum(
        local(value).nbytes * (used if is_sharded(value) else 1)
        for value in model.parameters()
        if value is not embedding
    )


def prompts_of(model: Any, batch: int, length: int) -> tuple[Tensor, str]:
    """Return this rank's prompts of `batch` in all, and the method of the experts for them."""
    world = dist.get_world_size()
    replicated = batch < world
    random = generator(0 if replicated else dist.get_rank())
    shape = (batch if replicated else batch // world, length)
    prompts = torch.randint(0, model.config.vocab_size, shape, device="cuda", generator=random)
    return prompts, "replicated" if replicated else "gather"


def set_method(model: nn.Module, method: str) -> None:
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            change(module, method=method, uniform=True)


def measure(model: Any) -> Iterator[dict]:
    for batch in BATCHES:
        prompts, method = prompts_of(model, batch, PROMPT)
        set_method(model, method)
        decoder = GraphDecoder(model, batch_sizes=(len(prompts),), max_length=PROMPT + ROOM)
        step = largest(step_seconds(decoder, prompts))
        cached = decoder.stats().cache_bytes * (PROMPT + MANY / 2) / (PROMPT + ROOM)
        floor = (read_bytes(model, batch) + cached) / (1e12 * roofline.copy_tbps())
        decoder.close()
        times = {"ms": 1e3 * step, "floor_ms": 1e3 * floor, "x_floor": step / floor, "tokens_s": batch / step}
        yield {"what": "decode", "batch": batch, "method": method, **times}
    for batch, length in PREFILLS:
        prompts, method = prompts_of(model, batch, length)
        set_method(model, method)
        decoder = GraphDecoder(model, batch_sizes=(len(prompts),), max_length=length + 16)

        def read(decoder: GraphDecoder = decoder, prompts: Tensor = prompts) -> None:
            decoder.generate(prompts, max_new_tokens=1, eos_token_id=())

        for _ in range(2):  # run twice before timing, because the graph of a short prompt is captured at its second use
            read()
        spent = largest(seconds(read))
        decoder.close()
        rates = {"ms": 1e3 * spent, "tokens_s": batch * length / spent}
        yield {"what": "prefill", "batch": batch, "prompt": length, **rates}


def work(args: Any) -> None:
    """Run the benchmark in this process, which is one of the ranks; rank 0 writes and prints the results."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    gpu = report.start()
    dist.init_process_group("nccl")
    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,))
    begin = time.perf_counter()
    model = build(MODEL, layers=args.layers, prepare=lambda model: spread(model, mesh))
    gb = sum(local(value).nbytes for value in model.parameters()) / 1e9
    about = {"ranks": world, "model": MODEL, "layers": model.config.num_hidden_layers, "gb": gb}
    rows: list[dict] = []
    for row in measure(model):
        rows.append(row)
        if dist.get_rank() == 0:
            write_json(args.out / "node.json", {"digest": report.digest(ROOT), "gpu": gpu, **about, "rows": rows})
            print(f"{time.perf_counter() - begin:.0f} s: {row}", flush=True)
    if dist.get_rank() == 0:
        print(*tables_of(rows, COLUMNS), sep="\n\n")
    dist.barrier()  # ExpertParallel uses gloo: a process that exits without waiting may abort (pytorch/pytorch#179291)
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser_of("node")
    parser.prog = "python -m benchmarks.node"
    parser.add_argument("--ranks", type=int, default=4, help="processes, one for each GPU")
    parser.add_argument(
        "--layers", type=int, help=f"fewer than the {CONFIGS[MODEL][1]['num_hidden_layers']} of the model"
    )
    args = parser.parse_args(argv)
    if "RANK" in os.environ:
        work(args)
        return 0
    return start_ranks("benchmarks.node", args.ranks, argv)


if __name__ == "__main__":
    sys.exit(main())
