"""Write new weights into a running model's memory, as reinforcement learning does after every step of its trainer."""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.master import invalidate_masters
from fp8moe.layers.parameters import is_sharded
from fp8moe.layers.wrapped import chain, check_merged, check_unmerged, unwrapped
from fp8moe.quant.arranged import NAN_BYTE, has_nan_scale
from fp8moe.quant.formats import PACKED_FORMATS, FP8Tensor, is_packed, packed_format
from fp8moe.quant.packed import quantize_arranged
from fp8moe.quant.quantize import Requantizer, quantize_128x128, quantize_channels
from fp8moe.runtime.checks import FLOATING, describe
from fp8moe.weights.closing import close, open_again
from fp8moe.weights.formats import scale_grid
from fp8moe.weights.names import CHANNEL_SCALE, GATE_UP, SCALE_ROLE, WEIGHT, Location, Name, from_vllm, parse
from fp8moe.weights.place import (
    WHOLE,
    Part,
    Place,
    Ranks,
    Target,
    check_writable,
    copy_weight,
    held,
    ignored_names,
    provider,
    scale_problems,
    state_of,
)
from fp8moe.weights.source import DTYPE_NAMES, FP8, CheckpointError, Reader, TensorSpec, unmappable
from fp8moe.weights.stored import INTERLEAVED, StoredWeight, is_interleaved, open_weights
from fp8moe.weights.views import in_blocks, inexact_problems, tensor_in_rows

_SHOWN = 8  # the most problems that an error lists
_ONLY_FLOATS = "the model has these experts in four bits; expected weights in BF16, F16 or F32, or a directory"
Source = Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | nn.Module | str | os.PathLike


class RefitReport(NamedTuple):
    """What a refit did. Tensors have the names of the model's state dict; tied tensors are listed by their first name.

    updated: tensors that got new values. left: tensors that got no values; if a fused tensor got values for only some
    experts, the names of the other experts' tensors.
    """

    updated: tuple[str, ...]
    left: tuple[str, ...]


@torch.inference_mode(False)
def refit(model: nn.Module, tensors: Source, *, strict: bool = True) -> RefitReport:
    """Write new weights into a model's own memory, quantized to FP8 or four bits where the model is.

    No pointer changes: CUDA graphs, a `GraphDecoder` and compiled kernels continue with the new weights. The result is
    bit for bit that of quantizing the whole checkpoint anew (``fp8moe quantize``) and loading it. Whatever derives from
    the weights (scales in other formats, copies beside transformers' experts, fused projections) is updated. From then
    on, a prefix made by a decoder raises ValueError, and sequences that a decoder had begun raise RuntimeError.

    model: a transformers model, or one with `FP8Linear`, `GroupedExperts` or `FP8MQAIndexer` in it. Pass the model that
        decoders were made for, or a wrapper around that model. If torch.compile, DistributedDataParallel or peft wraps
        it, the names of the model inside count; adapters stay as they are, and must not be merged.
    tensors: pairs (name, tensor) in any order, as in the model's checkpoint: linears and norms by name, experts one by
        one (gate_proj or w1...) or fused (gate_up_proj, vLLM's w13_weight), and whatever else transformers converts.
        In models that interleave gate and up, experts are (E, columns, rows); FP8 experts must come from a directory or
        module. Dtypes are bfloat16, float16 or float32; or, but for experts that the model has in four bits,
        float8_e4m3fn, with the scale before or after the weight; four bits must come from a directory. A DTensor is
        gathered, so all ranks must pass the same tensors. An iterable is read once, and the memory of a tensor may be
        reused when the next tensor is requested. Instead of pairs, pass a mapping; or a checkpoint's directory, in any
        format that `find_format` says loads; or a module in training, with master weights or unquantized. The names in
        a module's state dict are read without the names of wrappers. Adapters of peft in the module must be merged:
        call merge_adapter before the refit and unmerge_adapter after it.
    strict: require every tensor of the model; after a failed refit, every tensor is required in any case. With False,
        tensors that are not given stay as they are.
    Returns which tensors got values and which did not. Within `refitting`, this call is one of several pieces; missing
    tensors are then an error only at the end of that context.

    From the first tensor to the last, running the model or a module in it, `GraphDecoder` or transformers' generate
    raises RuntimeError. After an error, running them raises RuntimeError until a refit is complete. fp8moe cannot stop
    a CUDA graph of your own, or a torch.compile module around the model that is given here: do not run them meanwhile.

    Memory holds no second copy of the weights: at most one tensor beside those of ``tensors`` (transformers'
    conversions keep the tensors to combine until they have all of them). Scales are float32, or powers of two where the
    model has E8M0 scales.

    If the model has sharded parameters (DTensors, of FSDP2 or `fp8moe.distributed.ExpertParallel`), all ranks of the
    default group call this with whole tensors; each rank takes the parts that it holds. If one rank fails, all ranks
    raise the error of that rank.

    Raises ValueError for a model made under torch.inference_mode; for a tensor that is unknown, is repeated, or has
    another shape or dtype, before that tensor is written; and at the end, by name, for tensors that are missing, hold a
    NaN or an infinity, or differ although the model ties them. Raises CheckpointError (a ValueError) for a directory
    that cannot be read, TypeError for other arguments, and RuntimeError while another refit of the model is under way.
    """
    _check_module(model)
    work = _under_way.get(chain(model)[-1])  # not by `_inside`, which visits every module and is slow for many pieces
    if work is not None and work.thread == threading.get_ident():
        before = work.came
        work.take(_opened(tensors, work.model))
        return work.report(before)
    inner = _inside(model)
    source = _opened(tensors, inner)
    with _work(model, inner, source.names, strict) as work:
        work.take(source)
    return work.report()


@contextmanager
def refitting(model: nn.Module, *, names: Iterable[str] | None = None) -> Iterator[None]:
    """Refit a model in pieces: within this context, every call of `refit` in this thread adds to one refit.

    The end of the context raises ValueError unless every tensor of the model was given; then the model stays closed
    until a complete refit.
    names: the names of all tensors that will come. Unknown, repeated or missing names raise ValueError when the context
        begins, with the model unchanged; a tensor that is not among the names raises ValueError in `refit`.
    """
    _check_module(model)
    inner = _inside(model)
    if names is not None and (isinstance(names, str) or not isinstance(names, Iterable)):
        raise TypeError(f"names: expected an iterable of names, got {describe(names)}")
    with _work(model, inner, names, strict=True):
        yield


_lock = threading.Lock()
_under_way: WeakKeyDictionary[nn.Module, "_Refit"] = WeakKeyDictionary()
_places: WeakKeyDictionary[nn.Module, dict[str, tuple[Location, Place | None]]] = WeakKeyDictionary()
"""For each model, by tensor name: where transformers puts the tensor, and its place. Cached from earlier refits."""


class _Again(NamedTuple):
    """How an earlier refit quantized a weight: the places and memory of weight and scale, and the kernel call.

    halves: whether gate and up are quantized as two matrices.
    """

    weight: Place
    scale: Place
    memory: tuple[tuple, tuple]
    halves: bool
    quantize: Requantizer


_again: WeakKeyDictionary[nn.Module, dict[str, _Again]] = WeakKeyDictionary()
"""For each model, by tensor name: how a refit quantized the tensor, so that the next refit takes less host time."""


class _Source(NamedTuple):
    """The new weights of a refit. tensors: pairs (name, Tensor), or (name, StoredWeight), which ``reader`` reads.

    names: the tensors' names; None if not known in advance. in_turns: whether experts may have gate and up interleaved.
    """

    tensors: Iterable[tuple[str, Tensor | StoredWeight]]
    names: Iterable[str] | None
    in_turns: bool
    reader: Reader | None = None


@contextmanager
def _work(model: nn.Module, inner: nn.Module, names: Iterable[str] | None, strict: bool) -> Iterator["_Refit"]:
    """Run one refit: close the model, yield the refit, and open the model after it is complete.

    inner: the model without wrappers.
    """
    with _lock:
        if inner in _under_way:
            raise RuntimeError("model: another refit of it is under way; end that one first")
        work = _under_way[inner] = _Refit(inner)
    try:
        with work.ranks.step():
            if names is not None:
                work.expect(names, strict)
        failed_before = close(model)
        with work.ranks.step():
            yield work
            work.finish(strict or failed_before)
        with torch.no_grad():
            open_again(model, provider().refresh)
    finally:
        del _under_way[inner]


class _Refit:
    """One refit of a model. sources: names of the tensors received, by state-dict key and part."""

    def __init__(self, model: nn.Module):
        self.thread = threading.get_ident()
        self.target = Target(state_of(model))
        self.state = self.target.state
        check_writable(self.state)
        self.ranks = Ranks(self.state.values())
        self.sources: dict[str, dict[Part, str]] = defaultdict(dict)
        self._came: dict[str, Place] = {}  # places of tensors, by tensor name
        self.model = model
        self._first = {key: keys[0] for keys in self.target.ties for key in keys}
        self._tied = {key for keys in self.target.ties if len(keys) > 1 for key in keys}
        self._expected: set[str] | None = None
        self._places = _places.setdefault(model, {})
        self._again = _again.setdefault(model, {})
        self._memory: dict[str, tuple] = {}  # address and layout of tensors, by state-dict key
        self._parts: dict[str, dict[str, Tensor]] = {}  # tensors that transformers combines, by the result's key
        self._codes: dict[str, Place] = {}  # places of weights received in FP8, by tensor name
        self._scales: set[str] = set()  # state-dict keys of scales received for FP8 weights, or made for four bits
        scales = {key for key in self.target.scales if key.endswith(CHANNEL_SCALE)}
        self._packed = {key.removesuffix(CHANNEL_SCALE) for key in scales}  # state-dict keys of weights in four bits
        self._left: list[str] | None = None  # problem lines for the tensors that are missing at the end
        self._differ: dict[str, Tensor] = {}  # by tensor name: whether it differs from the tensor it is tied to
        self._ignored = ignored_names(model, provider().ignored_layers(model), ())

    @property
    def came(self) -> set[str]:
        """Return the state-dict keys for which at least one tensor was received."""
        return {key for key, parts in self.sources.items() if parts}

    def expect(self, names: Iterable[str], strict: bool) -> None:
        """Raise ValueError unless the model has a place for each name and, if ``strict``, each place has a name."""
        self._expected, problems = set(), []
        for name in names:
            self._expected.add(name)
            location, place = self._place(name)
            try:
                if place is None:
                    self._check_ignored(name)
                elif not (self._has_twin(place) or location.converter and self._claimant(place)):
                    self._claim(name, place)
            except ValueError as error:
                problems.append(str(error))
        for name, place in self._came.items():
            scale = self.target.scale_of(place)  # computed from the weight, unless ``names`` has the scale
            if scale is not None and self._claimant(scale) is None:
                self.sources[scale.key][scale.part] = name
        problems += self._missing() if strict else ()
        _raise("cannot refit, the model is unchanged", problems)
        self.sources, self._came = defaultdict(dict), {}

    @torch.no_grad()
    def take(self, source: _Source) -> None:
        for item in source.tensors:
            if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)):
                raise TypeError(f"tensors: expected pairs of a name and a tensor, got {describe(item)}")
            name, tensor = item
            weight = tensor if isinstance(tensor, StoredWeight) else None
            if weight is None and not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: expected a tensor, got {describe(tensor)}")
            if weight is None and tensor.is_meta:
                raise ValueError(f"{name}: has no data, on the meta device")
            if self._expected is not None and name not in self._expected:
                raise ValueError(f"{name}: is not among the names that the refit began with")
            if weight is None and self._write_again(name, tensor):
                continue
            location, place = self._place(name)
            if place is None:
                self._check_ignored(name)
                continue
            if weight is not None:
                if weight.has_scale:
                    self._copy(source.reader, weight, place)
                    continue
                tensor = weight.whole(source.reader)
            as_given = None if is_sharded(tensor) or weight is not None else name
            tensor = (tensor.full_tensor() if is_sharded(tensor) else tensor).detach()
            if self._is_in_turns(place.key):
                as_given = None
                if source.in_turns and tensor.dtype not in FLOATING:
                    why = f"refit {INTERLEAVED} in FP8 from a directory or module"
                    raise ValueError(f"{name}: dtype {_dtype(tensor)}; {why}")
                if source.in_turns:
                    tensor = tensor_in_rows(location.name.role, location.name.projection, tensor)
            if location.converter is None or (tensor.dtype not in FLOATING and tensor.shape == place.shape):
                self._write(name, place, tensor, as_given)
            else:
                self._convert(name, location, tensor)
        if source.reader is not None:
            source.reader.close()

    def _copy(self, reader: Reader, weight: StoredWeight, place: Place) -> None:
        """Copy a weight that the checkpoint stores quantized, and its scale."""
        scale, text = self.target.scale_of(place), weight.name.text
        specs = [(text, place, TensorSpec(weight.dtype, weight.shape))]
        if scale is not None:
            specs.append((weight.scale_name, scale, TensorSpec(weight.scale_dtype, weight.grid)))
        for name, part, spec in specs:
            problem = self.target.mismatch(spec, part)
            if problem is not None:
                raise ValueError(f"{name}: {problem}")
            self._claim(name, part)
        self._codes[text] = place
        self._scales.add(scale.key)
        copy_weight(reader, weight, place, self.state[place.key], scale, self.state[scale.key])

    def _write_again(self, name: str, tensor: Tensor) -> bool:
        """Repeat an earlier refit's quantization of the tensor of this name; return False if that is not possible."""
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

    @cached_property
    def _has_experts_in_turns(self) -> bool:
        config = getattr(self.model, "config", None)
        return is_interleaved({"model_type": getattr(config, "model_type", None)})

    def _is_in_turns(self, key: str) -> bool:
        """Return whether ``key`` is a tensor of `GroupedExperts` whose checkpoints have gate and up interleaved."""
        if not self._has_experts_in_turns:
            return False
        return isinstance(self.model.get_submodule(key.rpartition(".")[0]), GroupedExperts)

    @torch.no_grad()
    def finish(self, strict: bool) -> None:
        """Raise ValueError if received values are invalid, or if ``strict`` and a tensor is missing."""
        problems = [f"{next(iter(parts))}: came without others that make {key}" for key, parts in self._parts.items()]
        self._left = self._missing()
        if strict:
            problems += self._left
        else:
            scales = {name: self.target.scale_of(place) for name, place in self._codes.items()}
            problems += [
                f"{name}: came in FP8 without its scale"
                for name, scale in scales.items()
                if scale is not None and self._claimant(scale) is None
            ]
        increment_version([value for value in map(self.state.get, self.came) if not value.is_inference()])
        invalidate_masters()  # writing shards does not change the version counter of FSDP2's gathered weights
        problems += self._bad_values() if self._any_bad() else ()
        _raise("the refit failed, and the model does not run before a complete one", problems)

    def report(self, before: Iterable[str] = ()) -> RefitReport:
        """Report what was received. before: state-dict keys that earlier pieces updated; ``updated`` omits these."""
        came = self.came.difference(before)
        left = [line.partition(":")[0] for line in (self._missing() if self._left is None else self._left)]
        return RefitReport(tuple(key for key in self.state if key in came), tuple(left))

    def _missing(self) -> list[str]:
        """Return a line for each tensor not received, but none for the scale of a weight that was not received."""
        lines = {line.partition(":")[0]: line for line in self.target.missing(self.sources)}
        scales = self.target.scales
        weights = {name: parse(name.removesuffix(CHANNEL_SCALE) if name in scales else name).weight for name in lines}
        return [line for name, line in lines.items() if weights[name] == name or weights[name] not in lines]

    def _place(self, text: str) -> tuple[Location, Place | None]:
        """Return the Location and the Place of the tensor ``text``; the Place is None if the model lacks the tensor."""
        found = self._places.get(text)
        if found is not None and found[1].key in self.state:
            return found
        for other in dict.fromkeys((text, from_vllm(text))):
            name = parse(other)
            found = None
            if name.role == SCALE_ROLE:
                weight = self._locate(name._replace(text=name.weight, role=WEIGHT)).name
                scale = weight._replace(text=weight.scale, role=SCALE_ROLE)
                place = self.target.find(weight)
                packed = place is not None and place.key in self._packed
                place = self.target.scale_of(place) if packed else self.target.find(scale)
                found = Location(scale, scale.text), place
            if found is None or found[1] is None:  # not a scale, or the model's weight is not FP8
                location = self._locate(name)
                found = location, self.target.find(location.name)
            if found[1] is not None:
                self._places[text] = found
                break
        return found

    @cached_property
    def _locate(self) -> Callable[[Name], Location]:
        return provider().locator(self.model)

    def _check_ignored(self, name: str) -> None:
        if name.removesuffix("_tensor_scale") in self._packed:
            raise ValueError(f"{name}: {_ONLY_FLOATS}")
        if not self._ignored(name):
            raise ValueError(f"{name}: unknown, the model has no such tensor")

    def _claimant(self, place: Place) -> str | None:
        """Return the name of a tensor received for a place or for a part of the place, or None."""
        parts = self.sources[self._first[place.key]]
        if place.part == WHOLE:
            return next(iter(parts.values()), None)
        return parts.get(place.part) or parts.get(WHOLE)

    def _has_twin(self, place: Place) -> bool:
        """Return whether values were received for another tensor that the model ties to the tensor at this place."""
        first = self.sources[self._first[place.key]].get(WHOLE)
        return first is not None and self._came[first].key != place.key

    def _claim(self, name: str, place: Place) -> None:
        """Record that a tensor was received for a place. Raises ValueError if the place already has a tensor."""
        other = self._claimant(place)
        if other is not None:
            raise ValueError(f"{name}: came before" + (f", as {other}" if other != name else ""))
        self.sources[self._first[place.key]][place.part] = name
        self._came[name] = place

    def _write(self, name: str, place: Place, tensor: Tensor, as_given: str | None = None) -> None:
        """Write a tensor to its place. as_given: ``name`` if `_write_again` may repeat this write later, else None."""
        target = self.state[place.key]
        scale = self.target.scale_of(place) if tensor.dtype in FLOATING else None
        if scale is not None:
            problem = _unfit(place, scale, tensor, place.key in self._packed)
        elif place.key.removesuffix(CHANNEL_SCALE) in self._packed:
            problem = _ONLY_FLOATS
        elif target.dtype == torch.float8_e4m3fn != tensor.dtype:
            problem = f"dtype {_dtype(tensor)}, expected {FP8}, BF16, F16 or F32"
        else:
            problem = self.target.mismatch(TensorSpec(_dtype(tensor), tuple(tensor.shape)), place)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
        if self._has_twin(place) and name not in self._differ:
            local, part = place.held_by(target)
            self._differ[name] = (local != tensor[part].to(local)).any()
            return
        if scale is not None:
            self._claim(name, scale)
            self._claim(name, place)
            self._quantize(place, scale, tensor, as_given)
            return
        self._claim(name, place)
        if target.dtype == torch.float8_e4m3fn:
            self._codes[name] = place
        elif place.key in self.target.scales:
            self._scales.add(place.key)
        local, part = place.held_by(target)
        local.copy_(tensor.reshape(place.shape)[part])  # a scale's dimensions of size 1 may differ

    def _quantize(self, place: Place, scale_place: Place, tensor: Tensor, as_given: str | None) -> None:
        data, part = place.held_by(self.state[place.key])
        scale, scale_part = scale_place.held_by(self.state[scale_place.key])
        if not data.numel() and not scale.numel():
            return
        if tensor.dim() == 3 and part[0] == scale_part[0]:  # select this rank's experts
            tensor, part, scale_part = tensor[part[0]], (slice(None), *part[1:]), (slice(None), *scale_part[1:])
        as_given = as_given if tensor.device == data.device else None
        tensor = tensor.to(data.device)
        if is_packed(data):
            form, group = packed_format(scale), tensor.shape[-1] // self.state[scale_place.key].shape[-1]
            for index in range(len(tensor)) if tensor.dim() == 3 else [...]:
                values = quantize_arranged(tensor[index].unflatten(0, (_matrices(place), -1)), form, group)
                data[index].copy_(values.data.flatten(0, 1)[part[-2:]])
                scale[index].copy_(values.scale.flatten(0, 1)[scale_part[-2:]])
            self._scales.add(scale_place.key)  # exponents of MXFP4 are judged, too
            return
        if _has_channels(place, scale_place):
            for index in range(len(tensor)) if tensor.dim() == 3 else [...]:
                values = quantize_channels(tensor[index])
                data[index].copy_(values.data[part[-2:]])
                scale[index].copy_(values.scale[scale_part[-2:]])
            return
        parts = _halves if _matrices(place) == 2 else lambda value: value
        all_here = data.shape == tensor.shape and scale.shape[-2:] == scale_place.shape[-2:]
        if all_here and scale.dtype == torch.float32:
            out = FP8Tensor(parts(data), parts(scale))
            quantize_128x128(parts(tensor), out=out)
            memory = self._memory_of(place.key), self._memory_of(scale_place.key)
            if as_given is not None and data.is_cuda and all(memory):
                again = Requantizer(parts(tensor), out)
                self._again[as_given] = _Again(place, scale_place, memory, parts is _halves, again)
            return
        values = quantize_128x128(parts(tensor), scale_format="float32" if scale.dtype == torch.float32 else "ue8m0")
        data.copy_(values.data.view(tensor.shape)[part])
        scale.copy_(values.scale.view(*tensor.shape[:-2], *scale_place.shape[-2:])[scale_part])

    def _convert(self, name: str, location: Location, tensor: Tensor) -> None:
        """Keep a tensor until all tensors that form ``location.key`` were received; then write the combined tensor."""
        if tensor.dtype not in FLOATING:
            raise ValueError(
                f"{name}: dtype {_dtype(tensor)}, but transformers makes {location.key} of it by {location.steps}, "
                "which takes BF16, F16 or F32"
            )
        parts = self._parts.setdefault(location.key, {})
        if name in parts or self.sources[self._first[location.key]]:
            raise ValueError(f"{name}: came before")
        parts[name] = tensor
        locations = {other: self._place(other)[0] for other in parts}
        convert = provider().convert
        try:
            tried = convert(self.model, locations, {other: value.to("meta") for other, value in parts.items()})
            complete = all(value.shape == self._shape(key) for key, value in tried.items())
        except Exception:  # given too few tensors, transformers' operations raise errors of any type
            complete = False
        if not complete:
            parts[name] = tensor.clone()
            return
        for key, value in convert(self.model, locations, self._parts.pop(location.key)).items():
            self._write(key, Place(key, tuple(self.state[key].shape)), value)

    def _shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the model; for weights in four bits, the shape of their values."""
        shape = tuple(self.state[key].shape)
        return (*shape[:-1], 2 * shape[-1]) if key in self._packed else shape

    def _any_bad(self) -> bool:
        """Return whether any received tensor holds invalid values. Synchronizes with the device once."""
        entries = {key: held(self.state[key])[0] for key in self.came}
        entries = {
            key: values
            for key, values in entries.items()
            if values.numel() and (values.is_floating_point() or key in self._scales)
        }
        judged = {place.key for place in self._codes.values()} | self._scales
        flags = [*self._differ.values(), *(self._flag(key, entries[key]) for key in judged & {*entries})]
        # Detached, because get_total_norm takes Parameters one by one.
        wide = [values.detach() for values in entries.values() if values.element_size() > 1]
        if wide:
            flags.append(~nn.utils.get_total_norm(wide, torch.inf).isfinite())
        return bool(flags) and bool(torch.stack([flag.to(flags[0].device) for flag in flags]).any())

    def _bad_values(self) -> list[str]:
        """List the received tensors that hold invalid values."""
        codes = {place.key for place in self._codes.values()}
        entries = {key: held(self.state[key])[0] for key in self.came}
        flags = {
            key: self._flag(key, values)
            for key, values in entries.items()
            if values.numel()
            and (values.is_floating_point() or key in self._scales)
            and (values.dtype != torch.float8_e4m3fn or key in codes | self._scales)
        } | self._differ
        problems = []
        for key in [key for key, flag in flags.items() if flag]:
            if key in self._differ:
                problems.append(f"{key}: differs from another tensor that came, but the model ties the two")
                continue
            for name in dict.fromkeys(self.sources[key].values()):
                place = self._came[name]
                if place.key != key:  # ``key`` is a scale computed from the weight
                    place = self.target.scale_of(place) or Place(key, tuple(self.state[key].shape))
                values, _ = place.held_by(self.state[key])
                if values.numel() and self._flag(key, values):
                    problems.append(f"{name}: holds a NaN or an infinity, or scales that are not positive")
        return problems

    def _flag(self, key: str, values: Tensor) -> Tensor:
        """Return whether values of a state-dict entry are not finite or, if they are scales, not positive."""
        if values.dtype is torch.uint8:
            return (values == NAN_BYTE).any()
        if values.dtype is torch.float8_e8m0fnu:
            return values.view(torch.uint8).amax() == 255
        weight = key.removesuffix(CHANNEL_SCALE)
        if weight != key and weight in self._packed and packed_format(values) == "nvfp4":
            n = self.state[weight].shape[1]
            return has_nan_scale(values, n // _matrices(Place(weight, tuple(self.state[weight].shape))))
        if values.dtype == torch.float8_e4m3fn:
            return (values.view(torch.uint8) & 127).amax() == 127
        least, most = values.aminmax()
        return ~((least > (0 if key in self.target.scales else -torch.inf)) & (most < torch.inf))


def _matrices(place: Place) -> int:
    """Return the number of matrices with separate blocks that an expert has at a place: 2 for gate_up_proj, else 1."""
    return 2 if len(place.shape) == 3 and place.key.endswith(f".{GATE_UP}") else 1


def _halves(value: Tensor) -> Tensor:
    """View (E, 2N, K), gate above up, as (E, 2, N, K)."""
    return value.unflatten(1, (2, -1))


def _has_channels(weight: Place, scale: Place) -> bool:
    return weight.shape[-2] > 2 and scale.shape[-2:] == (weight.shape[-2], 1)


def _unfit(weight: Place, scale: Place, tensor: Tensor, packed: bool) -> str | None:
    """Return why a tensor cannot be quantized for its place, or None. packed: the place has codes of four bits."""
    shape = (*weight.shape[:-1], 2 * weight.shape[-1]) if packed else weight.shape
    if tensor.shape != shape:
        return f"shape {tuple(tensor.shape)}, expected {shape}"
    if packed:
        return None
    if scale.shape != scale_grid(_matrices(weight), weight.shape) and not _has_channels(weight, scale):
        return f"the model's scale has shape {scale.shape}, expected one for each 128x128 or each channel"
    return None


def _dtype(tensor: Tensor) -> str:
    return DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))


def _raise(what: str, problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(f"{what}: {'; '.join(problems[:_SHOWN])}{more}")


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {describe(model)}")


def _inside(model: nn.Module) -> nn.Module:
    """Return the model to refit, without its wrappers. Raises ValueError if it cannot be refitted."""
    inner = unwrapped("model", model)
    check_unmerged("model", model)
    return inner


def _opened(source: Source, model: nn.Module) -> _Source:
    """Open the new weights for a refit of ``model``, which is without wrappers."""
    if isinstance(source, nn.Module):
        unwrapped("tensors", source)
        check_merged("tensors", source)
        state = state_of(source)
        return _Source(state.items(), state, not any(isinstance(part, GroupedExperts) for part in source.modules()))
    if isinstance(source, str | os.PathLike):
        return _of_directory(source, model)
    if isinstance(source, Mapping):
        return _Source(source.items(), source, True)
    if isinstance(source, Tensor) or not isinstance(source, Iterable):
        raise TypeError(
            "tensors: expected pairs of a name and a tensor, a mapping, a module or a checkpoint's directory, got "
            f"{describe(source)}"
        )
    return _Source(source, None, True)


def _of_directory(directory: str | os.PathLike, model: nn.Module) -> _Source:
    """Open a checkpoint for a refit, as views of its weights in FP8 blocks, or in four bits where the model has them.

    Raises CheckpointError unless every weight can be loaded.
    """
    weights, what = open_weights(directory), f"cannot refit from {directory}, the model is unchanged"
    weights.check(f"cannot load {directory}")
    checkpoint = weights.checkpoint
    problems = checkpoint.problems + unmappable(checkpoint)
    if not problems:
        nvfp4 = [info for weight in weights.stored if weight.kind == "nvfp4" for info in weight.scales]
        problems += inexact_problems(weights) + (scale_problems(checkpoint, nvfp4) if nvfp4 else [])
    if problems:
        raise CheckpointError(what, problems)
    packed = []
    if any(weight.kind in PACKED_FORMATS for weight in weights.stored):  # visits the model
        locate = provider().locator(model)
        packed = Target(state_of(model)).packed(weights.stored, lambda name: locate(name).name)
    blocks = [weight for weight in in_blocks(weights, packed=packed) if weight.name.text not in weights.unused]
    names = [name for weight in blocks for name in (weight.name.text, weight.scale_name)[: 1 + weight.has_scale]]
    tensors = ((weight.name.text, weight) for weight in blocks)
    return _Source(tensors, names, not weights.quantized, Reader(checkpoint.directory))
