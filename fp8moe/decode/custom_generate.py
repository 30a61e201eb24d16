"""Translate arguments of transformers' ``model.generate(custom_generate=decoder)`` for GraphDecoder.generate."""

from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fp8moe.decode.request import Options
from fp8moe.decode.sampling import integers
from fp8moe.decode.step import positions_of
from fp8moe.hf import versions

_WITHOUT_EFFECT = ("use_cache", "logits_to_keep", "cache_position", "output_attentions", "output_hidden_states")
"""Model arguments that change no token. The last two are refused if the generation config asks for their outputs."""
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def translate(input_ids: Tensor, config: Any, model_arguments: dict[str, Any]) -> Options:
    """Return GraphDecoder.generate's options for transformers' input_ids (B, L), generation config and model arguments.

    Raises ValueError that names what GraphDecoder does not support.
    """
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample", "assisted_generation"):  # an assistant model changes no token
        raise ValueError(f"custom_generate: GraphDecoder serves greedy search and sampling, not {mode}")
    if (config.num_return_sequences or 1) > 1:
        raise ValueError(f"num_return_sequences: GraphDecoder returns one, got {config.num_return_sequences}")
    asked = [name for name in _OUTPUTS if getattr(config, name)]
    if asked:
        raise ValueError(f"{asked[0]}: GraphDecoder returns tokens (return_logprobs=True: and their logprobs)")
    mask = model_arguments.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    _check_model_arguments(mask, model_arguments)
    return Options(
        attention_mask=mask,
        max_new_tokens=config.max_length - input_ids.shape[1],
        eos_token_id=() if config.eos_token_id is None else None,
        do_sample=bool(config.do_sample),
        repetition_penalty=config.repetition_penalty,
    )


def check_processors(processors: Iterable[Any], config: Any) -> None:
    """Raise ValueError for a logits processor that the decoder lacks, or whose parameter differs from the config's."""
    from transformers import generation

    arguments = {
        generation.RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
        generation.TemperatureLogitsWarper: ("temperature", "temperature"),
        generation.TopKLogitsWarper: ("top_k", "top_k"),
        generation.TopPLogitsWarper: ("top_p", "top_p"),
        generation.MinPLogitsWarper: ("min_p", "min_p"),
    }
    for processor in processors:
        attribute, name = arguments.get(type(processor), (None, None))
        if attribute is None or getattr(processor, attribute) != getattr(config, name):
            raise ValueError(f"logits_processor: GraphDecoder does not apply {type(processor).__name__}")
        if isinstance(getattr(processor, "prompt_ignore_length", None), int):
            raise ValueError(f"logits_processor: GraphDecoder ignores no prompt, as this {type(processor).__name__}")


def check_criteria(criteria: Iterable[Any], config: Any) -> None:
    """Raise ValueError for a stopping criterion that the decoder lacks, or whose value is not the config's."""
    from transformers import generation

    ends = [] if config.eos_token_id is None else integers("eos_token_id", config.eos_token_id)
    for criterion in criteria:
        known = False
        if type(criterion) is generation.MaxLengthCriteria:
            known = criterion.max_length == config.max_length
        elif type(criterion) is generation.EosTokenCriteria:
            known = set(criterion.eos_token_id.flatten().tolist()) == set(ends)
        if not known:
            raise ValueError(f"stopping_criteria: GraphDecoder does not apply {type(criterion).__name__}")


def as_output(result: Tensor | tuple[Tensor, ...]) -> Any:
    """Wrap tokens, or the tokens in (tokens, logprobs, routing), in the class that return_dict_in_generate asks for."""
    from transformers.generation import GenerateDecoderOnlyOutput

    if isinstance(result, tuple):
        return GenerateDecoderOnlyOutput(sequences=result[0]), *result[1:]
    return GenerateDecoderOnlyOutput(sequences=result)


def check_streamer(caller: FrameType) -> None:
    """Raise ValueError if the calling ``model.generate`` has a streamer, which would never reach the decoder.

    transformers 5.24 does not pass a custom_generate those arguments that transformers' own ``_sample`` has
    (``_extract_generation_mode_kwargs``). caller: the frame of ``model.generate``.
    """
    if caller.f_locals.get("streamer") is not None:
        raise ValueError(
            "streamer: model.generate does not pass it on; give it to the decoder, as "
            "custom_generate=functools.partial(decoder, streamer=streamer)"
        )


def _check_model_arguments(mask: Tensor, arguments: dict[str, Any]) -> None:
    known = {"attention_mask", "position_ids", *versions.CACHE_NAMES, *_WITHOUT_EFFECT}
    others = sorted(name for name, value in arguments.items() if value is not None and name not in known)
    if arguments.get("mm_encoder_outputs") == {}:  # empty: a prompt without images
        others.remove("mm_encoder_outputs")
    if others:
        raise ValueError(f"{others[0]}: GraphDecoder does not pass it to the model")
    for name in versions.CACHE_NAMES:
        past = arguments.get(name)
        if past is not None and past.get_seq_length():
            raise ValueError(f"{name}: GraphDecoder begins with an empty cache; see GraphDecoder.prefix")
    positions = arguments.get("position_ids")
    if positions is not None and (positions != positions_of(mask)).logical_and(mask.bool()).any():
        raise ValueError("position_ids: GraphDecoder counts the tokens of a prompt from 0")
