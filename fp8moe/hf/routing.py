"""replay_routing and record_routing: forwards of a model take given experts, or say which ones they took.

A router's own code runs. Only its top-k is replaced, by the experts that are given and the scores that it has for them:
weights and gradients are those of the router's own formula.
"""

import functools
import inspect
import operator
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from fp8moe.hf import replaced
from fp8moe.hf.architecture import is_of_transformers
from fp8moe.hf.experts import TRAINS, here, prepare_training, runs_here
from fp8moe.hf.fused.known_forwards import CHOICE, form_of, recorders, runs_as_written
from fp8moe.hf.replaced import hold, release
from fp8moe.layers.wrapped import chain, unwrapped


class RecordedRouting:
    """The routing of the last forward in a `record_routing` block.

    routing: int16 (B, L, layers, K), the experts that each token took, on the model's device; -1 where attention_mask
    is 0. None before the first forward.
    """

    routing: Tensor | None = None


@contextmanager
def replay_routing(model: nn.Module, routing: Tensor) -> Iterator[None]:
    """Make the model's routers take the experts of `routing` in each forward in the block, in this thread.

    model: a model of transformers with experts, which torch.compile, DistributedDataParallel, FSDP2 or peft may wrap.
    routing: int16 (B, L, layers, K), on any device: the experts of each token of input_ids (B, L), or packed (1, L),
    for each layer with experts, in order; -1 in all K where the router is to choose by itself, as for padding.

    Weights of experts are what the router's formula gives for its own logits at these experts, with gradients. A
    forward that gradient checkpointing computes again takes the same experts, also after the block and in other blocks.
    In a compiled model the routers run uncompiled.

    In the block, experts that run through ``experts_implementation="fp8moe"`` give their weights gradients if these
    require any: the layer is that of ``GroupedExperts.from_experts(module, master_dtype=...)``, with the same bits.

    Raises TypeError or ValueError at the beginning for a model whose routers are not known, for a routing of another
    dtype or shape, and for an expert that the model does not have; before a layer runs, ValueError for a forward whose
    input_ids are not (B, L), and TypeError or ValueError for one with gradients through experts that are not trained in
    FP8, such as those of GPT-OSS.
    """
    layers = _layers_of(model)
    _check(routing, layers)
    with _Replay(model, layers, routing.clone()).open():  # a buffer may have others before the backward
        yield


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RecordedRouting]:
    """Record which experts the model's routers take in each forward in the block, in this thread.

    model: as for `replay_routing`, which takes the `routing` of the result. In a `replay_routing` block it has the
    experts that were given. Routers that `optimize` has fused run fused, and say what they choose.
    Raises TypeError or ValueError for a model whose routers are not known.
    """
    with Recorder(model).open() as recorded:
        yield recorded


def check_outside(owner: str, model: nn.Module) -> None:
    """Raise RuntimeError if this thread is in a block of `replay_routing` or `record_routing` for the model."""
    if any(model in block.models for block in _thread.blocks):
        raise RuntimeError(
            f"{owner}: its graphs do not see this block of replay_routing or record_routing; call it outside, with "
            "return_routing=True to record"
        )


def check_one_thread(model: nn.Module) -> None:
    """Raise ValueError for a model in DataParallel: blocks are of one thread."""
    if any(type(each).__name__ == "DataParallel" for each in chain(model)):
        raise ValueError("model: expected one that runs in one thread, got DataParallel; use DistributedDataParallel")


class _Layer(NamedTuple):
    """A layer with experts.

    name: the router's path in the decoder. routers: modules with the method that chooses the experts: one, or several
    where peft keeps a copy to train, only one of which runs.
    """

    name: str
    routers: list[nn.Module]
    method: str
    num_experts: int
    top_k: int


_METHODS = ("forward", "route_tokens_to_experts")
_COPY = re.compile(r"\.(original_module|modules_to_save\.[^.]+)$")  # of peft's, beside or in place of a module
_PLACE = re.compile(r"(^|.*?\.)\d+(?=\.)")  # of a decoder layer, up to its number


def _layers_of(model: nn.Module) -> list[_Layer]:
    """List the model's layers with experts, in order. Raises TypeError or ValueError if a router is not known."""
    inner = unwrapped("model", model)
    name = type(inner).__name__
    check_one_thread(model)
    if not is_of_transformers(inner):
        raise TypeError(f"model: expected a model of transformers, got {name}")
    config = inner.config.get_text_config(decoder=True)
    if getattr(config, "loop_num_passes", 1) > 1:
        raise ValueError(f"model: {name} runs its layers several times, each time with other experts")
    decoder = inner.get_decoder()
    if "input_ids" not in _signature(type(decoder)).parameters:  # the layers of block diffusion read a canvas
        raise ValueError(
            f"model: {name} cannot replay or record routing: its {type(decoder).__name__} reads no input_ids"
        )
    experts: dict[str, str] = {}
    found: dict[str, dict[str, _Layer]] = {}
    for path, module in decoder.named_modules():
        place = match[0] if (match := _PLACE.match(path)) else ""
        if "Experts" in type(module).__name__:
            experts.setdefault(place, f"{path} ({type(module).__name__})")
        for method in _METHODS:
            if (form := form_of(module, CHOICE, method)) is not None:
                sizes = (operator.attrgetter(size)(module) for size in (form.num_experts, form.top_k))
                own = _COPY.sub("", path)
                layer = _Layer(own, [], method, *sizes)
                found.setdefault(place, {}).setdefault(own, layer).routers.append(module)
    unknown = [path for place, path in experts.items() if place not in found]
    if unknown or not found:
        what = f"the router of {unknown[0]}" if unknown else "a router of its"
        raise ValueError(f"model: {name} cannot replay or record routing: {what} is not known")
    for layers in found.values():
        if len(layers) > 1:
            raise ValueError(
                f"model: {name} cannot replay or record routing: expected one router in a layer, got "
                f"{' and '.join(layers)}"
            )
    layers = [layer for each in found.values() for layer in each.values()]
    if len({layer.top_k for layer in layers}) > 1:
        raise ValueError(f"model: {name} cannot replay or record routing: its layers take different numbers of experts")
    return layers


def _check(routing: Tensor, layers: list[_Layer]) -> None:
    """Raise TypeError or ValueError for a routing that these layers cannot take."""
    if not isinstance(routing, Tensor) or routing.dtype is not torch.int16:
        got = routing.dtype if isinstance(routing, Tensor) else type(routing).__name__
        raise TypeError(f"routing: expected an int16 tensor, got {got}")
    shape = (len(layers), layers[0].top_k)
    if routing.ndim != 4 or routing.shape[2:] != shape:
        raise ValueError(
            f"routing: expected shape (B, L, layers, K) = (B, L, {shape[0]}, {shape[1]}), got {tuple(routing.shape)}"
        )
    counts = torch.tensor([layer.num_experts for layer in layers], dtype=torch.int64, device=routing.device)[:, None]
    wrong = (routing < -1) | (routing >= counts)
    if wrong.any():
        index = int(wrong.nonzero()[0, 2])
        raise ValueError(
            f"routing: expected experts from 0 to {layers[index].num_experts - 1}, or -1, for layer {index} "
            f"({layers[index].name}), got {int(routing[wrong][0])}"
        )
    chosen = routing >= 0
    if (chosen.any(-1) != chosen.all(-1)).any():
        raise ValueError("routing: expected -1 in all K experts of a token or in none")


# What blocks replace while they are open, and in which thread.


class _Thread(threading.local):
    """What this thread has open.

    blocks: the innermost last. recomputes: whether a backward computes a part of an earlier forward again.
    """

    def __init__(self):
        self.blocks: list[_Block] = []
        self.recomputes = False


_thread = _Thread()


class _Block:
    """A block of `replay_routing` or `record_routing`.

    routers: router -> (index of its layer, layer). models: the modules that run all layers and take input_ids.
    shape: (B, L) of the forward that is under way, None outside. ran: indices of the layers that it has run.
    """

    def __init__(self, model: nn.Module, layers: list[_Layer]):
        inner = unwrapped("model", model)
        self.name = type(inner).__name__
        self.routers = {router: (index, layer) for index, layer in enumerate(layers) for router in layer.routers}
        decoder = inner.get_decoder()
        around = [module for module in inner.modules() if any(each is decoder for each in module.modules())]
        self.models = [module for module in around if "input_ids" in _signature(type(module)).parameters]
        self.shape: tuple[int, int] | None = None
        self.ran: list[int] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        with _opened([*_thread.blocks, self]):
            yield

    def replaced(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield owner, name and replacement of each attribute that is replaced while the block is open."""
        for router, (_, layer) in self.routers.items():
            yield router, layer.method, MethodType(_router_forward(layer.method), router)
        for module in self.models:
            yield module, "forward", MethodType(_model_forward(type(module)), module)
        yield checkpoint._CheckpointFrame, "__init__", _init_frame
        yield checkpoint.CheckpointFunction, "forward", staticmethod(_forward_reentrant)

    def begin(self, shape: tuple[int, int], mask: Tensor | None) -> None:
        self.shape, self.ran = shape, []

    def end(self) -> None:
        """Check that each layer has run."""
        for index, layer in self.routers.values():
            if index not in self.ran:
                raise RuntimeError(f"model: {self.name} has not run the router {layer.name}, whose routing is unknown")

    def note(self, index: int, layer: _Layer, chosen: Tensor) -> None:
        """Note which experts (T, K) a layer has taken in the forward under way."""
        if index in self.ran:
            raise RuntimeError(f"model: {self.name} has run the router {layer.name} twice in a forward")
        self.ran.append(index)


class _Replay(_Block):
    """A block of `replay_routing`. It lets experts that run on fp8moe train their weights."""

    def __init__(self, model: nn.Module, layers: list[_Layer], routing: Tensor):
        super().__init__(model, layers)
        self.routing = {routing.device: routing}
        self.batch = tuple(routing.shape[:2])
        self.experts = [module for module in model.modules() if runs_here(module)]

    def replaced(self) -> Iterator[tuple[Any, str, Any]]:
        yield from super().replaced()
        for module in self.experts:
            yield module, TRAINS, True

    def begin(self, shape: tuple[int, int], mask: Tensor | None) -> None:
        for module in self.experts:
            prepare_training(module)
        super().begin(shape, mask)

    def given(self, index: int, device: torch.device) -> Tensor:
        """Return the experts (B, L, K) of a layer."""
        if device not in self.routing:
            self.routing[device] = next(iter(self.routing.values())).to(device)
        return self.routing[device][:, :, index]


class LayerReplay(_Replay):
    """A block in which one router takes given experts again, in a forward that a backward computes again.

    name, router: see `_Layer`. chosen (T, K): the experts. experts: the modules that `_Replay` lets train.
    """

    def __init__(self, name: str, router: nn.Module, chosen: Tensor, experts: list[nn.Module]):
        form = form_of(router, CHOICE)
        sizes = (operator.attrgetter(size)(router) for size in (form.num_experts, form.top_k))
        self.routers = {router: (0, _Layer(name, [router], "forward", *sizes))}
        self.models = []
        self.routing = {chosen.device: chosen[None, :, None]}
        self.experts = experts

    @contextmanager
    def open(self) -> Iterator[None]:
        with _opened([self], recomputes=True):
            yield


class Recorder(_Block):
    """A block of `record_routing` that can be opened several times. sizes: (layers, K) of its routing.

    Raises TypeError or ValueError for a model whose routers are not known.
    """

    def __init__(self, model: nn.Module):
        layers = _layers_of(model)
        super().__init__(model, layers)
        self.sizes = len(layers), layers[0].top_k

    @contextmanager
    def open(self) -> Iterator[RecordedRouting]:
        self.recorded = RecordedRouting()
        with super().open():
            yield self.recorded

    def begin(self, shape: tuple[int, int], mask: Tensor | None) -> None:
        super().begin(shape, mask)
        self.chosen: dict[int, Tensor] = {}
        self.mask = mask

    def note(self, index: int, layer: _Layer, chosen: Tensor) -> None:
        super().note(index, layer, chosen)
        self.chosen[index] = chosen.view(*self.shape, -1)

    def end(self) -> None:
        super().end()
        device = self.chosen[0].device
        routing = torch.stack([self.chosen[index].to(device) for index in sorted(self.chosen)], 2).to(torch.int16)
        if self.mask is not None and self.mask.ndim == 2:
            seen = self.mask[:, -self.shape[1] :].to(device) != 0
            routing = routing.masked_fill(~seen[:, :, None, None], -1)
        self.recorded.routing = routing


@contextmanager
def _opened(blocks: list[_Block], recomputes: bool = False) -> Iterator[None]:
    """Make these the blocks that this thread has open."""
    before = _thread.blocks, _thread.recomputes, recorders.get(), here.trained
    replays = any(isinstance(block, _Replay) for block in blocks)
    routers = [] if replays else [router for block in blocks for router in block.routers if runs_as_written(router)]
    held = []
    try:
        for block in blocks:
            for owner, name, ours in block.replaced():
                hold(owner, name, ours)
                held.append((owner, name))
        _thread.blocks, _thread.recomputes = blocks, recomputes
        recorders.set({router: functools.partial(_note, router) for router in routers})
        here.trained = {module for block in blocks if isinstance(block, _Replay) for module in block.experts}
        yield
    finally:
        _thread.blocks, _thread.recomputes, recorded, here.trained = before
        recorders.set(recorded)
        for owner, name in reversed(held):
            release(owner, name)


def _rejoining(run: Callable) -> Callable:
    """Return `run` such that it replays, in any thread and at any time, what this thread replays now."""
    blocks = [block for block in _thread.blocks if isinstance(block, _Replay)]
    if not blocks:
        return run

    @functools.wraps(run)
    def rejoined(*args: Any, **kwargs: Any) -> Any:
        with _opened(blocks, recomputes=True):
            return run(*args, **kwargs)

    return rejoined


# torch.compile looks for other functions than these when it runs a module again: they are the same in each block.


def _init_frame(self: Any, recompute_fn: Callable, *args: Any, **kwargs: Any) -> None:
    """In the place of the constructor of a region that torch.utils.checkpoint computes again."""
    replaced.theirs(checkpoint._CheckpointFrame, "__init__")(self, _rejoining(recompute_fn), *args, **kwargs)


def _forward_reentrant(ctx: Any, run_function: Callable, *args: Any) -> Any:
    """In the place of the same region's forward, with use_reentrant=True."""
    out = replaced.theirs(checkpoint.CheckpointFunction, "forward")(ctx, run_function, *args)
    ctx.run_function = _rejoining(run_function)
    return out


@functools.cache
def _signature(kind: type[nn.Module]) -> inspect.Signature:
    return inspect.signature(kind.forward)


@functools.cache
def _model_forward(kind: type[nn.Module]) -> Callable:
    """Make the forward of a module that takes input_ids, for its class."""

    @torch.compiler.disable(recursive=False)
    @functools.wraps(kind.forward)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        theirs = replaced.theirs(module, "forward")
        blocks = [block for block in _thread.blocks if module in block.models]
        if not blocks:
            return theirs(*args, **kwargs)
        inputs = _signature(kind).bind_partial(module, *args, **kwargs).arguments
        inputs |= inputs.get("kwargs", {})
        tokens = inputs.get("input_ids")
        tokens = inputs.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:  # its inner module gets them
            return theirs(*args, **kwargs)
        shape = tuple(tokens.shape[:2])
        for block in blocks:
            if isinstance(block, _Replay) and block.batch != shape:
                raise ValueError(
                    f"routing: expected the experts of tokens (B, L) = {shape} of input_ids, got {block.batch}"
                )
        begun = [] if _thread.recomputes else [block for block in blocks if block.shape is None]
        try:
            for block in begun:
                block.begin(shape, inputs.get("attention_mask"))
            out = theirs(*args, **kwargs)
            for block in begun:
                block.end()
        finally:
            for block in begun:
                block.shape = None
        return out

    return forward


@functools.cache
def _router_forward(method: str) -> Callable:
    """Make the method that chooses experts."""

    @torch.compiler.disable
    def choose(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        theirs = replaced.theirs(module, method)
        blocks = [block for block in _thread.blocks if module in block.routers]
        if not blocks:
            return theirs(*args, **kwargs)
        index, layer = blocks[-1].routers[module]
        replay = next((block for block in reversed(blocks) if isinstance(block, _Replay)), None)
        choice = _Choice(module, layer, None if replay is None else functools.partial(replay.given, index))
        with choice:
            out = theirs(*args, **kwargs)
        if choice.chosen is not None:
            _note(module, choice.chosen)
        elif replay is not None:
            raise RuntimeError(f"model: {type(module).__name__} ({layer.name}) has chosen experts in an unknown way")
        return out

    return choose


def _note(router: nn.Module, chosen: Tensor) -> None:
    """Note in this thread's blocks which experts (T, K) a router has taken."""
    for block in () if _thread.recomputes else _thread.blocks:
        if block.shape is not None and router in block.routers:
            block.note(*block.routers[router], chosen)


class _Choice(TorchFunctionMode):
    """Replaces the top-k by which a router chooses experts, where experts are given, and keeps what was chosen.

    given: returns the experts (B, L, K) on a device; None: the router chooses. chosen: experts (T, K), once it has.
    """

    def __init__(self, router: nn.Module, layer: _Layer, given: Callable[[torch.device], Tensor] | None):
        super().__init__()
        self.router, self.layer, self.given = router, layer, given
        self.chosen: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.topk, torch.Tensor.topk):
            scores, (values, indices) = args[0], result
            if scores.shape[-1] == self.layer.num_experts and indices.shape[-1] == self.layer.top_k:
                indices = self._choose(indices)
                values = values if self.given is None else scores.gather(-1, indices)
                return torch.return_types.topk((values, indices))
            if scores.ndim == 2 and self.given is not None:  # groups of experts: those of the given ones too
                given = self._given(indices) // (self.layer.num_experts // scores.shape[-1])
                indices = torch.cat([indices, torch.where(given < 0, indices[:, :1], given)], -1)
                return torch.return_types.topk((scores.gather(-1, indices), indices))
        elif function is torch.Tensor.__getitem__ and args[0] is getattr(self.router, "tid2eid", None):
            return self._choose(result)
        return result

    def _choose(self, own: Tensor) -> Tensor:
        """Return the given experts, and the router's own choice where none are given."""
        if self.given is not None:
            given = self._given(own).view(own.shape)
            own = torch.where(given < 0, own, given)
        self.chosen = own.detach().reshape(-1, self.layer.top_k)
        return own

    def _given(self, own: Tensor) -> Tensor:
        given = self.given(own.device)
        if given.shape[:2].numel() != own.shape[:-1].numel():
            raise ValueError(
                f"routing: expected experts of the {own.shape[:-1].numel()} tokens that {type(self.router).__name__} "
                f"({self.layer.name}) has got, got (B, L) = {tuple(given.shape[:2])}"
            )
        return given.reshape(-1, given.shape[-1]).long()
