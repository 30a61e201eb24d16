"""The decoder layers that a generator would have, with the weights of a training model, for `on_policy`.

A `Twin` shares memory with the model where it can: FP8 weights are those that masters keep for their own forward, and
weights that have the generator's dtype are the model's own. Other weights are copies, made once after each step of an
optimizer, and so are projections that a generator runs as one, whose weights are adjacent in memory.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.hf.experts import NAME as FP8MOE
from fp8moe.hf.experts import cached_layer, chosen_implementation, masters_of, prepare_training, runs_here
from fp8moe.hf.fused import known_forwards, linears, optimize
from fp8moe.hf.fused.fuse import is_decoder_layer
from fp8moe.hf.fused.known_forwards import form_of, is_fused, rotary_of, runs_as_written
from fp8moe.hf.packed_attention import NAME
from fp8moe.kernels.decoder_ops.decode_attention import serves
from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.linear import FP8Linear
from fp8moe.layers.master import generation, quantized
from fp8moe.layers.parameters import frozen, is_sharded


class Twin(nn.Module):
    """The layers and the final norm of a decoder, fused as in a `GraphDecoder`, and the weights of its output layer.

    layers, norm: the modules. dtype: the generator's, bfloat16 for a model in float32. head: weight and bias of the
    output layer in this dtype.
    """

    @torch.inference_mode(False)
    def __init__(self, model: Any):
        super().__init__()
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        main = decoder.norm.weight.dtype
        self.dtype = torch.bfloat16 if main is torch.float32 else main
        self._model = _parts_of(model)
        self._dtypes = _dtypes_of(self._model)
        self._experts: list[tuple[GroupedExperts, nn.Module]] = []
        memo: dict[int, Any] = {}
        for config in {id(each): each for each in (model.config, decoder.config)}.values():
            memo[id(config)] = own = copy.deepcopy(config)
            own._attn_implementation = NAME
        values: list[tuple[nn.Parameter, Callable[[], Tensor]]] = []
        for name, module in [*decoder.layers.named_modules(), ("norm", decoder.norm), ("lm_head", head)]:
            if _runs_experts(module):
                new = memo[id(module)] = _grouped(_layer_of(module))
                self._experts.append((new, module))
                continue
            masters = isinstance(module, FP8Linear) and module.trainable
            for own_name, value in module._parameters.items():
                if value is None or id(value) in memo or (masters and own_name == "weight"):
                    continue
                dtype = value.dtype if _stays(model, f"{name}.{own_name}", value) else self.dtype
                shared = value.detach() if value.dtype is dtype else torch.empty_like(value, dtype=dtype)
                memo[id(value)] = frozen(shared)
                values.append((memo[id(value)], value.detach))
            if masters:
                new = memo[id(module)] = FP8Linear(module.in_features, module.out_features, bias=False, device="meta")
                new.bias = None if module.bias is None else memo[id(module.bias)]
                for index, own_name in enumerate(FP8Linear.weight_names):
                    setattr(new, own_name, frozen(_of_master(module, index)))
                    values.append((getattr(new, own_name), partial(_of_master, module, index)))
        self.layers, self.norm = copy.deepcopy(decoder.layers, memo), copy.deepcopy(decoder.norm, memo)
        self.head = linears.Weights(memo[id(head.weight)], None, None if head.bias is None else memo[id(head.bias)])
        self.requires_grad_(False).eval()
        optimize(self)
        # Whether the memory is that of the value itself, or a copy.
        self._values = [(new, value, new.data_ptr() == value().data_ptr()) for new, value in values]
        self._stamp: Any = None

    def is_of(self, model: Any) -> bool:
        """Return whether the model has the modules, parameters and dtypes that it had when the twin was made."""
        parts = _parts_of(model)
        return list(map(id, self._model)) == list(map(id, parts)) and self._dtypes == _dtypes_of(parts)

    @torch.inference_mode(False)
    def refresh(self, model: Any) -> None:
        """Take the model's weights, if they may have changed since the last call.

        Raises TypeError or ValueError, naming the class, for experts whose weights want gradients but cannot be trained
        in FP8.
        """
        layers = model.get_decoder().layers
        of_experts = [_layer_of(module) for _, module in self._experts]
        tensors = [value for value in (*self._model, *layers.buffers()) if isinstance(value, Tensor)]
        stamp = generation(), [(value.data_ptr(), value._version, value.requires_grad) for value in tensors]
        if stamp == self._stamp:
            return
        with torch.no_grad():
            for path, module in layers.named_modules():
                for name, value in module._buffers.items():
                    stays = value is None or _stays(model, name, value)
                    self.layers.get_submodule(path)._buffers[name] = value if stays else value.to(self.dtype)
            for new, value, shared in self._values:
                if shared:
                    new.data = value()
                else:
                    new.copy_(value())
            for (new, _), layer in zip(self._experts, of_experts, strict=True):
                new._parameters.update(_in_fp8(layer))
        self._stamp = stamp


def _parts_of(model: Any) -> list[Any]:
    decoder = model.get_decoder()
    whole = (decoder.layers, decoder.norm, model.get_output_embeddings())
    return [part for each in whole for parts in (each.modules(), each.parameters()) for part in parts]


def _dtypes_of(parts: list[Any]) -> list[torch.dtype]:
    return [part.dtype for part in parts if isinstance(part, Tensor)]


def _of_master(module: FP8Linear, index: int) -> Tensor:
    return quantized(module.weight)[index]


def _stays(model: Any, name: str, value: Tensor) -> bool:
    """Return whether a generator keeps a parameter in its dtype."""
    if value.dtype is not torch.float32 or model.get_decoder().norm.weight.dtype is not torch.float32:
        return True
    kept = (
        getattr(model, attribute, None) or () for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    )
    return any(part in names for names in kept for part in name.split("."))


# Experts.


def _runs_experts(module: nn.Module) -> bool:
    return type(module) is GroupedExperts or runs_here(module)


def _layer_of(module: nn.Module) -> GroupedExperts:
    """Return the layer that a module of experts is or, if it uses "fp8moe", runs."""
    if type(module) is GroupedExperts:
        return module
    prepare_training(module)
    masters = masters_of(module) if any(value.requires_grad for value in module.parameters()) else None
    return cached_layer(module) if masters is None else masters


@torch.no_grad()
def _in_fp8(layer: GroupedExperts) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a frozen layer, which are the layer's own, or share the memory that masters keep."""
    if not layer.trainable:
        return layer._parameters
    up, down, *_ = layer.whole_weights().layer
    return dict(zip(layer.weight_names, map(frozen, (*up, *down)), strict=True))


def _grouped(layer: GroupedExperts) -> GroupedExperts:
    """Return a frozen layer with the FP8 weights of this one, which it shares."""
    if layer.trainable:
        new = layer.in_format("fp8")
    else:
        new = copy.copy(layer)
        new._parameters = {}
    new._parameters.update(_in_fp8(layer))
    return new


# What is refused.

_FOR_CHECKPOINTS = "make_inputs_require_grads"
"""The hook by which transformers lets the embedding's result require gradients, for reentrant checkpoints."""


def check(model: Any) -> None:
    """Raise ValueError for a model with parts whose results might have other bits than in a generator."""
    found = _refusal(model)
    if found is not None:
        raise ValueError(f"model: {type(model).__name__} cannot run in on_policy: {found}")


def _refusal(model: Any) -> str | None:
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module):
        return f"{type(decoder).__name__} has no list of layers with a norm"
    if type(head) is not nn.Linear or type(model.get_input_embeddings()) is not nn.Embedding:
        return f"its output layer is {type(head).__name__}, its embedding {type(model.get_input_embeddings()).__name__}"
    config = model.config.get_text_config(decoder=True)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            return f"soft caps ({name})"
    if any(is_sharded(value) for value in model.parameters()):
        return "its parameters are spread over ranks"
    for index, layer in enumerate(layers):
        if (found := _layer_refusal(layer)) is not None:
            return f"layers.{index}: {found}"
    if form_of(norm, known_forwards.RMS_NORM) is None:
        return f"the norm {type(norm).__name__} is not known"
    named = [(f"layers.{path}", module) for path, module in layers.named_modules()]
    for path, module in [*named, ("norm", norm), ("lm_head", head), ("embed_tokens", model.get_input_embeddings())]:
        hooks = [] if path != "embed_tokens" else list(module._forward_hooks.values())
        if hooks and all(hook.__name__ == _FOR_CHECKPOINTS for hook in hooks):
            continue
        if is_fused(module) or not runs_as_written(module):
            return f"{path} ({type(module).__name__}) has hooks or another forward"
    count = head.weight.shape[0]
    if head.weight.is_cuda and count > 1024 and count % 4:
        return f"PyTorch's log_softmax of {count} logits sums each row in another order; expected a multiple of 4"
    return None


def _layer_refusal(layer: Any) -> str | None:
    if not is_decoder_layer(layer):
        return f"the code of {type(layer).__name__} is not known"
    attention, block = layer.self_attn, layer.mlp
    form = form_of(attention, known_forwards.ATTENTION)
    if form is None or rotary_of(attention) is None:
        return f"the attention {type(attention).__name__} is not known"
    if form.sinks:
        return f"the attention {type(attention).__name__} has sinks"
    if not serves(attention.head_dim):
        return f"heads of {attention.head_dim} values"
    if form_of(block, known_forwards.MLP) is None:
        known = form_of(block, known_forwards.BLOCK)
        if known is None:
            return f"the feed-forward {type(block).__name__} is not known"
        router = getattr(block, known.router)
        if form_of(router, known_forwards.ROUTER) is None:
            return f"the router {type(router).__name__} is not known"
        if not _runs_experts(block.experts):
            how = chosen_implementation(block.experts)
            return (
                f"its experts {type(block.experts).__name__} run by {how!r}; expected "
                f"experts_implementation={FP8MOE!r} or GroupedExperts"
            )
        if any(getattr(block.experts, name, None) is not None for name in ("parallel", "_fp8moe_parallel")):
            return f"its experts {type(block.experts).__name__} are spread over ranks"
    for path, module in layer.named_modules():
        inside = module._parameters or module._modules
        if inside and not any(form_of(module, forms) for forms in _KNOWN) and not _is_known(module):
            return f"{path} ({type(module).__name__}) is not known"
    return None


_KNOWN = (
    *(known_forwards.DECODER_LAYER, known_forwards.ATTENTION, known_forwards.RMS_NORM),
    *(known_forwards.BLOCK, known_forwards.ROUTER, known_forwards.MLP),
)


def _is_known(module: nn.Module) -> bool:
    """Return whether this is a linear, or experts that fp8moe runs."""
    return type(module) in (nn.Linear, FP8Linear) or linears.weights(module) is not None or _runs_experts(module)
