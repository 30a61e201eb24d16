"""How the tokens of sequences are chosen, as tensors on the device: `SamplingState`, and its checks."""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.runtime.checks import FLOATING, check_dtype, check_like

IN_PROMPT, GENERATED = 1, 2
"""Bits of SamplingState.seen."""


class SamplingState(NamedTuple):
    """For B sequences, on the device of the logits: so one CUDA graph serves any mix of them.

    temperature: (B,) float32; 0 is greedy.
    top_k: (B,) int32; 0 is off, 1 is greedy.
    top_p: (B,) float32 from 0 to 1; 1 is off.
    min_p: (B,) float32 from 0 to 1; 0 is off.
    repetition_penalty: (B,) float32 above 0; 1 is off.
    presence_penalty: (B,) float32; 0 is off.
    seed: (B,) int64.
    step: (B,) int64, how many tokens the sequence has drawn.
    seen: (B, V) uint8; bit 0: the token is in the prompt, bit 1: it was generated.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    seed: Tensor
    step: Tensor
    seen: Tensor


_DTYPES = {"top_k": torch.int32, "seed": torch.int64, "step": torch.int64, "seen": torch.uint8}  # others are float32


def check(logits: Tensor, state: SamplingState) -> None:
    """Dtypes, shapes, devices and layouts of the arguments of `sample`."""
    check_dtype("logits", logits, *FLOATING)
    if logits.dim() != 2 or not 1 <= logits.shape[1] < 1 << 31:
        raise ValueError(f"logits: expected shape (B, V) with V from 1 to 2**31 - 1, got {tuple(logits.shape)}")
    for name, value in state._asdict().items():
        shape = logits.shape if name == "seen" else logits.shape[:1]
        check_like(f"state.{name}", value, (_DTYPES.get(name, torch.float32),), shape, logits.device, "logits")
        if not value.is_contiguous():
            raise ValueError(f"state.{name}: expected a contiguous tensor, got strides {value.stride()}")
