"""FP8MQAIndexer, the lightning indexer: scores cached tokens in FP8, and selects those that each query attends to."""

import inspect

import torch
from torch import Tensor, nn

from fp8moe.kernels.indexer import checks as mqa_checks
from fp8moe.kernels.indexer.mqa_cache import BLOCK_TOKENS, HEAD_DIMS, append_kv, read_kv
from fp8moe.kernels.indexer.mqa_logits import mqa_logits, paged_mqa_logits
from fp8moe.kernels.indexer.reference import tokens_seen
from fp8moe.kernels.indexer.top_k import mqa_top_k
from fp8moe.layers.linear import FP8Linear
from fp8moe.quant.checks import check_scale_format
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime.checks import FLOATING, check_device, check_dtype, check_floating, check_int, check_tensor, describe

LOGITS_AT_A_TIME = 1 << 28
"""The largest number of logits that a prefill holds in memory at a time: 1 GiB of float32."""

TRANSFORMERS_CLASSES = ("DeepseekV32Indexer", "GlmMoeDsaIndexer")
"""Class names of the indexers in transformers that FP8MQAIndexer can replace."""


class FP8MQAIndexer(nn.Module):
    """The lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1), in FP8.

    Query token s scores key t with ``sum over h of w[s, h] * relu(q[s, h] . k[t])``, and attends to the top_k tokens
    with the highest scores. q is projected from q_resid, the normed low-rank query of the attention. k, shared by all
    heads, and w are projected from hidden_states. The first rope_head_dim values of q and k get rotary embeddings.
    Each key, and each head of a query, has one scale for its head_dim values. `fp8moe.mqa_logits` computes the scores;
    `fp8moe.paged_mqa_logits` computes them over the paged cache of `fp8moe.kernels.indexer.mqa_cache`. The Hadamard
    rotation of DeepSeek's own code is omitted, as in transformers, since it does not change dot products. The state
    dict has the names of checkpoints:

        wq_b.weight, wq_b.weight_scale_inv  FP8Linear (num_heads * head_dim, q_lora_rank), no bias
        wk.weight, wk.weight_scale_inv      FP8Linear (head_dim, hidden_size), no bias
        k_norm.weight, k_norm.bias          LayerNorm (head_dim,) of ``dtype``
        weights_proj.weight                 (num_heads, hidden_size) float32

    wq_b and wk may be any linear layers of these sizes, such as nn.Linear. Casting the module, as with
    ``model.to(torch.bfloat16)``, casts k_norm and weights_proj too: weights_proj is then no longer float32.

    Shapes below: S query tokens, B sequences of the decode batch with next_n query tokens each. The selected indices
    have no gradients: nothing is recorded for a backward.

    Args:
        hidden_size, q_lora_rank: widths of hidden_states and q_resid.
        num_heads: 32 or 64. head_dim: 32, 64 or 128. rope_head_dim: even, at most head_dim.
        top_k: number of tokens that a query selects.
        device: the device of the parameters. dtype: the dtype of k_norm, bfloat16, float16 or float32.
        interleaved: whether the rotary pairs are the values (2i, 2i + 1), as in GLM; otherwise i and
            i + rope_head_dim / 2.
        scale_format: for the scales of queries and keys, "float32" or "ue8m0" (powers of two).

    Raises ValueError for a wrong size or scale_format, TypeError for a size that is not an int or a wrong dtype.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        q_lora_rank: int,
        num_heads: int,
        head_dim: int,
        rope_head_dim: int,
        top_k: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        interleaved: bool = False,
        scale_format: str = "float32",
    ):
        super().__init__()
        check_floating(dtype)
        positive = {"hidden_size": hidden_size, "q_lora_rank": q_lora_rank, "top_k": top_k}
        heads = {"num_heads": num_heads, "head_dim": head_dim, "rope_head_dim": rope_head_dim}
        for name, size in positive.items():
            check_int(name, size, at_least=1)
        for name, size in heads.items():
            check_int(name, size)
        for name, size, sizes in (("num_heads", num_heads, mqa_checks.NUM_HEADS), ("head_dim", head_dim, HEAD_DIMS)):
            if size not in sizes:
                raise ValueError(f"{name}: expected one of {sizes}, got {size}")
        if rope_head_dim % 2 or not 0 <= rope_head_dim <= head_dim:
            raise ValueError(
                f"rope_head_dim: expected an even number, at most the head_dim {head_dim}, got {rope_head_dim}"
            )
        check_scale_format(scale_format)
        self.hidden_size = hidden_size
        self.q_lora_rank = q_lora_rank
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.rope_head_dim = rope_head_dim
        self.top_k = top_k
        self.interleaved = interleaved
        self.scale_format = scale_format
        self.wq_b = FP8Linear(q_lora_rank, num_heads * head_dim, bias=False, device=device, dtype=dtype)
        self.wk = FP8Linear(hidden_size, head_dim, bias=False, device=device, dtype=dtype)
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-6, device=device, dtype=dtype)
        self.weights_proj = nn.Linear(hidden_size, num_heads, bias=False, device=device, dtype=torch.float32)

    @classmethod
    def from_transformers(cls, indexer: nn.Module, *, scale_format: str = "float32") -> "FP8MQAIndexer":
        """Make an indexer that selects the same tokens as transformers' DeepseekV32Indexer or GlmMoeDsaIndexer.

        The new indexer shares the four layers of ``indexer`` without quantizing them; `fp8moe.replace_linears` with
        ``skip=("weights_proj",)`` quantizes the weights of wq_b and wk afterwards.

        Raises TypeError for a module of another class, ValueError for sizes that `FP8MQAIndexer` does not take.
        """
        if type(indexer).__name__ not in TRANSFORMERS_CLASSES:
            raise TypeError(f"indexer: expected a {' or '.join(TRANSFORMERS_CLASSES)}, got {type(indexer).__name__}")
        new = cls(
            hidden_size=indexer.hidden_size,
            q_lora_rank=indexer.q_lora_rank,
            num_heads=indexer.n_heads,
            head_dim=indexer.head_dim,
            rope_head_dim=indexer.qk_rope_head_dim,
            top_k=indexer.index_topk,
            device="meta",
            interleaved=interleaves(type(indexer).forward),
            scale_format=scale_format,
        )
        for name in ("wq_b", "wk", "k_norm", "weights_proj"):
            setattr(new, name, getattr(indexer, name))
        return new.train(indexer.training)

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        starts: Tensor,
        ends: Tensor,
        *,
        kv_cache: Tensor | None = None,
        slots: Tensor | None = None,
        kv_slots: Tensor | None = None,
    ) -> Tensor:
        """Prefill: select keys for the tokens of one or more sequences, which are concatenated.

        hidden_states: (S, hidden_size), q_resid: (S, q_lora_rank), bfloat16, float16 or float32.
        position_embeddings: cos and sin, (S, rope_head_dim) each, of the tokens' positions; each row has its
            rope_head_dim / 2 angles twice, as in transformers.
        starts, ends: (S,) int32: query s selects from the keys ``starts[s]:ends[s]``, clamped as in `mqa_logits`. For
            causal attention, ``starts[s]`` is the index of the first key of the query's sequence, and ``ends[s]`` is
            the index of the query's own key, plus 1.
        kv_cache, slots: a paged cache and (S,) int32 slots in it. The new keys are written to these slots before keys
            are selected.
        kv_slots: (T,) int32, with a cache: select from the keys in these slots, such as a sequence's earlier and new
            keys; ``starts`` and ``ends`` are then indices into kv_slots. If None: select from the S new keys. A slot
            outside of the cache, such as -1, reads as a key of zeros, whose score of 0 may be among the best:
            ``starts`` and ``ends`` must exclude it.
        Returns (S, top_k) int32, the best first: positions counted from ``starts``; -1 if a query sees fewer keys.

        The scores take S * T * 4 bytes in total, of which at most about 1 GiB exists at a time.
        Raises, before it writes, TypeError for a wrong type or dtype, ValueError for a wrong shape or device, a cache
        without slots, or slots without a cache.
        """
        if (kv_cache is None) != (slots is None) or (kv_cache is None and kv_slots is not None):
            raise ValueError("kv_cache, slots, kv_slots: expected a cache with slots, and perhaps kv_slots, or none")
        tokens = self._check_tokens(hidden_states, q_resid, position_embeddings)
        vectors = [("starts", starts, tokens), ("ends", ends, tokens)]
        if kv_cache is not None:
            shape = (None, BLOCK_TOKENS, 1, self.head_dim + 4)
            _check("kv_cache", kv_cache, (torch.uint8,), shape, hidden_states)
            vectors.append(("slots", slots, tokens))
        if kv_slots is not None:
            vectors.append(("kv_slots", kv_slots, None))
        for name, value, length in vectors:
            _check(name, value, (torch.int32,), (length,), hidden_states)
        q, weights, k = self._project(hidden_states, q_resid, position_embeddings)
        if kv_cache is not None:
            append_kv(kv_cache, k, slots, scale_format=self.scale_format)
        if kv_slots is None:
            data, scale = quantize_1x128(k, scale_format=self.scale_format)
            kv = FP8Tensor(data, scale[:, 0])
        else:
            kv = read_kv(kv_cache, kv_slots)
        queries = (q, weights, starts, ends)
        chunk = max(1, LOGITS_AT_A_TIME // max(1, kv.data.shape[0]))
        if tokens <= chunk:  # avoid the loop below: a compiled graph with a loop would serve only one number of tokens
            return self._selected(kv, *queries)
        parts = zip(*(value.split(chunk) for value in queries), strict=True)
        return torch.cat([self._selected(kv, *part) for part in parts])

    @torch.no_grad()
    def decode(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        kv_cache: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        max_context_len: int,
    ) -> Tensor:
        """Decode step: write the new keys to the paged cache, then select from it. Can be captured in a CUDA graph.

        hidden_states: (B * next_n, hidden_size), q_resid: (B * next_n, q_lora_rank), position_embeddings: cos and sin,
            (B * next_n, rope_head_dim) each, as in `forward`; next_n is 1 to 4.
        kv_cache, context_lens, block_table, max_context_len: as in `paged_mqa_logits`; lengths include the new tokens.
            The last token that a query sees is the query's own token, whose key is written to the token's
            position in the sequence. A key at a position past max_context_len is written too, but never selected. No
            key is written for a query that sees no token (a context of 0 marks an unused row), or whose block is not in
            the table or the cache.
        Returns (B * next_n, top_k) int32 positions, the best first; -1 if a query sees fewer tokens.

        Raises, before it writes, TypeError for a wrong type or dtype, ValueError for a wrong shape or device.
        """
        rows = self._check_tokens(hidden_states, q_resid, position_embeddings)
        for name, value in (("kv_cache", kv_cache), ("context_lens", context_lens), ("block_table", block_table)):
            check_tensor(name, value)
        mqa_checks.row_length("max_context_len", max_context_len)
        if block_table.dim() != 2:
            raise ValueError(f"block_table: expected shape (B, max_blocks), got {tuple(block_table.shape)}")
        batch = block_table.shape[0]
        next_n = rows // batch if batch else 1
        if next_n * batch != rows or not 1 <= next_n <= mqa_checks.MAX_NEXT_N:
            raise ValueError(
                f"hidden_states: expected the same number of rows, 1 to {mqa_checks.MAX_NEXT_N}, for each of the "
                f"{batch} sequences of block_table, got {rows}"
            )
        q, weights, k = self._project(hidden_states, q_resid, position_embeddings)
        q = q.unflatten(0, (batch, next_n))
        mqa_checks.paged(mqa_checks.Paged(q, kv_cache, weights, context_lens, block_table, max_context_len))
        seen = tokens_seen(context_lens, next_n)
        slots = _slots(seen, block_table, kv_cache.shape[0])
        append_kv(kv_cache, k, slots, scale_format=self.scale_format)
        rest = {"max_context_len": max_context_len, "fill_masked": False}
        logits = paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, **rest)
        scored = BLOCK_TOKENS * block_table.shape[1] if kv_cache.shape[0] else 0
        return mqa_top_k(logits, top_k=self.top_k, ends=seen.clamp(max=scored).flatten().int())

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, rope_head_dim={self.rope_head_dim}, "
            f"top_k={self.top_k}, interleaved={self.interleaved}, scale_format={self.scale_format!r}"
        )

    def _project(
        self, hidden_states: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = {"interleaved": self.interleaved, "scale_format": self.scale_format}
        return score_operands(self, hidden_states, q_resid, position_embeddings, **options)

    def _selected(self, kv: FP8Tensor, q: Tensor, weights: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """Return the positions of the top_k keys of each query, counted from `starts`, (S, top_k) int32."""
        logits = mqa_logits(q, kv, weights, starts, ends, fill_masked=False)
        return mqa_top_k(logits, top_k=self.top_k, starts=starts, ends=ends)

    def _check_tokens(self, hidden_states: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> int:
        """Check types, dtypes, shapes and devices of the inputs to `forward` or `decode`; return the token count."""
        _check("hidden_states", hidden_states, FLOATING, (None, self.hidden_size), hidden_states)
        tokens = hidden_states.shape[0]
        _check("q_resid", q_resid, FLOATING, (tokens, self.q_lora_rank), hidden_states)
        if not isinstance(position_embeddings, tuple | list) or len(position_embeddings) != 2:
            raise TypeError(f"position_embeddings: expected a (cos, sin) pair, got {describe(position_embeddings)}")
        for name, value in zip(("cos", "sin"), position_embeddings, strict=True):
            shape = (tokens, self.rope_head_dim)
            _check(f"position_embeddings, {name}", value, FLOATING, shape, hidden_states)
        return tokens


def score_operands(
    indexer: nn.Module,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *,
    interleaved: bool,
    scale_format: str = "float32",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the operands of the scores: queries in FP8, the weights of their heads, and keys.

    indexer: a module with the layers wq_b, wk, k_norm and weights_proj of `FP8MQAIndexer`.
    hidden_states: (..., hidden_size), q_resid: (..., q_lora_rank), cos and sin: (..., rope_head_dim).
    Returns q (..., H, D) float8_e4m3fn; weights (..., H) float32, which include the scales of q, 1/sqrt(D) and
    1/sqrt(H); k (..., D), not quantized.
    """
    cos, sin = position_embeddings
    k = indexer.k_norm(indexer.wk(hidden_states).to(indexer.k_norm.weight.dtype))
    k = _rotate(k, cos, sin, interleaved)
    q = indexer.wq_b(q_resid).unflatten(-1, (-1, k.shape[-1]))
    q = _rotate(q, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)
    data, scale = quantize_1x128(q, scale_format=scale_format)
    proj = indexer.weights_proj
    if proj.weight.dtype in FLOATING:  # an unquantized linear, whose input must have the weight's dtype
        hidden_states = hidden_states.to(proj.weight.dtype)
    weights = proj(hidden_states).float() * scale.squeeze(-1) * (q.shape[-2] * q.shape[-1]) ** -0.5
    return data, weights, k


def interleaves(forward) -> bool:
    """Whether the forward of an indexer of transformers rotates pairs of neighbouring values, as GLM-MoE-DSA does."""
    return "apply_rotary_pos_emb_interleave" in inspect.unwrap(forward).__code__.co_names


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Apply rotary embeddings to the first R values of x (..., D); cos and sin (..., R) hold R/2 angles twice.

    As in transformers, the result has the first values of all interleaved pairs, then the second ones. Queries and keys
    are permuted alike, so dot products do not change.
    """
    width = cos.shape[-1]
    turned, rest = x.split((width, x.shape[-1] - width), dim=-1)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _slots(seen: Tensor, block_table: Tensor, num_blocks: int) -> Tensor:
    """Return the cache slot of the last token that each query sees, (B * next_n,) int32; -1 if there is none.

    seen: (B, next_n) int64, the number of tokens that each query sees. block_table: (B, max_blocks) int32.
    """
    max_blocks = block_table.shape[1]
    if max_blocks == 0:
        return torch.full((seen.numel(),), -1, dtype=torch.int32, device=seen.device)
    position = seen - 1
    index = position.div(BLOCK_TOKENS, rounding_mode="floor")
    block = block_table.gather(1, index.clamp(0, max_blocks - 1)).long()
    exists = (index >= 0) & (index < max_blocks) & (block >= 0) & (block < num_blocks)
    return torch.where(exists, block * BLOCK_TOKENS + position % BLOCK_TOKENS, -1).flatten().int()


def _check(
    name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...], like: Tensor
) -> None:
    """Check type, dtype, shape and device of a tensor. If the first size in `shape` is None, any is allowed."""
    check_tensor(name, value)
    check_dtype(name, value, *dtypes)
    first = 1 if shape[0] is None else 0
    if value.dim() != len(shape) or value.shape[first:] != shape[first:]:
        expected = str(shape).replace("None", "any")
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(value.shape)}")
    check_device(name, value, like.device, "hidden_states")
