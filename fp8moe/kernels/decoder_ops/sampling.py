"""The next token of each sequence: ``sample`` and the operator ``fp8moe::sample`` behind it."""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops import sampling_plan, sampling_reference
from fp8moe.kernels.decoder_ops.sampling_state import SamplingState, check
from fp8moe.runtime.autograd import check_derivatives, detached
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor, describe
from fp8moe.runtime.operator import define

__all__ = ["Sampled", "SamplingState", "sample"]


class Sampled(NamedTuple):
    """tokens: (B,) int64. logprobs: (B,) float32, the log-softmax of the logits as they came at these tokens."""

    tokens: Tensor
    logprobs: Tensor


def sample(logits: Tensor, state: SamplingState) -> Sampled:
    """Choose a token for each row of logits, mark it in `state.seen` (bit 1) and add 1 to `state.step`, in place.

    logits: (B, V) bfloat16, float16 or float32, any strides, V from 1 to 2**31 - 1. -inf is a token that is not chosen.
    state: its tensors are contiguous.
    Returns Sampled(tokens, logprobs). Equal inputs give equal bits, and a row depends on nothing but itself. A row with
    a NaN, +inf or nothing finite among its logits, raw or penalized, or with a parameter out of range, gets token -1
    and logprob NaN; its state stays.

    In float32, in the order and with the results of transformers' processors:
    1. repetition penalty on tokens seen; then presence penalty, which transformers does not have: it is subtracted from
       the logits of generated tokens, as OpenAI's API defines it.
    2. Greedy rows, and those whose largest logit over the temperature is beyond float32, take the largest of these
       logits, of equal ones the first.
    3. The others: temperature; top_k, with all that equal the k-th; top_p, the smallest set with that share of the
       mass, of equal ones the last; min_p. Of what is left the largest sum of scaled logit and Gumbel noise is a draw
       from its softmax (Maddison, Tarlow, Minka, "A* sampling", arXiv:1411.0030). The noise is a function of seed, step
       and token.

    Sampling has no derivative: nothing is recorded for the autograd graph of logits.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or layout.
    """
    check_tensor("logits", logits)
    if not isinstance(state, SamplingState):
        raise TypeError(f"state: expected a SamplingState, got {describe(state)}")
    for name, value in state._asdict().items():
        check_tensor(f"state.{name}", value)
    check_derivatives("fp8moe.kernels.decoder_ops.sampling", logits)
    return Sampled(*_sample_op(detached(logits), *state))


def _sample(logits: Tensor, *state: Tensor) -> tuple[Tensor, Tensor]:
    state = SamplingState(*state)
    check(logits, state)
    backend = sampling_plan if use_cuda(logits) else sampling_reference
    return backend.sample(logits, state)


def _sample_fake(logits: Tensor, *state: Tensor) -> tuple[Tensor, Tensor]:
    check(logits, SamplingState(*state))
    rows = logits.shape[:1]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)


_sample_op = define(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor repetition_penalty, "
    "Tensor presence_penalty, Tensor seed, Tensor(a!) step, Tensor(b!) seen) -> (Tensor, Tensor)",
    _sample,
    _sample_fake,
)
