"""Expert parallelism on one node: `python -m benchmarks.distributed [--ranks N]`, which starts a process for each GPU.

- `layer`: DeepSeek-V3's experts, so many tokens on each rank. `us` is a call, from when all ranks are ready to when the
  slowest has its result, with a cold L2: a graph's replay, for all_to_all an eager call. `beyond_us` and `over_local`
  are against `local`: the experts of one rank alone on the tokens of all. `equal` is the share of values that are those
  of one GPU's layer, `farther` that of values more than one bfloat16 step away from them; where a value is smaller than
  its token's root mean square, so that the sums cancel, a step of that. `one_gpu` is all of it on each GPU.
- `scratch`: memory of an eager call beside its result and the buffers between GPUs, over that of the rows of a rank.
- `training`: forward and backward with master weights in bfloat16, against the same experts alone. `repeats`: whether
  a second pass gives equal gradients.
- `decode`: a step of a whole model (`benchmarks/whole_models.py`), its batch shared out, against one GPU's step.
- `predicted`: what `benchmarks/roofline.py` makes of two GPUs' layers for more of them. It is printed, not kept.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks import command, timing
from benchmarks.baselines import MODELS
from benchmarks.decode import ROOM, random_prompts, step_seconds
from benchmarks.report import Threshold, format_kinds, select
from benchmarks.roofline import MANY, predicted
from benchmarks.whole_models import CONFIGS, build
from fp8moe import GroupedExperts
from fp8moe.distributed import ExpertParallel
from fp8moe.distributed.peers import Peers
from fp8moe.integrations.decode import GraphDecoder
from fp8moe.kernels.experts.partial import experts_partial
from fp8moe.quant.formats import FP8Tensor

MODEL = MODELS["dsv3"]
TOKENS = (1, 64, 512, 4096)
BATCH, PROMPT = 64, 512
REPEATS = 20
COLUMNS = {
    "layer": ("tokens", "method", "us", "beyond_us", "over_local", "equal", "farther"),
    "scratch": ("tokens", "bytes", "share", "over_share"),
    "training": ("tokens", "method", "us", "over_local", "gradient_error", "repeats"),
    "decode": ("batch", "ms", "one_gpu_ms", "over_one_gpu"),
    "predicted": ("ranks", "tokens", "method", "us", "over_local"),
}


class Inputs(NamedTuple):
    """hidden_states, top_k_index, top_k_weights."""

    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor

    def of(self, rank: int, tokens: int) -> "Inputs":
        return Inputs(*(value[rank * tokens : (rank + 1) * tokens].clone() for value in self))


def inputs(tokens: int) -> Inputs:
    """The same on all ranks."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    scores = torch.rand(tokens, MODEL.experts, device="cuda", generator=generator)
    weights, index = scores.topk(MODEL.top_k)
    x = torch.randn(tokens, MODEL.hidden, device="cuda", generator=generator)
    return Inputs(x.bfloat16(), index, weights / weights.sum(1, keepdim=True))


def experts(seed: int = 0, **options: Any) -> GroupedExperts:
    sizes = {"num_experts": MODEL.experts, "hidden_size": MODEL.hidden, "intermediate_size": MODEL.intermediate}
    torch.manual_seed(seed)
    return GroupedExperts(**sizes, device="cuda", **options)


def local_part(layer: GroupedExperts) -> GroupedExperts:
    """The experts of this rank alone, in a layer that knows no others, with memory of their own."""
    count = MODEL.experts // dist.get_world_size()
    sizes = {"num_experts": count, "hidden_size": MODEL.hidden, "intermediate_size": MODEL.intermediate}
    part = GroupedExperts(**sizes, device="meta", master_dtype=layer.down_proj.dtype if layer.trainable else None)
    part.to_empty(device="cuda")
    first = dist.get_rank() * count
    for mine, whole in zip(part.parameters(), layer.parameters(), strict=True):
        mine.data.copy_(whole.data[first : first + count])
    return part


def spread(layer: GroupedExperts, **options: Any) -> GroupedExperts:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    return parallelize_module(layer, mesh, ExpertParallel(**options), src_data_rank=None)


@contextmanager
def without_peers() -> Iterator[None]:
    """NCCL for everything."""
    of, Peers.of = Peers.of, classmethod(lambda *args: None)
    try:
        yield
    finally:
        Peers.of = of


def captured(call: Callable[[], object]) -> Callable[[], object]:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.result = call()
    return graph.replay


def microseconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median over the repeats of what the slowest rank takes, from when all are ready, with a cold L2."""
    for _ in range(timing.WARMUP):
        call()
    flush = torch.empty(timing.FLUSH_BYTES // 2, dtype=timing.FLUSH_DTYPE, device="cuda")
    ready = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    time.sleep(timing.REST_S)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for repeat, (start, end) in enumerate(events):
        flush.fill_(repeat)
        dist.all_reduce(ready)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = torch.tensor([1000 * start.elapsed_time(end) for start, end in events], device="cuda")
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(times.median())


def local_call(part: GroupedExperts, given: Inputs) -> Callable[[], object]:
    """The experts of this rank on the tokens of all: what there is to compute, and nothing to send."""
    first = dist.get_rank() * part.num_experts
    up, down = (
        FP8Tensor(*pair)
        for pair in ((part.gate_up_proj, part.gate_up_proj_scale_inv), (part.down_proj, part.down_proj_scale_inv))
    )
    options = {"activation": part.activation, "first_expert": first, "num_experts": MODEL.experts}
    rows = given.top_k_index.numel()
    room = min(rows, max(int(1.25 * rows / dist.get_world_size()), 256 * MODEL.top_k))
    return lambda: experts_partial(*given, up, down, **options, row_dtype=torch.bfloat16, num_rows=room)


METHODS = {
    "gather": {"method": "gather", "uniform": True},
    "gather, NCCL": {"method": "gather", "uniform": True},
    "replicated": {"method": "replicated", "uniform": True},
    "all_to_all, eager": {"method": "all_to_all"},
    "all_to_all, exact, eager": {"method": "all_to_all", "exact": True},
}


def measure_layers(counts: Sequence[int]) -> list[dict]:
    world, rank = dist.get_world_size(), dist.get_rank()
    layer = experts()
    part = local_part(layer)
    expected = {tokens: layer(*inputs(world * tokens)) for tokens in counts}
    alone = {tokens: microseconds(captured(partial(layer, *inputs(world * tokens)))) for tokens in counts}
    rows = [{"what": "layer", "tokens": tokens, "method": "one_gpu", "us": us} for tokens, us in alone.items()]
    local = {tokens: microseconds(captured(local_call(part, inputs(world * tokens)))) for tokens in counts}
    rows += [{"what": "layer", "tokens": tokens, "method": "local", "us": us} for tokens, us in local.items()]
    del layer, part
    for name, options in METHODS.items():
        spread_layer = spread(experts(), **options)
        for tokens in counts:
            every = inputs(world * tokens)
            same = options["method"] == "replicated"
            given = every if same else every.of(rank, tokens)

            call = partial(spread_layer, *given)
            ours, want = call(), expected[tokens] if same else expected[tokens].chunk(world)[rank]
            if "NCCL" in name:
                with without_peers():
                    us = microseconds(captured(call))
            else:
                us = microseconds(call if "eager" in name else captured(call))
            found = {
                "us": us,
                "beyond_us": us - local[tokens],
                "over_local": us / local[tokens],
                **agreement(ours, want),
            }
            rows.append({"what": "layer", "tokens": tokens, "method": name, **found})
        if name == "gather":
            rows.append(measure_scratch(spread_layer, inputs(world * MANY).of(rank, MANY)))
        del spread_layer
        torch.cuda.empty_cache()
    return rows


def agreement(ours: Tensor, expected: Tensor) -> dict[str, float]:
    """Shares of all ranks' values that are equal, and that are more than a step away."""
    size = torch.maximum(expected.float().abs(), expected.float().square().mean(-1, keepdim=True).sqrt())
    step = 2.0 ** (size.log2().floor() - 7)
    far = (ours.float() - expected.float()).abs() > step
    shares = torch.stack([(ours == expected).double().mean(), far.double().mean()])
    dist.all_reduce(shares)
    equal, farther = (shares / dist.get_world_size()).tolist()
    return {"equal": equal, "farther": farther}


def measure_scratch(layer: GroupedExperts, given: Inputs) -> dict:
    """share: what GroupedExperts says of its memory, for the rows that a rank has if they are even."""
    layer(*given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = layer(*given)
    used = torch.cuda.max_memory_allocated() - before - out.nbytes
    rows = len(given.top_k_index) * MODEL.top_k
    blocks = -(-MODEL.hidden // 128) + -(-MODEL.intermediate // 128)
    share = rows * (3 * MODEL.hidden + MODEL.intermediate) + 4 * rows * blocks
    return {"what": "scratch", "tokens": len(out), "bytes": used, "share": share, "over_share": used / share}


def measure_training(tokens: int) -> list[dict]:
    world, rank = dist.get_world_size(), dist.get_rank()
    every = inputs(world * tokens)
    gradient = torch.randn(every.hidden_states.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    gradient = gradient.bfloat16()
    masters = {"dtype": torch.bfloat16, "master_dtype": torch.bfloat16}
    layer = experts(**masters)
    part = local_part(layer)
    first = rank * part.num_experts
    index = every.top_k_index - first
    index = torch.where((index >= 0) & (index < part.num_experts), index, part.num_experts)
    alone = _pass(part, every._replace(top_k_index=index), gradient)
    alone()
    want = part.down_proj.grad.clone()
    local = microseconds(alone, repeats=8)
    rows = [{"what": "training", "tokens": tokens, "method": "local", "us": local}]
    del part, alone
    torch.cuda.empty_cache()
    for method in ("gather", "all_to_all"):
        trained = spread(experts(**masters) if layer is None else layer, method=method)
        layer = None
        both = _pass(trained, every.of(rank, tokens), gradient.chunk(world)[rank])
        both()
        found = trained.down_proj.grad.to_local()
        error = float((found.float() - want.float()).norm() / want.float().norm())
        both()
        same = torch.equal(trained.down_proj.grad.to_local(), found)
        us = microseconds(both, repeats=8)
        rows.append(
            {
                "what": "training",
                "tokens": tokens,
                "method": method,
                "us": us,
                "over_local": us / local,
                "gradient_error": error,
                "repeats": same,
            }
        )
        del trained, both, found
        torch.cuda.empty_cache()
    return rows


def _pass(layer: GroupedExperts, given: Inputs, gradient: Tensor) -> Callable[[], None]:
    """Forward and backward with all gradients, eager."""
    x, index, weights = given
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()

    def run() -> None:
        for value in (x, weights, *layer.parameters()):
            value.grad = None
        layer(x, index, weights).backward(gradient)

    return run


def measure_decode(name: str) -> list[dict]:
    world = dist.get_world_size()
    model = build(name)
    decoder = GraphDecoder(model, batch_sizes=(BATCH,), max_length=PROMPT + ROOM)
    alone = step_seconds(decoder, random_prompts(model, BATCH, PROMPT))
    decoder.close()
    del decoder
    mesh = init_device_mesh("cuda", (world,))
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            parallelize_module(module, mesh, ExpertParallel(method="gather", uniform=True), src_data_rank=None)
    torch.cuda.empty_cache()
    decoder = GraphDecoder(model, batch_sizes=(BATCH // world,), max_length=PROMPT + ROOM)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    prompts = torch.randint(0, model.config.vocab_size, (BATCH // world, PROMPT), device="cuda", generator=generator)
    seconds = torch.tensor(step_seconds(decoder, prompts), device="cuda")
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    step = float(seconds)
    decoder.close()
    return [
        {
            "what": "decode",
            "model": name,
            "batch": BATCH,
            "ms": 1e3 * step,
            "one_gpu_ms": 1e3 * alone,
            "over_one_gpu": step / alone,
        }
    ]


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    found = []
    layers = {(row["tokens"], row["method"]): row for row in select(rows, "layer")}

    def best(tokens: int, column: str) -> float | None:
        values = [layers[tokens, name][column] for name in ("gather", "gather, NCCL") if (tokens, name) in layers]
        return min(values, default=None)

    for tokens, column, limit, aim in (
        (1, "beyond_us", 18, 12),
        (64, "over_local", 1.04, 1.02),
        (4096, "over_local", 1.13, 1.08),
    ):
        if (value := best(tokens, column)) is not None:
            found.append(Threshold(f"layer, {tokens} tokens a rank, {column}", value, limit, aim))
    for row in layers.values():
        if "equal" in row:
            name = f"layer, {row['tokens']} tokens a rank, {row['method']}"
            least = 1.0 if "exact" in row["method"] else 0.9999
            found.append(Threshold(f"{name}, values equal to one GPU's", row["equal"], least, at_least=True))
            found.append(Threshold(f"{name}, values farther than a step", row["farther"], 0.0))
    for row in select(rows, "scratch"):
        found.append(
            Threshold(f"scratch of a rank, {row['tokens']} tokens a rank, over its share", row["over_share"], 1.3, 1.1)
        )
    trained = [row for row in select(rows, "training") if "over_local" in row]
    if trained:
        found.append(
            Threshold(
                "training, forward and backward, over_local", min(row["over_local"] for row in trained), 1.25, 1.12
            )
        )
        found.append(
            Threshold("training, relative error of gradients", max(row["gradient_error"] for row in trained), 3e-2)
        )
        same = float(all(row["repeats"] for row in trained))
        found.append(Threshold("training, gradients equal on repeat", same, 1.0, at_least=True))
    for row in select(rows, "decode"):
        found.append(Threshold("decode, whole model, step over one GPU's", row["over_one_gpu"], 0.80, 0.72))
    return found


def work(args: Any) -> None:
    """What each process does; the first one reports."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    gpu = command.start()
    dist.init_process_group("nccl")
    rows = []
    with torch.no_grad():
        if "layer" in args.only:
            rows += measure_layers(args.tokens)
    if "training" in args.only:
        rows += measure_training(MANY)
    if "decode" in args.only:
        rows += measure_decode(args.model)
    if dist.get_rank() == 0:
        made = command.result(gpu, rows, thresholds(rows), ranks=dist.get_world_size(), model=args.model)
        shown = rows + (predicted(rows, MODEL) if dist.get_world_size() == 2 else [])
        command.finish(args.out / "distributed.json", made, *format_kinds(shown, COLUMNS))
    dist.destroy_process_group()


PARTS = ("layer", "training", "decode")
# NVLink multicast stays off, as in the tests: on some hosts a program that uses it harms others.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("distributed", "expert parallelism over the GPUs of one node")
    parser.add_argument("--ranks", type=int, default=2, help="processes, one for each GPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="T", help="on each rank")
    parser.add_argument("--model", choices=CONFIGS, default=next(iter(CONFIGS)))
    args = parser.parse_args(argv)
    if "RANK" in os.environ:
        work(args)
        return 0
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    given = sys.argv[1:] if argv is None else argv
    start += ["-m", "benchmarks.distributed", *given]
    return subprocess.run(start, env=WITHOUT_MULTICAST | os.environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
