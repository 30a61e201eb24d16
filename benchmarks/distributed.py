"""Expert parallelism on one node: `python -m benchmarks.distributed [--ranks N]`, which starts a process for each GPU.

- `layer`: time of DeepSeek-V3's experts. `tokens`: tokens on each rank. `us`: microseconds of a call, from the moment
  when all ranks are ready until the slowest rank has its result, with a cold L2. A call is a replay of a CUDA graph, or
  an eager call for methods named "eager". The method `local` is the experts of one rank alone, on the tokens of all
  ranks; `beyond_us` is `us` minus the time of `local`, and `over_local` is `us` over the time of `local`. The method
  `one_gpu` is the whole layer on each GPU, on the tokens of all ranks. `equal` is the share of result values that equal
  those of `one_gpu`; `farther` is the share of result values that differ from those of `one_gpu` by more than one
  bfloat16 step. For values below the root mean square of their token, the step is the step at the root mean square,
  since the sums of such values cancel. With gather, a graph computes all rows that could arrive; an eager call asks how
  many rows did arrive.
- `auto`: the method that "auto" chooses for eager calls, and the fastest method measured.
- `scratch`: `bytes` of memory that an eager call uses, without its result and the buffers between GPUs. `share`: the
  memory of a rank's rows under even routing. `over_share`: the ratio of `bytes` to `share`.
- `training`: time of forward and backward of `--layers` consecutive layers, with master weights in bfloat16.
  `over_local`: ratio of this time to the time of the same experts without communication (`local`). `gradient_error`:
  relative error of a layer's weight gradient, the largest of all layers. The expected gradient comes from a pass of the
  rank's experts without communication, on the same input of the layer. `repeats`: whether a second pass gives equal
  gradients.
- `decode`: time of a decode step of a whole model (`benchmarks/whole_models.py`) with the batch divided among ranks,
  and the ratio of this time to the time of a step on one GPU.
- `predicted`: times of layers on more GPUs, predicted from two GPUs by `benchmarks/roofline.py`. Printed, not stored.

The result is rewritten after every row, so that measurements are kept if a process ends early.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks import report, timing
from benchmarks.decode import ROOM, random_prompts, step_seconds
from benchmarks.report import Bar, Threshold, judge, tables_of, write_json
from benchmarks.roofline import MANY, predicted
from benchmarks.shapes import MODELS
from benchmarks.whole_models import CONFIGS, build
from fp8moe import GroupedExperts
from fp8moe.decode import GraphDecoder
from fp8moe.distributed import ExpertParallel
from fp8moe.distributed.peers import Peers
from fp8moe.distributed.transport import choose_method
from fp8moe.kernels.experts import operands as kernel
from fp8moe.kernels.experts.operator import experts_partial
from fp8moe.quant.formats import FP8Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # CPU only in tests
MODEL = MODELS["dsv3"]
TOKENS = (1, 64, 512, 4096)
BATCH, PROMPT = 64, 512
REPEATS = 20
GAIN = 1.6  # scales random weights so that the experts' results have about the magnitude of their inputs
COLUMNS = {
    "layer": ("tokens", "method", "us", "beyond_us", "over_local", "equal", "farther"),
    "auto": ("tokens", "method", "fastest"),
    "scratch": ("tokens", "bytes", "share", "over_share"),
    "training": ("tokens", "layers", "method", "us", "over_local", "gradient_error", "repeats"),
    "decode": ("batch", "ms", "one_gpu_ms", "over_one_gpu"),
    "predicted": ("ranks", "tokens", "method", "us", "over_local"),
}


class Inputs(NamedTuple):
    """The inputs of an experts layer: hidden_states, top_k_index, top_k_weights."""

    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor

    def of(self, rank: int, tokens: int) -> "Inputs":
        return Inputs(*(value[rank * tokens : (rank + 1) * tokens].clone() for value in self))


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def inputs(tokens: int) -> Inputs:
    """Draw random inputs for `tokens` tokens, the same on every rank."""
    random = generator(tokens)
    scores = torch.rand(tokens, MODEL.experts, device=DEVICE, generator=random)
    weights, index = scores.topk(MODEL.top_k)
    x = torch.randn(tokens, MODEL.hidden, device=DEVICE, generator=random)
    return Inputs(x.bfloat16(), index, weights / weights.sum(1, keepdim=True))


def layer_of(experts: int, device: str = "meta", **options: Any) -> GroupedExperts:
    """Build an experts layer with MODEL's sizes and the given number of experts."""
    sizes = {"num_experts": experts, "hidden_size": MODEL.hidden, "intermediate_size": MODEL.intermediate}
    return GroupedExperts(**sizes, device=device, **options)


def experts() -> GroupedExperts:
    torch.manual_seed(0)
    return layer_of(MODEL.experts, DEVICE)


def local_part(layer: GroupedExperts) -> GroupedExperts:
    """Copy this rank's experts from `layer` into a layer without expert parallelism."""
    count = MODEL.experts // dist.get_world_size()
    part = layer_of(count).to_empty(device=DEVICE)
    first = dist.get_rank() * count
    for mine, whole in zip(part.parameters(), layer.parameters(), strict=True):
        mine.data.copy_(whole.data[first : first + count])
    return part


def spread(layer: GroupedExperts, **options: Any) -> GroupedExperts:
    return parallelize_module(layer, _mesh(), ExpertParallel(**options), src_data_rank=None)


@cache
def _mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def change(layer: GroupedExperts, **options: Any) -> None:
    """Change the ExpertParallel options of a layer that is already parallelized."""
    layer.parallel.options = ExpertParallel(**options).options


@contextmanager
def without_peers() -> Iterator[None]:
    """Make all communication within the with block use NCCL instead of direct access to other GPUs' memory."""
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
    """Return the microseconds from when all ranks are ready until the slowest rank has finished a call.

    The L2 cache is cold. The result is the median over repeats.
    """
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
    """Return a call of this rank's experts on the tokens of all ranks: all of their computation, no communication."""
    first = dist.get_rank() * part.num_experts
    up, down = (
        FP8Tensor(*pair)
        for pair in ((part.gate_up_proj, part.gate_up_proj_scale_inv), (part.down_proj, part.down_proj_scale_inv))
    )
    rows = given.top_k_index.numel()
    room = min(rows, max(int(1.25 * rows / dist.get_world_size()), 256 * MODEL.top_k))
    shard = kernel.Shard(first, MODEL.experts, num_rows=room, row_dtype=torch.bfloat16)
    return lambda: experts_partial(*given, kernel.Layer(up, down, part.activation), shard)


METHODS = {
    "gather": {"method": "gather", "uniform": True},
    "gather, eager": {"method": "gather", "uniform": True},
    "gather, NCCL": {"method": "gather", "uniform": True},
    "all_to_all, eager": {"method": "all_to_all"},
    "all_to_all, exact, eager": {"method": "all_to_all", "exact": True},
    "replicated": {"method": "replicated", "uniform": True},
}
OWN = [name for name, options in METHODS.items() if options["method"] != "replicated"]
"""The names of the methods in which each rank has its own tokens."""


@torch.no_grad()
def measure_layers(counts: Sequence[int]) -> Iterator[dict]:
    world = dist.get_world_size()
    layer = experts()
    part = local_part(layer)
    expected, local = {}, {}
    for tokens in counts:
        every = inputs(world * tokens)
        expected[tokens] = layer(*every)
        us = microseconds(captured(partial(layer, *every)))
        yield {"what": "layer", "tokens": tokens, "method": "one_gpu", "us": us}
        us = local[tokens] = microseconds(captured(local_call(part, every)))
        yield {"what": "layer", "tokens": tokens, "method": "local", "us": us}
    del part
    layer = spread(layer, **METHODS["gather"])
    torch.cuda.empty_cache()
    found = {}
    for name in METHODS:
        for tokens in counts:
            us, agreed = measure_method(layer, name, tokens, expected[tokens])
            found[name, tokens] = us
            beside = {"beyond_us": us - local[tokens], "over_local": us / local[tokens]}
            yield {"what": "layer", "tokens": tokens, "method": name, "us": us, **beside, **agreed}
        if name == "gather":
            yield measure_scratch(layer, inputs(world * MANY).of(dist.get_rank(), MANY))
        torch.cuda.empty_cache()
    for tokens in counts:
        fastest = min((name for name in OWN if "eager" in name), key=lambda name: found[name, tokens])
        yield {
            "what": "auto",
            "tokens": tokens,
            "method": choose_method(tokens, MODEL.top_k, world),
            "fastest": fastest,
        }


def measure_method(layer: GroupedExperts, name: str, tokens: int, expected: Tensor) -> tuple[float, dict[str, float]]:
    """Return the microseconds of a call, and how its result agrees with one GPU's result for all ranks' tokens."""
    world, rank = dist.get_world_size(), dist.get_rank()
    change(layer, **METHODS[name])
    every = inputs(world * tokens)
    own = name in OWN
    call = partial(layer, *(every.of(rank, tokens) if own else every))
    with without_peers() if "NCCL" in name else nullcontext():
        agreed = agreement(call(), expected.chunk(world)[rank] if own else expected)
        return microseconds(call if "eager" in name else captured(call)), agreed


def agreement(ours: Tensor, expected: Tensor) -> dict[str, float]:
    """Return the shares, over all ranks, of values equal to `expected` and of values more than a bfloat16 step away."""
    size = torch.maximum(expected.float().abs(), expected.float().square().mean(-1, keepdim=True).sqrt())
    step = 2.0 ** (size.log2().floor() - 7)
    far = (ours.float() - expected.float()).abs() > step
    shares = torch.stack([(ours == expected).double().mean(), far.double().mean()])
    dist.all_reduce(shares)
    equal, farther = (shares / dist.get_world_size()).tolist()
    return {"equal": equal, "farther": farther}


def measure_scratch(layer: GroupedExperts, given: Inputs) -> dict:
    """Measure scratch memory of a call, and its ratio to `share`: the memory of a rank's rows under even routing."""
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


def measure_training(tokens: int, layers: int) -> Iterator[dict]:
    world, rank = dist.get_world_size(), dist.get_rank()
    every = inputs(world * tokens)
    mine = every.of(rank, tokens)
    gradient = torch.randn(every.hidden_states.shape, device=DEVICE, generator=generator(1)).bfloat16()
    parts = [trained_part(place) for place in range(layers)]
    alone = _pass(parts, _routed_here(every), gradient)
    alone()
    local = microseconds(alone, repeats=8)
    about = {"what": "training", "tokens": tokens, "layers": layers}
    yield {**about, "method": "local", "us": local}
    for part in parts:
        part.zero_grad()
    trained = [spread(whole_of(part), method="gather") for part in parts]
    for method in ("gather", "all_to_all"):
        for layer in trained:
            change(layer, method=method)
        both = _pass(trained, mine, gradient.chunk(world)[rank])
        inputs_of, gradients_of = both(keep=True)
        found = [layer.down_proj.grad.to_local() for layer in trained]
        errors = [
            _gradient_error(part, _all(x), every, _all(gradient_of), ours)
            for part, x, gradient_of, ours in zip(parts, inputs_of, gradients_of, found, strict=True)
        ]
        both()
        same = all(layer.down_proj.grad.to_local().equal(ours) for layer, ours in zip(trained, found, strict=True))
        us = microseconds(both, repeats=8)
        checked = {"gradient_error": largest(max(errors)), "repeats": largest(not same) == 0}
        yield {**about, "method": method, "us": us, "over_local": us / local, **checked}


def trained_part(place: int) -> GroupedExperts:
    """Make this rank's experts, with random weights, for layer number `place` of the layers to train.

    The results of the layer have about the magnitude of its inputs.
    """
    part = layer_of(MODEL.experts // dist.get_world_size(), master_dtype=torch.bfloat16).to_empty(device=DEVICE)
    random = generator(place * dist.get_world_size() + dist.get_rank())
    for weight in part.parameters():
        weight.data.normal_(std=GAIN / weight.shape[-1] ** 0.5, generator=random)
    return part


def whole_of(part: GroupedExperts) -> GroupedExperts:
    """Make the whole layer. Its parameters are DTensors whose shards on this rank share the memory of `part`."""
    whole = layer_of(MODEL.experts, master_dtype=torch.bfloat16)
    for name, weight in part.named_parameters():
        sharded = DTensor.from_local(weight.data, _mesh(), [Shard(0)], run_check=False)
        setattr(whole, name, nn.Parameter(sharded))
    return whole


def _routed_here(every: Inputs) -> Inputs:
    """Renumber expert indices: this rank's experts begin at 0, other ranks' experts become out of range."""
    count = MODEL.experts // dist.get_world_size()
    index = every.top_k_index - dist.get_rank() * count
    return every._replace(top_k_index=torch.where((index >= 0) & (index < count), index, count))


def _all(value: Tensor) -> Tensor:
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value.contiguous())
    return torch.cat(parts)


def largest(value: float) -> float:
    """Return the largest of the ranks' values."""
    found = torch.tensor(float(value), device=DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _gradient_error(part: GroupedExperts, x: Tensor, every: Inputs, gradient: Tensor, ours: Tensor) -> float:
    """Return the relative error of `ours`, the gradient of down_proj.

    The expected gradient comes from a pass of `part` without communication, on the same input `x` of the layer.
    """
    _pass([part], _routed_here(every._replace(hidden_states=x)), gradient)()
    want = part.down_proj.grad.float()
    part.zero_grad()
    return float((ours.float() - want).norm() / want.norm())


def _pass(layers: Sequence[GroupedExperts], given: Inputs, gradient: Tensor) -> Callable[..., Any]:
    """Return a call that runs forward and backward of consecutive layers, eagerly, with all gradients.

    The call takes an option, keep. With keep=True it returns all layers' inputs, and the gradients of their results.
    """
    x, index, weights = given
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    parameters = [parameter for layer in layers for parameter in layer.parameters()]

    def run(keep: bool = False) -> Any:
        for value in (x, weights, *parameters):
            value.grad = None
        values = [x]
        for layer in layers:
            values.append(layer(values[-1], index, weights))
            if keep:
                values[-1].retain_grad()
        values[-1].backward(gradient)
        if keep:
            return [value.detach() for value in values[:-1]], [value.grad for value in values[1:]]
        return None

    return run


def measure_decode(name: str) -> Iterator[dict]:
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
    size, random = (BATCH // world, PROMPT), generator(dist.get_rank())
    prompts = torch.randint(0, model.config.vocab_size, size, device=DEVICE, generator=random)
    seconds = torch.tensor(step_seconds(decoder, prompts), device="cuda")
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    step = float(seconds)
    decoder.close()
    times = {"ms": 1e3 * step, "one_gpu_ms": 1e3 * alone, "over_one_gpu": step / alone}
    yield {"what": "decode", "model": name, "batch": BATCH, **times}


TIMED = {
    2: ((1, "beyond_us", 18, 12), (64, "over_local", 1.04, 1.02), (4096, "over_local", 1.13, 1.08)),
    8: ((64, "over_local", 1.15, None), (4096, "over_local", 1.25, None)),
}
"""Maps the number of ranks to bars for the fastest method of the layer: (tokens, column, limit, aim)."""
LAYER, ROUNDED = "layer, {tokens} tokens a rank", tuple(name for name in METHODS if "exact" not in name)
FASTEST = {"what": "layer", "method": tuple(OWN)}
TRAINED = {"what": "training", "method": ("gather", "all_to_all")}
BARS = [
    *(
        Bar(f"{LAYER}, {{method}}, values equal to one GPU's", "equal", least, None, {"method": methods}, at_least=True)
        for methods, least in ((ROUNDED, 0.9999), ("all_to_all, exact, eager", 1.0))
    ),
    Bar(f"{LAYER}, {{method}}, values farther than a step", "farther", 0.0),
    Bar("scratch of a rank, {tokens} tokens a rank, over its share", "over_share", 1.3, 1.1),
    Bar("training, relative error of gradients", "gradient_error", 3e-2, None, TRAINED, over=max),
    Bar("training, gradients equal on repeat", "repeats", 1.0, None, TRAINED, at_least=True, over=min),
]


def thresholds(rows: Sequence[dict], ranks: int) -> list[Threshold]:
    """Make thresholds: for results and memory, with any number of ranks; for times, with 2 or 8 ranks only."""
    bars = [
        Bar(f"layer, {tokens} tokens a rank, {column}", column, limit, aim, FASTEST | {"tokens": tokens}, over=min)
        for tokens, column, limit, aim in TIMED.get(ranks, ())
    ]
    if ranks == 2:
        passes, step = "training, forward and backward, over_local", "decode, whole model, step over one GPU's"
        bars += [Bar(passes, "over_local", 1.25, 1.12, TRAINED, over=min), Bar(step, "over_one_gpu", 0.80, 0.72)]
    return judge(rows, [*BARS, *bars])


def measure(args: Any) -> Iterator[dict]:
    """Yield the rows of the parts that --only selects."""
    parts = {
        "layer": lambda: measure_layers(args.tokens),
        "training": lambda: measure_training(MANY, args.layers),
        "decode": lambda: measure_decode(args.model),
    }
    for name in (name for name in PARTS if name in args.only):
        yield from parts[name]()


def work(args: Any) -> None:
    """Run the benchmark in this process, which is one of the ranks; rank 0 writes and prints the results."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    gpu = report.start()
    dist.init_process_group("nccl")
    rows, path, made = [], args.out / "distributed.json", {}
    begin = time.perf_counter()
    for row in measure(args):
        rows.append(row)
        if dist.get_rank() == 0:
            ranks = dist.get_world_size()
            made = report.result(gpu, rows, thresholds(rows, ranks), ranks=ranks, model=args.model)
            write_json(path, made)
            print(f"{time.perf_counter() - begin:.0f} s: {row}", flush=True)
    if dist.get_rank() == 0:
        shown = rows + (predicted(rows, MODEL) if dist.get_world_size() == 2 else [])
        report.finish(path, made, *tables_of(shown, COLUMNS))
    dist.barrier()  # ExpertParallel uses gloo: a process that exits without waiting may abort (pytorch/pytorch#179291)
    dist.destroy_process_group()


PARTS = ("layer", "training", "decode")
# As in the tests, NVLink multicast is off: on some hosts a program that uses it harms other programs.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser_of("distributed")
    parser.prog = "python -m benchmarks.distributed"
    parser.add_argument("--ranks", type=int, default=2, help="processes, one for each GPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="T", help="on each rank")
    parser.add_argument("--layers", type=int, default=1, help="of training")
    parser.add_argument("--model", choices=CONFIGS, default=next(iter(CONFIGS)))
    args = parser.parse_args(argv)
    if "RANK" in os.environ:
        work(args)
        return 0
    return start_ranks("benchmarks.distributed", args.ranks, argv)


def start_ranks(module: str, ranks: int, argv: Sequence[str] | None) -> int:
    """Run a module in a process for each GPU; return the exit status. argv: as `main` got it."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    start += ["-m", module, *(sys.argv[1:] if argv is None else argv)]
    return subprocess.run(start, env=WITHOUT_MULTICAST | os.environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
