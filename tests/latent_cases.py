"""Operands of latent attention, and the attention of a sequence in float64."""

import torch


def operands(lengths, *, queries=1, heads=16, limit=None, paged=False, width=576, seed=0, device="cpu"):
    """(q, latents, lengths, block_table) in bfloat16. What lies behind a sequence's latents is NaN."""
    draw = torch.Generator().manual_seed(seed)
    batch, limit = len(lengths), limit or max([*lengths, 1])
    q = torch.randn(batch, queries, heads, width, generator=draw)
    blocks = -(-limit // 64)
    latents = torch.randn(batch, 64 * blocks if paged else limit, width, generator=draw)
    for sequence, length in enumerate(lengths):
        latents[sequence, max(length, 0) :] = torch.nan
    table = None
    if paged:
        places = torch.randperm(batch * blocks + 2, generator=draw)[: batch * blocks].view(batch, blocks)
        kept = torch.full((batch * blocks + 2, 64, width), torch.nan)
        kept[places.flatten()] = latents.view(-1, 64, width)
        latents, table = kept, places.int().to(device)
    moved = (x.to(device, torch.bfloat16) for x in (q, latents))
    return *moved, torch.tensor(lengths, dtype=torch.int32, device=device), table


def expected(q, latents, lengths, table, *, value_size, scale, indices=None, begin=None):
    """In float64, on the device of the operands."""
    batch, queries, heads, _ = q.shape
    out = torch.zeros(batch, queries, heads, value_size, dtype=torch.float64, device=q.device)
    for b, length in enumerate(lengths.tolist()):
        rows = latents[b] if table is None else latents[table[b].long().clamp(0, len(latents) - 1)].flatten(0, 1)
        length = min(max(length, 0), len(rows))
        for t in range(queries):
            first = 0 if begin is None else max(begin[b].item(), 0)
            seen = rows[first : max(length - queries + 1 + t, 0)]
            if indices is not None:
                chosen = indices[b, t].long()
                seen = rows[chosen[(chosen >= 0) & (chosen < length)]]
            if len(seen):
                seen = seen.double()
                out[b, t] = (q[b, t].double() @ seen.T * scale).softmax(-1) @ seen[:, :value_size]
    return out
