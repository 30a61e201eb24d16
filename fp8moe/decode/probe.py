"""Check that a decoder can run a model, by the model's modules and by the logits of a decode step for a few tokens."""

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.decode.cache import STATES, CachePosition, in_fp8, static_cache
from fp8moe.decode.output import check_output_layer
from fp8moe.decode.step import PLAIN, Capabilities, Step, positions_of, vocabulary
from fp8moe.decode.transfers import HostReads
from fp8moe.decode.use import check_eval
from fp8moe.hf import versions
from fp8moe.hf.fused import Optimized
from fp8moe.hf.fused.flash_attention_3 import BrokenInstallation
from fp8moe.runtime.checks import FLOATING, describe

PADDING = 2
PROMPT = 8
"""The number of tokens of the probe's prompt, including the padding on its left."""
CHUNK = 5
NEW = 3


def device_of(model: Any) -> torch.device:
    """Return the one device that holds a transformers model. Raises TypeError or ValueError for any other model."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a causal language model of transformers, got {type(model).__name__}")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise ValueError(f"model: expected all of it on one device, got {sorted(map(str, devices))}")
    device = devices.pop()
    if device.type == "meta":
        raise ValueError("model: expected weights in memory, they are on the meta device")
    return device


_MIXING = ("DogeCDMoE",)  # routers that mix the tokens of a call; transformers keeps them for old checkpoints


def check_model(model: Any, captured: bool) -> None:
    """Raise TypeError or ValueError if a decoder cannot run the model's modules or, if ``captured``, capture them."""
    name = type(model).__name__
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise TypeError(f"model: expected a causal language model, got {name}")
    positions = "position_ids" in inspect.signature(model.forward).parameters
    if not positions or versions.cache_name(model.forward) is None:
        raise TypeError(f"model: expected a model whose forward takes a cache and position_ids, got {name}")
    _check_scales(model)
    check_eval(model)
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"model: its attention implementation is {attention!r}; GraphDecoder runs 'sdpa' and 'eager' "
            "(model.set_attn_implementation('sdpa'))"
        )
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", ())
        kinds = set(kinds.values() if isinstance(kinds, dict) else [kinds] if isinstance(kinds, str) else [])
        if kinds & {"dynamic", "longrope"}:
            raise ValueError(f"model: {path} changes its frequencies on the host as the sequence grows ({kinds})")
        if type(module).__name__ in _MIXING:
            raise ValueError(
                f"model: {path} ({type(module).__name__}) routes a token by others of the same call, of other "
                "sequences too, and calls of a decoder are others than the model's own"
            )
        if captured and _is_experts(module) and module.config._experts_implementation == "eager":
            raise ValueError(
                f"model: {path} runs the experts implementation 'eager', which reads the routing on the host and "
                "cannot be captured; call fp8moe.hf.register() and "
                "model.set_experts_implementation('fp8moe')"
            )


def _check_scales(model: Any) -> None:
    """Raise ValueError if transformers has loaded a model's quantized weights without applying their scales."""
    configs = (model.config, model.config.get_text_config(decoder=True))
    quantized = any(getattr(config, "quantization_config", None) is not None for config in configs)
    has_codes = any(parameter.dtype.itemsize == 1 for parameter in model.parameters())
    if quantized and not has_codes and getattr(model, "hf_quantizer", None) is None:
        raise ValueError(
            f"model: {type(model).__name__} has a quantization_config, but none of its weights is quantized, as where "
            "transformers does not know the method and leaves the scales out; load it with "
            "fp8moe.hf.load_model, or take quantization_config from model.config if its weights "
            "are right"
        )


def check_batch_invariance(model: Any, attention: str, states: bool) -> None:
    """Raise ValueError for a model that cannot be batch invariant.

    attention: "flash", or the reason why flash attention is not used. states: whether layers keep states of linear
        attention.
    """
    name = type(model).__name__
    if attention != "flash":
        raise ValueError(f"model: {name} cannot be batch invariant, as it is without flash attention ({attention})")
    if states:
        raise ValueError(f"model: {name} cannot be batch invariant, as it has layers of linear attention")


def check_cache_dtype(model: Any, dtype: torch.dtype | None) -> None:
    """Raise TypeError or ValueError for a cache dtype that there is not, or that the model's layers cannot have."""
    if not _is_fp8("cache_dtype", dtype):
        return
    name = type(model).__name__
    if model.dtype is torch.float32:
        raise ValueError(f"cache_dtype: {name} is in torch.float32, and FP8 needs a model in bfloat16 or float16")
    if not in_fp8(static_cache(model.config, 1, CachePosition(1, torch.device("cpu"), False), dtype)):
        raise ValueError(
            f"cache_dtype: {name} has no layer for FP8: those with a sliding window keep the model's dtype"
        )


def check_output_dtype(model: Any, dtype: torch.dtype | None) -> None:
    """Raise TypeError or ValueError for an output dtype that there is not, or that the model's layer cannot have."""
    if _is_fp8("output_dtype", dtype):
        check_output_layer(model)


def _is_fp8(name: str, dtype: torch.dtype | None) -> bool:
    """Return whether an argument is float8_e4m3fn and not None. Raises TypeError or ValueError for anything else."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: expected None or torch.float8_e4m3fn, got {describe(dtype)}")
    if dtype not in (None, torch.float8_e4m3fn):
        raise ValueError(f"{name}: expected None or torch.float8_e4m3fn, got {dtype}")
    return dtype is not None


def _is_experts(module: nn.Module) -> bool:
    """Return whether transformers' use_experts_implementation made the module's forward."""
    return hasattr(module, "has_gate") and hasattr(getattr(module, "config", None), "_experts_implementation")


def find_capabilities(
    model: Any,
    device: torch.device,
    captured: bool,
    flash: str | None,
    fused: Optimized | None = None,
    cache_dtype: torch.dtype | None = None,
) -> tuple[Capabilities, dict[str, str]]:
    """Find the capabilities with which the model gives the right logits; return them, and why others are refused.

    flash: the name of the attention implementation to try. fused: modules to try in fp8moe's kernels. cache_dtype: that
        of keys and values.
    Raises the ValueError of `check_step` if the model's logits are wrong even with every capability off, that is, with
    the model's own forwards and attention, rows of one length and prompts in one piece; ValueError, too, if keys and
    values cannot have the cache_dtype.
    """
    best = Capabilities(flash, ragged=True, chunked_prefill=True, fused=fused, cache_dtype=cache_dtype)
    if _refusal(model, device, captured, best) is None:
        return best, {}
    capabilities, refusals = PLAIN, {}
    check_step(model, device, captured, capabilities)
    for name, value in best._asdict().items():
        better = capabilities._replace(**{name: value})
        refusal = None if better == capabilities else _refusal(model, device, captured, better)
        if refusal is None:
            capabilities = better
        else:
            refusals[name] = str(refusal)
    if capabilities.cache_dtype is not cache_dtype:
        reason = refusals.get("attention", refusals["cache_dtype"])
        raise ValueError(f"cache_dtype: {type(model).__name__} cannot keep keys and values in FP8: {reason}")
    return capabilities, refusals


def _refusal(model: Any, device: torch.device, captured: bool, capabilities: Capabilities) -> ValueError | None:
    """Return an error if the model fails `check_step` for two token sequences: rounding alone may fail one of them."""
    refusal = None
    for beginning in (0.25, 0.3):
        try:
            check_step(model, device, captured, capabilities, beginning)
        except ValueError as error:
            refusal = error
        else:
            return None
    return refusal


@torch.no_grad()
def check_step(
    model: Any, device: torch.device, captured: bool, capabilities: Capabilities = PLAIN, beginning: float = 0.25
) -> None:
    """Run a few tokens through a new decode step, and check the logits against a call with all tokens at once.

    A ragged step has two rows, moved from other steps; a step with chunked prefill gets the prompt in chunks.
    beginning: the first token, as a fraction of the vocabulary.

    Raises ValueError if the step cannot run; if it is to be captured but reads values on the host; or if, after every
    new token, its logits are too far from the logits for the whole sequence. The limit is a fraction of the error
    that the logits have if the model sees only the new token. An error due to rounding, or to a choice of other experts
    in a near tie, is below the limit after at least one of the tokens.
    """
    name = type(model).__name__
    tokens, mask = _sequence(vocabulary(model), device, beginning)
    begins = (0, PROMPT // 2) if capabilities.ragged else (0,)
    sizes = (2, 1, 1) if capabilities.ragged else (1,)
    steps = [Step(model, size, PROMPT + NEW, device, capabilities, CHUNK) for size in sizes]
    try:
        stepwise, reads = _with_cache(steps, tokens, mask, begins, captured)
        wholes = [_without_cache(model, tokens[:, begin:], mask[:, begin:]) for begin in begins]
    except (torch.OutOfMemoryError, BrokenInstallation):
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"model: {name} cannot run a decode step ({type(error).__name__}: {reason})") from error
    if reads:
        raise ValueError(
            f"model: the decode step of {name} cannot be captured, it reads values on the host "
            f"({', '.join(sorted(set(reads)))})"
        )
    for logits, (whole, alone) in zip(stepwise, wholes, strict=True):
        if logits.dtype not in FLOATING:
            raise ValueError(f"model: the logits of {name} are {logits.dtype}, expected bfloat16, float16 or float32")
        if whole.isnan().any():
            raise ValueError(f"model: the logits of {name} are NaN")
        parts = [slice(1, None)]  # logits after each new token
        if capabilities != PLAIN:
            parts.append(slice(1))  # logits after the prompt, if its prefill runs code of fp8moe
        if logits.shape != whole.shape or any(_far(logits[part], whole[part], alone[part]) for part in parts):
            raise ValueError(
                f"model: with a static cache the logits of {name} are not those that it gives without a cache: what it "
                "has read it keeps elsewhere, or not at all"
            )
    if capabilities.chunked_prefill and _forgets_states(model, tokens, capabilities):
        raise ValueError(f"model: {name} forgets its states of linear attention when it reads several tokens")


def _far(stepwise: Tensor, whole: Tensor, alone: Tensor) -> bool:
    """Return whether, after every token, the step's logits are far from the logits for the whole sequence.

    alone: the logits after each token if the model sees only this token.
    """
    # In 16 bits, a deep model of random weights amplifies rounding errors until they equal the effect of the context.
    tolerance = 0.25 if whole.dtype.itemsize > 2 else 0.8
    rounding = torch.finfo(whole.dtype).eps ** 0.5
    stepwise, whole, alone = map(_comparable, (stepwise, whole, alone))
    limit = torch.maximum(tolerance * (whole - alone).norm(dim=-1), rounding * whole.norm(dim=-1))
    return bool(((stepwise - whole).norm(dim=-1) > limit).all())


def _sequence(size: int, device: torch.device, beginning: float) -> tuple[Tensor, Tensor]:
    """Return tokens (1, PROMPT + NEW) and a mask. Special tokens are avoided: they are at the vocabulary's ends."""
    tokens = torch.linspace(
        int(size * beginning), size * 3 // 4, PROMPT + NEW, dtype=torch.float64, device=device
    ).long()[None]
    mask = torch.ones_like(tokens)
    mask[:, :PADDING] = 0
    return tokens, mask


def _without_cache(model: Any, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits (1 + NEW, vocabulary) after the prompt and after each new token, computed in two ways.

    In the first result the model sees the whole sequence, in the second each token alone.
    """
    positions = positions_of(mask)
    whole = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits[0, -1 - NEW :]
    last = tokens[:, -1 - NEW :].T, positions[:, -1 - NEW :].T
    alone = model(input_ids=last[0], position_ids=last[1], use_cache=False).logits[:, 0]
    return whole, alone


def _with_cache(
    steps: list[Step], tokens: Tensor, mask: Tensor, begins: tuple[int, ...], captured: bool
) -> tuple[Tensor, list[str]]:
    """Return the logits (rows, 1 + NEW, vocabulary) of the first step and, if captured, what it reads on the host.

    Row i's prompt begins at token begins[i], and is prefilled in a step of its own if there are several steps.
    """
    step, *others = steps
    device = tokens.device
    prompt, shown = tokens[:, :PROMPT], mask[:, :PROMPT].bool()
    logits, reads = [], HostReads(device)
    for reader, begin in zip(others or [step], begins, strict=True):
        reader.start(1, PROMPT - begin, shown[:, begin:], [], 0)
        logits.append([reader.prefill(prompt[:, begin:], shown[:, begin:])])
    if others:
        step.start(len(begins), 1, None, [], 0)
    for row, (other, begin) in enumerate(zip(others, begins, strict=bool(others))):
        rows = torch.tensor([0, row], dtype=torch.int64, device=device)
        step.adopt(rows[1:], other, rows[:1], PROMPT - begin)
    for new in tokens[0, PROMPT:]:
        step.tokens.fill_(new)
        with reads if captured else nullcontext():
            after = step.read()
        for row, values in zip(logits, after.split(1), strict=True):
            row.append(values)
    return torch.stack([torch.cat(row) for row in logits]), reads.operations


def _forgets_states(model: Any, tokens: Tensor, capabilities: Capabilities) -> bool:
    """Return whether prefill of a prompt's second chunk ignores the states that the first chunk left in the cache.

    It does if NaN in these states has no effect on the logits. Comparing logits with those of a whole prompt would not
    show this in 16 bits, nor where other layers remember the first chunk.
    """
    for kind in STATES:
        step = Step(model, 1, PROMPT, tokens.device, capabilities)
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
    """Return logits in float32, with 0 for the huge negative values of tokens that a model never chooses."""
    logits = logits.float()
    return logits.masked_fill(logits.abs() > 1e4, 0)
