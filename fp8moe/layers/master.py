"""Master weights: trainable parameters in bfloat16 or float32, and their FP8 copies, made once per optimizer step.

A copy hangs on the storage of its master. So it lives as long as that memory does, is found through every alias of the
weight (detached, seen by a compiled graph), and is neither saved, moved nor copied with the weight. It serves while the
weight's version stays the same, no optimizer makes a step (some write through ``.data``), and nothing calls `outdate`.
It goes when its module gets another Parameter in place of the master. So FSDP2 keeps no copies of gathered weights, nor
meets an old one when it gathers anew, into the same memory and without a change of the version.

In a compiled graph only storages of modules' Parameters have copies: the graph may put several computed weights, one
after the other, into the same storage.
"""

from collections.abc import Iterable

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import INPUT_DTYPES, quantize_128x128
from fp8moe.runtime.operators import define

MASTER_DTYPES = (torch.bfloat16, torch.float32)

_ATTRIBUTE = "_fp8moe_copies"
_outdated = 0  # calls of outdate
_suspected = 0  # calls of outdate_masters


class _Copies:
    """The FP8 copies of the weights in one storage.

    by_layout: by offset, shape, strides and dtype: the copy, and the state of the weight that it is of.
    captured: a CUDA graph quantizes or changes one of the weights. Its replays may change it unseen.
    """

    def __init__(self):
        self.by_layout: dict[tuple, tuple[FP8Tensor, tuple[int, int, int]]] = {}
        self.captured = False


def quantized(weight: Tensor) -> FP8Tensor:
    """``quantize_128x128(weight)``, from the last call if the weight has not changed since.

    weight: a master, or a view of one, (..., N, K) bfloat16, float16 or float32.
    Returns data (..., N, K) and scale (..., ceil(N/128), ceil(K/128)), detached. They are not to be changed.

    The weight counts as unchanged while its version does, until the next step of any optimizer or `outdate`. Some
    changes show in neither (see docs/training.md): call `outdate` after them. A call under CUDA graph capture always
    quantizes, so that replays do too. A compiled graph gets a clone, since it may reuse the memory of all that its
    operators return.
    """
    if torch.compiler.is_compiling():
        return FP8Tensor(*torch.ops.fp8moe.quantized_master(weight.detach()))
    return _quantized(weight)


def outdate() -> None:
    """Let every FP8 copy be made again at its next use: after changes that versions of tensors do not show.

    That is the copies of masters, and those of transformers' experts (`fp8moe.integrations.transformers.register`).
    """
    global _outdated
    _outdated += 1


def outdated() -> int:
    """How often `outdate` has been called."""
    return _outdated


def outdate_masters() -> None:
    """As `outdate`, of masters only: where only these may have changed."""
    global _suspected
    _suspected += 1


@register_optimizer_step_post_hook
def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    outdate_masters()
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.layout is torch.strided:
                    _copies(weight.untyped_storage()).captured = True


class MasterModule(nn.Module):
    """Base of the modules that can have masters; `trainable` says whether one has."""

    trainable: bool

    def train(self, mode: bool = True) -> "MasterModule":
        # Around an evaluation weights may be exchanged through .data.
        if self.trainable and mode != self.training:
            outdate_masters()
        return super().train(mode)

    def __setattr__(self, name: str, value: object) -> None:
        old = self.__dict__.get("_parameters", {}).get(name)
        if type(old) is nn.Parameter and old is not value:  # FSDP2's shards are of another class
            _forget(old)
        super().__setattr__(name, value)  # marks the new one, which may have the same memory

    # Wherever a master gets its memory, `_copies` marks it for compiled graphs.

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark_masters()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._mark_masters()
        return self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._mark_masters()

    def _mark_masters(self) -> None:
        for value in self._parameters.values():
            if type(value) is nn.Parameter and value.dtype in MASTER_DTYPES and not value.is_meta:
                _copies(value.untyped_storage())


def check_master_dtype(dtype: torch.dtype | None) -> None:
    """A dtype of master weights, or None for a module without."""
    if dtype is not None and dtype not in MASTER_DTYPES:
        raise TypeError(f"master_dtype: expected torch.bfloat16, torch.float32 or None, got {dtype}")


def not_for_masters(state_dict: dict[str, Tensor], names: Iterable[str], way_out: str) -> list[str]:
    """An error for each entry that no master can be loaded from, such as FP8, whose scale copying would leave out."""
    return [
        f"{name}: expected bfloat16, float16 or float32 for a master weight, got {state_dict[name].dtype}; {way_out}"
        for name in names
        if name in state_dict and state_dict[name].dtype not in INPUT_DTYPES
    ]


def _copies(storage: torch.UntypedStorage) -> _Copies:
    copies = getattr(storage, _ATTRIBUTE, None)
    if copies is None:
        copies = _Copies()
        setattr(storage, _ATTRIBUTE, copies)
    return copies


def _quantized(weight: Tensor) -> FP8Tensor:
    try:
        copies = _copies(weight.untyped_storage())
    except NotImplementedError:  # under torch.func.vmap
        return _quantize(weight)
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        copies.captured = True
    if copies.captured or weight.is_inference():  # inference tensors have no version
        copies.by_layout.clear()
        return _quantize(weight)
    layout = (weight.storage_offset(), weight.shape, weight.stride(), weight.dtype)
    state = (weight._version, _suspected, _outdated)
    copy, copied_state = copies.by_layout.get(layout, (None, None))
    if copied_state != state:
        copy = None
        copies.by_layout.pop(layout, None)  # its memory may serve the new copy
        copy = _quantize(weight)
        copies.by_layout[layout] = copy, state
    return copy


def _forget(weight: Tensor) -> None:
    storage = weight.untyped_storage()
    if hasattr(storage, _ATTRIBUTE):
        delattr(storage, _ATTRIBUTE)


def _quantize(weight: Tensor) -> FP8Tensor:
    with torch.inference_mode(False):  # the backward of a later call may save the copy
        return quantize_128x128(weight)


def _quantized_op(weight: Tensor) -> tuple[Tensor, Tensor]:
    if not hasattr(weight.untyped_storage(), _ATTRIBUTE):  # a value that the compiled graph has computed
        return tuple(_quantize(weight))
    data, scale = _quantized(weight)
    return data.clone(), scale.clone()


define(
    "quantized_master(Tensor weight) -> (Tensor, Tensor)", _quantized_op, lambda weight: tuple(quantize_128x128(weight))
)

# Selective checkpointing is not to look for quantizations: in the recomputation there may be more, or fewer.
getattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", set()).add(torch.ops.fp8moe.quantize_128x128.default)
