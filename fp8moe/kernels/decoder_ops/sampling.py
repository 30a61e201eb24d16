"""Sampling: ``sample`` draws the next token of each sequence, ``sample_next`` also appends it to generated tokens."""

import ctypes
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fp8moe.quant.quantize import input_defines
from fp8moe.runtime.autograd import check_derivatives, detached
from fp8moe.runtime.checks import FLOATING, check_contiguous, check_dtype, check_like, check_tensor, describe
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import Written, operator
from fp8moe.runtime.sm90 import MAX_BLOCKS_PER_PORTABLE_CLUSTER, WARP

IN_PROMPT, GENERATED = 1, 2
"""Bits of SamplingState.seen: the token is in the prompt; the token was generated."""


class SamplingState(NamedTuple):
    """Sampling parameters and state of B sequences, on the device of the logits.

    As parameters are tensors, one captured CUDA graph serves any mix of them.

    temperature: (B,) float32; 0 is greedy.
    top_k: (B,) int32; 0 is off, 1 is greedy.
    top_p: (B,) float32 from 0 to 1; 1 is off.
    min_p: (B,) float32 from 0 to 1; 0 is off.
    repetition_penalty: (B,) float32 above 0; 1 is off.
    presence_penalty: (B,) float32; 0 is off.
    seed: (B,) int64.
    step: (B,) int64, the number of tokens that the sequence has drawn.
    seen: (B, V) uint8; bit 0: the token is in the prompt, bit 1: it was generated.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    seed: Tensor
    step: Written
    seen: Annotated[Tensor, "Tensor(b!)"]


class Sequences(NamedTuple):
    """Generated tokens of B sequences, on the device of the logits.

    tokens: (B,) int64, the last token of each sequence. generated, logprobs: (B, L) int64 and float32; row b has
        count[b] valid entries.
    count: (B,) int64. finished: (B,) bool, the sequence has ended; failed: (B,) bool, it ended because no token could
        be chosen.
    limit: (B,) int64, the largest count, at most L. ends: (B, V) bool, tokens that end the sequence.
    pad: (1,) int64, the token that a finished sequence gets.
    """

    tokens: Annotated[Tensor, "Tensor(c!)"]
    generated: Annotated[Tensor, "Tensor(d!)"]
    logprobs: Annotated[Tensor, "Tensor(e!)"]
    count: Annotated[Tensor, "Tensor(f!)"]
    finished: Annotated[Tensor, "Tensor(g!)"]
    failed: Annotated[Tensor, "Tensor(h!)"]
    limit: Tensor
    ends: Tensor
    pad: Tensor


class Sampled(NamedTuple):
    """Results of `sample`. tokens: (B,) int64. logprobs: (B,) float32, log-softmax of the raw logits at the tokens."""

    tokens: Tensor
    logprobs: Tensor


def sample(logits: Tensor, state: SamplingState) -> Sampled:
    """Choose a token for each row of logits, mark it in `state.seen` (bit 1) and add 1 to `state.step`, in place.

    logits: (B, V) bfloat16, float16 or float32, any strides, V from 1 to 2**31 - 1. A token with -inf is not chosen.
    state: contiguous tensors.
    Returns Sampled(tokens, logprobs). Equal inputs give equal bits, and a row does not depend on other rows. A row gets
    token -1 and logprob NaN, and keeps its state, if its logits (raw or penalized) have a NaN, a +inf or no finite
    value, or if a parameter is out of range.

    The steps, in float32, have the order and the results of transformers' logits processors:
    1. The repetition penalty applies to tokens of the prompt and to generated tokens. Then the presence penalty, which
       transformers lacks, is subtracted from the logits of generated tokens, as in OpenAI's API.
    2. Greedy rows, and rows whose largest logit overflows float32 when divided by the temperature, take the token with
       the largest logit, the first of equal ones.
    3. Other rows are divided by the temperature. top_k keeps the k largest logits and all that equal the k-th. Of these
       tokens, top_p keeps the fewest that together have at least the share ``top_p`` of the probability mass,
       preferring higher indices among equals. Then min_p applies. The token with the largest sum of scaled logit and
       Gumbel noise is a draw from the softmax of the kept tokens (Maddison, Tarlow, Minka, "A* sampling",
       arXiv:1411.0030). The noise is a function of seed, step and token.

    Sampling has no derivative: nothing is recorded for the autograd graph of logits.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or layout.
    """
    check_tensor("logits", logits)
    if not isinstance(state, SamplingState):
        raise TypeError(f"state: expected a SamplingState, got {describe(state)}")
    for name, value in state._asdict().items():
        check_tensor(f"state.{name}", value)
    check_derivatives("fp8moe.kernels.decoder_ops.sampling", logits)
    return Sampled(*_op(detached(logits), *state))


def sample_next(logits: Tensor, state: SamplingState, sequences: Sequences) -> None:
    """Choose a token for each row of logits as `sample` does, and append it to `sequences`, in place.

    logits, state: as for `sample`. sequences: contiguous tensors.

    A finished sequence gets `pad`. A sequence for which no token can be chosen gets `pad` too, and is marked finished
    and failed. Other sequences finish with a token of `ends` or when their count reaches `limit`.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or layout.
    """
    _next_op(logits, *state, *sequences)


# Dtypes of the fields of SamplingState that are not float32, and the fields of Sequences that are not int64.
_DTYPES = {"top_k": torch.int32, "seed": torch.int64, "step": torch.int64, "seen": torch.uint8}
_BOOLEANS, _FLOATS = ("finished", "failed", "ends"), ("logprobs",)


def check(logits: Tensor, state: SamplingState) -> None:
    """Check dtypes, shapes, devices and layouts of the arguments of `sample`."""
    check_dtype("logits", logits, *FLOATING)
    if logits.dim() != 2 or not 1 <= logits.shape[1] < 1 << 31:
        raise ValueError(f"logits: expected shape (B, V) with V from 1 to 2**31 - 1, got {tuple(logits.shape)}")
    for name, value in state._asdict().items():
        shape = logits.shape if name == "seen" else logits.shape[:1]
        check_like(f"state.{name}", value, (_DTYPES.get(name, torch.float32),), shape, logits.device, "logits")
        check_contiguous(f"state.{name}", value)


def check_next(logits: Tensor, state: SamplingState, sequences: Sequences) -> None:
    """Check dtypes, shapes, devices and layouts of the arguments of `sample_next`."""
    check(logits, state)
    rows, vocab = logits.shape
    if sequences.generated.dim() != 2:
        raise ValueError(f"sequences.generated: expected shape (B, L), got {tuple(sequences.generated.shape)}")
    longest = sequences.generated.shape[1]
    shapes = {"generated": (rows, longest), "logprobs": (rows, longest), "ends": (rows, vocab), "pad": (1,)}
    for name, value in sequences._asdict().items():
        dtype = torch.bool if name in _BOOLEANS else torch.float32 if name in _FLOATS else torch.int64
        check_like(f"sequences.{name}", value, (dtype,), shapes.get(name, (rows,)), logits.device, "logits")
        check_contiguous(f"sequences.{name}", value)


MASS_BITS = 40
"""Probability mass is counted in integers: the most probable token has 2**MASS_BITS, other masses are rounded down."""

EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
LOG_TERMS = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
LOG2_E = 1.44269504
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; LN2_HIGH times an integer exponent is exact
MIN_EXPONENT = -86.0  # e**-86 is still a normal float32, but its probability mass rounds to 0
SQRT_HALF_BITS = 0x3F3504F3

PHILOX_ROUNDS = 10
PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


# ---- the kernel ----

_CLUSTER = MAX_BLOCKS_PER_PORTABLE_CLUSTER  # thread blocks that share a row
_WARPS = 16  # warps of a thread block
_POINTERS = 1 + len(SamplingState._fields) + 2 + len(Sequences._fields)


class _SampleArguments(ctypes.Structure):
    _pointers_ = _POINTERS
    _fields_ = (
        ("pointers", ctypes.c_int64 * _POINTERS),
        ("logits_stride", ctypes.c_int64),
        ("vocab", ctypes.c_uint32),
        ("longest", ctypes.c_uint32),
    )


def kernel_spec(dtype: torch.dtype, vector: bool) -> KernelSpec:
    """Return the kernel for logits of `dtype`.

    vector: each row of logits and each row of `seen` consists of whole, aligned 16-byte vectors.
    """
    defines = {
        "WARPS": _WARPS,
        "CLUSTER": _CLUSTER,
        "DIGIT_BITS": 11,
        "CAPACITY": 2048,
        "MASS_BITS": MASS_BITS,
        "IN_PROMPT": IN_PROMPT,
        "GENERATED": GENERATED,
        "EXP_TERMS": _array(EXP_TERMS),
        "LOG_TERMS": _array(LOG_TERMS),
        "LOG2_E": _number(LOG2_E),
        "LN2_HIGH": _number(LN2_HIGH),
        "LN2_LOW": _number(LN2_LOW),
        "MIN_EXPONENT": _number(MIN_EXPONENT),
        "SQRT_HALF_BITS": SQRT_HALF_BITS,
        "PHILOX_ROUNDS": PHILOX_ROUNDS,
        "PHILOX_FACTORS": _array(PHILOX_FACTORS),
        "PHILOX_WEYL": _array(PHILOX_WEYL),
        "OPERANDS_BYTES": ctypes.sizeof(_SampleArguments),
    }
    return KernelSpec("sample.cu", "sample", (*input_defines(dtype, vector=vector), *defines.items()))


def _number(value: float) -> str:
    """Return the CUDA literal of a number: a float literal for a float, an unsigned literal for an int."""
    return f"{value!r}f" if isinstance(value, float) else f"{value}u"


def _array(values: tuple[float, ...]) -> str:
    return f"{{{', '.join(map(_number, values))}}}"


@planned
def launcher(
    device_index: int, rows: int, vocab: int, logits_stride: int, longest: int, dtype: torch.dtype, vector: bool
) -> PointerLauncher:
    """Return the launcher, to be called with (logits, *SamplingState, tokens, logprobs, *Sequences).

    For `sample`, the tensors of Sequences are None; for `sample_next`, tokens and logprobs are None. longest: number of
    columns of `generated`. vector: see `kernel_spec`.
    """
    return PointerLauncher(
        load(kernel_spec(dtype, vector)),
        grid=rows * _CLUSTER,
        block=_WARPS * WARP,
        cluster=_CLUSTER,
        pdl=True,
        args=(_SampleArguments(vocab=vocab, logits_stride=logits_stride, longest=longest),),
    )


def _launch(logits: Tensor, state: SamplingState) -> tuple[Tensor, Tensor]:
    tokens, logprobs = _empty(logits, state)
    _choose(logits, state, 0, tokens, logprobs, *(None,) * len(Sequences._fields))
    return tokens, logprobs


def _launch_next(logits: Tensor, state: SamplingState, sequences: Sequences) -> None:
    _choose(logits, state, sequences.generated.shape[1], None, None, *sequences)


def _choose(logits: Tensor, state: SamplingState, longest: int, *written: Tensor | None) -> None:
    """Launch the sampling kernel. longest: see `launcher`. written: tokens, logprobs and the tensors of `Sequences`."""
    rows, vocab = logits.shape
    if not rows:
        return
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    stride, size = logits.stride(0), logits.itemsize
    vector = not (logits.data_ptr() | state.seen.data_ptr() | vocab * size | stride * size) % 16
    launch = launcher(logits.get_device(), rows, vocab, stride, longest, logits.dtype, vector)
    launch(logits, *state, *written)


def _empty(logits: Tensor, state: SamplingState) -> tuple[Tensor, Tensor]:
    rows = logits.shape[:1]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)


# ---- the reference ----

# The reference defines which tokens are drawn, identically on every device. Therefore exponentials and logarithms are
# computed with sums and products of float32, each rounded, from the polynomials of Cephes (S. L. Moshier, expf and
# logf: relative error about 1e-7), probability mass is counted in integers, and noise comes from the counter-based
# generator Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11).


def reference(logits: Tensor, state: SamplingState) -> tuple[Tensor, Tensor]:
    """Compute `sample` in plain PyTorch: return tokens and logprobs (B,), and update state.seen and state.step."""
    raw = logits.float()
    penalized = _penalized(raw, state)
    scaled = penalized / state.temperature[:, None]
    largest = scaled.amax(1, keepdim=True)
    greedy = (state.temperature == 0) | (state.top_k == 1) | ~largest[:, 0].isfinite()
    tokens = penalized.argmax(1)
    # On a CPU, noise is computed only for rows that need noise. On a GPU, noise is computed for all rows: to know which
    # rows need noise, the host would have to wait for the GPU.
    some = (~greedy).nonzero()[:, 0] if greedy.is_cpu else slice(None)
    if not greedy.is_cpu or len(some):
        options, scaled = SamplingState(*(value[some] for value in state)), scaled[some]
        scores = scaled + gumbel_noise(options.seed, options.step, logits.shape[1])
        drawn = torch.where(kept(scaled, largest[some], options), scores, -torch.inf).argmax(1)
        tokens[some] = torch.where(greedy[some], tokens[some], drawn)
    logprobs = raw.log_softmax(1).gather(1, tokens[:, None])[:, 0]

    valid = _valid_parameters(state) & raw.amax(1).isfinite() & penalized.amax(1).isfinite()
    rows = torch.arange(len(tokens), device=tokens.device)
    state.seen[rows, tokens] |= GENERATED * valid.to(torch.uint8)
    state.step.add_(valid)
    return torch.where(valid, tokens, -1), torch.where(valid, logprobs, torch.nan)


def reference_next(logits: Tensor, state: SamplingState, sequences: Sequences) -> None:
    """Compute `sample_next` in plain PyTorch, on any device."""
    chosen, logprobs = reference(logits, state)
    tokens, finished, failed, count = sequences.tokens, sequences.finished, sequences.failed, sequences.count
    stopped = finished | (chosen < 0)
    failed.logical_or_(stopped ^ finished)
    torch.where(stopped, sequences.pad, chosen, out=tokens)
    column = count[:, None]
    sequences.generated.scatter_(1, column, tokens[:, None])
    sequences.logprobs.scatter_(1, column, logprobs.masked_fill_(stopped, 0)[:, None])
    count.add_(~stopped)
    ended = sequences.ends.gather(1, chosen.clamp(min=0)[:, None])[:, 0]
    torch.logical_or(stopped | ended, count >= sequences.limit, out=finished)


def _valid_parameters(state: SamplingState) -> Tensor:
    """Return which rows have all sampling parameters in range, bool (B,)."""
    temperature, top_k, top_p, min_p, repetition, presence = state[:6]
    return (
        ((temperature >= 0) & temperature.isfinite())
        & (top_k >= 0)
        & ((top_p >= 0) & (top_p <= 1))
        & ((min_p >= 0) & (min_p <= 1))
        & ((repetition > 0) & repetition.isfinite())
        & presence.isfinite()
    )


def _penalized(raw: Tensor, state: SamplingState) -> Tensor:
    """Apply the repetition and presence penalties to raw logits (B, V) float32."""
    repetition = state.repetition_penalty[:, None]
    repeated = torch.where(raw < 0, raw * repetition, raw / repetition)
    penalized = torch.where((state.seen & (IN_PROMPT | GENERATED)) != 0, repeated, raw)
    return torch.where((state.seen & GENERATED) != 0, penalized - state.presence_penalty[:, None], penalized)


def kept(scaled: Tensor, largest: Tensor, state: SamplingState) -> Tensor:
    """Return which tokens top_k, top_p and min_p keep, bool (B, V).

    scaled: logits over temperature, (B, V) float32. largest: (B, 1), the maximum of each row.
    """
    vocab = scaled.shape[1]
    # Sort logits in ascending order, equal logits by index. top_p then drops tokens from the beginning of the order.
    order = scaled.sort(dim=1, stable=True)
    top_k = torch.where(state.top_k > 0, state.top_k, vocab).clamp(max=vocab)
    kept = scaled >= order.values.gather(1, vocab - top_k[:, None].long())

    weight = exp(scaled - largest)
    # In a row without finite logits, all weights are NaN: count their probability mass as 0.
    mass = torch.where(kept & weight.isfinite(), (weight * 2.0**MASS_BITS).long(), 0)
    mass = mass.gather(1, order.indices)
    above = mass.sum(1, keepdim=True) - mass.cumsum(1)
    target = (state.top_p.double() * mass.sum(1).double()).ceil().clamp(min=1).long()[:, None]
    in_top_p = torch.empty_like(kept).scatter_(1, order.indices, above < target)
    kept &= in_top_p | (state.top_p >= 1)[:, None]
    return kept & (weight >= state.min_p[:, None])


def exp(x: Tensor) -> Tensor:
    """Return e**x for float32 x <= 0, with the same bits on every device; x is clamped to MIN_EXPONENT."""
    x = x.clamp(min=MIN_EXPONENT)
    exponent = (x * LOG2_E).round()
    rest = x - exponent * LN2_HIGH
    rest = rest - exponent * LN2_LOW
    power = _polynomial(rest, EXP_TERMS) * (rest * rest) + rest + 1
    return power * ((exponent.int() + 127) << 23).view(torch.float32)


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of normal positive float32 x, with the same bits on every device."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23  # such that x / 2**exponent is from sqrt(1/2) to sqrt(2)
    return _log_near_1((bits - (exponent << 23)).view(torch.float32) - 1, exponent.float())


def _log_near_1(f: Tensor, exponent: Tensor) -> Tensor:
    """Return log((1 + f) * 2**exponent) in float32, for f from -0.3 to 0.42."""
    square = f * f
    tail = _polynomial(f, LOG_TERMS) * f * square + exponent * LN2_LOW - square * 0.5
    return f + tail + exponent * LN2_HIGH


def _polynomial(x: Tensor, terms: tuple[float, ...]) -> Tensor:
    value = torch.full_like(x, terms[0])
    for term in terms[1:]:
        value = value * x + term
    return value


def gumbel_noise(seed: Tensor, step: Tensor, vocab: int) -> Tensor:
    """Return Gumbel noise -log(-log(u)) with a uniform u in (0, 1) per token, (B, vocab) float32.

    seed, step: (B,) int64. The u of token i is computed from word i % 4 of the Philox block whose counter is
    (i // 4, 0, low word of step, high word of step) and whose key is (low word of seed, high word of seed).
    """
    blocks = torch.arange((vocab + 3) // 4, device=seed.device).expand(len(seed), -1)
    seed, step = seed[:, None], step[:, None]
    words = philox(
        (blocks, torch.zeros_like(blocks), *(part.expand_as(blocks) for part in (step & _WORD, step >> 32 & _WORD))),
        (seed & _WORD, seed >> 32 & _WORD),
    )
    word = torch.stack(words, 2).flatten(1)[:, :vocab]
    # Where the noise is large, u is close to 1. log(u) is then computed from 1 - u, which keeps all digits of float32.
    rest = _unit(word)
    exponential = torch.where(
        word < 1 << 30, _log_near_1(-rest, torch.zeros_like(rest)), log(_unit(_WORD - word))
    ).neg()
    return -log(exponential)


def _unit(word: Tensor) -> Tensor:
    """Map a 32-bit `word` to (0, 1): the midpoint of interval number `word` of 2**32 equal intervals, as float32."""
    return word.float() * 2.0**-32 + 2.0**-33


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four 32-bit words of Philox 4x32-10 for four counter words and two key words, all held in int64."""
    for _ in range(PHILOX_ROUNDS):
        first, second = (word * factor for word, factor in zip(counter[::2], PHILOX_FACTORS, strict=True))
        counter = (
            (second >> 32 & _WORD) ^ counter[1] ^ key[0],
            second & _WORD,
            (first >> 32 & _WORD) ^ counter[3] ^ key[1],
            first & _WORD,
        )
        key = tuple(word + weyl & _WORD for word, weyl in zip(key, PHILOX_WEYL, strict=True))
    return counter


_op = operator("sample -> (Tensor, Tensor)", check=check, cuda=_launch, reference=reference, fake=_empty)
_next_op = operator(
    "sample_next -> ()",
    check=check_next,
    cuda=_launch_next,
    reference=reference_next,
    fake=lambda logits, state, sequences: None,
    forward_only=True,
)
