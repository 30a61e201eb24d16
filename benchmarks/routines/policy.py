"""What equal bits in reinforcement learning cost: `python -m benchmarks policy`.

Sizes of Qwen3-30B-A3B, in FP8. Each row is a time in milliseconds beside the usual time of the same work, in turn.

- `step`: a decode step of a `GraphDecoder` in `fp8moe.batch_invariant`, over one without the mode.
- `recording`: a decode step with ``return_routing``, over one without it.
- `layers`: a training forward of FORWARD_LAYERS layers with bfloat16 masters over 16 x 1024 tokens, in
  `fp8moe.hf.on_policy`, over one without it. Both record what a backward reads; weights count as unchanged.
- `forward`: the same, with the output layer for all tokens.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

import fp8moe
from benchmarks import decode
from benchmarks.report import Bar, Benchmark
from benchmarks.shapes import QWEN
from benchmarks.whole_models import build
from fp8moe import GroupedExperts, replace_linears
from fp8moe.decode import GraphDecoder
from fp8moe.hf import on_policy
from fp8moe.weights import DEFAULT_SKIP

BATCHES, PROMPT = (1, 8, 64), 512
FORWARD_LAYERS, FORWARD = 4, (16, 1024)
TURNS = 5
COLUMNS = ("what", "batch", "usual_ms", "ms", "ratio")


def row(what: str, batch: int, usual: list[float], found: list[float]) -> dict:
    """Return a row with the medians of times in seconds."""
    usual_ms, ms = (1e3 * statistics.median(times) for times in (usual, found))
    return {"what": what, "batch": batch, "usual_ms": usual_ms, "ms": ms, "ratio": ms / usual_ms}


def measure_steps(model: Any, batch: int) -> Iterator[dict]:
    """Yield the rows `step` and `recording` of a batch size."""

    def decoder(mode: Callable[[], AbstractContextManager], **how: Any) -> Callable[[], float]:
        with mode():
            made = GraphDecoder(model, batch_sizes=(batch,), max_length=PROMPT + decode.ROOM)
        decoders.callback(made.close)

        def run() -> float:
            with mode():
                return decode.step_seconds(made, prompts, **how)

        run()
        return run

    prompts = decode.random_prompts(model, batch, PROMPT)
    with ExitStack() as decoders:
        runs = {
            "usual": decoder(nullcontext),
            "step": decoder(fp8moe.batch_invariant),
            "recording": decoder(nullcontext, return_routing=True),
        }
        turns = [[run() for run in runs.values()] for _ in range(TURNS)]
    usual, *others = map(list, zip(*turns, strict=True))
    for what, found in zip([*runs][1:], others, strict=True):
        yield row(what, batch, usual, found)


def trainer() -> Any:
    """Build a model of FORWARD_LAYERS layers with bfloat16 masters, in train mode."""
    model = build(QWEN, experts=None, layers=FORWARD_LAYERS)
    for layer in model.model.layers:
        layer.mlp.experts = GroupedExperts.from_experts(layer.mlp.experts, master_dtype=torch.bfloat16)
    replace_linears(model, skip=DEFAULT_SKIP, master_dtype=torch.bfloat16)
    return model.train()


def measure_forward() -> Iterator[dict]:
    """Yield the rows `layers` and `forward`."""
    model = trainer()
    ids = torch.randint(0, model.config.vocab_size, FORWARD, device="cuda")

    def forward(mode: Callable[[], AbstractContextManager], tokens: int) -> float:
        with mode():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            model(ids, use_cache=False, logits_to_keep=tokens)
            end.record()
            torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    modes = nullcontext, partial(on_policy, model)
    for what, tokens in (("layers", 1), ("forward", FORWARD[1])):
        times = [[forward(mode, tokens) for mode in modes] for _ in range(TURNS + 2)]
        usual, found = map(list, zip(*times[2:], strict=True))  # the first two compile and quantize
        yield row(what, FORWARD[0], usual, found)


def measure() -> Iterator[dict]:
    yield from measure_forward()
    torch.cuda.empty_cache()
    model = build(QWEN)
    for batch in BATCHES:
        yield from measure_steps(model, batch)


POLICY = Benchmark(
    "policy",
    measure,
    COLUMNS,
    [
        Bar(
            f"on policy, {what}, batch {batch}, over the usual time",
            "ratio",
            limit,
            None,
            {"what": what, "batch": batch},
        )
        for what, batch, limit in (
            *(("step", batch, 1.10) for batch in BATCHES),
            *(("recording", 64, 1.01), ("layers", FORWARD[0], 1.35)),
        )
    ],
)
