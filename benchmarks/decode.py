"""A whole model under GraphDecoder: `python -m benchmarks decode [--model M] [--experts F] [--batch B ...]`.

- `ms`: time of a decode step: GPU time from the first of MANY new tokens to the last, divided by the number of steps.
- `decode_fp8_cache`: the same with keys and values in FP8; `decode_fp8_output`: with the output layer in FP8;
  `of_decode`: ratio of `ms` to that of `decode`.
- `floor_ms`: lower bound of `ms`: the bytes that a step must read (weights without the embedding, the experts in use,
  keys and values up to the middle of the answer) over the bandwidth of a copy. `x_floor`: ratio of `ms` to `floor_ms`.
- `kernels`: the number of kernels in one step. Each column after `kernels` is one kind of kernel: the share of this
  kind in the time of all kernels.
- Prefill: time of the prefill of prompts and the choice of one token; `tokens_s` counts prompt tokens. `prefill`:
  in PyTorch's attention; `prefill_fa3`: in FlashAttention-3's, if `fa3-fwd` is installed.
- Sampling: time of a step whose tokens are sampled, with a repetition penalty; `over_greedy`: extra time relative to a
  greedy step.
- `latent_decode`: a model with latent attention, GLM-4.7-Flash, in fp8moe's attention and in its own: steps after
  CACHED random latents, and prefill.
- First: seconds from the construction of a decoder with the batch sizes FIRST_SIZES to its first token: `new_s` in a
  process with empty disk caches, `again_s` in another process with the caches that the first one filled. `beside_gb`:
  GPU memory that the second process used for anything but weights, keys and values.

Prompts are random and all different; weights are random (`benchmarks/whole_models.py`), those of experts in the format
F. For `decode_bf16` the model is in bfloat16 and its experts run on transformers' `grouped_mm`.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import roofline, timing
from benchmarks.report import Bar, Benchmark, Option, start
from benchmarks.whole_models import CONFIGS, FORMATS, build
from fp8moe.decode import GraphDecoder, latents
from fp8moe.hf.fused import flash_attention_3
from fp8moe.hf.fused import latent_attention as fused_latents
from fp8moe.hf.fused.attention import UnsupportedAttention

CASES = ((1, 512), (8, 512), (64, 512), (1, 8192), (32, 8192))
BF16_CASES = CASES[:3]
FP8_CACHE_CASES = CASES[3:]
FP8_OUTPUT_CASES = CASES[:1]
PREFILLS = ((1, 512), (1, 2048), (4, 4096))
LIMITS = {
    ("decode", 1, 512, "ms"): (2.8, 2.4),
    ("decode", 1, 8192, "ms"): (3.3, 2.7),
    ("decode", 8, 512, "ms"): (5.5, 4.8),
    ("decode", 64, 512, "ms"): (11.0, 10.0),
    ("decode", 32, 8192, "x_floor"): (1.5, 1.3),
    ("decode_fp8_cache", 32, 8192, "of_decode"): (1 / 1.22, 1 / 1.3),
    ("sampling", 64, 512, "over_greedy"): (0.05, 0.02),
    ("first", 64, 512, "new_s"): (60, 30),
    ("first", 64, 512, "again_s"): (15, 8),
    ("first", 64, 512, "beside_gb"): (2.0, 1.0),
    ("prefill", 4, 4096, "tokens_s"): (100_000, 120_000),
    ("prefill_fa3", 4, 4096, "ms"): (150, 130),
}
"""Maps (what, batch, prompt length, column) to (limit, aim) on an H200. Every case fits in 80 GB of GPU memory."""

MANY = 65
ROOM = 256  # columns of the KV cache for new tokens
PROFILED = 4
REPEATS = 3
MANY_TOKENS = 1 << 17  # batches with at least this many prompt tokens are timed only once
KINDS = {
    "gemm": re.compile(r"^(gemm|gemm_k)\b"),
    "experts": re.compile(r"sort_by_expert|permute_quantize|combine"),
    "quantize": re.compile(r"quantize"),
    "attention": re.compile(r"flash|fmha|attention", re.IGNORECASE),
    "other_gemm": re.compile(r"gemm|cutlass|nvjet|gemv|splitK", re.IGNORECASE),
}
FIRST_SIZES = (1, 8, 64)
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "seed": 0}
COLUMNS = ("what", "batch", "prompt", "ms", "tokens_s", "floor_ms", "x_floor", "of_decode", "kernels", *KINDS, "other")


def seconds(work: Callable[[], object]) -> float:
    """Return the median wall time of REPEATS calls of `work`, in seconds."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def step_bytes(model: Any, prompts: Tensor, cached: float) -> int:
    """Return the bytes that a decode step after these prompts must read. cached: bytes of cached keys and values."""
    hit = experts_hit(model, prompts)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    total = sum(p.nbytes for p in model.parameters() if p is head or p is not embedding)
    for module, used in hit.items():
        total -= sum(int(p.nbytes * (1 - used / len(p))) for p in module.parameters())
    return total + int(cached)


def tokens_read(config: Any, tokens: float) -> float:
    """Return the mean over layers of the tokens that a decode step reads from a cache which has this many."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return statistics.mean(min(tokens, config.sliding_window) if "sliding" in kind else tokens for kind in kinds)


def experts_hit(model: Any, prompts: Tensor) -> dict[nn.Module, int]:
    """Map each experts module to the number of experts that the last tokens of the prompts use."""
    found: dict[nn.Module, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: found.update({module: inputs[1]}))
        for module in model.modules()
        if isinstance(getattr(module, "down_proj", None), nn.Parameter)
    ]
    with torch.no_grad():
        model(prompts[:, -1:], use_cache=False)
    for hook in hooks:
        hook.remove()
    return {module: len(used.unique()) for module, used in found.items()}


def shares(replay: Callable[[], object]) -> tuple[int, dict[str, float]]:
    """Return the number of kernels in a step, and the share of each kind of kernel in their time.

    replay: runs one step.
    """

    def steps() -> None:
        for _ in range(PROFILED):
            replay()

    count, spent = 0, Counter()
    for event in timing.profile(steps):
        kind = next((kind for kind, names in KINDS.items() if names.search(event.name)), "other")
        count += 1
        spent[kind] += event.duration_ns
    total = sum(spent.values())
    return count // PROFILED, {kind: spent[kind] / total for kind in (*KINDS, "other")}


def random_prompts(model: Any, batch: int, length: int) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (batch, length), device="cuda")


def step_seconds(decoder: GraphDecoder, prompts: Tensor, **how: Any) -> float:
    """Return seconds per decode step: the median of REPEATS runs, or of one run if the prompts are long."""
    times = []
    for _ in range(REPEATS if prompts.numel() < MANY_TOKENS else 1):
        before = decoder.stats()
        decoder.generate(prompts, max_new_tokens=MANY, eos_token_id=(), **how)
        times.append(decoder.stats().seconds - before.seconds)
    return statistics.median(times) / (MANY - 1)


def measure_decode(model: Any, batch: int, prompt: int, **dtypes: torch.dtype) -> dict:
    decoder = GraphDecoder(model, batch_sizes=(batch,), max_length=prompt + ROOM, **dtypes)
    prompts = random_prompts(model, batch, prompt)
    step = step_seconds(decoder, prompts)
    kernels, kinds = shares(decoder.steps[batch].replay)
    cached = decoder.stats().cache_bytes * tokens_read(model.config, prompt + MANY / 2) / (prompt + ROOM)
    read = step_bytes(model, prompts, cached)
    if "output_dtype" in dtypes:
        read -= model.get_output_embeddings().weight.nbytes // 2
    floor = read / (1e12 * roofline.copy_tbps())
    decoder.close()
    rates = {"ms": 1000 * step, "tokens_s": batch / step, "floor_ms": 1000 * floor, "x_floor": step / floor}
    return {"what": "decode", "batch": batch, "prompt": prompt, **rates, "kernels": kernels, **kinds}


def measure_sampling(model: Any, batch: int, prompt: int) -> dict:
    decoder = GraphDecoder(model, batch_sizes=(batch,), max_length=prompt + ROOM)
    prompts = random_prompts(model, batch, prompt)
    greedy, sampled = (step_seconds(decoder, prompts, **how) for how in ({}, SAMPLING))
    decoder.close()
    rates = {"ms": 1000 * sampled, "tokens_s": batch / sampled, "over_greedy": sampled / greedy - 1}
    return {"what": "sampling", "batch": batch, "prompt": prompt, **rates}


def without_fa3() -> AbstractContextManager:
    """Return a context in which prompts run as if fa3-fwd were not installed."""
    return mock.patch.object(flash_attention_3, "_interface", lambda: None)


def measure_prefill(model: Any, batch: int, prompt: int) -> dict:
    decoder = GraphDecoder(model, batch_sizes=(batch,), max_length=prompt + 16)
    read = partial(decoder.generate, random_prompts(model, batch, prompt), max_new_tokens=1, eos_token_id=())
    for _ in range(2):  # run twice before timing, because the graph of a short prompt is captured at its second use
        read()
    spent = seconds(read)
    decoder.close()
    return {"what": "prefill", "batch": batch, "prompt": prompt, "ms": 1000 * spent, "tokens_s": batch * prompt / spent}


def measure_first(name: str) -> dict:
    """Measure the time to the first token in two processes in a row; the second reuses the disk caches of the first."""
    prompt = CASES[0][1]
    with tempfile.TemporaryDirectory() as directory:
        places = ("FP8MOE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
        environment = os.environ | {place: os.path.join(directory, place) for place in places}
        program = f"from {__spec__.name} import first_token; first_token({name!r})"
        command_line = [sys.executable, "-c", program]
        found = []
        for _ in range(2):
            run = subprocess.run(command_line, env=environment, check=True, capture_output=True, text=True)
            found.append(json.loads(run.stdout.splitlines()[-1]))
    new, again = found
    row = {"what": "first", "batch": max(FIRST_SIZES), "prompt": prompt, "beside_gb": again["beside_gb"]}
    return {**row, "new_s": new["seconds"], "again_s": again["seconds"]}


def first_token(name: str) -> None:
    """Print as JSON the seconds from the decoder's constructor to the first token, and the GPU memory used.

    The memory includes neither weights nor cached keys and values.
    """
    start()
    model = build(name)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    prompts = random_prompts(model, max(FIRST_SIZES), CASES[0][1])
    begin = time.perf_counter()
    decoder = GraphDecoder(model, batch_sizes=FIRST_SIZES, max_length=CASES[0][1] + ROOM)
    decoder.generate(prompts[:1], max_new_tokens=1)
    spent = time.perf_counter() - begin
    for size in FIRST_SIZES:
        decoder.generate(prompts[:size], max_new_tokens=2)
    torch.cuda.empty_cache()
    beside = free - torch.cuda.mem_get_info()[0] - decoder.stats().cache_bytes
    print(json.dumps({"seconds": spent, "beside_gb": beside / 1e9}))


def measure(
    model: str | None = None, experts: str = "fp8", batch: Sequence[int] = (), prompt: Sequence[int] = (512,)
) -> Iterator[dict]:
    """Measure decode steps and prefill of `model`; if it is None, measure all rows that `tools.validate` records."""
    name = model or next(iter(CONFIGS))
    if model is None:
        yield measure_first(name)
    built = build(name, experts=experts)
    times = {}
    for case in product(batch, prompt) if batch else CASES:
        row = measure_decode(built, *case)
        times[case] = row["ms"]
        yield row
    for what, cases in (("cache", FP8_CACHE_CASES), ("output", FP8_OUTPUT_CASES)):
        for case in product(batch, prompt) if batch else cases:
            row = measure_decode(built, *case, **{f"{what}_dtype": torch.float8_e4m3fn})
            yield row | {"what": f"decode_fp8_{what}", "of_decode": row["ms"] / times[case]}
    for sizes in PREFILLS:
        with without_fa3():
            yield measure_prefill(built, *sizes)
        if find_spec(flash_attention_3.MODULE):
            yield measure_prefill(built, *sizes) | {"what": "prefill_fa3"}
    if model is None:
        yield measure_sampling(built, *CASES[2])
        del built
        torch.cuda.empty_cache()
        built = build(name, experts=None)
        for case in BF16_CASES:
            yield measure_decode(built, *case) | {"what": "decode_bf16"}


DECODE = Benchmark(
    "decode",
    measure,
    COLUMNS,
    [
        Bar(
            *(f"{what}, batch {batch}, prompt {prompt}, {column}", column, limit, aim),
            *({"what": what, "batch": batch, "prompt": prompt}, column == "tokens_s"),
        )
        for (what, batch, prompt, column), (limit, aim) in LIMITS.items()
    ],
    {
        "model": Option(next(iter(CONFIGS)), tuple(CONFIGS)),
        "experts": Option("fp8", FORMATS),
        "batch": Option(()),
        "prompt": Option((512,)),
    },
)

CACHED = 8192
GLM_LAYERS = 47
LATENT_PREFILL = (4, 4096)


@contextmanager
def own_attention() -> Iterator[None]:
    """Within the context, have decoders leave latent attention to the model."""
    refused = mock.Mock(side_effect=UnsupportedAttention("latent attention, for comparison"))
    with mock.patch.object(latents, "absorption", refused), mock.patch.object(fused_latents, "absorption", refused):
        yield


def measure_cached_step(model: Any, batch: int) -> float:
    """Return milliseconds per decode step after CACHED tokens of random latents."""
    decoder = GraphDecoder(model, batch_sizes=(batch,), max_length=CACHED + ROOM)
    decoder.generate(random_prompts(model, batch, 8), max_new_tokens=2, eos_token_id=())
    step = decoder.steps[batch]
    for layer in step.cache.layers:
        for values in (layer.keys, layer.values):
            values.normal_()
    for tensor in (step.count, step.finished, step.failed, step.begin):
        tensor.zero_()
    step.limit.fill_(ROOM)
    times = []
    for _ in range(REPEATS):
        step.columns.fill_(CACHED)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        step.replay()
        begin.record()
        for _ in range(MANY):
            step.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / MANY)
    decoder.close()
    return statistics.median(times)


def measure_latents(layers: int = GLM_LAYERS) -> Iterator[dict]:
    """Measure steps and prefill of a model with latent attention, in fp8moe's attention and in the model's own."""
    model = build("glm-4.7-flash", layers=layers)
    for batch, prompt in ((1, CACHED), (64, CACHED), LATENT_PREFILL):
        what = "prefill" if (batch, prompt) == LATENT_PREFILL else "decode"
        found = {}
        for name, context in (("latent", nullcontext()), ("own", own_attention())):
            with context:
                found[name] = (
                    measure_prefill(model, batch, prompt)["ms"]
                    if what == "prefill"
                    else measure_cached_step(model, batch)
                )
        row = {"what": what, "batch": batch, "prompt": prompt, "ms": found["latent"], "own_ms": found["own"]}
        yield row | {"own_over": found["own"] / found["latent"]}


LATENT_DECODE = Benchmark(
    "latent_decode",
    measure_latents,
    ("what", "batch", "prompt", "ms", "own_ms", "own_over"),
    [
        Bar(
            f"the model's own latent attention over fp8moe's, {what}, batch {{batch}}",
            *("own_over", limit, None, {"what": what, "batch": batch}),
            at_least=True,
        )
        for what, batch, limit in (("decode", 64, 2.0), ("prefill", 4, 1.2))
    ],
    {"layers": Option(GLM_LAYERS)},
)

if __name__ == "__main__":
    sys.exit(DECODE.main())
