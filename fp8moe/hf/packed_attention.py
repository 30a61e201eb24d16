"""Attention of a training forward, packed or padded, with the bits of decode steps; transformers calls it.

`sequences_of` finds the sequences in a batch as transformers marks them, by attention_mask and position_ids. In the
place of a mask, transformers passes an `AttendedSequences` on to attention.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fp8moe.hf.fused.attention import WITHOUT_EFFECT, UnsupportedAttention
from fp8moe.hf.replaced import attention_chosen
from fp8moe.kernels.decoder_ops.decode_attention import DTYPES
from fp8moe.kernels.decoder_ops.prompt_attention import prompt_attention

NAME = "fp8moe_on_policy"

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments of a forward that repeat what position_ids say."""


@dataclass(frozen=True, eq=False)
class AttendedSequences:
    """The sequences in a batch (B, T): tokens that attend to each other.

    index: (tokens,) int64, the places of tokens in the flattened batch; None if none of it is padding. sequences: of
    these tokens, as `prompt_attention` takes them. longest: the most tokens of a sequence. window: the most keys that a
    query sees, or None.
    """

    index: Tensor | None
    sequences: Tensor
    longest: int
    window: int | None = None


def sequences_of(mask: Tensor | None, positions: Tensor) -> AttendedSequences:
    """Find the sequences of a batch. Waits for the device.

    mask: (B, T), 0 for padding, or None. positions: (B, T), from 0 on in each sequence.
    Raises ValueError for a batch without tokens, and for a sequence that does not begin at position 0 or has padding
    inside.
    """
    if positions.numel() == 0:
        raise ValueError(f"input_ids: on_policy expects at least one token, got shape {tuple(positions.shape)}")
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask.bool()
    continues = torch.zeros_like(real)
    continues[:, 1:] = real[:, :-1] & (positions[:, 1:] == positions[:, :-1] + 1)
    begins = real & ~continues
    marks = (real.byte() + 2 * begins.byte() + 4 * (begins & (positions != 0)).byte()).flatten().cpu()
    if (marks & 4).any():
        row, column = divmod(int((marks & 4).nonzero()[0]), real.shape[1])
        raise ValueError(
            f"position_ids: on_policy expects positions 0, 1, 2... in each sequence and no padding inside, got "
            f"{int(positions[row, column])} for the first token of a sequence, at row {row}, column {column}"
        )
    places = (marks & 1).nonzero()[:, 0]
    firsts = (marks[places] & 2).nonzero()[:, 0]
    ends = pad(firsts, (0, 1), value=len(places))
    counts = pad(ends.diff(), (0, 1))
    return AttendedSequences(
        None if len(places) == len(marks) else places.to(positions.device),
        torch.stack([ends, ends, counts]).int().to(positions.device),
        int(counts.max()),
    )


_sequences: ContextVar[AttendedSequences | None] = ContextVar("sequences", default=None)


@contextmanager
def attention_of(config: Any, sequences: AttendedSequences | None = None) -> Iterator[None]:
    """Within the context, run models of this configuration with `attend`, in this thread; sequences: of the batch."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _attended_sequences)
    before = _sequences.set(sequences)
    try:
        with attention_chosen(config, NAME):
            yield
    finally:
        _sequences.reset(before)


def _attended_sequences(
    batch_size: int,
    q_length: int,
    *,
    mask_function: Callable,
    local_size: int | None = None,
    use_vmap: bool = False,
    **others: Any,
) -> AttendedSequences:
    """Return the sequences of the batch. transformers calls this function to make a mask."""
    from transformers.masking_utils import causal_mask_function

    if use_vmap or (local_size is None and mask_function is not causal_mask_function):
        raise UnsupportedAttention("a mask that is neither causal nor of a sliding window")
    return replace(_sequences.get(), window=local_size)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttendedSequences,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention among the tokens of each sequence, differentiably; transformers calls this function.

    query: (B, heads, T, D). key, value: (B, key heads, T, D). Of float32 operands, bfloat16 values are taken.
    Returns (B, T, heads, D) in the dtype of query, 0 for padding, and None for the attention weights.
    Raises UnsupportedAttention for features other than windows.
    """
    given = sorted(name for name, other in others.items() if other is not None and name not in WITHOUT_EFFECT)
    if given or dropout or not isinstance(attention_mask, AttendedSequences):
        raise UnsupportedAttention(f"attention with {', '.join(given or ['dropout' if dropout else 'another mask'])}")
    batch, heads, tokens, size = query.shape
    dtype = query.dtype if query.dtype in DTYPES else torch.bfloat16
    rows = [x.transpose(1, 2).reshape(batch * tokens, -1, size).to(dtype) for x in (query, key, value)]
    index, longest = attention_mask.index, attention_mask.longest
    if index is not None:
        rows = [x.index_select(0, index) for x in rows]
    how = {"most_queries": longest, "window": attention_mask.window, "scale": scaling}
    out, _ = prompt_attention(*rows, attention_mask.sequences, **how)
    if index is not None:
        out = out.new_zeros(batch * tokens, heads, size).index_copy(0, index, out)
    return out.view(batch, tokens, heads, size).to(query.dtype), None
