"""Times of kernels compared with their bounds: quantizers, indexer logits, decode attention, and batch invariance.

Each call is checked against the reference backend before it is timed. `of_copy` is the ratio of the call's
bandwidth to the bandwidth of a copy.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

import fp8moe
from benchmarks import adapters, calls, operands, roofline, shapes, timing
from benchmarks.calls import Case, ceil_div
from benchmarks.report import Bar, Benchmark, Option, geomean
from benchmarks.timing import Timing
from fp8moe.kernels.decoder_ops import fp8_cache
from fp8moe.kernels.decoder_ops.decode_attention import StaticCache, decode_attention
from fp8moe.kernels.gemm.tiles import invariant_parts
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime import config

DEVICE = "cuda"  # device of operands; tests set "cpu"
# Largest error of FP8 results relative to the reference: rounding to FP8 amplifies differences of sums
MAX_DIFFERENCE = 1e-2
MAX_ERROR = 1e-3  # largest relative error of indexer logits
RATES = ("us", "gbps", "of_copy")


def by_reference(call: Callable[[], object]) -> object:
    """Run a call on the reference backend; return its result."""
    kept, config.settings = config.settings, replace(config.settings, backend="reference")
    try:
        return call()
    finally:
        config.settings = kept


def check(name: str, call: Callable[[], object], largest: float = MAX_DIFFERENCE) -> float:
    """Return the largest relative error of a call's floating-point results, compared with the reference backend's.

    RuntimeError if the error exceeds `largest`, if integer results differ, or if the infinite entries differ.
    """
    found, worst = [value.clone() for value in calls.flatten(call())], 0.0
    for got, want in zip(found, calls.flatten(by_reference(call)), strict=True):
        if not got.is_floating_point():
            if not torch.equal(got, want):
                raise RuntimeError(f"{name}: {int((got != want).sum())} values are not the reference's")
            continue
        got, want = got.float(), want.float()
        finite = want.isfinite()
        if not torch.equal(got[~finite], want[~finite]):
            raise RuntimeError(f"{name}: values are finite where the reference's are not")
        error = operands.relative_error(got[finite], want[finite].double())
        if not error <= largest:
            raise RuntimeError(f"{name}: relative error {error:.2e}, must be <= {largest}")
        worst = max(worst, error)
    return worst


def timed(cases: Sequence[Case], **how: object) -> Iterator[tuple[Case, Callable[[], object], Timing]]:
    """Check the results of each case, then yield the case, its call, and the call's time."""
    made = [calls.build(case, calls.Operands(DEVICE)) for case in cases]
    for case, call in zip(cases, made, strict=True):
        check(case.name, call)
    yield from zip(cases, made, timing.measure(made, **how), strict=True)


def rates(moved: float, us: float) -> dict[str, float]:
    """Return columns of a row: time, bandwidth for `moved` bytes, and the ratio of this bandwidth to a copy's."""
    return {"us": us, "gbps": moved / us / 1e3, "of_copy": moved / us / 1e6 / roofline.copy_tbps()}


K = 7168
SMALL_M, LARGE_M = (1, 2, 4, 8, 16, 32, 64), (4096, 65536)


def quantize() -> Iterator[dict]:
    """Time the quantizers.

    The bandwidth counts one read of the bfloat16 values, and one write of the FP8 data and float32 scales.
    """
    cases = [Case("quantize_1x128", {"m": m, "k": K}) for m in SMALL_M + LARGE_M]
    cases += [Case("quantize_128x128", {"m": m, "k": K}) for m in LARGE_M]
    for case, _, found in timed(cases):
        m = case.sizes["m"]
        blocks = (m if case.op == "quantize_1x128" else ceil_div(m, 128)) * ceil_div(K, 128)
        yield {"op": case.op, **case.sizes, **rates(3 * m * K + 4 * blocks, found.median_us)}


SHARE = "{op} ({m}, {k}), share of the copy bandwidth"
QUANTIZE = Benchmark(
    "quantize",
    quantize,
    ("op", "m", "k", *RATES),
    [
        Bar(SHARE, "of_copy", 0.60, 0.72, {"m": 4096}, at_least=True),
        Bar(SHARE, "of_copy", 0.85, 0.92, {"m": 65536}, at_least=True),
        Bar(
            *(f"quantize_1x128 (1..64, {K}), slowest", "us", 3.0, 2.0, {"op": "quantize_1x128", "m": SMALL_M}),
            **{"unit": "us", "over": max},
        ),
    ],
)

ROUTING = {"hidden": 7168, "experts": 32, "top_k": 8, "tokens": 8192}
SWIGLU = {"groups": 32, "mean_rows": 2048, "intermediate": 2048}
# Maps the name of a row to the case to time, and to the bytes that are read for each element of the result.
TRANSPOSED = {
    "one group": (Case("quantize_with_transpose", {"m": 65536, "k": 7168}), 2),
    "gather": (Case("gather_with_transpose", ROUTING), 2),
    "swiglu backward": (Case("swiglu_backward_quantize", SWIGLU), 3),
}


def transpose() -> Iterator[dict]:
    """Time transposing quantizers.

    `of_copy_once` counts the bytes of a gathered token once, as if L2 served all other reads of the token.
    """
    for (name, (_, read)), (case, call, found) in zip(
        TRANSPOSED.items(), timed([case for case, _ in TRANSPOSED.values()]), strict=True
    ):
        data, _, columns, *_ = results = call()
        (rows, k), width = data.shape, columns.shape[1]
        written = sum(part.nbytes for part in results if part.dim() == 2)
        once = read / case.sizes.get("top_k", 1)
        made = {
            "case": name,
            "rows": rows,
            "k": k,
            "columns": width,
            **rates(written + read * rows * k, found.median_us),
        }
        yield made | {"of_copy_once": rates(written + once * rows * k, found.median_us)["of_copy"]}


TRANSPOSE = Benchmark(
    "transpose",
    transpose,
    ("case", "rows", "k", *RATES, "of_copy_once"),
    [
        Bar(
            *("transposing quantizer, {case}, share of the copy bandwidth", "of_copy", 0.75, 0.85),
            **{"where": {"case": ("one group", "gather")}, "at_least": True},
        )
    ],
)

LONG = 131072
EVEN = (8192,) * 64  # contexts of the batch whose bandwidth is the baseline
UNEVEN, AS_MANY = (LONG, *[512] * 63), (2552,) * 64  # contexts of two batches with the same number of tokens
# Maps the number of tokens to append to how many of them go into each cache block.
APPENDS = {1: 1, 128: 1, 8192: calls.CACHE_BLOCK, 65536: calls.CACHE_BLOCK}
TOP_K = ((1, 8192), (128, 65536), (2048, 16384), (2048, 65536))  # rows and columns of index scores, of which 2048
OVERLAP = {"tokens": 16384, "queries": 64, "heads": 64, "head_dim": 128, "top_k": 2048}
REST = timing.SHORT_REST_S


def paged_case(contexts: Sequence[int], fill_masked: bool = True) -> Case:
    """Make the case of one decode step for sequences with these context lengths."""
    longest = max(contexts) if contexts == EVEN else LONG
    sizes = {"batch": len(contexts), "context": list(contexts), "next_n": 1, "heads": 64, "head_dim": 128}
    return Case("paged_mqa_logits", sizes | {"max_context_len": longest, "fill_masked": fill_masked})


def paged_work(case: Case) -> tuple[int, int]:
    """Return the numbers of operations and bytes. Keys, scales and queries are read once, logits are written once."""
    batch, contexts, _, heads, head_dim, longest, fill_masked = case.sizes.values()
    logits = batch * longest if fill_masked else sum(contexts)
    moved = sum(contexts) * (head_dim + 4) + 4 * logits + batch * heads * head_dim
    return 2 * heads * head_dim * sum(contexts), moved


def check_paged(case: Case, call: partial) -> float:
    """Return the relative error of the logits within each query's context. RuntimeError if it is too large."""
    filled = partial(call.func, *call.args, **call.keywords | {"fill_masked": True})
    if case.sizes["fill_masked"]:
        return check(case.name, call, MAX_ERROR)
    seen = by_reference(filled).isfinite()
    return check(case.name, lambda: call()[seen], MAX_ERROR)


def paged() -> Iterator[dict]:
    """Time indexer logits of decode steps.

    Each "uneven" row is about a batch with one long context. `over_bytes` is the ratio of this batch's time to the time
    that its bytes would take at the bandwidth of the batch EVEN. `over_even` is the ratio of this batch's time to the
    time of a batch with as many tokens in equal contexts.
    """
    cases = [paged_case(EVEN), *(paged_case(one, fill) for one in (UNEVEN, AS_MANY) for fill in (True, False))]
    made = [calls.build(case, calls.Operands(DEVICE)) for case in cases]
    errors = [check_paged(*pair) for pair in zip(cases, made, strict=True)]
    us = {}
    for case, error, found in zip(cases, errors, timing.measure(made, rests=[REST] * len(made)), strict=True):
        sizes, (flops, moved) = case.sizes, paged_work(case)
        us[case.name] = time = found.median_us
        about = {"what": "paged_mqa_logits", **sizes, "context": max(sizes["context"]), "tokens": sum(sizes["context"])}
        bound = max(flops / roofline.TFLOPS, moved / roofline.copy_tbps()) / 1e6
        yield about | {
            "us": time,
            "tflops": flops / time / 1e6,
            "gbps": moved / time / 1e3,
            "floor_us": bound,
            "error": error,
        }
    for fill in (True, False):
        mine, even_us = paged_case(UNEVEN, fill), us[paged_case(AS_MANY, fill).name]
        bytes_us = paged_work(mine)[1] / paged_work(cases[0])[1] * us[cases[0].name]
        times = {"us": us[mine.name], "bytes_us": bytes_us, "even_us": even_us}
        ratios = {"over_bytes": us[mine.name] / bytes_us, "over_even": us[mine.name] / even_us}
        yield {"what": "uneven", "batch": len(UNEVEN), "context": LONG, "fill_masked": fill, **times, **ratios}


def append() -> Iterator[dict]:
    """Time the quantization of bfloat16 keys into a paged cache.

    The bandwidth counts 3 * D + 8 bytes per token: the key is read, its FP8 values are written, and the scale and the
    slot take 8 bytes.
    """
    cases = [Case("append_kv", {"tokens": tokens, "per_block": each}) for tokens, each in APPENDS.items()]
    for case, _, found in timed(cases, rests=[REST] * len(cases)):
        tokens = case.sizes["tokens"]
        yield {"what": "append_kv", "tokens": tokens, "head_dim": 128, **rates(tokens * (3 * 128 + 8), found.median_us)}


def shared(actual: Tensor, expected: Tensor, k: int) -> Tensor:
    """Return the share of each row's k largest values in `expected` that are also among the k largest in `actual`."""
    chosen = [
        torch.zeros_like(one, dtype=torch.bool).scatter_(-1, one.topk(k).indices, True) for one in (actual, expected)
    ]
    return (chosen[0] & chosen[1]).sum(-1) / k


def overlap(tokens: int, queries: int, heads: int, head_dim: int, top_k: int) -> Iterator[dict]:
    """Measure which share of the top_k keys by float32 scores is also in the top_k by FP8 scores, on normal data."""
    q, keys = (torch.randn(*shape, head_dim, device=DEVICE) for shape in ((queries, heads), (tokens,)))
    weights = torch.randn(queries, heads, device=DEVICE)
    expected = torch.stack([weight @ (one @ keys.t()).relu() for one, weight in zip(q, weights, strict=True)])
    (codes, scale), (data, of_key) = fp8moe.quantize_1x128(q), fp8moe.quantize_1x128(keys)
    starts = torch.zeros(queries, dtype=torch.int32, device=DEVICE)
    kv = fp8moe.FP8Tensor(data, of_key[:, 0])
    actual = fp8moe.mqa_logits(codes, kv, weights * scale[..., 0], starts, torch.full_like(starts, tokens))
    shares = shared(actual, expected, top_k)
    sizes = {"tokens": tokens, "queries": queries, "heads": heads, "head_dim": head_dim, "top_k": top_k}
    yield {"what": "overlap", **sizes, "overlap": shares.mean().item(), "least": shares.min().item()}


SCORES = {"paged_mqa_logits": paged, "append_kv": append, "overlap": lambda: overlap(**OVERLAP)}
TO_BYTES = "paged_mqa_logits, one long context among short ones, {}, time over that of its bytes"
MQA = Benchmark(
    "mqa",
    lambda only=tuple(SCORES): (row for part in only for row in SCORES[part]()),
    {
        "paged_mqa_logits": ("batch", "context", "tokens", "next_n", "fill_masked", "us", "gbps", "floor_us", "error"),
        "uneven": ("batch", "context", "fill_masked", "us", "bytes_us", "over_bytes", "even_us", "over_even"),
        "append_kv": ("tokens", "head_dim", *RATES),
        "overlap": ("tokens", "queries", "top_k", "overlap", "least"),
    },
    [
        Bar(TO_BYTES.format("-inf filled in"), "over_bytes", 1.3, 1.1, {"fill_masked": True}),
        Bar(TO_BYTES.format("no -inf"), "over_bytes", 1.3, 1.1, {"fill_masked": False}),
        Bar("mqa, largest relative error on finite entries", "error", MAX_ERROR, over=max),
        Bar("mqa, overlap of the top {top_k} of {tokens} tokens with float32 scores", "overlap", 0.93, at_least=True),
    ],
    {"only": Option(tuple(SCORES), tuple(SCORES))},
)

# Sequences, and tokens of each. Heads are those of Qwen3-30B-A3B.
CACHED = ((1, 8192), (8, 8192), (64, 512), (64, 8192))
HEADS = {"heads": 32, "key_heads": 4, "head_dim": 128}


def attention() -> Iterator[dict]:
    """Time attention of one new token per sequence over a bfloat16 cache, and over an FP8 cache with the same tokens.

    The bandwidth counts one read of the cached keys and values, with their scales. `of_bf16` is the ratio of the time
    to that over the bfloat16 cache.
    """
    make, (heads, key_heads, head_dim) = calls.Operands(DEVICE), HEADS.values()
    for batch, tokens in CACHED:
        q = make.normal(batch, heads, head_dim)
        keys, values = (make.normal(batch, key_heads, tokens, head_dim) for _ in range(2))
        columns = make.integers([tokens - 1] * batch, dtype=torch.int64)
        caches = {"bf16": (keys, values), "fp8": tuple(map(fp8_cache.quantized, (keys, values)))}
        made = [
            partial(decode_attention, q, StaticCache(*cache, torch.zeros_like(columns), columns))
            for cache in caches.values()
        ]
        for name, call in zip(caches, made, strict=True):
            check(f"attention over {name}", call)
        found = timing.measure(made, rests=[REST] * len(made))
        for (name, cache), time in zip(caches.items(), found, strict=True):
            moved = sum(part.nbytes for part in calls.flatten(cache))
            ratio = time.median_us / found[0].median_us
            yield {"cache": name, "batch": batch, "tokens": tokens, **rates(moved, time.median_us), "of_bf16": ratio}


LARGEST = {"cache": "fp8", "batch": 64, "tokens": 8192}
ATTENTION = Benchmark(
    "attention",
    attention,
    ("cache", "batch", "tokens", *RATES, "of_bf16"),
    [
        Bar("decode attention over an FP8 cache, {batch} x {tokens}", "us", 200, 190, LARGEST, unit="us"),
        Bar("the same, over the time with a bfloat16 cache", "of_bf16", 0.55, 0.52, LARGEST),
        Bar("the same, share of the copy bandwidth", "of_copy", 0.80, 0.90, LARGEST, at_least=True),
    ],
)

LATENT_CASES = [
    *({"heads": heads, "batch": batch, "tokens": 8192} for heads in (16, 20, 128) for batch in (1, 64)),
    {"heads": 16, "batch": 64, "tokens": 512},
    {"heads": 16, "batch": 64, "tokens": 8192, "queries": 4},
    {"heads": 16, "batch": 64, "tokens": 8192, "chosen": 2048},
    {"heads": 128, "batch": 64, "tokens": 8192, "chosen": 2048},
    {"heads": 128, "batch": 1, "tokens": 32768, "queries": 2048, "chosen": 2048},
]
"""Numbers of heads, sequences, latents of a sequence, queries of a sequence, and latents that each query has chosen."""
FP8_LATENT_CASES = [LATENT_CASES[i] for i in (1, 0, 5, 8)]
"""Those that are timed over latents in FP8, too."""
LATENT_VALUES, ROTARY = 512, 64


def latent() -> Iterator[dict]:
    """Time attention over latents: of the last tokens of sequences, over all latents or chosen ones.

    The bandwidth counts one read of each latent that is seen, and of each that a query has chosen. `over_pytorch`: the
    time of products and a softmax in PyTorch, which make all scores, over that of the kernel. `over_vllm`: the same of
    vLLM's Triton kernels for decode, if vLLM is installed. `of_bf16`: the time over FP8 latents, over that of the row
    before.
    """
    make, scale = calls.Operands(DEVICE), (LATENT_VALUES + ROTARY) ** -0.5
    for case in LATENT_CASES:
        heads, batch, tokens, queries, chosen = (({"queries": 1, "chosen": 0} | case)[name] for name in LATENT_COLUMNS)
        q = make.normal(batch, queries, heads, LATENT_VALUES + ROTARY)
        latents = make.normal(batch, tokens, LATENT_VALUES + ROTARY)
        lengths = make.integers([tokens] * batch)
        indices = None
        if chosen:
            drawn = torch.rand(batch, queries, tokens, device=DEVICE).argsort(-1)[..., :chosen]
            indices = drawn.int()
        how = {"value_size": LATENT_VALUES, "scale": scale}
        caches = {"bf16": latents}
        if case in FP8_LATENT_CASES:
            caches["fp8"] = fp8moe.quantize_latents(latents, value_size=LATENT_VALUES)
        made = [partial(fp8moe.latent_attention, q, each, lengths, indices=indices, **how) for each in caches.values()]
        for call in made:
            check("latent attention", call)
        others = {}
        if queries == 1 and not chosen:
            others["over_pytorch"] = partial(_by_products, q[:, 0], latents, scale)
            if find_spec("vllm") is not None:
                theirs = adapters.vllm_latent_attention(q, latents, lengths, scale).run
                if (error := operands.relative_error(theirs(), made[0]())) > 1e-2:
                    raise ValueError(f"vLLM's latent attention: {error:.2g} from fp8moe's")
                others["over_vllm"] = theirs
        found = timing.measure([*made, *others.values()], rests=[REST] * (len(made) + len(others)))
        compared = dict(zip(others, found[len(made) :], strict=True))
        read = batch * queries * chosen if chosen else batch * tokens
        pairs = heads * (read if chosen else batch * (queries * tokens - queries * (queries - 1) // 2))
        for (name, cache), time in zip(caches.items(), found, strict=False):
            yield {
                **{"cache": name, **dict(zip(LATENT_COLUMNS, (heads, batch, tokens, queries, chosen), strict=True))},
                **rates(cache.shape[-1] * cache.element_size() * read, time.median_us),
                "tflops": 2 * pairs * (2 * LATENT_VALUES + ROTARY) / time.median_us / 1e6,
                **{
                    name: compared[name].median_us / time.median_us if name in compared else None
                    for name in ("over_pytorch", "over_vllm")
                },
                "of_bf16": time.median_us / found[0].median_us,
            }
        del q, latents, indices, caches, made


def _by_products(q: Tensor, latents: Tensor, scale: float) -> Tensor:
    """Attention of one query a sequence by PyTorch's products, with scores and their softmax in float32."""
    scores = torch.empty((*q.shape[:2], latents.shape[1]), dtype=torch.float32, device=q.device)
    keys = latents.mT
    if q.is_cuda:
        torch.baddbmm(scores, q, keys, torch.float32, beta=0, alpha=scale, out=scores)
    else:  # PyTorch has bfloat16 products with float32 results on GPUs only
        torch.baddbmm(scores, q.float(), keys.float(), beta=0, alpha=scale, out=scores)
    return torch.bmm(scores.softmax(-1).to(q.dtype), latents[..., :LATENT_VALUES])


LATENT_COLUMNS = ("heads", "batch", "tokens", "queries", "chosen")
LATENT = Benchmark(
    "latent",
    latent,
    ("cache", *LATENT_COLUMNS, *RATES, "tflops", "over_pytorch", "over_vllm", "of_bf16"),
    [
        Bar(
            "latent attention, 16 heads, 64 x 8192: the time over FP8 latents of that over bfloat16",
            *("of_bf16", 1 / 1.5, 1 / 1.7, {"cache": "fp8", "heads": 16, "batch": 64, "tokens": 8192, "chosen": 0}),
        ),
        Bar(
            "vLLM's latent attention over fp8moe's, smallest ratio",
            *("over_vllm", 1.5, None, {"cache": "bf16"}),
            at_least=True,
            over=min,
        ),
        *(
            Bar(
                f"latent attention, {heads} heads, 64 x 8192, share of the copy bandwidth",
                *(
                    "of_copy",
                    0.80,
                    0.90,
                    {"cache": "bf16", "heads": heads, "batch": 64, "tokens": 8192, "queries": 1, "chosen": 0},
                ),
                at_least=True,
            )
            for heads in (16, 20)
        ),
        *(
            Bar(
                f"latent attention, {heads} heads, 1 x 8192",
                *("us", 15, 12, {"cache": "bf16", "heads": heads, "batch": 1, "tokens": 8192}),
                unit="us",
            )
            for heads in (16, 20)
        ),
        Bar(
            "latent attention, 128 heads, 64 x 8192",
            *("tflops", 450, 600, {"cache": "bf16", "heads": 128, "batch": 64, "tokens": 8192, "chosen": 0}),
            at_least=True,
            unit="TFLOPS",
        ),
        Bar(
            "latent attention of a prompt, 128 heads, 2048 chosen latents",
            *("tflops", 350, 500, {"heads": 128, "queries": 2048}),
            at_least=True,
            unit="TFLOPS",
        ),
    ],
)


def top_k() -> Iterator[dict]:
    """Time the choice of 2048 index scores of each query.

    The bandwidth counts one read of the scores and one write of the columns. over_pytorch: torch.topk's time over ours.
    """
    cases = [(torch.randn(size, device=DEVICE), *size, SPARSE["chosen"]) for size in TOP_K]
    ours = [partial(fp8moe.mqa_top_k, logits, top_k=k) for logits, *_, k in cases]
    theirs = [partial(torch.topk, logits, k) for logits, *_, k in cases]
    found = timing.measure([*ours, *theirs], rests=[REST] * (2 * len(cases)))
    for (_, rows, columns, k), time, other in zip(cases, found, found[len(cases) :], strict=False):
        yield {
            **{"rows": rows, "columns": columns, "k": k, **rates(4 * rows * (columns + k), time.median_us)},
            "over_pytorch": other.median_us / time.median_us,
        }


TOP_K_CHOICE = Benchmark(
    "top_k",
    top_k,
    ("rows", "columns", "k", *RATES, "over_pytorch"),
    [Bar("torch.topk over mqa_top_k, smallest ratio", "over_pytorch", 1.0, 3.0, at_least=True, over=min)],
)

SPARSE_TOKENS = {4096: None, 8192: None, 16384: None, 32768: 1.0, 65536: 1.6, 131072: 2.5}
"""Maps lengths of prompts to bars of `dense_over`."""
SPARSE = {"heads": 128, "passed": 128, "value": 128, "index_heads": 64, "index_size": 128, "chosen": 2048}
"""Sizes of a layer of DeepSeek-V3.2; `passed`: values of a head that rotary embeddings leave as they are."""
SPARSE_QUERIES, SPARSE_SCORES = 512, 1 << 26
"""Queries that attend at a time, and scores, of at least as many queries, that are in memory."""
STAGES = ("scores", "choice", "attention")


def sparse_latent() -> Iterator[dict]:
    """Time attention of whole prompts in a layer of DeepSeek-V3.2: index scores, choice, attention to what was chosen.

    Attention includes the products that absorb the latents' expansion into queries and results; all is without
    projections. `dense_ms`: cuDNN's causal attention on expanded heads, which must be there already. scratch_gb: memory
    beside operands and result. Times are medians of three calls; those of the stages add up to `ms` but for pauses.
    """
    make, latent = calls.Operands(DEVICE), LATENT_VALUES
    heads, passed, value, index_heads, index_size, chosen = SPARSE.values()
    scale = (passed + ROTARY) ** -0.5
    up = make.normal(heads, passed, latent) / 16, make.normal(heads, latent, value) / 16

    def attend(rows: Tensor, indices: Tensor, latents: Tensor, out: Tensor) -> None:
        absorbed = rows.new_empty(*rows.shape[:2], latent + ROTARY)
        torch.bmm(rows[..., :passed].transpose(0, 1), up[0], out=absorbed[..., :latent].transpose(0, 1))
        absorbed[..., latent:] = rows[..., passed:]
        how = {"indices": indices[None], "value_size": latent, "scale": scale}
        length = torch.full((1,), latents.shape[1], dtype=torch.int32, device=DEVICE)
        found = fp8moe.latent_attention(absorbed[None], latents, length, **how)
        torch.bmm(found[0].transpose(0, 1), up[1], out=out.transpose(0, 1))

    for tokens in SPARSE_TOKENS:
        q, latents = make.normal(1, tokens, heads, passed + ROTARY), make.normal(1, tokens, latent + ROTARY)
        index_q = make.codes(tokens, index_heads, index_size)
        index_k = FP8Tensor(make.codes(tokens, index_size), make.uniform(tokens, mean=1 / calls.STD))
        weights = make.normal(tokens, index_heads, dtype=torch.float32)
        ends = torch.arange(1, tokens + 1, dtype=torch.int32, device=DEVICE)
        out = torch.empty((tokens, heads, value), dtype=torch.bfloat16, device=DEVICE)

        def ours(mark, tokens=tokens, q=q, latents=latents, index=(index_q, index_k, weights), ends=ends, out=out):
            scored = max(SPARSE_QUERIES, SPARSE_SCORES // tokens)
            for first in range(0, tokens, scored):
                part = slice(first, min(first + scored, tokens))
                seen, starts = index[1], torch.zeros_like(ends[part])
                seen = FP8Tensor(seen.data[: part.stop], seen.scale[: part.stop])
                scores = fp8moe.mqa_logits(index[0][part], seen, index[2][part], starts, ends[part], fill_masked=False)
                mark("scores")
                columns = fp8moe.mqa_top_k(scores, top_k=chosen, ends=ends[part])
                del scores
                mark("choice")
                each = (x.split(SPARSE_QUERIES) for x in (q[0, part], columns, out[part]))
                for rows, indices, target in zip(*each, strict=True):
                    attend(rows, indices, latents, target)
                mark("attention")

        times, scratch = _time_whole(ours)
        k, v = make.normal(1, heads, tokens, passed + ROTARY), make.normal(1, heads, tokens, value)
        q = q.transpose(1, 2)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            dense = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, scale=scale)
            dense_ms = _time_whole(lambda mark, dense=dense: dense())[0][""]
        ms = times.pop("")
        yield {
            **{"tokens": tokens, **{f"{stage}_ms": times[stage] for stage in STAGES}, "ms": ms},
            **{"scratch_gb": scratch / 1e9, "dense_ms": dense_ms, "dense_over": dense_ms / ms},
        }
        del q, k, v, latents, dense, ours, index_q, index_k, out


def _time_whole(call: Callable[[Callable[[str], None]], object], repeats: int = 3) -> tuple[dict[str, float], int]:
    """Return milliseconds of a call and of its stages, medians, and the bytes that it takes beside what there is.

    call: calls its argument with the name of each stage that it has enqueued. The time of the whole is named "".
    """
    call(lambda _: None)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        events = [("", torch.cuda.Event(enable_timing=True))]
        events[0][1].record()

        def mark(stage: str, events=events) -> None:
            events.append((stage, torch.cuda.Event(enable_timing=True)))
            events[-1][1].record()

        call(mark)
        mark("")
        events[-1][1].synchronize()
        times = Counter({"": events[0][1].elapsed_time(events[-1][1])})
        for (_, begin), (stage, end) in pairwise(events[:-1]):
            times[stage] += begin.elapsed_time(end)
        for stage, ms in times.items():
            found.setdefault(stage, []).append(ms)
    return {stage: sorted(ms)[len(ms) // 2] for stage, ms in found.items()}, (
        torch.cuda.max_memory_allocated() - before
    )


SPARSE_LATENT = Benchmark(
    "sparse_latent",
    sparse_latent,
    ("tokens", *(f"{stage}_ms" for stage in STAGES), "ms", "scratch_gb", "dense_ms", "dense_over"),
    [
        *(
            Bar(
                f"cuDNN's dense attention over DeepSeek-V3.2's sparse attention, {tokens} tokens",
                *("dense_over", limit, None, {"tokens": tokens}),
                at_least=True,
            )
            for tokens, limit in SPARSE_TOKENS.items()
            if limit
        ),
        Bar("scratch of sparse attention, most", "scratch_gb", 0.5, None, unit="GB", over=max),
    ],
)

DENSE_M, TOKENS = (1, 16, 64, 512, 4096), (1, 16, 64, 512, 4096)
FEW, MANY = 64, 512  # the bars are for calls with at most FEW tokens and with at least MANY tokens


def problems() -> Iterator[tuple[dict, Callable[[], object]]]:
    """Yield, for each GEMM and each experts layer, a row still without times, and the call to time."""
    make = calls.Operands(DEVICE)
    for n, k in shapes.DENSE_SHAPES:
        for m in DENSE_M:
            row = {"what": "gemm", "m": m, "n": n, "k": k, "parts": invariant_parts(n, k)}
            yield row, calls.gemm(make, m, n, k)
    for name in ("dsv3_ep8", "qwen3_30b"):
        for tokens in TOKENS:
            call = calls.experts(make, **shapes.MODELS[name]._asdict(), tokens=tokens)
            yield {"what": "experts", "model": name, "tokens": tokens}, call


def invariance() -> Iterator[dict]:
    """Time each call outside of `fp8moe.batch_invariant` (`usual_us`) and inside it (`us`)."""

    def invariant(call: Callable[[], object]) -> object:
        with fp8moe.batch_invariant():
            return call()

    for row, call in problems():
        usual, mode = timing.measure([call, partial(invariant, call)], rests=[REST] * 2)
        us, usual_us = mode.median_us, usual.median_us
        yield row | {"usual_us": usual_us, "us": us, "ratio": us / usual_us}


TIMES = ("usual_us", "us", "ratio")
BATCH_INVARIANCE = Benchmark(
    "batch_invariance",
    invariance,
    {"gemm": ("m", "n", "k", "parts", *TIMES), "experts": ("model", "tokens", *TIMES)},
    [
        Bar(f"batch invariance, {what}, {text}, {shown}", "ratio", limit, None, {"what": what, size: some}, over=over)
        for what, size in (("gemm", "m"), ("experts", "tokens"))
        for some, text, limit in (
            (lambda count: count <= FEW, f"up to {FEW} tokens", 1.15),
            (lambda count: count >= MANY, f"from {MANY} tokens on", 1.05),
        )
        for shown, over in (("largest ratio", max), ("geomean", geomean))
    ],
)
