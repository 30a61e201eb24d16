"""Sampling against PyTorch's own operations: `python -m benchmarks.sampling [--out DIR]`.

Times one step over bfloat16 logits, from the logits to the tokens: greedy against torch.argmax, and with temperature,
top_k, top_p and a penalty against the penalty, top-k, softmax, cumulative sum and multinomial of PyTorch. Tokens are
compared with those of the reference backend before they are timed.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks import command, timing
from benchmarks.report import Threshold, format_table
from fp8moe.kernels.decoder_ops.sampling import SamplingState, reference, sample

VOCAB = 151936
BATCHES = (1, 8, 64)
STD = 3.0
PROMPT = 512
# temperature, top_k, top_p, repetition_penalty
KINDS = {"greedy": (0.0, 0, 1.0, 1.0), "top_k and top_p": (0.7, 20, 0.8, 1.1), "all tokens": (1.0, 0, 1.0, 1.0)}
STEP_US = 11_000  # of the model that the thresholds are about, at a batch of 64
COLUMNS = ("kind", "batch", "us", "torch_us", "over_argmax_us")


def make_state(batch: int, kind: str) -> SamplingState:
    temperature, top_k, top_p, penalty = KINDS[kind]

    def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((batch,), value, dtype=dtype, device="cuda")

    seen = torch.zeros(batch, VOCAB, dtype=torch.uint8, device="cuda")
    seen.scatter_(1, torch.randint(VOCAB, (batch, PROMPT), device="cuda"), 1)
    return SamplingState(
        temperature=filled(temperature),
        top_k=filled(top_k, torch.int32),
        top_p=filled(top_p),
        min_p=filled(0.0),
        repetition_penalty=filled(penalty),
        presence_penalty=filled(0.0),
        seed=torch.arange(batch, device="cuda"),
        step=filled(0, torch.int64),
        seen=seen,
    )


def by_torch(logits: Tensor, state: SamplingState, kind: str) -> Tensor:
    """The same choice, one value of each parameter for all rows."""
    temperature, top_k, top_p, penalty = KINDS[kind]
    if not temperature:
        return logits.argmax(1)
    scores = logits.float()
    if penalty != 1.0:
        penalized = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(state.seen > 0, penalized, scores)
    scores /= temperature
    if not top_k:
        return torch.multinomial(scores.softmax(1), 1)
    values, tokens = scores.topk(top_k)  # from the largest one on
    probabilities = values.softmax(1)
    probabilities = probabilities.masked_fill(probabilities.cumsum(1) - probabilities >= top_p, 0.0)
    return tokens.gather(1, torch.multinomial(probabilities, 1))


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    """Sampling's share of a step at the largest batch, beyond that of torch.argmax."""
    share = {row["kind"]: row["over_argmax_us"] / STEP_US for row in rows if row["batch"] == max(BATCHES)}
    return [Threshold(f"sampling, batch {max(BATCHES)}, of a step", share["top_k and top_p"], 0.05, 0.02)]


def check(logits: Tensor, state: SamplingState, kind: str) -> None:
    """RuntimeError where a token is not that of the reference."""
    expected = reference(logits, SamplingState(*(value.clone() for value in state)))[0]
    tokens = sample(logits, SamplingState(*(value.clone() for value in state))).tokens
    if not torch.equal(tokens, expected):
        raise RuntimeError(f"{kind}, batch {len(logits)}: {int((tokens != expected).sum())} tokens are wrong")


def run() -> dict:
    """Checks and times every case; {"gpu", "rows", "thresholds"}. RuntimeError if a result is wrong."""
    gpu = command.start()
    cases: list[tuple[str, int]] = []
    calls: list[Callable[[], object]] = []  # ours and PyTorch's, one after the other
    for batch in BATCHES:
        logits = (STD * torch.randn(batch, VOCAB, device="cuda")).bfloat16()
        for kind in KINDS:
            state = make_state(batch, kind)
            check(logits, state, kind)
            cases.append((kind, batch))
            calls += [partial(sample, logits, state), partial(by_torch, logits, state, kind)]
    times = [timed.median_us for timed in timing.measure(calls)]
    timed = list(zip(times[::2], times[1::2], strict=True))
    argmax = {batch: theirs for (kind, batch), (_, theirs) in zip(cases, timed, strict=True) if kind == "greedy"}
    rows = [
        {"kind": kind, "batch": batch, "us": ours, "torch_us": theirs, "over_argmax_us": ours - argmax[batch]}
        for (kind, batch), (ours, theirs) in zip(cases, timed, strict=True)
    ]
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> None:
    args = command.parser("sampling", "sampling against PyTorch's operations").parse_args(argv)
    result = run()
    command.finish(args.out / "sampling.json", result, format_table(result["rows"], COLUMNS))


if __name__ == "__main__":
    main()
