"""Whether the decode step of a model gives what the model gives without a cache, and can be captured."""

from typing import Any

import torch
from torch import Tensor

from fp8moe.integrations.decode.cache import STATES
from fp8moe.integrations.decode.host_reads import HostReads
from fp8moe.integrations.decode.step import PLAIN, Step, Way, positions_of, vocabulary
from fp8moe.integrations.models import Optimized
from fp8moe.runtime.checks import FLOATING

PADDING = 2
PROMPT = 8
"""Tokens of the probe's prompt, with those of the padding on its left."""
CHUNK = 5
NEW = 3


def find_way(
    model: Any, device: torch.device, captured: bool, flash: str | None, fused: Optimized | None = None
) -> tuple[Way, str]:
    """How the model reads best of what gives the right logits, and why flash attention is not in it, or "".

    flash: the name of the attention to try. fused: modules to try in fp8moe's kernels.
    Raises the ValueError of `check_step` if not even the plain way is right: the model's own forwards and attention,
    rows of one length and prompts in one piece.
    """
    best = Way(flash, rows=True, chunks=True, fused=fused)
    if _refusal(model, device, captured, best) is None:
        return best, ""
    way, reason = PLAIN, ""
    check_step(model, device, captured, way)
    for name, value in best._asdict().items():
        better = way._replace(**{name: value})
        refusal = None if better == way else _refusal(model, device, captured, better)
        if refusal is None:
            way = better
        elif name == "attention":
            reason = str(refusal)
    return way, reason


def _refusal(model: Any, device: torch.device, captured: bool, way: Way) -> ValueError | None:
    """Why the way is not right, for two sequences of tokens: with one rounding alone may be the reason."""
    refusal = None
    for beginning in (0.25, 0.3):
        try:
            check_step(model, device, captured, way, beginning)
        except ValueError as error:
            refusal = error
        else:
            return None
    return refusal


@torch.no_grad()
def check_step(model: Any, device: torch.device, captured: bool, way: Way = PLAIN, beginning: float = 0.25) -> None:
    """Run a few tokens through a decode step of its own, and the same tokens through the model at once.

    Where rows may have lengths of their own, the step has two of them, taken over from other steps. Where prompts come
    in chunks, so does this one. beginning: of the tokens, as a share of the vocabulary.

    Raises ValueError if the step cannot run; if it is to be captured and reads values on the host; or if, after each
    new token, its logits are too far from those of the whole sequence: by a share of what remembering nothing but that
    token would make. Rounding, and experts chosen otherwise in a near tie, stay below that at least once.
    """
    name = type(model).__name__
    tokens, mask = _sequence(vocabulary(model), device, beginning)
    begins = (0, PROMPT // 2) if way.rows else (0,)
    steps = [Step(model, size, PROMPT + NEW, device, way, CHUNK) for size in (len(begins), *[1] * way.rows * 2)]
    try:
        stepwise, reads = _with_cache(steps, tokens, mask, begins)
        wholes = [_without_cache(model, tokens[:, begin:], mask[:, begin:]) for begin in begins]
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
    for logits, (whole, alone) in zip(stepwise, wholes, strict=True):
        if logits.dtype not in FLOATING:
            raise ValueError(f"model: the logits of {name} are {logits.dtype}, expected bfloat16, float16 or float32")
        if whole.isnan().any():
            raise ValueError(f"model: the logits of {name} are NaN")
        parts = [slice(1, None)] if way == PLAIN else [slice(1, None), slice(1)]  # how others read prompts is ours too
        if logits.shape != whole.shape or any(_far(logits[part], whole[part], alone[part]) for part in parts):
            raise ValueError(
                f"model: with a static cache the logits of {name} are not those that it gives without a cache: what it "
                "has read it keeps elsewhere, or not at all"
            )
    if way.chunks and _forgets_states(model, tokens, way):
        raise ValueError(f"model: {name} forgets its states of linear attention when it reads several tokens")


def _far(stepwise: Tensor, whole: Tensor, alone: Tensor) -> bool:
    """Whether the step is far from the whole sequence after every token."""
    # In 16 bits a deep model of random weights multiplies rounding errors until they are as large as the context.
    share = 0.25 if whole.dtype.itemsize > 2 else 0.8
    rounding = torch.finfo(whole.dtype).eps ** 0.5
    stepwise, whole, alone = map(_comparable, (stepwise, whole, alone))
    limit = torch.maximum(share * (whole - alone).norm(dim=-1), rounding * whole.norm(dim=-1))
    return bool(((stepwise - whole).norm(dim=-1) > limit).all())


def _sequence(size: int, device: torch.device, beginning: float) -> tuple[Tensor, Tensor]:
    """Tokens (1, PROMPT + NEW) from the middle of a vocabulary, as models keep special ones at its ends; their mask."""
    tokens = torch.linspace(int(size * beginning), size * 3 // 4, PROMPT + NEW, device=device).long()[None]
    mask = torch.ones_like(tokens)
    mask[:, :PADDING] = 0
    return tokens, mask


def _without_cache(model: Any, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The logits (1 + NEW, vocabulary) after the prompt and each new token: of all of it, and of that token alone."""
    positions = positions_of(mask)
    whole = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits[0, -1 - NEW :]
    last = tokens[:, -1 - NEW :].T, positions[:, -1 - NEW :].T
    alone = model(input_ids=last[0], position_ids=last[1], use_cache=False).logits[:, 0]
    return whole, alone


def _with_cache(steps: list[Step], tokens: Tensor, mask: Tensor, begins: tuple[int, ...]) -> tuple[Tensor, list[str]]:
    """The logits (rows, 1 + NEW, vocabulary) of the first step, and what its last run read on the host.

    Each row reads the prompt from another token on, in another step if there are several.
    """
    step, *others = steps
    device = tokens.device
    prompt, shown = tokens[:, :PROMPT], mask[:, :PROMPT].bool()
    logits = []
    for reader, begin in zip(others or [step], begins, strict=True):
        reader.start(1, PROMPT - begin, shown[:, begin:], [], 0)
        logits.append([reader.prefill(prompt[:, begin:], shown[:, begin:])])
    if others:
        step.start(len(begins), 1, None, [], 0)
    for row, (other, begin) in enumerate(zip(others, begins, strict=bool(others))):
        rows = torch.tensor([0, row], device=device)
        step.adopt(rows[1:], other, rows[:1], PROMPT - begin)
    for new in tokens[0, PROMPT:]:
        step.tokens.fill_(new)
        with HostReads(device) as reads:
            after = step.read()
        for row, values in zip(logits, after.split(1), strict=True):
            row.append(values)
    return torch.stack([torch.cat(row) for row in logits]), reads.found


def _forgets_states(model: Any, tokens: Tensor, way: Way) -> bool:
    """Whether a second chunk of a prompt ignores states that the first one left: then NaN in them does not reach it.

    In 16 bits, or where other layers remember, the logits alone would not tell.
    """
    for kind in STATES:
        step = Step(model, 1, PROMPT, tokens.device, way)
        step.start(1, PROMPT, None, [], 0)
        step.read_several(tokens[:, :CHUNK], 0, 0, False)
        states = [state for layer in step.cache.layers for state in getattr(layer, kind, {}).values()]
        states = [state for state in states if state is not None]
        for state in states:
            state.fill_(torch.nan)
        if states and not step.read_several(tokens[:, CHUNK:PROMPT], CHUNK, CHUNK, False).isnan().any():
            return True
    return False


def _comparable(logits: Tensor) -> Tensor:
    """In float32, without the huge negative values of tokens that a model never chooses."""
    logits = logits.float()
    return logits.masked_fill(logits.abs() > 1e4, 0)
