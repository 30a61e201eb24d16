"""The experts implementation "fp8moe" that `register` adds to transformers: runs experts modules on GroupedExperts."""

import functools
import gc
import threading
from collections.abc import Set
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe.kernels.decoder_ops.rms_norm import Normed
from fp8moe.kernels.experts.operands import Norm
from fp8moe.layers import experts_source
from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.master import Fingerprint
from fp8moe.layers.parameters import local
from fp8moe.quant.formats import BLOCK, FP8Tensor
from fp8moe.runtime import autograd
from fp8moe.runtime.checks import FLOATING

NAME = "fp8moe"
"""The name under which transformers knows fp8moe's experts, expert parallelism and quantization method."""

BOUND = ("forward", "_old_forward")
"""Attributes where accelerate keeps a module's bound forward.

`_old_forward` holds it while the module has accelerate's hook, and `forward` holds it after the hook is removed.
"""

TRAINS = "_fp8moe_trains"
"""An attribute of the experts modules that are in `here.trained` of any thread: torch.compile looks for it."""

_MASTERS = "_fp8moe_masters"


class _Here(threading.local):
    """State of this thread. trained: experts modules whose weights `experts_forward` gives gradients."""

    trained: Set[nn.Module] = frozenset()


here = _Here()


def experts_forward(
    self: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    residual: Tensor | None = None,
    groups: Tensor | None = None,
    rows: Tensor | None = None,
    quantized: FP8Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor | tuple[Tensor, Normed | None]:
    """Run an experts module of transformers, whose forward calls this function; return the experts' weighted sums.

    Arguments are those of `GroupedExperts.forward`; with a `norm`, arguments and result are those of
    `GroupedExperts.forward_with_norm`. ``self`` may hold the experts of one rank only. If
    `fp8moe.distributed.ExpertParallel` has spread them, top_k_index and result cover the experts of all ranks.
    Otherwise the result covers this rank's experts: transformers gives the experts of other ranks the index
    num_experts, which is out of range and adds nothing.

    Weights that require gradients get them in this thread's blocks of `replay_routing`. Otherwise the backward raises
    RuntimeError.
    """
    inputs = hidden_states, top_k_index, top_k_weights
    others = {"residual": residual, "groups": groups, "rows": rows, "quantized": quantized}
    trained = TRAINS in self.__dict__ and any(weight.requires_grad for weight in _weights(self))
    return (_run_in_block if trained else _run_frozen)(self, inputs, norm, **others)


def _run_frozen(self: nn.Module, inputs: tuple, norm: Norm | None, *, residual: Tensor | None, **order: Any) -> Any:
    """Compute `experts_forward` with FP8 copies of the weights. The backward raises RuntimeError if any is trained."""
    trained = [weight for weight in _weights(self) if weight.requires_grad]
    layer = cached_layer(self)
    # The layer is frozen: its weights get no gradients. If weights require gradients, the backward must raise an error.
    if not trained:
        if norm is None:
            return layer(*inputs, residual=residual, **order)
        return layer.forward_with_norm(*inputs, norm, residual=residual, **order)
    name = (
        f"experts_implementation={NAME!r} of {type(self).__name__} (to train its weights, put "
        "GroupedExperts.from_experts(module, master_dtype=...) in its place)"
    )
    out = autograd.run(lambda *args: layer(*args[: len(inputs)]), name, *inputs, *trained)
    out = out if residual is None else residual + out
    return out if norm is None else (out, None)


@torch.compiler.disable
def prepare_training(module: nn.Module) -> None:
    """Make or update the GroupedExperts whose masters are a module's weights, unless none of these requires a gradient.

    Call it before each forward of a model: `experts_forward` runs the layer where `here.trained` has the module, which
    then has the attribute TRAINS. FP8 weights have no masters. Where gradients are recorded, raises TypeError or
    ValueError, naming the module's class, for other weights that GroupedExperts cannot train.
    """
    weights, layer = _weights(module), masters_of(module)
    if not any(weight.requires_grad for weight in weights) or any(weight.dtype not in FLOATING for weight in weights):
        return
    if layer is None:
        try:
            layer = GroupedExperts.from_source(experts_source.read(module), master_dtype=module.down_proj.dtype)
        except (TypeError, ValueError) as error:
            if not torch.is_grad_enabled():
                return
            name = type(module).__name__
            raise type(error)(
                f"{name} cannot be trained with experts_implementation={NAME!r}; choose another: {error}"
            ) from error
        module.__dict__[_MASTERS] = _CachedLayer(layer)
    _take(layer, module._parameters)
    layer.parallel = getattr(module, "_fp8moe_parallel", None)
    layer.train(module.training)


def masters_of(module: nn.Module) -> GroupedExperts | None:
    """Return the layer that `prepare_training` has made for an experts module, or None."""
    cached = module.__dict__.get(_MASTERS)
    return None if cached is None else cached.layer


@torch.compiler.disable
def _run_in_block(module: nn.Module, inputs: tuple, norm: Norm | None, **others: Any) -> Any:
    """Compute `experts_forward` with the masters, if there are any and the block is one of this thread."""
    layer = masters_of(module) if module in here.trained else None
    if layer is None:
        return _run_frozen(module, inputs, norm, **others)
    gathered = _is_gathered(module)
    if gathered:
        _take(layer, module._parameters)
    try:
        out, normed = layer.forward_with_norm(*inputs, norm, **others)
    finally:  # checkpointing may end a recomputed forward by an exception
        if gathered:
            _take(layer, dict.fromkeys(module._parameters))
    return out if norm is None else (out, normed)


def _take(layer: GroupedExperts, parameters: dict[str, nn.Parameter | None]) -> None:
    """Replace parameters of the layer, whose FP8 copies are dropped."""
    for name, value in parameters.items():
        if layer._parameters.get(name) is not value:
            setattr(layer, name, value)


def runs_here(module: nn.Module) -> bool:
    """Return whether the module is an experts module of transformers that uses "fp8moe"."""
    return "is_transposed" in vars(module) and chosen_implementation(module) == NAME


def keep_forwards() -> None:
    """Give every experts module that uses "fp8moe" a forward of its own, so that it stays on fp8moe after `unregister`.

    If accelerate has hooked a module, the original forward, which accelerate keeps in the module, is replaced instead.
    """
    for module in [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]:
        if not runs_here(module):
            continue
        bound = {name: vars(module)[name] for name in BOUND if name in vars(module)} or {"forward": None}
        for name, forward in bound.items():
            if forward is None or (isinstance(forward, MethodType) and forward.__func__ is type(module).forward):
                setattr(module, name, functools.partial(_kept_forward, module))


def is_kept(module: nn.Module) -> bool:
    """Return whether `keep_forwards` has replaced the module's forward."""
    return getattr(vars(module).get("forward"), "func", None) is _kept_forward


def _kept_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run an experts module on fp8moe if its configuration chooses "fp8moe", otherwise by its class's forward."""
    return (
        experts_forward(module, *args, **kwargs)
        if chosen_implementation(module) == NAME
        else type(module).forward(module, *args, **kwargs)
    )


def chosen_implementation(module: nn.Module) -> str | None:
    """Return the experts_implementation that the configuration of a model or an experts module chooses, or None."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def cached_layer(module: nn.Module) -> GroupedExperts:
    """Return the frozen GroupedExperts cached for an experts module; make it again if the weights have changed."""
    cached = module.__dict__.get("_fp8moe")
    # A compiled forward cannot tell whether weights have changed: it uses the layer that the last eager call cached.
    if cached is None or cached.layer is None or not (torch.compiler.is_compiling() or cached.is_of(module)):
        cached = module.__dict__["_fp8moe"] = None  # frees the old layer before the new one is made
        cached = module.__dict__["_fp8moe"] = _make_cached(module)
    return cached.layer


def refresh(module: nn.Module) -> None:
    """Update the layer cached for a module, if outdated, in the layer's own memory, which CUDA graphs may read.

    Call it under torch.no_grad.
    """
    cached = module.__dict__.get("_fp8moe")
    if cached is None or cached.layer is None or cached.is_of(module):
        return
    for old, new in zip(cached.layer.parameters(), grouped_experts(module).parameters(), strict=True):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
    cached.weights = Fingerprint(_weights(module))


class _CachedLayer:
    """A GroupedExperts cached in the experts module that it was made from. Copies and pickles of the module lack it."""

    def __init__(self, layer: GroupedExperts | None = None, weights: Fingerprint | None = None):
        self.layer = layer
        self.weights = weights

    def is_of(self, module: nn.Module) -> bool:
        """Return whether the layer is up to date, as far as addresses and version counters of the weights show.

        After a switch between train and eval mode the layer counts as outdated: weights may have been swapped for an
        evaluation without a change of address or version. So do FP8 copies of weights that FSDP2 gathers.
        """
        if self.layer is None or self.layer.training != module.training or self.weights is None:
            return False
        weights = _weights(module)
        copied = any(weight.dtype in FLOATING for weight in weights) and _is_gathered(module)
        return not copied and self.weights.matches(weights)

    def __reduce__(self):
        return _CachedLayer, ()


def _weights(module: nn.Module) -> list[Tensor]:
    return [value for value in module._parameters.values() if value is not None]


def _is_gathered(module: nn.Module) -> bool:
    """Return whether FSDP2 shards the module's weights.

    For each forward, FSDP2 then gathers them into the same memory, without a change of their version counters.
    """
    if not dist.is_available():
        return False
    from torch.distributed._composable_state import _module_state_mapping as states
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(each, FSDPModule) and module in each.modules() for each in list(states))


@torch.compiler.disable
def _make_cached(module: nn.Module) -> _CachedLayer:
    return _CachedLayer(grouped_experts(module), Fingerprint(_weights(module)))


def refusal(module: nn.Module) -> str | None:
    """Return why `grouped_experts` refuses the module, or None.

    The function tries a copy of the module on the meta device, so it reads no weights.
    """
    try:
        grouped_experts(_without_data(module))
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@torch.inference_mode(False)
@torch.no_grad()
def grouped_experts(module: nn.Module) -> GroupedExperts:
    """Make the frozen GroupedExperts of an experts module, with this rank's experts.

    Raises TypeError or ValueError, naming the module's class, for a module that GroupedExperts cannot express.
    """
    try:
        if getattr(module, "block_size", ()) is None:
            raise ValueError(f"module: one scale per tensor; expected blocks of {BLOCK}x{BLOCK}")
        layer = GroupedExperts.from_source(experts_source.read(_on_this_rank(module))).train(module.training)
        layer.parallel = getattr(module, "_fp8moe_parallel", None)
        return layer
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{type(module).__name__} cannot run with experts_implementation={NAME!r}: {error}"
        ) from error


def _without_data(module: nn.Module) -> nn.Module:
    """Copy the module to the meta device without loading its weights.

    _parameters and _buffers of the copy are plain dicts: those of an offloaded module would load the weights.
    """
    tensors = {
        kind: {name: value if value is None else value.to("meta") for name, value in getattr(module, kind).items()}
        for kind in ("_parameters", "_buffers")
    }
    inner = {name: part if part is None else _without_data(part) for name, part in module._modules.items()}
    return _twin(module, **tensors, _modules=inner)


def _on_this_rank(module: nn.Module) -> nn.Module:
    """Copy the module with DTensor parameters replaced by this rank's shards."""
    parameters = {name: value if value is None else local(value) for name, value in module._parameters.items()}
    return _twin(module, _parameters=parameters)


def _twin(module: nn.Module, **attributes: Any) -> nn.Module:
    """Make a shallow copy of the module with these attributes replaced; copy.copy fails for modules of FSDP2."""
    twin = object.__new__(type(module))
    twin.__dict__ = {**vars(module), **attributes}
    return twin
