"""A whole model under GraphDecoder: `python -m benchmarks.decode [--model M] [--batch B ...] [--prompt L ...]`.

- `ms`: a decode step, the difference between generating MANY new tokens and one, over the tokens between.
- `floor_ms`: the bytes that a step must read (weights outside the embedding, experts that were hit, keys and values up
  to the middle of the answer) at BANDWIDTH. `x_floor`: `ms` over it.
- `kernels`: of one step; the columns after it share out the time of a step's kernels by kind.
- Prefill: prompts read and one token chosen; `tokens_s` counts the prompts' tokens.

Prompts are random and all different, weights random (`benchmarks/whole_models.py`). With `--bf16` the model is in
bfloat16 and its experts run on transformers' `grouped_mm`.
"""

import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import command, timing
from benchmarks.report import Threshold, format_table, select
from benchmarks.whole_models import CONFIGS, build
from fp8moe.integrations.decode import GraphDecoder

BANDWIDTH = 4.2e12  # bytes a second: a copy on the H200 (docs/kernel-notes.md)
CASES = ((1, 512), (8, 512), (64, 512), (1, 8192))
PREFILLS = ((1, 2048), (4, 4096))
LIMITS = {
    ("decode", 1, 512, "ms"): (2.8, 2.4),
    ("decode", 1, 8192, "ms"): (3.3, 2.7),
    ("decode", 8, 512, "ms"): (5.5, 4.8),
    ("decode", 64, 512, "ms"): (11.0, 10.0),
    ("prefill", 4, 4096, "tokens_s"): (100_000, 120_000),
}
"""What, batch, prompt and column -> limit and aim, on an H200."""

MANY = 65
PROFILED = 9
REPEATS = 3
KINDS = {
    "gemm": re.compile(r"^(gemm|gemm_k)\b"),
    "experts": re.compile(r"sort_by_expert|permute_quantize|combine"),
    "quantize": re.compile(r"quantize"),
    "attention": re.compile(r"flash|fmha|attention", re.IGNORECASE),
    "other_gemm": re.compile(r"gemm|cutlass|nvjet|gemv|splitK", re.IGNORECASE),
}
COLUMNS = ("what", "batch", "prompt", "ms", "tokens_s", "floor_ms", "x_floor", "kernels", *KINDS, "other")


def seconds(work: Callable[[], object]) -> float:
    """Median of some runs, on the host's clock."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def step_bytes(model: Any, prompts: Tensor, length: int) -> int:
    """Bytes that a step after these prompts must read."""
    hit = experts_hit(model, prompts)
    embedding = model.get_input_embeddings().weight
    total = sum(p.nbytes for p in model.parameters() if p is not embedding)
    for module, used in hit.items():
        experts = [p for p in module.parameters() if p.dim() == 3]
        total -= sum(int(p.nbytes * (1 - used / p.shape[0])) for p in experts)
    config = model.config
    token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 2
    return total + len(prompts) * length * token


def experts_hit(model: Any, prompts: Tensor) -> dict[nn.Module, int]:
    """How many experts of each module the first step after the prompts uses."""
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
    return {module: len(indices.unique()) for module, indices in found.items()}


def shares(generate: Callable[[int], object]) -> tuple[int, dict[str, float]]:
    """Kernels of a step, and the share of each kind in their time; generate: so many new tokens."""
    count, spent = Counter(), Counter()
    for tokens, sign in ((PROFILED, 1), (1, -1)):
        for event in timing.profile(partial(generate, tokens)):
            kind = next((kind for kind, names in KINDS.items() if names.search(event.name)), "other")
            count[kind] += sign
            spent[kind] += sign * event.duration_ns
    total = sum(spent.values())
    return sum(count.values()) // (PROFILED - 1), {kind: spent[kind] / total for kind in (*KINDS, "other")}


def random_prompts(model: Any, batch: int, length: int) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (batch, length), device="cuda")


def measure_decode(model: Any, batch: int, prompt: int) -> dict:
    decoder = GraphDecoder(model, batch_sizes=(batch,), max_length=prompt + 256)
    prompts = random_prompts(model, batch, prompt)

    def generate(tokens: int) -> None:
        decoder.generate(prompts, max_new_tokens=tokens, eos_token_id=())

    generate(2)
    step = (seconds(partial(generate, MANY)) - seconds(partial(generate, 1))) / (MANY - 1)
    kernels, kinds = shares(generate)
    floor = step_bytes(model, prompts, prompt + MANY // 2) / BANDWIDTH
    decoder.close()
    rates = {"ms": 1000 * step, "tokens_s": batch / step, "floor_ms": 1000 * floor, "x_floor": step / floor}
    return {"what": "decode", "batch": batch, "prompt": prompt, **rates, "kernels": kernels, **kinds}


def measure_prefill(model: Any, batch: int, prompt: int) -> dict:
    decoder = GraphDecoder(model, batch_sizes=(batch,), max_length=prompt + 16)
    read = partial(decoder.generate, random_prompts(model, batch, prompt), max_new_tokens=1, eos_token_id=())
    read()
    spent = seconds(read)
    decoder.close()
    return {"what": "prefill", "batch": batch, "prompt": prompt, "ms": 1000 * spent, "tokens_s": batch * prompt / spent}


def measure(model: Any, cases: Iterable[tuple[int, int]]) -> list[dict]:
    """cases: batch and prompt of the decode steps."""
    return [measure_decode(model, *case) for case in cases] + [measure_prefill(model, *sizes) for sizes in PREFILLS]


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    """Of the first of CONFIGS; rows of other sizes have none."""
    found = []
    for (what, batch, prompt, column), (limit, aim) in LIMITS.items():
        for row in select(rows, what):
            if (row["batch"], row["prompt"]) == (batch, prompt):
                name = f"{what}, batch {batch}, prompt {prompt}, {column}"
                found.append(Threshold(name, row[column], limit, aim=aim, at_least=column == "tokens_s"))
    return found


def run() -> dict:
    """What `tools.validate` records."""
    gpu = command.start()
    rows = measure(build(next(iter(CONFIGS))), CASES)
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("decode", "a whole model: decode steps and prompts")
    parser.add_argument("--model", choices=CONFIGS, default=next(iter(CONFIGS)))
    parser.add_argument("--batch", type=int, nargs="+", help="of decode steps; default: those of CASES")
    parser.add_argument("--prompt", type=int, nargs="+", default=(512,), help="with --batch")
    parser.add_argument("--bf16", action="store_true", help="the model in bfloat16")
    args = parser.parse_args(argv)
    gpu = command.start()
    model = build(args.model, fp8=not args.bf16)
    rows = measure(model, product(args.batch, args.prompt) if args.batch else CASES)
    made = command.result(gpu, rows, () if args.bf16 else thresholds(rows), model=args.model, bf16=args.bf16)
    command.finish(args.out / "decode.json", made, format_table(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
