"""Multi-head latent attention (MLA) of DeepSeek-V3: decode steps attend to the latents, without making keys and values.

For one new token, kv_b_proj is absorbed into the query and the output, so that all heads read the cached latents
directly: DeepSeek-V2, arXiv:2405.04434, section 2.1.2. For several new tokens, the latents are expanded to keys and
values as in the module's own forward. Into a static cache of GraphDecoder, one kernel writes the latents of new tokens
from the projections on, `kernels.latent.append`.
"""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fp8moe.hf.fused import known_forwards, linears, norms
from fp8moe.hf.fused.attention import (
    WITHOUT_EFFECT,
    AttentionMetadata,
    UnsupportedAttention,
    attention_interface,
    decoder_layer,
    unsupported,
)
from fp8moe.hf.fused.known_forwards import called, form_of, runs_as_written
from fp8moe.hf.versions import update_cache
from fp8moe.kernels.decoder_ops.rms_norm import Normed
from fp8moe.kernels.latent import append, latent_attention
from fp8moe.layers.master import Fingerprint
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import dequantize
from fp8moe.runtime import config


def serves(module: nn.Module, dtype: torch.dtype, position_embeddings: tuple[Tensor, Tensor] | None) -> bool:
    """Return whether `attend` computes the same as the module's own forward for an input of this dtype."""
    if not _is_known(module) or not runs_as_written(module):
        return False
    return position_embeddings is not None and position_embeddings[0].dtype is dtype


def prepare(module: nn.Module) -> str | None:
    """Make the weights of the input projections adjacent in memory; return a description of what is fused.

    Returns None for unknown code.
    """
    if not _is_known(module):
        return None
    together = runs_as_written(module) and linears.pack(inputs(module))
    return "queries and latents as one, latent attention" if together else "latent attention"


def attend(
    module: nn.Module,
    normed: Normed,
    lead: torch.Size,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    past_key_values: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Compute the module's result (B, T, H), including o_proj.

    normed: the module's input as rows (B * T, H), quantized or not. lead: (B, T). Other arguments: those of the
    module's own forward.
    """
    cos, sin = position_embeddings
    q, latent = linears.project(normed.quantized or normed.values, inputs(module), cos.dtype)
    if module.q_lora_rank is not None:
        q = _queries(module, q)
    q = q.view(*lead, -1, module.qk_head_dim)
    latent = latent.view(*lead, -1)
    layer = _static_layer(module, past_key_values if cache is None else cache, q, latent, cos, attention_mask)
    if layer is not None:
        return module.o_proj(_attend_in_place(module, q, latent, (cos, sin), attention_mask, layer, kwargs).flatten(2))
    q = q.transpose(1, 2)
    q_pass, q_rot = q.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    latent, k_rot = latent.split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
    latent, k_rot = module.kv_a_layernorm(latent)[:, None], k_rot[:, None]
    rotate = "apply_rotary_pos_emb_interleave" if module.config.rope_interleave else "apply_rotary_pos_emb"
    q_rot, k_rot = called(module, rotate)(q_rot, k_rot, cos, sin)
    if past_key_values is not None or cache is not None:
        latent, k_rot = update_cache(past_key_values, cache, latent, k_rot, module.layer_idx, kwargs)
    weight = None
    if lead[1] == 1 and _is_plain(module, attention_mask, latent.shape[2], kwargs):
        weight = up_weight(module.kv_b_proj, q.dtype)
    if weight is None:
        output = _expanded(module, torch.cat((q_pass, q_rot), dim=-1), latent, k_rot, attention_mask, kwargs)
    else:
        q = q_pass[:, :, 0], q_rot[:, :, 0]
        mask = None if attention_mask is None else attention_mask[:, 0]
        output = _absorbed(*q, latent[:, 0], k_rot[:, 0], weight, mask, module.scaling)
    return module.o_proj(output.reshape(*lead, -1))


def _static_layer(module: nn.Module, past: Any, q: Tensor, latent: Tensor, cos: Tensor, mask: Any) -> Any:
    """Return the module's layer of a cache if it is GraphDecoder's, and `append_latents` writes it; otherwise None."""
    norm, rest = module.kv_a_layernorm, module.qk_rope_head_dim
    if not isinstance(mask, AttentionMetadata) or not append.serves(q, latent.shape[-1], latent.shape[-1] - rest):
        return None
    if _is_interleaved(module) is None or not norms.serves(norm, q.dtype) or cos.shape[1:] != (q.shape[1], rest):
        return None
    values, rotary = latent[:, :, None].split([latent.shape[-1] - rest, rest], dim=-1)
    layer = decoder_layer(past, module.layer_idx, values, rotary)
    return layer if hasattr(layer, "latents") else None


def _is_interleaved(module: nn.Module) -> bool | None:
    """Return whether rotary pairs are neighbouring values; None for a rotary embedding of another kind."""
    if form_of(module, known_forwards.SPARSE_ATTENTION) is None and not module.config.rope_interleave:
        form = known_forwards.rotary_of(module)
        return None if form is None or form.half else False
    function = called(module, "apply_rotary_pos_emb_interleave")
    return True if known_forwards.digest(function) in known_forwards.INTERLEAVED_ROTARY else None


def _attend_in_place(
    module: nn.Module,
    q: Tensor,
    latent: Tensor,
    tables: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    layer: Any,
    kwargs: dict[str, Any],
    choose: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Write new tokens to a static cache, and attend to it; return (B, T, heads, D).

    q (B, T, heads, N + P), latent (B, T, R + P): as they are projected. q may be overwritten. choose: called once the
    latents are written; returns the columns (B, T, k) that the queries read. None: all that they see.
    """
    rank, rest = module.kv_lora_rank, module.qk_rope_head_dim
    passed, turned = q.split([q.shape[-1] - rest, rest], dim=-1)
    one = q.shape[1] == 1
    if one:
        to_keys, to_values = absorption(module, q.dtype, metadata, kwargs)
    query = q.new_empty((*q.shape[:3], rank + rest)) if one else q
    norm, cached = module.kv_a_layernorm, layer.latents()
    append.append_latents(
        *(turned, latent, norm.weight, *tables, query[..., -rest:], cached),
        columns=layer.position.columns,
        eps=norm.variance_epsilon,
        interleaved=_is_interleaved(module),
    )
    layer.written_in = layer.position.call
    keys, values = layer.first_columns()
    chosen = None if choose is None else choose()
    if one:
        multiply(passed, to_keys, query[..., :rank])
        how: dict[str, Any] = {"begin": metadata.first}
        if chosen is not None and chosen.shape[-1] < keys.shape[2]:  # otherwise every column is chosen
            how = {"indices": metadata.seen(chosen)}
        found = latent_attention(query, cached, metadata.ends, value_size=rank, scale=module.scaling, **how)
        out = q.new_empty((*q.shape[:3], to_values.shape[2]))
        multiply(found, to_values, out)
        return out
    keys, values = module.expand_kv(keys, values)
    kwargs = {"dropout": 0.0, "scaling": module.scaling, **kwargs}
    if chosen is not None:
        kwargs["indices"] = chosen
    return attention_interface(module)(module, query.transpose(1, 2), keys, values, metadata, **kwargs)[0]


def is_sparse(module: nn.Module) -> bool:
    """Return whether the module attends to the latents that an indexer chooses, by known code."""
    known = form_of(module, known_forwards.SPARSE_ATTENTION) is not None
    return known and expands_latents(module) and _is_interleaved(module) is True


def attend_sparse(
    module: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any,
    past_key_values: Any = None,
    cache: Any = None,
    position_ids: Tensor | None = None,
    prev_topk_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Any, ...] | None:
    """Compute the result of a module's forward, in which queries read only the latents that its indexer has chosen.

    Arguments are those of the module's own forward. Returns None for what is not computed here: a mask that is neither
    boolean nor GraphDecoder's, latents or a dtype that the kernel does not take, projections that cannot be absorbed,
    batch-invariant results, and hooks.
    """
    plain = isinstance(attention_mask, Tensor) and attention_mask.dtype is torch.bool
    size, rest, rank = module.qk_head_dim, module.qk_rope_head_dim, module.kv_lora_rank
    cos, sin = position_embeddings
    if not (plain or isinstance(attention_mask, AttentionMetadata)) or not runs_as_written(module):
        return None
    if cos.dtype is not hidden_states.dtype or not append.serves(hidden_states, rank + rest, rank):
        return None
    if plain and (config.settings.batch_invariant or up_weight(module.kv_b_proj, hidden_states.dtype) is None):
        return None
    lead = hidden_states.shape[:-1]
    q_resid, latent = linears.project(hidden_states.flatten(0, 1), inputs(module), hidden_states.dtype)
    q_resid = module.q_a_layernorm(q_resid)
    q = module.q_b_proj(q_resid).view(*lead, -1, size)
    q_resid, latent = q_resid.view(*lead, -1), latent.view(*lead, -1)
    past = past_key_values if cache is None else cache
    if module.indexer is None and prev_topk_indices is None:
        raise ValueError("prev_topk_indices: expected the choice of an earlier layer for a layer without an indexer")

    chosen: list[Tensor] = []

    def choose() -> Tensor:
        if module.indexer is None:
            chosen.append(prev_topk_indices)
        else:
            given = hidden_states, q_resid, position_embeddings, attention_mask[:, 0, :, :], position_ids, past
            chosen.append(module.indexer(*given))
        return chosen[0]

    layer = _static_layer(module, past, q, latent, cos, attention_mask)
    if layer is not None:
        found = _attend_in_place(module, q, latent, (cos, sin), attention_mask, layer, kwargs, choose)
    else:
        found = _attend_to_chosen(module, q, latent, (cos, sin), attention_mask, past, kwargs, choose)
    out = module.o_proj(found.reshape(*lead, -1))
    return (out, None, *chosen) if form_of(module, known_forwards.SPARSE_ATTENTION) else (out, None)


def _attend_to_chosen(
    module: nn.Module,
    q: Tensor,
    latent: Tensor,
    tables: tuple[Tensor, Tensor],
    mask: Any,
    past: Any,
    kwargs: dict[str, Any],
    choose: Callable[[], Tensor],
) -> Tensor:
    """Attend to the chosen latents of a cache of any kind; arguments and result are those of `_attend_in_place`."""
    rank, rest = module.kv_lora_rank, module.qk_rope_head_dim
    q_pass, q_rot = q.transpose(1, 2).split([q.shape[-1] - rest, rest], dim=-1)
    latent, k_rot = latent.split([rank, rest], dim=-1)
    latent, k_rot = module.kv_a_layernorm(latent)[:, None], k_rot[:, None]
    q_rot, k_rot = called(module, "apply_rotary_pos_emb_interleave")(q_rot, k_rot, *tables)
    if past is not None:
        latent, k_rot = update_cache(past, None, latent, k_rot, module.layer_idx, {})
    chosen = choose()
    query = torch.cat((q_pass, q_rot), dim=-1)
    if not isinstance(mask, Tensor):  # GraphDecoder's, in a cache that `append_latents` does not write
        keys, values = module.expand_kv(latent, k_rot)
        kwargs = {"dropout": 0.0, "scaling": module.scaling, **kwargs, "indices": chosen}
        return attention_interface(module)(module, query, keys, values, mask, **kwargs)[0]
    if chosen.shape[-1] >= latent.shape[2]:  # everything that a query sees
        return _expanded(module, query, latent, k_rot, mask, kwargs)
    seen = mask[:, 0].expand(-1, query.shape[2], -1).gather(-1, chosen.long())
    latents = torch.cat((latent, k_rot), dim=-1)[:, 0]
    lengths = torch.full((len(latents),), latents.shape[1], dtype=torch.int32, device=latents.device)
    indices = torch.where(seen, chosen, -1).int()
    weights = _absorption(module, query.dtype)
    return absorbed(module, query, weights, latents, lengths, module.scaling, indices=indices)


ROWS_AT_A_TIME = 1 << 18
"""Absorbed queries, of all heads and sequences, that are in memory at a time: 302 MB for latents of 576 values."""


def absorbed(
    module: nn.Module,
    query: Tensor,
    weights: tuple[Tensor, Tensor],
    latents: Tensor,
    ends: Tensor,
    scale: float,
    *,
    begin: Tensor | None = None,
    indices: Tensor | None = None,
) -> Tensor:
    """Attend to latents by kv_b_proj's absorption into queries and results, part by part; return (B, T, heads, D).

    query: (B, heads, T, N + P). weights: those of `absorption`. latents, begin, indices: as `latent_attention` takes
    them. ends: (B,), the number of latents that each sequence's last query sees.
    """
    batch, heads, new, size = query.shape
    rank, rest = module.kv_lora_rank, module.qk_rope_head_dim
    to_keys, to_values = weights
    out = query.new_empty((batch, new, heads, to_values.shape[2]))
    at_a_time = max(1, ROWS_AT_A_TIME // heads)
    everything = [(slice(batch), slice(new))]
    pieces = product(_slices(batch, 1), _slices(new, at_a_time)) if batch * new > at_a_time else everything
    for some, part in pieces:
        passed, rotated = query[some, :, part].transpose(1, 2).split([size - rest, rest], dim=-1)
        q = query.new_empty((*passed.shape[:3], rank + rest))
        multiply(passed, to_keys, q[..., :rank])
        q[..., rank:] = rotated
        last, how = ends[some], {"begin": None if begin is None else begin[some]}
        if indices is None:
            last = last - (new - part.stop)
        else:
            how = {"indices": indices[some, part]}
        found = latent_attention(q, latents[some], last, value_size=rank, scale=scale, **how)
        multiply(found, to_values, out[some, part])
    return out


def _slices(size: int, each: int) -> list[slice]:
    return [slice(first, min(first + each, size)) for first in range(0, size, each)]


def absorption(
    module: nn.Module, dtype: torch.dtype, metadata: AttentionMetadata, others: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return what `latent_attention` needs of kv_b_proj: weights (heads, N, R) to keys and (heads, R, D) to values.

    others: further keyword arguments of the module's attention. Raises UnsupportedAttention for projections that cannot
    be absorbed, for a mask of another kind, for what others ask for, and in batch-invariant mode.
    """
    unsupported(others)
    if metadata.window is not None:
        raise UnsupportedAttention("latent attention with a mask of another kind")
    if config.settings.batch_invariant:
        raise UnsupportedAttention("latent attention, whose bits depend on the other sequences of a call")
    return _absorption(module, dtype)


def _absorption(module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = up_weight(module.kv_b_proj, dtype)
    if weight is None:
        raise UnsupportedAttention(f"a kv_b_proj that cannot be absorbed ({type(module.kv_b_proj).__name__})")
    passed = module.qk_nope_head_dim
    to_keys, to_values = weight.view(-1, passed + module.v_head_dim, weight.shape[1]).tensor_split([passed], dim=1)
    return to_keys, to_values.transpose(1, 2)


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write the products of x (B, T, heads, K) and weight (heads, K, N) into a view (B, T, heads, N) of B * T rows."""
    rows = out.view(-1, *out.shape[2:])
    torch.bmm(x.flatten(0, 1).transpose(0, 1), weight, out=rows.transpose(0, 1))


def _is_known(module: nn.Module) -> bool:
    return form_of(module, known_forwards.LATENT_ATTENTION) is not None and expands_latents(module)


def expands_latents(module: nn.Module) -> bool:
    """Return whether the module expands cached latents to keys and values by a known `expand_kv`."""
    return form_of(module, known_forwards.EXPANSION, "expand_kv") is not None


def inputs(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the linears that project the module's input: to queries, and to latents with rotary keys."""
    return module.q_proj if module.q_lora_rank is None else module.q_a_proj, module.kv_a_proj_with_mqa


def _queries(module: nn.Module, x: Tensor) -> Tensor:
    """Return the queries (M, heads * D) for x (M, q_lora_rank), the result of q_a_proj."""
    norm, project = module.q_a_layernorm, module.q_b_proj
    if linears.weights(project) is None or not norms.serves(norm, x.dtype):
        return project(norm(x))
    normed = norms.norm(norm, x, values=False, quantized=True)
    return linears.project(normed.quantized, [project], x.dtype)[0]


def _is_plain(module: nn.Module, mask: Any, length: int, kwargs: dict[str, Any]) -> bool:
    """Return whether the attention is a plain softmax, without a mask or with an "sdpa" or "eager" mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_interface(module) not in (sdpa_attention_forward, called(module, "eager_attention_forward")):
        return False
    if any(value is not None and name not in WITHOUT_EFFECT for name, value in kwargs.items()):
        return False
    if mask is None:
        return True
    if not isinstance(mask, Tensor) or not (mask.dtype is torch.bool or mask.is_floating_point()):
        return False
    return mask.dim() == 4 and mask.shape[1:] == (1, 1, length)


def _expanded(
    module: nn.Module, query: Tensor, latent: Tensor, k_rot: Tensor, mask: Any, kwargs: dict[str, Any]
) -> Tensor:
    """Expand the latents to keys and values, and attend over those with the model's attention function.

    query: (B, heads, T, D). latent: (B, 1, L, R). k_rot: (B, 1, L, P). Returns (B, T, heads, value head size).
    """
    keys, values = module.expand_kv(latent, k_rot)
    kwargs = {"dropout": 0.0, "scaling": module.scaling, **kwargs}
    return attention_interface(module)(module, query, keys, values, mask, **kwargs)[0]


def _absorbed(
    q_pass: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, weight: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attend to the latents directly: absorb kv_b_proj into the query and the output; return (B, heads, D).

    Each row of the batch has one new token. q_pass (B, heads, N), q_rot (B, heads, P), latent (B, L, R), k_rot
    (B, L, P). weight: kv_b_proj's weight (heads * (N + D), R), with the key rows and then the value rows of each head.
    mask: (B, 1, L), or None. A bool mask is True for the keys that the query sees; any other mask is added to scores.

    Scores and their softmax are computed in float32.
    """
    batch, heads, pass_size = q_pass.shape
    to_keys, to_values = weight.view(heads, -1, weight.shape[1]).tensor_split([pass_size], dim=1)
    q_latent = torch.bmm(q_pass.transpose(0, 1), to_keys).transpose(0, 1)
    scores = torch.empty((batch, heads, latent.shape[1]), dtype=torch.float32, device=latent.device)
    if mask is not None:
        # Masked scores get the lowest finite value, not -inf, which would give NaN in rows that see nothing.
        scores.copy_((mask.float() - 1) * torch.finfo(torch.float32).max if mask.dtype is torch.bool else mask)
    _add_products(scores, q_rot, k_rot, scale, 0 if mask is None else 1)
    _add_products(scores, q_latent, latent, scale, 1)
    mean = torch.bmm(scores.softmax(dim=-1).to(latent.dtype), latent)
    return torch.bmm(mean.transpose(0, 1), to_values.transpose(1, 2)).transpose(0, 1)


def _add_products(scores: Tensor, query: Tensor, keys: Tensor, scale: float, beta: int) -> None:
    """Set scores (B, heads, L) float32 to beta * scores + scale * query (B, heads, D) @ keys (B, L, D)^T."""
    keys = keys.transpose(1, 2)
    if query.is_cuda and query.dtype is not torch.float32:
        torch.baddbmm(scores, query, keys, torch.float32, beta=beta, alpha=scale, out=scores)
    else:  # PyTorch has 16-bit products with float32 results on GPUs only
        torch.baddbmm(scores, query.float(), keys.float(), beta=beta, alpha=scale, out=scores)


def up_weight(linear: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """Return the weight (N, K) of kv_b_proj, dequantized to this dtype; None if the linear cannot be absorbed."""
    weights = linears.weights(linear)
    if weights is not None:
        return None if weights.bias is not None else _dequantized(linear, weights, dtype)
    if type(linear) is not nn.Linear or not runs_as_written(linear) or linear.bias is not None:
        return None
    return linear.weight if type(linear.weight) is nn.Parameter and linear.weight.dtype is dtype else None


class _CachedWeight(NamedTuple):
    values: Tensor
    weights: Fingerprint


_weight_cache: WeakKeyDictionary[nn.Module, _CachedWeight] = WeakKeyDictionary()
"""The dequantized weights of FP8 linears, by module. Modules are saved and copied without them."""


@torch.compiler.disable
@torch.inference_mode(False)
@torch.no_grad()
def _dequantized(linear: nn.Module, weights: linears.Weights, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight in this dtype, from the cache while the FP8 values have not changed."""
    sources = weights.data, weights.scale
    cached = _weight_cache.get(linear)
    if cached is not None and cached.values.dtype is dtype and cached.weights.matches(sources):
        return cached.values
    values = dequantize(FP8Tensor(*sources), dtype=dtype)
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        return values  # captured, not computed: there are no values to cache before the graph runs
    if cached is not None and (cached.values.dtype, cached.values.device) == (dtype, values.device):
        values = cached.values.copy_(values)  # update in place, as CUDA graphs may read this memory
    _weight_cache[linear] = _CachedWeight(values, Fingerprint(sources))
    return values


def refresh(linear: nn.Module) -> None:
    """Update the cached dequantized weight of this linear, if there is one."""
    cached = _weight_cache.get(linear) if _weight_cache else None
    parts = None if cached is None else linears.weights(linear)
    if parts is not None:
        _dequantized(linear, parts, cached.values.dtype)
