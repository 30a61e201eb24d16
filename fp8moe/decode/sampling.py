"""Sampling parameters: parse arguments into a `Sampling`, and write it to a row of the kernel's `SamplingState`."""

import ctypes
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops.sampling import IN_PROMPT, SamplingState
from fp8moe.runtime.checks import describe

NEAR_ZERO = 1e-5
"""Temperatures below this value mean greedy decoding."""
PENALTIES = ("repetition_penalty", "presence_penalty")  # sampling parameters that change greedy decoding, too
_SEEDS = range(-(2**63), 2**63)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one sequence, with the values that `SamplingState` stores. The default is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int = 0


GREEDY = Sampling()
NAMES = tuple(field.name for field in fields(Sampling) if field.name != "seed")


def random_seeds(batch: int) -> list[int]:
    """Draw seeds from PyTorch's default generator, so that torch.manual_seed makes them repeatable."""
    return torch.randint(_SEEDS.start, _SEEDS.stop - 1, (batch,)).tolist()


def parse_sampling(
    options: Mapping[str, Any],
    generation_config: Any,
    batch: int,
    draw: Callable[[int], list[int]] = random_seeds,
) -> list[Sampling]:
    """Return the parameters of each sequence, from the options do_sample, seed and NAMES.

    With do_sample, an option that is missing or None comes from the generation config, and is off if it is missing
    there too. Without do_sample, only the repetition penalty comes from the config, as in transformers. draw: called
    with the batch size to make seeds, if none are given.

    Raises TypeError or ValueError with the name of an argument (or generation_config.NAME) that is wrong, or that would
    have no effect because do_sample is False.
    """
    sampled = options.get("do_sample", False)
    if not isinstance(sampled, bool):
        raise TypeError(f"do_sample: expected True or False, got {describe(sampled)}")
    values = {name: _checked(name, options[name]) for name in NAMES if options.get(name) is not None}
    seeds = None if options.get("seed") is None else _seeds(options["seed"], batch)
    if not sampled:
        for name, value in values.items():
            if name not in PENALTIES and value not in _WITHOUT_EFFECT[name]:
                raise ValueError(f"{name}: {value:g} has no effect without sampling; pass do_sample=True")
    for name in NAMES if sampled else ("repetition_penalty",):
        default = getattr(generation_config, name, None)
        # In the generation config, a top_k of 0 means off.
        if name not in values and default is not None and (name, default) != ("top_k", 0):
            values[name] = _checked(f"generation_config.{name}", default)
    if not sampled:
        return [Sampling(**{name: value for name, value in values.items() if name in PENALTIES})] * batch
    values = {"temperature": 1.0} | values
    return [Sampling(**values, seed=seed) for seed in seeds or draw(batch)]


def _checked(name: str, value: Any) -> float | int:
    """Check a value and return it as SamplingState stores it; a temperature near 0 becomes 0."""
    argument = name.rpartition(".")[2]
    if argument == "top_k":
        value = integer(name, value)
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
        return min(value, torch.iinfo(torch.int32).max)
    rounded = ctypes.c_float(number(name, value)).value  # in float32, as in the kernel: 1e-50 becomes 0
    holds, expected = _RANGES[argument]
    if not holds(rounded):
        raise ValueError(f"{name}: expected {expected}, got {value}")
    return 0.0 if argument == "temperature" and rounded < NEAR_ZERO else rounded


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value < math.inf, "a finite number of at least 0"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "a finite number above 0"),
    "presence_penalty": (math.isfinite, "a finite number"),
}
_WITHOUT_EFFECT = {"temperature": (0.0, 1.0), "top_k": (1,), "top_p": (1.0,), "min_p": (0.0,)}
"""Values that ask for greedy decoding, or have no effect on it."""


def _seeds(seed: Any, batch: int) -> list[int]:
    """Return a seed for each sequence. seed: one integer for all, or one for each."""
    seeds = integers("seed", seed)
    if not _are_several(seed):
        seeds = seeds * batch
    if len(seeds) != batch:
        raise ValueError(f"seed: expected an integer, or one for each of {batch} sequences, got {len(seeds)}")
    wrong = next((value for value in seeds if value not in _SEEDS), None)
    if wrong is not None:
        raise ValueError(f"seed: expected an integer of 64 bits, got {wrong}")
    return seeds


def integer(name: str, value: Any) -> int:
    """Return an int from any integer: Python's, numpy's, a tensor of one element."""
    try:
        if not isinstance(value, bool) and getattr(value, "dtype", None) is not torch.bool:
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected an integer, got {describe(value)}")


def integers(name: str, values: Any) -> list[int]:
    """Return a list of ints from one integer of any kind, or from several."""
    return [integer(name, value) for value in (values if _are_several(values) else [values])]


def _are_several(values: Any) -> bool:
    return isinstance(values, Iterable) and getattr(values, "ndim", 1) > 0


def number(name: str, value: Any) -> float:
    """Return a float from any real number: Python's, numpy's, a tensor of one element."""
    try:
        if not isinstance(value, bool | str | bytes) and getattr(value, "dtype", None) is not torch.bool:
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a complex tensor
        pass
    raise TypeError(f"{name}: expected a number, got {describe(value)}")


def empty_state(size: int, vocabulary: int, device: torch.device) -> SamplingState:
    """Return the SamplingState of ``size`` greedy sequences without a prompt."""

    def filled(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((size,), value, dtype=dtype, device=device)

    return SamplingState(
        **{name: filled(getattr(GREEDY, name), torch.float32) for name in NAMES if name != "top_k"},
        top_k=filled(GREEDY.top_k, torch.int32),
        seed=filled(GREEDY.seed, torch.int64),
        step=filled(0, torch.int64),
        seen=torch.zeros(size, vocabulary, dtype=torch.uint8, device=device),
    )


def write(state: SamplingState, row: int, sampling: Sampling, prompt_ids: Tensor, mask: Tensor | None = None) -> None:
    """Start a sequence in a row: write its parameters, and mark the tokens of its prompt as seen.

    prompt_ids (L,). mask (L,): False where the prompt is padded. Does not wait for the device.
    """
    for name in (*NAMES, "seed"):
        getattr(state, name)[row].fill_(getattr(sampling, name))
    state.step[row].zero_()
    vocabulary = state.seen.shape[1]
    # `seen` gets one column more than the vocabulary. It stands for padding, and for tokens that the model accepts as
    # input but never gives logits for.
    ids = prompt_ids.clamp(max=vocabulary)
    if mask is not None:
        ids = ids.masked_fill(~mask, vocabulary)
    seen = torch.zeros(vocabulary + 1, dtype=torch.uint8, device=ids.device)
    state.seen[row].copy_(seen.index_fill_(0, ids, IN_PROMPT)[:vocabulary])
