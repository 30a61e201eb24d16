"""New weights into the memory of a model that runs, as reinforcement learning needs after every step of its trainer."""

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fp8moe.hf import experts as cached_experts
from fp8moe.hf import linears
from fp8moe.hf.architecture import Location, Locator, convert, is_of_transformers
from fp8moe.hf.fused import latent_attention
from fp8moe.hf.load import predicted_layers
from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.master import invalidate_masters
from fp8moe.layers.parameters import is_sharded
from fp8moe.quant.formats import BLOCK, FP8Tensor, ceil_div
from fp8moe.quant.quantize import Requantizer, quantize_128x128, quantize_channels
from fp8moe.runtime.checks import FLOATING, describe
from fp8moe.weights.as_blocks import as_blocks, inexact_weights
from fp8moe.weights.closing import close, open_again
from fp8moe.weights.expert_names import DOWN, GATE_UP
from fp8moe.weights.formats import (
    CHANNEL_SCALE,
    DTYPE_NAMES,
    FP8,
    SCALE,
    TensorSpec,
    scale_name,
    weight_of,
)
from fp8moe.weights.gpt_oss import tensor_in_rows
from fp8moe.weights.load import ignored_names
from fp8moe.weights.match import (
    WHOLE,
    Destination,
    LoadPlan,
    Part,
    find_destination,
    mismatch,
    missing,
    state_of,
    ties,
)
from fp8moe.weights.read import Checkpoint, CheckpointError, open_checkpoint, unmappable
from fp8moe.weights.sharded import Ranks, held

_SHOWN = 8  # problems that an error names
_FUSED = {"w13": GATE_UP, "w2": DOWN}  # by vLLM's names
_OF_VLLM = re.compile(rf"(?<=\.)(w13|w2)_weight(?=$|{SCALE}$)")

Source = Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | nn.Module | str | os.PathLike


class RefitReport(NamedTuple):
    """What a refit has done, by names of the model's state dict, of tied tensors the first.

    updated: that have got values. left: that have not, or of fused experts the single ones that have not.
    """

    updated: tuple[str, ...]
    left: tuple[str, ...]


def refit(model: nn.Module, tensors: Source, *, strict: bool = True) -> RefitReport:
    """Put new weights into a model in its own memory, in FP8 where the model is.

    No pointer changes: CUDA graphs, a `GraphDecoder` and compiled kernels go on with the new weights. The bits are
    those of quantizing the whole checkpoint anew (``fp8moe quantize``) and loading it. What is made of the weights
    (scales in other formats, copies beside transformers' experts, fused projections) follows. A decoder's prefix raises
    ValueError from then on; its sequences that had begun raise RuntimeError.

    model: with `FP8Linear`, `GroupedExperts` or `FP8MQAIndexer` in it, or of transformers; the one that decoders were
        made for, or one around it.
    tensors: (name, tensor) in any order, as the model's checkpoint has them: linears and norms by name, experts one by
        one (gate_proj or w1...) or fused (gate_up_proj, vLLM's w13_weight), and what else transformers converts.
        GPT-OSS's experts are in columns, in FP8 only from a directory or module.
        bfloat16, float16 or float32; or float8_e4m3fn and, before it or after, its scale. A DTensor is gathered: all
        ranks give the same then. An iterable is read once, and the memory of a tensor may be used again when the next
        one is asked for. Or a mapping; a checkpoint's directory, of any format that `find_format` says loads; or a
        module that trains, with masters or unquantized, whose state dict is taken.
    strict: every tensor of the model must come. False leaves the others as they are, but not after a refit that failed.
    Returns what came and what did not. Within `refitting` this is one of several pieces, whose end judges what is
    missing.

    From the first tensor to the last the model's forward and those of its modules, `GraphDecoder` and transformers'
    generate raise RuntimeError; after an error they do so until a refit is complete. A CUDA graph of your own, and a
    module of torch.compile around the model that is given here, cannot be stopped: do not run them meanwhile.

    Memory takes no second copy of the weights: at most one tensor beside those of ``tensors`` (transformers'
    conversions keep the tensors that they put together until they have all). Scales are float32, or powers of two where
    the model has them in E8M0.

    On a model of sharded parameters (DTensors, of FSDP2 or `fp8moe.distributed.ExpertParallel`) all ranks of the
    default group call this with whole tensors; each takes what it holds, and an error of one is raised on all.

    Raises ValueError, before the tensor is written, for one that is unknown, came before, or has another shape or
    dtype; at the end, naming the tensors, for those that are missing, hold a NaN or an infinity, or differ though the
    model ties them. CheckpointError (a ValueError) for a directory that cannot be read, TypeError for other arguments,
    and RuntimeError while another refit of the model is under way.
    """
    _check_model(model)
    work = _under_way.get(model)
    if work is not None and work.thread == threading.get_ident():
        before = work.came
        work.take(_opened(tensors))
        return work.report(before)
    source = _opened(tensors)
    with _work(model, source.names, strict) as work:
        work.take(source)
    return work.report()


@contextmanager
def refitting(model: nn.Module, *, names: Iterable[str] | None = None) -> Iterator[None]:
    """Refit a model in pieces: within this context each `refit` by this thread adds to the same one.

    Its end raises ValueError unless every tensor of the model has come: the model runs again only after a complete one.
    names: of all tensors that will come. Those that are unknown, twice or missing raise ValueError here, with the model
        as it was; so does, in `refit`, a tensor that is not among them.
    """
    _check_model(model)
    if names is not None and (isinstance(names, str) or not isinstance(names, Iterable)):
        raise TypeError(f"names: expected an iterable of names, got {describe(names)}")
    with _work(model, names, strict=True):
        yield


_lock = threading.Lock()
_under_way: WeakKeyDictionary[nn.Module, "_Refit"] = WeakKeyDictionary()
_places: WeakKeyDictionary[nn.Module, dict[str, "_Place"]] = WeakKeyDictionary()
"""Where the tensors of a checkpoint go in each model, as found at earlier refits."""


class _Place(NamedTuple):
    """Where a tensor goes; `destination` is None if the model has no place for it."""

    location: Location
    destination: Destination | None


class _Again(NamedTuple):
    """A weight that an earlier refit has quantized: where it and its scale went, into what memory, and how."""

    weight: Destination
    scale: Destination
    memory: tuple[tuple, tuple]
    halves: bool
    quantize: Requantizer


_again: WeakKeyDictionary[nn.Module, dict[str, _Again]] = WeakKeyDictionary()
"""By the names of tensors. A model has tens of thousands of experts' matrices, so the host's time for each counts."""


class _Source(NamedTuple):
    """names: of all tensors, None where they are not known before. as_published: GPT-OSS's experts are in columns."""

    tensors: Iterable[tuple[str, Tensor]]
    names: Iterable[str] | None
    as_published: bool


@contextmanager
def _work(model: nn.Module, names: Iterable[str] | None, strict: bool) -> Iterator["_Refit"]:
    with _lock:
        if model in _under_way:
            raise RuntimeError("model: another refit of it is under way; end that one first")
        work = _under_way[model] = _Refit(model)
    try:
        with work.ranks.step():
            if names is not None:
                work.expect(names, strict)
        failed_before = close(model)
        with work.ranks.step():
            yield work
            work.finish(strict or failed_before)
        with torch.no_grad():
            open_again(model, _refresh)
    finally:
        del _under_way[model]


class _Refit:
    """One refit of a model. plan: what has come, and what of the model it is."""

    def __init__(self, model: nn.Module):
        self.thread = threading.get_ident()
        self.state = {key.replace("_orig_mod.", ""): value for key, value in state_of(model).items()}  # compiled
        self.ranks = Ranks(self.state.values())
        self.plan = LoadPlan([])
        self._model = model = getattr(model, "_orig_mod", model)
        names = ties(self.state)
        self._first = {key: keys[0] for keys in names for key in keys}
        self._tied = {key for keys in names if len(keys) > 1 for key in keys}
        self._expected: set[str] | None = None
        self._places = _places.setdefault(model, {})
        self._again = _again.setdefault(model, {})
        self._memory: dict[str, tuple] = {}  # address and layout of entries of the state dict
        self._parts: dict[str, dict[str, Tensor]] = {}  # of what transformers makes of several tensors, by its key
        self._codes: dict[str, Destination] = {}  # FP8 weights that came as such
        self._scales: set[str] = set()  # of which scales came as such
        self._left: list[str] | None = None  # what is missing at the end
        self._differ: dict[str, Tensor] = {}  # whether tensors differ from those that the model ties them to
        layers = predicted_layers(model.config) if is_of_transformers(model) else ()
        self._ignored = ignored_names(model, layers, ())

    @property
    def came(self) -> set[str]:
        """The entries of the state dict that something came for."""
        return {key for key, parts in self.plan.sources.items() if parts}

    def expect(self, names: Iterable[str], strict: bool) -> None:
        """Raise ValueError unless tensors of these names are for this model, and with `strict` all that it needs."""
        self._expected, problems = set(), []
        for name in names:
            self._expected.add(name)
            location, destination = self._place(name)
            try:
                if destination is None:
                    self._check_ignored(name)
                elif not (self._has_twin(destination) or location.converter and self._claimant(destination)):
                    self._claim(name, destination)
            except ValueError as error:
                problems.append(str(error))
        for name, destination in self.plan.destinations.items():
            scale = self._scale_of(destination)  # which is made of the weight, if none comes
            if scale is not None and self._claimant(scale) is None:
                self.plan.sources[scale.key][scale.part] = name
        problems += self._missing() if strict else ()
        _raise("cannot refit, the model is unchanged", problems)
        self.plan = LoadPlan([])

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self, source: _Source) -> None:
        for item in source.tensors:
            if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)):
                raise TypeError(f"tensors: expected pairs of a name and a tensor, got {describe(item)}")
            name, tensor = item
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: expected a tensor, got {describe(tensor)}")
            if self._expected is not None and name not in self._expected:
                raise ValueError(f"{name}: is not among the names that the refit began with")
            if self._write_again(name, tensor):
                continue
            as_given = None if is_sharded(tensor) else name
            tensor = (tensor.full_tensor() if is_sharded(tensor) else tensor).detach()
            location, destination = self._place(name)
            if destination is not None and self._is_of_gpt_oss(destination.key):
                as_given = None
                if source.as_published and tensor.dtype not in FLOATING:
                    raise ValueError(f"{name}: dtype {_dtype(tensor)}; refit GPT-OSS in FP8 from a directory or module")
                tensor = tensor_in_rows(name, tensor) if source.as_published else tensor
            if destination is None:
                self._check_ignored(name)
            elif location.converter is None or (tensor.dtype not in FLOATING and tensor.shape == destination.shape):
                self._write(name, destination, tensor, as_given)
            else:
                self._convert(name, location, tensor)

    def _write_again(self, name: str, tensor: Tensor) -> bool:
        """Quantize a tensor as an earlier refit did one of this name; return False where it cannot be so."""
        again = self._again.get(name)
        if again is None or type(tensor) not in (Tensor, nn.Parameter) or tensor.shape != again.weight.shape:
            return False
        tensor = _halves(tensor) if again.halves else tensor
        memory = self._memory_of(again.weight.key), self._memory_of(again.scale.key)
        if memory != again.memory or not again.quantize.takes(tensor):
            return False
        self._claim(name, again.scale)
        self._claim(name, again.weight)
        again.quantize(tensor)
        return True

    def _memory_of(self, key: str) -> tuple:
        found = self._memory.get(key)
        if found is None:
            value = self.state.get(key)
            usable = value is not None and key not in self._tied and not is_sharded(value)
            found = (value.data_ptr(), value.dtype, value.shape, value.stride()) if usable else ()
            self._memory[key] = found
        return found

    def _is_of_gpt_oss(self, key: str) -> bool:
        """Whether this is a tensor of experts that GPT-OSS's checkpoints have in another layout."""
        model_type = getattr(getattr(self._model, "config", None), "model_type", None)
        path = key.rpartition(".")[0]
        return model_type == "gpt_oss" and isinstance(self._model.get_submodule(path), GroupedExperts)

    @torch.no_grad()
    def finish(self, strict: bool) -> None:
        """Raise ValueError if something is missing, or has values that cannot be."""
        problems = [f"{next(iter(parts))}: came without others that make {key}" for key, parts in self._parts.items()]
        self._left = self._missing()
        if strict:
            problems += self._left
        else:
            scales = {name: self._scale_of(destination) for name, destination in self._codes.items()}
            problems += [
                f"{name}: came in FP8 without its scale"
                for name, scale in scales.items()
                if scale is not None and self._claimant(scale) is None
            ]
        increment_version([value for value in map(self.state.get, self.came) if not value.is_inference()])
        invalidate_masters()  # weights that FSDP2 gathers have versions that do not change
        problems += self._bad_values() if self._any_bad() else ()
        _raise("the refit failed, and the model does not run before a complete one", problems)

    def report(self, before: Iterable[str] = ()) -> RefitReport:
        """before: entries of the state dict that are not to be in `updated`."""
        came = self.came.difference(before)
        left = [line.partition(":")[0] for line in (self._missing() if self._left is None else self._left)]
        return RefitReport(tuple(key for key in self.state if key in came), tuple(left))

    def _missing(self) -> list[str]:
        """A line for each tensor that has not come; that of a weight is enough, it may come without a scale."""
        lines = {line.partition(":")[0]: line for line in missing(self.plan, self.state)}
        return [line for name, line in lines.items() if weight_of(name) not in lines]

    def _place(self, name: str) -> _Place:
        found = self._places.get(name)
        if found is not None and found.destination.key in self.state:
            return found
        found = self._find_place(name)
        if found.destination is None:
            found = self._find_place(_OF_VLLM.sub(lambda match: _FUSED[match[1]], name))
        if found.destination is not None:
            self._places[name] = found
        return found

    def _find_place(self, name: str) -> _Place:
        weight = name.removesuffix(CHANNEL_SCALE) if name.endswith(f".weight{CHANNEL_SCALE}") else weight_of(name)
        if weight is not None:
            scale = scale_name(self._locate(weight).name)
            destination = find_destination(scale, self.state)
            if destination is not None:
                return _Place(Location(scale, destination.key), destination)
        location = self._locate(name)
        return _Place(location, find_destination(location.name, self.state))

    def _locate(self, name: str) -> Location:
        return Location(name, name) if self._locator is None else self._locator.locate(name)

    @cached_property
    def _locator(self) -> Locator | None:
        return Locator(self._model) if is_of_transformers(self._model) else None

    def _check_ignored(self, name: str) -> None:
        if not self._ignored(name):
            raise ValueError(f"{name}: unknown, the model has no such tensor")

    def _claimant(self, destination: Destination) -> str | None:
        """The tensor that came for a place, or for a part of it."""
        parts = self.plan.sources[self._first[destination.key]]
        if destination.part == WHOLE:
            return next(iter(parts.values()), None)
        return parts.get(destination.part) or parts.get(WHOLE)

    def _has_twin(self, destination: Destination) -> bool:
        """Whether a tensor came that the model ties to this one."""
        first = self.plan.sources[self._first[destination.key]].get(WHOLE)
        return first is not None and self.plan.destinations[first].key != destination.key

    def _claim(self, name: str, destination: Destination) -> None:
        """Note that a tensor is there. Raises ValueError if it came before."""
        other = self._claimant(destination)
        if other is not None:
            raise ValueError(f"{name}: came before" + (f", as {other}" if other != name else ""))
        self.plan.sources[self._first[destination.key]][destination.part] = name
        self.plan.destinations[name] = destination

    def _scale_of(self, destination: Destination) -> Destination | None:
        """Where the scale of a weight goes; None for what is no weight in FP8 with a scale."""
        weight, key = self.state[destination.key], scale_name(destination.key)
        scale = self.state.get(key)
        if weight.dtype != torch.float8_e4m3fn or scale is None:
            return None
        if destination.part == WHOLE:
            return Destination(key, tuple(scale.shape))
        expert, row = destination.part
        size = scale.shape[1] * destination.shape[0] // weight.shape[1]
        return Destination(key, (size, scale.shape[2]), Part(expert, size if row else 0))

    def _write(self, name: str, destination: Destination, tensor: Tensor, as_given: str | None = None) -> None:
        """as_given: the name of a tensor that nothing was made of before, so that the next one is written likewise."""
        target = self.state[destination.key]
        scale = self._scale_of(destination) if tensor.dtype in FLOATING else None
        if scale is not None:
            problem = _unfit(destination, scale, tensor)
        elif target.dtype == torch.float8_e4m3fn != tensor.dtype:
            problem = f"dtype {_dtype(tensor)}, expected {FP8}, BF16, F16 or F32"
        else:
            problem = mismatch(TensorSpec(_dtype(tensor), tuple(tensor.shape)), destination, self.state)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
        if self._has_twin(destination) and name not in self._differ:
            local, part = destination.held_by(target)
            self._differ[name] = (local != tensor[part].to(local)).any()
            return
        if scale is not None:
            self._claim(name, scale)
            self._claim(name, destination)
            self._quantize(destination, scale, tensor, as_given)
            return
        self._claim(name, destination)
        if target.dtype == torch.float8_e4m3fn:
            self._codes[name] = destination
        elif self._is_scale(destination.key):
            self._scales.add(destination.key)
        local, part = destination.held_by(target)
        local.copy_(tensor.reshape(destination.shape)[part])  # a scale may have other sizes of one

    def _quantize(
        self, destination: Destination, scale_destination: Destination, tensor: Tensor, as_given: str | None
    ) -> None:
        data, part = destination.held_by(self.state[destination.key])
        scale, scale_part = scale_destination.held_by(self.state[scale_destination.key])
        if not data.numel() and not scale.numel():
            return
        if tensor.dim() == 3 and part[0] == scale_part[0]:  # only experts of this rank
            tensor, part, scale_part = tensor[part[0]], (slice(None), *part[1:]), (slice(None), *scale_part[1:])
        as_given = as_given if tensor.device == data.device else None
        tensor = tensor.to(data.device)
        if _has_channels(destination, scale_destination):
            for index in range(len(tensor)) if tensor.dim() == 3 else [...]:
                values = quantize_channels(tensor[index])
                data[index].copy_(values.data[part[-2:]])
                scale[index].copy_(values.scale[scale_part[-2:]])
            return
        parts = _halves if _matrices(destination) == 2 else lambda value: value
        all_here = data.shape == tensor.shape and scale.shape[-2:] == scale_destination.shape[-2:]
        if all_here and scale.dtype == torch.float32:
            out = FP8Tensor(parts(data), parts(scale))
            quantize_128x128(parts(tensor), out=out)
            memory = self._memory_of(destination.key), self._memory_of(scale_destination.key)
            if as_given is not None and data.is_cuda and all(memory):
                again = Requantizer(parts(tensor), out)
                self._again[as_given] = _Again(destination, scale_destination, memory, parts is _halves, again)
            return
        values = quantize_128x128(parts(tensor), scale_format="float32" if scale.dtype == torch.float32 else "ue8m0")
        data.copy_(values.data.view(tensor.shape)[part])
        scale.copy_(values.scale.view(*tensor.shape[:-2], *scale_destination.shape[-2:])[scale_part])

    def _convert(self, name: str, location: Location, tensor: Tensor) -> None:
        """Write what transformers makes of this tensor and others, if they are all there, and keep it otherwise."""
        if tensor.dtype not in FLOATING:
            steps = ", ".join(type(step).__name__ for step in location.converter.operations)
            raise ValueError(
                f"{name}: dtype {_dtype(tensor)}, but transformers makes {location.key} of it by {steps}, which takes "
                "BF16, F16 or F32"
            )
        parts = self._parts.setdefault(location.key, {})
        if name in parts or self.plan.sources[self._first[location.key]]:
            raise ValueError(f"{name}: came before")
        parts[name] = tensor
        locations = {other: self._place(other)[0] for other in parts}
        try:
            tried = convert(self._model, locations, {other: value.to("meta") for other, value in parts.items()})
            complete = all(value.shape == self.state[key].shape for key, value in tried.items())
        except Exception:  # transformers' operations raise anything, given too few tensors
            complete = False
        if not complete:
            parts[name] = tensor.clone()
            return
        for key, value in convert(self._model, locations, self._parts.pop(location.key)).items():
            self._write(key, Destination(key, tuple(value.shape)), value)

    def _any_bad(self) -> bool:
        """Whether some of the values that came cannot be. Waits for the device once."""
        entries = {key: held(self.state[key])[0] for key in self.came}
        entries = {key: values for key, values in entries.items() if values.numel() and values.is_floating_point()}
        judged = {destination.key for destination in self._codes.values()} | self._scales
        flags = [*self._differ.values(), *(self._flag(key, entries[key]) for key in judged & {*entries})]
        wide = [values.detach() for values in entries.values() if values.element_size() > 1]  # of Parameters one by one
        if wide:
            flags.append(~nn.utils.get_total_norm(wide, torch.inf).isfinite())
        return bool(flags) and bool(torch.stack([flag.to(flags[0].device) for flag in flags]).any())

    def _bad_values(self) -> list[str]:
        """What is wrong with the values of tensors, by the names of these."""
        codes = {destination.key for destination in self._codes.values()}
        entries = {key: held(self.state[key])[0] for key in self.came}
        flags = {
            key: self._flag(key, values)
            for key, values in entries.items()
            if values.numel() and values.is_floating_point() and (values.dtype != torch.float8_e4m3fn or key in codes)
        } | self._differ
        problems = []
        for key in [key for key, flag in flags.items() if flag]:
            if key in self._differ:
                problems.append(f"{key}: differs from another tensor that came, but the model ties the two")
                continue
            for name in dict.fromkeys(self.plan.sources[key].values()):
                destination = self.plan.destinations[name]
                if destination.key != key:  # of a scale that was made of the weight
                    destination = self._scale_of(destination) or Destination(key, tuple(self.state[key].shape))
                values, _ = destination.held_by(self.state[key])
                if values.numel() and self._flag(key, values):
                    problems.append(f"{name}: holds a NaN or an infinity, or scales that are not positive")
        return problems

    def _flag(self, key: str, values: Tensor) -> Tensor:
        """Whether values of an entry of the state dict are not finite, or scales not positive."""
        if values.dtype == torch.float8_e8m0fnu:
            return values.view(torch.uint8).amax() == 255
        if values.dtype == torch.float8_e4m3fn:
            return (values.view(torch.uint8) & 127).amax() == 127
        least, most = values.aminmax()
        return ~((least > (0 if self._is_scale(key) else -torch.inf)) & (most < torch.inf))

    def _is_scale(self, key: str) -> bool:
        weight = self.state.get(key.removesuffix(SCALE)) if key.endswith(SCALE) else None
        return weight is not None and weight.dtype == torch.float8_e4m3fn


def _refresh(module: nn.Module) -> None:
    """Bring up to date what is made of a module's weights."""
    for kind in (linears, latent_attention, cached_experts):
        kind.refresh(module)


def _matrices(destination: Destination) -> int:
    """How many matrices with blocks of their own lie one below the other: gate and up of fused experts."""
    return 2 if len(destination.shape) == 3 and destination.key.endswith(f".{GATE_UP}") else 1


def _halves(value: Tensor) -> Tensor:
    """(E, 2N, K), gate above up, as (E, 2, N, K)."""
    return value.unflatten(1, (2, -1))


def _has_channels(weight: Destination, scale: Destination) -> bool:
    return weight.shape[-2] > 2 and scale.shape[-2:] == (weight.shape[-2], 1)


def _unfit(weight: Destination, scale: Destination, tensor: Tensor) -> str | None:
    """Why a tensor cannot be quantized for its place, or None."""
    if tensor.shape != weight.shape:
        return f"shape {tuple(tensor.shape)}, expected {weight.shape}"
    matrices = _matrices(weight)
    blocks = matrices * ceil_div(weight.shape[-2] // matrices, BLOCK), ceil_div(weight.shape[-1], BLOCK)
    if scale.shape[-2:] != blocks and not _has_channels(weight, scale):
        return f"the model's scale has shape {scale.shape}, expected one for each {BLOCK}x{BLOCK} or each channel"
    return None


def _dtype(tensor: Tensor) -> str:
    return DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))


def _raise(what: str, problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(f"{what}: {'; '.join(problems[:_SHOWN])}{more}")


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {describe(model)}")


def _opened(source: Source) -> _Source:
    if isinstance(source, nn.Module):
        state = state_of(source)
        return _Source(state.items(), state, not any(isinstance(part, GroupedExperts) for part in source.modules()))
    if isinstance(source, str | os.PathLike):
        return _of_directory(source)
    if isinstance(source, Mapping):
        return _Source(source.items(), source, True)
    if isinstance(source, Tensor) or not isinstance(source, Iterable):
        raise TypeError(
            "tensors: expected pairs of a name and a tensor, a mapping, a module or a checkpoint's directory, got "
            f"{describe(source)}"
        )
    return _Source(source, None, True)


def _of_directory(directory: str | os.PathLike) -> _Source:
    """The tensors of a checkpoint in blocks. Raises CheckpointError unless all of them can be read."""
    checkpoint, found = as_blocks(open_checkpoint(directory))
    problems = checkpoint.problems + unmappable(checkpoint)
    problems += inexact_weights(found) if not problems else ()
    if problems:
        raise CheckpointError(f"cannot refit from {directory}, the model is unchanged", problems)
    names = [name for tensors in checkpoint.by_file.values() for name in tensors if name not in found.unused]
    return _Source(_read(checkpoint, names), names, as_published=not found.weights)


def _read(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    with checkpoint.reader() as reader:
        for name in names:
            yield name, reader.read(name)
