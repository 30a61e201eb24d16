"""on_policy: a training model's forward with the bits of a generator.

Each decoder layer runs as the generator's would (`twin.Twin`), without recording gradients. Its backward computes the
layer again by its own code, with the experts that the forward has taken, and goes back through that (straight through).
So each layer is a checkpoint of its own.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe.hf import replaced
from fp8moe.hf.architecture import is_of_transformers
from fp8moe.hf.experts import runs_here
from fp8moe.hf.fused import known_forwards
from fp8moe.hf.fused.known_forwards import form_of, recorders
from fp8moe.hf.packed_attention import PACKING, AttendedSequences, attention_of, sequences_of
from fp8moe.hf.routing import LayerReplay, check_one_thread, check_outside
from fp8moe.hf.twin import Twin, check
from fp8moe.layers.wrapped import unwrapped
from fp8moe.runtime import config
from fp8moe.runtime.fixed_rows import by_fixed_rows, linears_by_fixed_rows


@contextmanager
def on_policy(model: nn.Module) -> Iterator[None]:
    """Give the model's forwards in the block, in this thread, the bits of a generator that it refits.

    In the block, ``model(input_ids).logits.float().log_softmax(-1)`` equals, bit by bit, the log probabilities that a
    `GraphDecoder` without cache_dtype and output_dtype, made and called in `fp8moe.batch_invariant`, returns for the
    same tokens after ``fp8moe.refit(generator, model)``. This holds for prompts and answers of any length and in any
    batch, padded as attention_mask says or packed as position_ids say, in train() and eval().

    model: a model of transformers, which torch.compile or DistributedDataParallel may wrap, whose layers fp8moe knows,
        as Llama's, Mixtral's, Qwen3's and Qwen3-MoE's. Linears and experts are in FP8 in the generator where they have
        masters here: `FP8Linear` and `GroupedExperts` with a ``master_dtype``; experts with
        ``experts_implementation="fp8moe"`` too. All other weights are bfloat16 in the generator if they are float32
        here, otherwise of the same dtype.

    The block is one of `fp8moe.batch_invariant`, too. Backwards may come behind it, in any order, before the weights
    change. They are straight through and deterministic: each layer is computed again, by its own code and with the
    experts that the forward took, so that only its input is kept; gradient checkpointing is off in the block.

    Raises TypeError or ValueError at the beginning for a model that it cannot run, naming the part: other layers,
    attention with sinks or soft caps, other experts, parameters spread over ranks, hooks. Raises RuntimeError in a
    block of `replay_routing` or `record_routing` for the model. A forward raises ValueError before a layer runs, for a
    cache, a mask of four dimensions, positions that do not begin at 0, dropout, and router losses or hidden states in
    the output.
    """
    inner = unwrapped("model", model)
    if not is_of_transformers(inner):
        raise TypeError(f"model: expected a model of transformers, got {type(inner).__name__}")
    check_one_thread(model)
    check_outside("on_policy", model)
    with ExitStack() as stack:
        stack.enter_context(config.batch_invariant())
        block = _Block(inner)
        for owner, name, ours in block.replaced():
            stack.enter_context(replaced.holding(owner, name, ours))
        before = _thread.block
        _thread.block = block
        stack.callback(setattr, _thread, "block", before)
        yield


class _Thread(threading.local):
    """block: what this thread has open."""

    block: "_Block | None" = None


_thread = _Thread()
_twins: WeakKeyDictionary[nn.Module, Twin] = WeakKeyDictionary()


class _Block:
    """A block of `on_policy`.

    parts: layers and norm of the model -> their part. runs: whether a forward of the decoder is under way.
    """

    def __init__(self, model: Any):
        self.model, self.runs = model, False
        self.decoder, self.head = model.get_decoder(), model.get_output_embeddings()
        self.embedding = model.get_input_embeddings()
        if not replaced.is_held(self.decoder, "forward"):
            check(model)
        twin = _twins.get(model)
        if twin is None or not twin.is_of(model):
            _twins.pop(model, None)
            twin = _twins[model] = Twin(model)
        self.twin = twin
        pairs = [*zip(self.decoder.layers, twin.layers, strict=True), (self.decoder.norm, twin.norm)]
        self.parts = {own: _Part(own, theirs, self.decoder) for own, theirs in pairs}

    def replaced(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield owner, name and replacement of each attribute that is replaced while the block is open."""
        yield self.decoder, "forward", MethodType(_decoder_forward(type(self.decoder)), self.decoder)
        for part in self.parts:
            yield part, "forward", MethodType(_part_forward, part)
            yield part, "gradient_checkpointing", False
        yield self.head, "forward", MethodType(_head_forward, self.head)
        yield self.embedding, "forward", MethodType(_embedding_forward, self.embedding)

    @contextmanager
    def forward(self, sequences: AttendedSequences) -> Iterator[None]:
        self.runs = True
        try:
            with attention_of(self.decoder.config, sequences):
                yield
        finally:
            self.runs = False

    def refresh(self) -> None:
        if not self.twin.is_of(self.model):
            raise RuntimeError("on_policy: modules or parameters of the model were replaced or cast in the block")
        self.twin.refresh(self.model)


class _Part:
    """A layer or norm of the model, and its twin.

    router, name: the model's router in the layer, and its path, if the layer has experts. experts: the layer's modules
    of experts that use "fp8moe". dtype: of the model's hidden states.
    """

    def __init__(self, own: nn.Module, twin: nn.Module, decoder: Any):
        self.own, self.twin = own, twin
        self.config, self.dtype = decoder.config, decoder.norm.weight.dtype
        found = [(path, module) for path, module in own.named_modules() if form_of(module, known_forwards.ROUTER)]
        self.name, self.router = found[0] if found else ("", None)
        self.twin_router = twin.get_submodule(self.name) if found else None
        self.experts = [module for module in own.modules() if runs_here(module)]

    def run(self, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return the twin's result and the experts (T, K) that it took, or None. Without gradients."""
        chosen: list[Tensor] = []
        before = recorders.get()
        recorders.set({} if self.router is None else {self.twin_router: chosen.append})
        try:
            with _without_autocast(hidden), linears_by_fixed_rows():
                out = self.twin(hidden, **kwargs)
        finally:
            recorders.set(before)
        return out, *(chosen or [None])

    def again(self, hidden: Tensor, chosen: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
        """Return the result of the model's own code, with these experts."""
        replay = nullcontext()
        if self.router is not None:
            replay = LayerReplay(self.name, self.router, chosen, self.experts).open()
        whole = replaced.holding(self.own, "gradient_checkpointing", False)
        with replay, whole, attention_of(self.config):
            return type(self.own).forward(self.own, hidden, **kwargs)


class _StraightThrough(torch.autograd.Function):
    """Runs the twin of a layer or norm; its backward is that of the model's own module for the same input."""

    @staticmethod
    def forward(ctx: Any, part: _Part, kwargs: dict[str, Any], hidden: Tensor, *parameters: Tensor) -> Tensor:
        out, chosen = part.run(hidden, kwargs)
        ctx.part, ctx.kwargs, ctx.autocast = part, kwargs, _autocast_of(hidden)
        ctx.save_for_backward(hidden, chosen, *parameters)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, chosen, *parameters = ctx.saved_tensors
        dtype = ctx.part.dtype
        kwargs = {name: _cast(value, dtype) for name, value in ctx.kwargs.items()}
        with torch.enable_grad(), torch.autocast(hidden.device.type, **ctx.autocast):
            x = hidden.detach().to(dtype).requires_grad_()
            out = ctx.part.again(x, chosen, kwargs)
        wanted = [value for value, needed in zip((x, *parameters), ctx.needs_input_grad[2:], strict=True) if needed]
        grads = iter(torch.autograd.grad(out, wanted, grad.to(out.dtype), allow_unused=True))
        found = [next(grads) if needed else None for needed in ctx.needs_input_grad[2:]]
        if found[0] is not None:
            found[0] = found[0].to(hidden.dtype)
        return None, None, *found


class _Head(torch.autograd.Function):
    """Computes logits as a generator does: `ROWS` rows at a time, in the generator's dtype."""

    @staticmethod
    def forward(ctx: Any, ours: tuple[Tensor, Tensor | None], hidden: Tensor, weight: Tensor, bias: Tensor | None):
        ctx.save_for_backward(hidden, weight)
        rows = hidden.reshape(-1, hidden.shape[-1])
        with _without_autocast(hidden):
            logits = by_fixed_rows(lambda x: F.linear(x, *ours), rows)
        return logits.view(*hidden.shape[:-1], len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        _, of_hidden, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1]).to(weight.dtype)
        with _without_autocast(hidden):
            return (
                None,
                (rows @ weight).to(hidden.dtype).view(hidden.shape) if of_hidden else None,
                rows.T @ hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype) if of_weight else None,
                rows.sum(0) if of_bias else None,
            )


def _without_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)


def _autocast_of(x: Tensor) -> dict[str, Any]:
    kind = x.device.type
    return {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return tensors of floating point in this dtype, also those in a tuple, and anything else unchanged."""
    if isinstance(value, tuple):
        return tuple(_cast(each, dtype) for each in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


# What blocks replace while they are open.


@torch.compiler.disable
def _part_forward(module: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    block = _thread.block
    if block is None or not block.runs or module not in block.parts:
        return replaced.theirs(module, "forward")(hidden_states, *args, **kwargs)
    if args:
        kwargs |= inspect.signature(type(module).forward).bind_partial(module, hidden_states, *args).arguments
        kwargs = {name: value for name, value in kwargs.items() if name not in ("self", "hidden_states")}
    parameters = [value for value in module.parameters() if value.requires_grad]
    return _StraightThrough.apply(block.parts[module], kwargs, hidden_states, *parameters)


@torch.compiler.disable
def _head_forward(module: nn.Module, hidden: Tensor) -> Tensor:
    block = _thread.block
    if block is None or module is not block.head:
        return replaced.theirs(module, "forward")(hidden)
    return _Head.apply((block.twin.head.data, block.twin.head.bias), hidden, module.weight, module.bias)


@torch.compiler.disable
def _embedding_forward(module: nn.Module, tokens: Tensor) -> Tensor:
    block = _thread.block
    out = replaced.theirs(module, "forward")(tokens)
    return out if block is None or not block.runs or module is not block.embedding else out.to(block.twin.dtype)


@functools.cache
def _decoder_forward(kind: type[nn.Module]) -> Callable:
    """Make the forward of the module that runs the layers, for its class."""
    signature = inspect.signature(kind.forward)

    @torch.compiler.disable
    @functools.wraps(kind.forward)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        theirs = replaced.theirs(module, "forward")
        block = _thread.block
        if block is None or module is not block.decoder:
            return theirs(*args, **kwargs)
        given = signature.bind_partial(module, *args, **kwargs).arguments
        given = {name: value for name, value in given.items() if name != "self"}
        given |= given.pop("kwargs", {})
        options, sequences = _arguments(module, given)
        if options.get("inputs_embeds") is not None:
            options["inputs_embeds"] = options["inputs_embeds"].to(block.twin.dtype)
        block.refresh()
        with block.forward(sequences):
            return theirs(**options)

    return forward


def _arguments(decoder: Any, given: dict[str, Any]) -> tuple[dict[str, Any], AttendedSequences]:
    """Return the arguments of the decoder's own forward, and the sequences of the batch.

    Raises ValueError for arguments and settings that on_policy does not serve.
    """
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    batch, length = tokens.shape[:2]
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    for name in ("cache", "past_key_values"):
        if given.get(name) is not None:
            raise ValueError(f"{name}: on_policy runs whole sequences, without a cache")
    for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if given.get(name) or (given.get(name) is None and getattr(decoder.config, name, False)):
            raise ValueError(f"{name}: on_policy computes nothing but logits")
    for name in ("attention_dropout", "router_jitter_noise"):
        if decoder.training and getattr(decoder.config, name, 0):
            raise ValueError(f"{name}: on_policy expects 0 in training mode, as a generator has no such noise")
    if mask is not None and tuple(mask.shape) != (batch, length):
        raise ValueError(f"attention_mask: on_policy expects shape {(batch, length)}, got {tuple(mask.shape)}")
    if positions is None:
        if any(given.get(name) is not None for name in PACKING):
            raise ValueError("position_ids: on_policy expects them for packed sequences, got None")
        ones = torch.ones((1, length), dtype=torch.int64, device=tokens.device) if mask is None else mask.long()
        positions = (ones.cumsum(1) - 1).clamp(min=0)
    if positions.ndim != 2 or positions.shape[1] != length or positions.shape[0] not in (1, batch):
        raise ValueError(f"position_ids: on_policy expects shape {(batch, length)}, got {tuple(positions.shape)}")
    positions = positions.expand(batch, length)
    sequences = sequences_of(mask, positions)
    options = {name: value for name, value in given.items() if name not in PACKING}
    # A mask of ones, which says that transformers need not look for packed sequences.
    ones = torch.ones((batch, length), dtype=torch.bool, device=tokens.device)
    return options | {"attention_mask": ones, "position_ids": positions, "use_cache": False}, sequences
