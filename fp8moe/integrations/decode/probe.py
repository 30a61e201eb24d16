"""Whether the decode step of a model gives what the model gives without a cache, and can be captured."""

from typing import Any

import torch
from torch import Tensor

from fp8moe.integrations.decode.host_reads import HostReads
from fp8moe.integrations.decode.step import Step, positions_of, vocabulary

PADDING = 2
PROMPT = 8
"""Tokens of the probe's prompt, with those of the padding on its left."""
NEW = 3


@torch.no_grad()
def check_step(model: Any, device: torch.device, captured: bool, attention: str | None = None) -> None:
    """Run a few tokens through a decode step of its own, and the same tokens through the model at once.

    Raises ValueError if the step cannot run; if it is to be captured and reads values on the host; or if, after each
    new token, its logits are too far from those of the whole sequence: by a share of what remembering nothing but that
    token would make. Rounding, and experts chosen otherwise in a near tie, stay below that at least once.
    """
    name = type(model).__name__
    step = Step(model, 1, PROMPT + NEW, device, attention)
    tokens, mask = _sequence(vocabulary(model), device)
    try:
        whole, alone = _without_cache(model, tokens, mask)
        stepwise, reads = _with_cache(step, tokens, mask)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"model: {name} cannot run a decode step ({type(error).__name__}: {reason})") from error
    if captured and reads:
        raise ValueError(
            f"model: the decode step of {name} cannot be captured, it reads values on the host "
            f"({', '.join(sorted(set(reads)))})"
        )
    if whole.isnan().any():
        raise ValueError(f"model: the logits of {name} are NaN")
    if stepwise.shape != whole.shape or _far(stepwise, whole, alone):
        raise ValueError(
            f"model: with a static cache the logits of {name} are not those that it gives without a cache: what it has "
            "read it keeps elsewhere, or not at all"
        )


def _far(stepwise: Tensor, whole: Tensor, alone: Tensor) -> bool:
    """Whether the step is far from the whole sequence after every token."""
    # In 16 bits a deep model of random weights multiplies rounding errors until they are as large as the context.
    share = 0.25 if whole.dtype.itemsize > 2 else 0.8
    rounding = torch.finfo(whole.dtype).eps ** 0.5
    stepwise, whole, alone = map(_comparable, (stepwise, whole, alone))
    limit = torch.maximum(share * (whole - alone).norm(dim=-1), rounding * whole.norm(dim=-1))
    return bool(((stepwise - whole).norm(dim=-1) > limit).all())


def _sequence(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (1, PROMPT + NEW) from the middle of a vocabulary, as models keep special ones at its ends; their mask."""
    tokens = torch.linspace(size // 4, size * 3 // 4, PROMPT + NEW, device=device).long()[None]
    mask = torch.ones_like(tokens)
    mask[:, :PADDING] = 0
    return tokens, mask


def _without_cache(model: Any, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The logits (NEW, vocabulary) after each new token: of the whole sequence, and of that token alone."""
    positions = positions_of(mask)
    whole = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits[0, PROMPT:]
    alone = model(input_ids=tokens[:, PROMPT:].T, position_ids=positions[:, PROMPT:].T, use_cache=False).logits[:, 0]
    return whole, alone


def _with_cache(step: Step, tokens: Tensor, mask: Tensor) -> tuple[Tensor, list[str]]:
    """The logits (NEW, vocabulary) of the step, and what its last run read on the host."""
    mask = mask[:, :PROMPT].bool()
    step.start(1, PROMPT, mask, [], 0)
    step.prefill(tokens[:, :PROMPT], mask)
    logits = []
    for new in tokens[0, PROMPT:]:
        step.tokens.copy_(new[None, None])
        with HostReads(tokens.device) as reads:
            logits.append(step.read())
    return torch.cat(logits), reads.found


def _comparable(logits: Tensor) -> Tensor:
    """In float32, without the huge negative values of tokens that a model never chooses."""
    logits = logits.float()
    return logits.masked_fill(logits.abs() > 1e4, 0)
