"""Master weights: trainable parameters in bfloat16 or float32, and their FP8 copies, made once per optimizer step.

An FP8 copy is an attribute of its master's storage. So the copy lives as long as the master's memory, is found through
every alias of the weight (detached, or as a compiled graph sees it), and is not saved, moved or copied with the weight.
The copy is valid until the weight's version counter changes. All copies are dropped before and after a step of any
optimizer (some optimizers write through ``.data``), and by `invalidate`. The last forward before a step keeps none
(`_Copy.last_use`). A copy is dropped, too, when another Parameter takes the master's place in its module. FSDP2 does
this when it frees gathered weights; it later gathers new values into the same memory without changing the version.

A compiled graph keeps copies only for Parameters of modules, not for weights that it computes: it may reuse one storage
for several weights that it computes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Self
from weakref import WeakValueDictionary

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8moe.layers.parameters import frozen, is_sharded, local
from fp8moe.quant.formats import BLOCK, FP8Tensor, ceil_div
from fp8moe.quant.quantize import quantize_128x128
from fp8moe.quant.transpose import quantize_both_ways
from fp8moe.runtime.autograd import recorded
from fp8moe.runtime.checks import FLOATING, check_dtype
from fp8moe.runtime.operator import define

MASTER_DTYPES = (torch.bfloat16, torch.float32)

_ATTRIBUTE = "_fp8moe_copies"
_generation = 0  # number of calls of invalidate
_master_generation = 0  # number of calls of invalidate_masters, including those made by invalidate


class _Copy:
    """What is kept of a weight.

    value, state: the FP8 copy, if there is one, and the state in which it was made: version counters, the `_Copies` of
        the second of two weights that share it, and `_master_generation`.
    uses: forwards with a backward since `_master_generation` became `generation`. expected: the same between the two
        optimizer steps before, 0 if not known.
    """

    def __init__(self):
        self.value: FP8Tensor | None = None
        self.state: tuple | None = None
        self.uses = self.expected = self.generation = 0

    def last_use(self) -> bool:
        """Count a forward with a backward; return whether it is the last that is expected before an optimizer's step.

        As many are expected as there were between the two optimizer steps before. If there are more, the next one
        quantizes again; if there are fewer, the copy stays until the step.
        """
        if self.generation != _master_generation:
            self.expected, self.uses, self.generation = self.uses, 0, _master_generation
        self.uses += 1
        return self.uses == self.expected


_held: WeakValueDictionary[int, _Copy] = WeakValueDictionary()
"""What may have a value, by its id. Where each weight has an optimizer of its own, all but the first find none."""


class _Copies:
    """The FP8 copies of the weights in one storage.

    by_layout: maps (offset, shape, strides, dtype) of a weight, or of the two weights that share a copy, to the copy.
    captured: whether a CUDA graph quantizes or changes one of the weights; its replays change no version counter.
    gathered: whether FSDP2 has gathered the weights. Their copies have no transposes: autograd keeps the copies of all
        layers from forward to backward, on every rank.
    """

    def __init__(self):
        self.by_layout: dict[tuple, _Copy] = {}
        self.captured = self.gathered = False


def quantized(weight: Tensor, *, parameter: Tensor | None = None, backward: bool = False) -> FP8Tensor:
    """Return ``quantize_128x128(weight)``, cached from the last call if the weight has not changed since.

    weight: a master, or a view of one, (..., N, K) bfloat16, float16 or float32.
    parameter: the tensor, possibly a DTensor, of which `weight` is this rank's shard; changes of a DTensor show only in
        its own version counter, not in its shard's.
    backward: whether a backward will read the copy. A new copy then has its transpose (`quantize_both_ways`), unless
        FSDP2 has gathered the weight or a compiled graph calls. What was returned to the last forward that is expected
        before an optimizer's step is not kept here: autograd has what the backward needs (`backward_operand`).
    Returns data (..., N, K) and scale (..., ceil(N/128), ceil(K/128)), detached. The results must not be written to.

    A weight counts as changed if its version counter has changed or if any optimizer has made a step. For changes that
    neither condition detects (see docs/training.md), call `invalidate`. A call under CUDA graph capture always
    quantizes, so that replays do too. A compiled graph gets a clone, since it may reuse the memory of whatever its
    operators return.
    """
    if torch.compiler.is_compiling():
        return FP8Tensor(*torch.ops.fp8moe.quantized_master(weight.detach()))
    return _quantized((weight,), (parameter,), backward)


def quantized_gate_up(
    gate: Tensor, up: Tensor, *, parameters: tuple[Tensor, Tensor], backward: bool = False
) -> FP8Tensor:
    """Quantize gate and up, masters (E, I, H), into one (E, 2I, H), cached while neither has changed; see `quantized`.

    parameters: the tensors, possibly DTensors, of which gate and up are this rank's shards.
    Returns data and scales (E, 2 * ceil(I/128), ceil(H/128)).
    """
    if torch.compiler.is_compiling():
        return FP8Tensor(*torch.ops.fp8moe.quantized_gate_up(gate.detach(), up.detach()))
    return _quantized((gate, up), parameters, backward)


def part_of(name: str, weight: nn.Parameter) -> Tensor:
    """Return a master itself or, if it is a DTensor, this rank's shard, differentiably.

    The backward raises RuntimeError if the DTensor, which the error calls `name`, has been changed in place since the
    forward.
    """
    part = local(weight)
    return part if part is weight or not recorded(part) else _Part.apply(part, (name, weight))


def invalidate() -> None:
    """Discard the FP8 copies of all masters and of transformers' experts (`fp8moe.hf.register`).

    The next use of a weight quantizes it again. Call this after changes of weights that their version counters do not
    show.
    """
    global _generation
    _generation += 1
    invalidate_masters()


def invalidate_masters() -> None:
    """Discard the FP8 copies of masters only, not of transformers' experts. For changes that affect only masters."""
    global _master_generation
    _master_generation += 1
    for reference in _held.valuerefs():
        kept = reference()
        if kept is not None:
            _held.pop(id(kept), None)
            kept.value = kept.state = None


def generation() -> int:
    """Return a number that grows with every step of an optimizer and every call of `invalidate`."""
    return _master_generation


@register_optimizer_step_pre_hook
def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    invalidate_masters()  # the first step allocates the optimizer's state


@register_optimizer_step_post_hook
def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    invalidate_masters()
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.layout is torch.strided:
                    _copies(local(weight).untyped_storage()).captured = True


_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e8m0fnu)

WEIGHT_SCALES = ("block", "channel")
"""Granularities of weight scales: one per 128x128 block, or one per output channel."""


class WeightFormat(NamedTuple):
    """How a module keeps frozen weights. scale: the suffix of a scale's name. dtypes, scale_dtypes: as loaded."""

    scale: str
    dtypes: tuple[torch.dtype, ...]
    scale_dtypes: tuple[torch.dtype, ...]


FP8_WEIGHTS = WeightFormat("_scale_inv", (torch.float8_e4m3fn,), _SCALE_DTYPES)


class MasterModule(nn.Module):
    """Base class of modules whose weights are master weights if `trainable`, and frozen tensors otherwise.

    It drops outdated FP8 copies of masters: when FSDP2 or a caller replaces the Parameter, when a state dict is loaded,
    and on a switch between train and eval mode. A module of another library that trains masters inherits from this
    class with ``trainable = True`` and no weight_names.

    weight_names: parameter names, each frozen weight followed by its scale. kept: the format of frozen weights.
    _ways_out: two texts of advice for the error about a state dict whose weights have the wrong kind. The first is for
        a module with FP8 weights, the second for a module with masters.
    """

    trainable: bool
    weight_names: tuple[str, ...] = ()
    kept: WeightFormat = FP8_WEIGHTS
    _ways_out: tuple[str, str]

    def train(self, mode: bool = True) -> Self:
        # Callers may swap in other weights through .data for an evaluation, such as averaged weights; copies are then
        # outdated.
        if self.trainable and mode != self.training:
            invalidate_masters()
        return super().train(mode)

    def __setattr__(self, name: str, value: object) -> None:
        old = self.__dict__.get("_parameters", {}).get(name)
        if isinstance(old, nn.Parameter) and old is not value:
            storage = local(old).untyped_storage()
            if hasattr(storage, _ATTRIBUTE):
                delattr(storage, _ATTRIBUTE)
        # This calls register_parameter, which marks the new parameter's storage, even if that was just unmarked.
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter) and isinstance(old, nn.Parameter) and is_sharded(old):
            _copies(local(value).untyped_storage()).gathered = True

    def _register_weight(
        self,
        name: str,
        shape: tuple[int, ...],
        blocks: tuple[int, ...],
        device: torch.device | str | None,
        master_dtype: torch.dtype | None,
        weight_scales: str,
    ) -> None:
        """Register an uninitialized weight: a master, or an FP8 weight with its scale per block or per channel."""
        if weight_scales not in WEIGHT_SCALES:
            raise ValueError(f"weight_scales: expected one of {WEIGHT_SCALES}, got {weight_scales!r}")
        if weight_scales == "channel" and master_dtype is not None:
            raise ValueError("weight_scales: expected 'block' with a master_dtype, got 'channel'")
        if weight_scales == "channel":
            blocks = (*shape[:-1], 1)
        scale = None
        if master_dtype is None:
            weight = frozen(torch.empty(shape, dtype=torch.float8_e4m3fn, device=device))
            scale = frozen(torch.empty(blocks, dtype=torch.float32, device=device))
        else:
            weight = nn.Parameter(torch.empty(shape, dtype=master_dtype, device=device))
        self.register_parameter(name, weight)
        self.register_parameter(f"{name}_scale_inv", scale)

    # The next three methods run wherever a master gets its memory. They mark its storage with the attribute that
    # `_quantized_op` looks for in compiled graphs.

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark_masters()

    def _apply(self, fn, recurse=True):
        super()._apply(fn if self.trainable else self._keeping_dtypes(fn), recurse)
        self._mark_masters()
        return self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._mark_masters()

    def _keeping_dtypes(self, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Wrap the ``fn`` of nn.Module._apply so that it keeps the dtype of frozen weights and their scales."""
        kept = {id(getattr(self, name)) for name in self.weight_names}

        def apply(value: Tensor) -> Tensor:
            if id(value) not in kept:
                return fn(value)
            # An empty tensor shows what fn does to the dtype, without casting the whole weight.
            probe = fn(local(value).new_empty(0))
            return fn(value) if probe.dtype == value.dtype else value.to(probe.device)

        return apply

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        """Load the weights; add an error for each weight or scale whose dtype is wrong.

        PyTorch itself would cast silently and give wrong values: it would cast FP8 weights to masters and masters to
        FP8, in both cases without scales, and would cast the integer codes of stored scales to float.
        """
        masters = self.trainable
        if masters:
            invalidate_masters()
        allowed = FLOATING if masters else self.kept.dtypes
        expected = "bfloat16, float16 or float32 for a master weight" if masters else _listed(allowed)
        wrong = []
        for name in self.weight_names[1::2]:
            value = state_dict.get(prefix + name)
            if value is not None and not masters and value.dtype not in self.kept.scale_dtypes:
                known = _listed(self.kept.scale_dtypes)
                wrong.append(
                    f"{prefix}{name}: expected scales in {known}, got {value.dtype}, whose numbers are not their values"
                )
        for name in self.weight_names[::2]:
            value = state_dict.get(prefix + name)
            if value is not None and value.dtype not in allowed:
                wrong.append(f"{prefix}{name}: expected {expected}, got {value.dtype}; {self._ways_out[masters]}")
        if wrong:
            errors.extend(wrong)
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _mark_masters(self) -> None:
        for value in self._parameters.values():
            if isinstance(value, nn.Parameter) and value.dtype in MASTER_DTYPES and not value.is_meta:
                _copies(local(value).untyped_storage())


def _listed(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_master_dtype(dtype: torch.dtype | None) -> None:
    """Raise TypeError unless `dtype` is an allowed dtype of master weights, or None, which means no masters."""
    if dtype is not None and dtype not in MASTER_DTYPES:
        raise TypeError(f"master_dtype: expected torch.bfloat16, torch.float32 or None, got {dtype}")


def check_master(name: str, master: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Check a master of a call. Raises TypeError for another dtype, RuntimeError if it is trained and cannot be."""
    check_dtype(name, master, *dtypes)
    if not torch.compiler.is_compiling() and master.is_inference() and recorded(master):
        raise RuntimeError(
            f"{name} is a tensor of inference mode, which autograd does not record: clone it outside of "
            "torch.inference_mode(), or call the layer under torch.no_grad()"
        )


def _copies(storage: torch.UntypedStorage) -> _Copies:
    copies = getattr(storage, _ATTRIBUTE, None)
    if copies is None:
        copies = _Copies()
        setattr(storage, _ATTRIBUTE, copies)
    return copies


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, named):
        ctx.named, ctx.version = named, named[1]._version
        return part.view_as(part)

    @staticmethod
    def backward(ctx, grad):
        name, weight = ctx.named
        if weight._version != ctx.version:
            raise RuntimeError(
                f"{name}, shape {tuple(weight.shape)}, has been changed in place between forward and backward: call "
                "the backward before the optimizer's step, or the forward again"
            )
        return grad, None


def _quantized(weights: tuple[Tensor, ...], parameters: tuple[Tensor | None, ...], backward: bool = False) -> FP8Tensor:
    try:
        copies, *others = [_copies(weight.untyped_storage()) for weight in weights]
    except NotImplementedError:  # torch.func.vmap's tensors have no storage
        return _quantize(*weights)
    both_ways = backward and not any(each.gathered for each in (copies, *others))
    if weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
        for each in (copies, *others):
            each.captured = True
    # Keep no copy where changes do not show: replays of CUDA graphs change no version counter, inference tensors have
    # none.
    if any(each.captured for each in (copies, *others)) or any(weight.is_inference() for weight in weights):
        copies.by_layout.clear()
        return _quantize(*weights, both_ways=both_ways)
    layout = tuple((weight.storage_offset(), weight.shape, weight.stride(), weight.dtype) for weight in weights)
    versions = [None if value is None else value._version for value in (*weights, *parameters)]
    state = (versions, others, _master_generation)
    kept = copies.by_layout.get(layout)
    if kept is None:
        kept = copies.by_layout[layout] = _Copy()
    copy = kept.value if kept.state == state else None
    if copy is None:
        kept.value = None  # frees the old copy's memory before the new one is allocated
        copy = kept.value = _quantize(*weights, both_ways=both_ways)
        kept.state = state
        _held[id(kept)] = kept
    if backward and kept.last_use():
        kept.value = kept.state = None
    return copy


def _quantize(*weights: Tensor, both_ways: bool = False) -> FP8Tensor:
    with torch.inference_mode(False):  # make no inference tensors: a later call may save the copy for its backward
        if both_ways:
            return quantize_both_ways(*weights)
        if len(weights) == 1:
            return quantize_128x128(*weights)
        data, scale = _empty_gate_up(*weights)
        for half, weight in enumerate(weights):
            out = (part.unflatten(1, (2, -1))[:, half] for part in (data, scale))
            quantize_128x128(weight, out=FP8Tensor(*out))
        return FP8Tensor(data, scale)


def _empty_gate_up(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    experts, rows, columns = gate.shape
    data = gate.new_empty((experts, 2 * rows, columns), dtype=torch.float8_e4m3fn)
    blocks = experts, 2 * ceil_div(rows, BLOCK), ceil_div(columns, BLOCK)
    return data, gate.new_empty(blocks, dtype=torch.float32)


def _quantized_op(*weights: Tensor) -> tuple[Tensor, Tensor]:
    # weights that a compiled graph computes: keep no copy
    if not all(hasattr(weight.untyped_storage(), _ATTRIBUTE) for weight in weights):
        return tuple(_quantize(*weights))
    # weights that are Parameters: keep the copy, as in eager code
    data, scale = _quantized(weights, (None,) * len(weights))
    return data.clone(), scale.clone()


define(
    "quantized_master(Tensor weight) -> (Tensor, Tensor)", _quantized_op, lambda weight: tuple(quantize_128x128(weight))
)
define("quantized_gate_up(Tensor gate, Tensor up) -> (Tensor, Tensor)", _quantized_op, _empty_gate_up)

# Selective activation checkpointing must ignore these operators: because of the cached copies, a recomputation may
# quantize more or fewer weights than the forward did.
getattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", set()).update(
    getattr(torch.ops.fp8moe, name).default
    for name in ("quantize_128x128", "quantize_128x128_out", "quantize_both_ways")
)


class Fingerprint:
    """A snapshot of tensors' addresses and version counters, to tell later whether they have changed.

    The values are not read. After `invalidate`, called for writes that change no version counter, no earlier snapshot
    matches.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        parts = [part for tensor in tensors for part in _parts(tensor)]
        self._generation = _generation
        self._stamps = [_stamp(part) for part in parts]
        # Weak references do not keep the tensors' memory alive, but prevent a new storage object from getting the
        # address (_cdata) of an old one.
        self._storages = [StorageWeakRef(part.untyped_storage()) for part in parts]

    def matches(self, tensors: Iterable[Tensor]) -> bool:
        stamps = [_stamp(part) for tensor in tensors for part in _parts(tensor)]
        return self._generation == _generation and self._stamps == stamps


_PLAIN = (nn.Parameter, Tensor)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor and, if it is a wrapper such as a DTensor, the tensors inside.

    Each of these tensors has a version counter of its own.
    """
    yield tensor
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):  # skips a DTensor's mesh
                yield from _parts(part)


def _stamp(tensor: Tensor) -> tuple[int, int, int | None]:
    version = None if tensor.is_inference() else tensor._version
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), version
