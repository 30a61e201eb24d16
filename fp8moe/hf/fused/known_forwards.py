"""Recognises forwards of transformers' modules by digests of their source code.

transformers repeats the same forward in the file of every model that uses it, so a few digests serve many models. A
digest ignores annotations, docstrings and decorators. Functions that a forward calls beside its own modules are
recognised by digests, too.
"""

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe.hf.experts import is_kept
from fp8moe.hf.versions import LATER_DIGESTS


@functools.cache
@torch.compiler.assume_constant_result
def digest(function: Callable) -> str:
    """Return a hash of the function's source code, ignoring its name, annotations, docstring and decorators."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    text = f"({ast.unparse(tree.args)})\n{ast.unparse(ast.Module(body, []))}"
    value = hashlib.sha256(text.encode()).hexdigest()[:16]
    return LATER_DIGESTS.get(value, value)


def form_of(module: nn.Module, forms: dict[str, Any], method: str = "forward") -> Any:
    """Return the description in `forms` of the forward, or another method, of the module's class, or None.

    forms: maps digests of forwards to descriptions.
    """
    try:
        return forms.get(digest(getattr(type(module), method)))
    except (AttributeError, OSError, TypeError, SyntaxError):  # no such method, or without Python source
        return None


def called(module: nn.Module, name: str) -> Callable | None:
    """Return the global function `name` in the file of the module's forward, or None."""
    return inspect.unwrap(type(module).forward).__globals__.get(name)


def rotary_of(attention: nn.Module) -> "Rotary | None":
    """Return the description of the attention's rotary embedding; None if `rotary` does not compute this one."""
    function = called(attention, "apply_rotary_pos_emb")
    form = None if function is None else ROTARY.get(digest(function))
    helper = None if form is None else inspect.unwrap(function).__globals__.get(form.helper)
    return form if helper is not None and digest(helper) == form.digest else None


recorders: ContextVar[Mapping[nn.Module, Callable[[Tensor], None]]] = ContextVar(
    "recorders", default=MappingProxyType({})
)
"""While routing is recorded, not replayed: what gets the experts (T, K) that a router chooses in fp8moe's kernels."""

_HOOKS = ("_forward_pre_hooks", "_backward_pre_hooks", "_backward_hooks")


def runs_as_written(module: nn.Module) -> bool:
    """Return whether the module has no hooks, and its forward is the class's own or was set by fp8moe.

    `optimize`, `unregister` and `record_routing` set forwards. transformers leaves behind hooks that record outputs;
    these hooks are ignored unless a call asks for the outputs.
    """
    own = module.__dict__
    as_written = "forward" not in own or is_fused(module) or is_kept(module) or module in recorders.get()
    if not as_written or any(own[kind] for kind in _HOOKS):
        return False
    return all(map(_is_idle, own["_forward_hooks"].values()))


def is_cast(weight: Tensor) -> bool:
    """Return whether torch.autocast is enabled and would run the module of this weight in another dtype."""
    kind = weight.device.type
    return not weight.is_meta and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != weight.dtype


def is_fused(module: nn.Module) -> bool:
    """Return whether the module's forward is one that `optimize` gave it."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and forward.func.__module__.startswith(__package__)


def _is_idle(hook) -> bool:
    from transformers.utils import output_capturing

    recorder = hook.__module__ == output_capturing.__name__ and hook.__name__ == "output_capturing_hook"
    return recorder and output_capturing._active_collector.get() is None


@dataclass(frozen=True)
class Attention:
    """Description of an attention forward with projections q, k, v and o and a rotary embedding.

    norm: whether queries and keys of each head are normalized: "always", "if use_qk_norm" or "never". window: where
    the forward reads the sliding window from: "module", "config" or "nowhere". sinks: whether heads have sinks.
    """

    norm: str
    window: str
    sinks: bool = False


@dataclass(frozen=True)
class Rotary:
    """Description of a function that applies rotary embedding to q and k.

    helper, digest: the name and digest of the function that it calls. half: whether its cos and sin have one column
    for each pair of values that are rotated together, not one for each value.
    """

    helper: str
    digest: str
    half: bool = False


@dataclass(frozen=True)
class Router:
    """Description of a router forward.

    score: the function applied to logits, "softmax" or "sigmoid". normalize: when weights are divided by their sum:
    "always" or "if norm_topk_prob". in_float32: whether logits are computed in float32; if not, they have the dtype of
    the input. cast: whether weights are cast to the dtype of the logits. bias: whether experts are chosen with a
    correction bias and expert groups. logits_bias: whether a bias is added to the logits.
    """

    score: str
    normalize: str
    in_float32: bool = False
    cast: bool = True
    bias: bool = False
    logits_bias: bool = False


@dataclass(frozen=True)
class Choice:
    """Description of a function that chooses experts by one top-k, which `fp8moe.hf.routing` replaces.

    num_experts, top_k: paths, from the function's module, of the attributes with the number of experts to choose from,
    those included that compute nothing, and of those chosen for each token.
    """

    num_experts: str = "num_experts"
    top_k: str = "top_k"


@dataclass(frozen=True)
class Block:
    """Description of the forward of a mixture-of-experts block.

    shared: the attribute name of the shared experts, None if there are none. gated: whether a sigmoid gate scales the
    shared experts' result. router: the attribute name of the router.
    """

    shared: str | None = None
    gated: bool = False
    router: str = "gate"


# The comment at each digest names one class of transformers with this forward; most occur in many models.
RMS_NORM = {
    "1b07ee1747472a39": True,  # LlamaRMSNorm
    "b1de898ee5fd9935": True,  # GptOssRMSNorm, which does not round before it multiplies by the weight
}
ROTARY_TABLES = {"4d38bfa9ff6accf4": True}  # MixtralRotaryEmbedding, which computes the cosines and sines
DECODER_LAYER = {
    "92647791d19bfb72": True,  # Qwen3MoeDecoderLayer
    "96644274337cc9a1": True,  # MixtralDecoderLayer
    "5ad457d5ec4d898d": True,  # GptOssDecoderLayer, whose mlp also returns routing weights
}
MLP = {"0a08cc4ca23a9a0e": True}  # Qwen3MoeMLP
ATTENTION = {
    "ae8de13efb721403": Attention("never", "nowhere"),  # Qwen2MoeAttention
    "c167ccd9ac50b49b": Attention("always", "module"),  # Qwen3MoeAttention
    "f646f8be1444751f": Attention("never", "config"),  # MixtralAttention
    "bcc7d9a8194d1110": Attention("if use_qk_norm", "nowhere"),  # Glm4MoeAttention
    "22d2a9344e3cc50b": Attention("never", "module", sinks=True),  # GptOssAttention
}
LATENT_ATTENTION = {"7035ce544a77a2ac": True}  # DeepseekV3Attention
# Attention to the latents that an indexer has chosen, and whether its forward returns the choice, too. In transformers
# 5.17 these classes cache expanded keys and values, so their forwards are not known.
SPARSE_ATTENTION = {
    "c1663e0a09b5d851": False,  # DeepseekV32Attention
    "46259a3da3e115e0": True,  # GlmMoeDsaAttention
}
EXPANSION = {"4cf8bd8cc9c9b3aa": True}  # DeepseekV3Attention.expand_kv
ROUTER = {
    "9df852d229406d32": Router("softmax", "if norm_topk_prob"),  # Qwen3MoeTopKRouter
    "7fb11be956c0942d": Router("softmax", "always"),  # Qwen3VLMoeTextTopKRouter
    "89372d209011b62d": Router("softmax", "always", cast=False),  # MixtralTopKRouter
    "730bcb26bf7bb223": Router("softmax", "always", logits_bias=True),  # GptOssTopKRouter
    # DeepseekV3TopkRouter
    "df3fd62777ada19f": Router("sigmoid", "if norm_topk_prob", in_float32=True, cast=False, bias=True),
}
# Routers whose scores the kernels do not compute; like those above, they differ in scores and weights.
CHOICE = {
    **dict.fromkeys(ROUTER, Choice()),
    "76d2710ee3ee2e3c": Choice(),  # AXK2TopkRouter
    "da0b10ad4ba6bfc9": Choice(),  # AfmoeTokenChoiceRouter
    "1a590caed08d0e9d": Choice(),  # AriaTextTopKRouter
    "a67193093d657152": Choice(),  # BeamTopKRouter
    "3261cecd308d7082": Choice(),  # Cohere2MoeTopKRouter
    "3feb4960ef6e8637": Choice("experts.num_experts"),  # DbrxFFN.route_tokens_to_experts
    "d2010201e90de22f": Choice(),  # DeepseekV2TopkRouter
    "b8466ce414675d81": Choice(),  # DeepseekV4TopKRouter
    "728b76062848bdf7": Choice(),  # DeepseekV4HashRouter: a table of tokens in place of top-k
    "733b4247aacad080": Choice(),  # Ernie4_5_MoeTopKRouter
    "4fd85a8308671691": Choice(),  # Ernie4_5_MoeTopKRouter of transformers 5.17
    "74f53deaa89fd4e6": Choice(),  # FlintTopKRouter
    "25cc4f24dd51cfcd": Choice("config.num_experts", "config.top_k_experts"),  # Gemma4TextRouter
    "d3fe06f01eb99d12": Choice(),  # GraniteMoeTopKRouter
    "054c23255c47177c": Choice(),  # GraniteMoeTopKRouter of transformers 5.17
    "57cbffcdfaa41606": Choice(),  # HYV3TopKRouter
    "ac76e7774a11176e": Choice(),  # HunYuanMoEV1Gate
    "07f7569743b66bfe": Choice(),  # Inkling2TopKRouter
    "4f664c4278054bb3": Choice(),  # InklingTopkRouter
    "10c13483e2797a69": Choice(),  # InklingTopkRouter of transformers 5.17
    "61397d66621ee113": Choice(),  # JambaTopKRouter
    "508022caf92a403e": Choice(),  # JambaSparseMoeBlock.route_tokens_to_experts of transformers 5.17
    "c83ca6d4bb2e61d1": Choice(),  # Kolibri1TopKRouter
    "4e2106d9c6d97951": Choice(),  # LagunaTopKRouter
    "cbed096c9a51ba9e": Choice(),  # LaraMiniTopKRouter
    "cfcd7c8a6022e8a3": Choice(),  # Lfm2MoeTopKRouter
    "ee42cea89a08504f": Choice(),  # Llama4Router
    "07f141f7cfde361f": Choice("n_routed_experts"),  # LongcatFlashTopkRouter
    "4d998e18a7d75601": Choice("n_routed_experts"),  # LongcatFlashTopkRouter of transformers 5.17
    "fff689447db0c335": Choice(),  # MiniMaxM2TopKRouter
    "7fd3a594e24bb8a1": Choice(),  # MiniMaxM3VLTopKRouter
    "124e961197300e89": Choice(),  # Mistral4TopkRouter
    "fa030e06e18296b0": Choice(),  # MistralLarge4TextTopkRouter
    "f6138af0cb66545c": Choice(),  # MuseSparkTopkRouter
    "1672aace23377293": Choice("num_router_classes"),  # ZayaRouter
}
BLOCK = {
    "1bb4331ef2d3d098": Block(),  # Qwen3MoeSparseMoeBlock
    "bf04a7ab1a1de69c": Block(),  # OlmoeSparseMoeBlock
    "b6f29946c1778188": Block(),  # MixtralSparseMoeBlock
    "ef217d27435dae99": Block("shared_expert", gated=True),  # Qwen2MoeSparseMoeBlock
    "e9533d621e160c35": Block("shared_experts"),  # DeepseekV3MoE
    "e26783a9b4b6ed9b": Block(router="router"),  # GptOssMLP
}
_ROTATE_HALF = Rotary("rotate_half", "4c77fab22626d7c9")
ROTARY = {
    "15cdd1d7eb945d09": _ROTATE_HALF,  # the apply_rotary_pos_emb of qwen3_moe: whole heads
    "4b7dbe68e03c2004": _ROTATE_HALF,  # the apply_rotary_pos_emb of glm4_moe: a part of the heads
    # the apply_rotary_pos_emb of gpt_oss
    "4c39ab31fe31a341": Rotary("_apply_rotary_emb", "aaee2b19b11930dc", half=True),
}
INTERLEAVED_ROTARY = {"6db14a92385ecd21": True}  # the apply_rotary_pos_emb_interleave of deepseek_v3
