"""Latent attention in plain PyTorch, one sequence after the other, with sums in float32."""

from torch import Tensor

from fp8moe.kernels.latent.checks import BLOCK_TOKENS, LatentOperands
from fp8moe.kernels.latent.fp8_latents import dequantize_latents


def latent_attention(operands: LatentOperands) -> Tensor:
    """Compute `latent_attention` for checked operands."""
    if operands.coded:
        values = dequantize_latents(operands.latents, value_size=operands.value_size, dtype=operands.q.dtype)
        operands = operands._replace(latents=values)
    q, _, lengths, indices, _, begin, value_size, scale = operands
    batch, queries, heads, _ = q.shape
    q = q.contiguous()  # products of other layouts may be summed in another order
    out = q.new_zeros((batch, queries, heads, value_size))
    begins = [0] * batch if begin is None else begin.clamp(min=0).tolist()
    for b, length in enumerate(lengths.clamp(0, operands.limit).tolist()):
        rows = _latents(operands, b, length).float()
        if not length:
            continue
        for t in range(queries):
            if indices is None:
                seen = rows[begins[b] : max(length - queries + 1 + t, 0)]
            else:
                chosen = indices[b, t]
                seen = rows[chosen[(chosen >= 0) & (chosen < length)].long()]
            if len(seen):
                weights = (q[b, t].float() @ seen.T * scale).softmax(-1)
                out[b, t] = weights @ seen[:, :value_size]
    return out


def _latents(operands: LatentOperands, sequence: int, length: int) -> Tensor:
    """Return the first `length` latents of a sequence."""
    latents, table = operands.latents, operands.block_table
    if table is None:
        return latents[sequence, :length]
    if not len(latents) or not length:
        return latents.new_zeros((0, latents.shape[2]))
    blocks = table[sequence, : -(-length // BLOCK_TOKENS)].long().clamp(0, len(latents) - 1)
    return latents[blocks].flatten(0, 1)[:length]
