"""What GraphDecoder checks of a model and of a call before anything runs."""

import inspect
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.integrations import cache_argument
from fp8moe.runtime import config
from fp8moe.runtime.checks import check_tensor, describe


def device_of(model: Any) -> torch.device:
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


_MIXING = ("DogeCDMoE",)  # routers of transformers that mix the tokens of a call, which it keeps for old checkpoints


def check_model(model: Any, captured: bool) -> None:
    name = type(model).__name__
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise TypeError(f"model: expected a causal language model, got {name}")
    positions = "position_ids" in inspect.signature(model.forward).parameters
    if not positions or cache_argument.name_of(model.forward) is None:
        raise TypeError(f"model: expected a model whose forward takes a cache and position_ids, got {name}")
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
                "cannot be captured; call fp8moe.integrations.transformers.register() and "
                "model.set_experts_implementation('fp8moe')"
            )


def check_eval(model: nn.Module) -> None:
    training = next((path for path, module in model.named_modules() if module.training), None)
    if training is not None:
        raise ValueError(f"model: call model.eval() first, {training or 'it'} is in training mode")


def check_batch_invariance(model: Any, attention: str, states: bool) -> None:
    """attention: "flash", or another and why. states: some layers keep states of linear attention."""
    name = type(model).__name__
    if attention != "flash":
        raise ValueError(f"model: {name} cannot be batch invariant, as it is without flash attention ({attention})")
    if states:
        raise ValueError(f"model: {name} cannot be batch invariant, as it has layers of linear attention")


def check_mode(batch_invariant: bool) -> None:
    """batch_invariant: whether the decoder was made so."""
    if config.settings.batch_invariant != batch_invariant:
        made = "inside" if batch_invariant else "outside"
        raise RuntimeError(f"the decoder was made {made} of fp8moe.batch_invariant(): call it there too")


def integer(name: str, value: Any) -> int:
    """An int from any integer: Python's, numpy's, a tensor of one element."""
    try:
        if not isinstance(value, bool) and getattr(value, "dtype", None) is not torch.bool:
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected an integer, got {describe(value)}")


def integers(name: str, values: Any) -> list[int]:
    """From one integer of any kind, or several."""
    if isinstance(values, Iterable) and getattr(values, "ndim", 1):
        return [integer(name, value) for value in values]
    return [integer(name, values)]


def number(name: str, value: Any) -> float:
    """A float from any real number: Python's, numpy's, a tensor of one element."""
    try:
        if not isinstance(value, bool | str | bytes) and getattr(value, "dtype", None) is not torch.bool:
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a complex tensor
        pass
    raise TypeError(f"{name}: expected a number, got {describe(value)}")


def check_prompt(ids: Tensor, mask: Tensor | None) -> None:
    check_tensor("input_ids", ids)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise TypeError(f"input_ids: expected integers, got {ids.dtype}")
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"input_ids: expected shape (batch, length), neither of them 0, got {tuple(ids.shape)}")
    if mask is not None:
        check_tensor("attention_mask", mask)
        if mask.shape != ids.shape:
            raise ValueError(f"attention_mask: expected shape {tuple(ids.shape)}, got {tuple(mask.shape)}")


def check_tokens(ids: Tensor, model: Any) -> None:
    """That the model has all of these tokens; of tokens on a GPU nothing is read."""
    size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if size is None or ids.device.type != "cpu":
        return
    ids = ids.long()
    wrong = ids[(ids < 0) | (ids >= size)]
    if len(wrong):
        raise ValueError(f"input_ids: expected tokens between 0 and {size - 1}, got {wrong[0]}")


def _is_experts(module: nn.Module) -> bool:
    """Whether transformers' use_experts_implementation made its forward."""
    return hasattr(module, "has_gate") and hasattr(getattr(module, "config", None), "_experts_implementation")
