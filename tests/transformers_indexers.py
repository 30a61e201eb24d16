"""What CPU and GPU tests of transformers' indexers share: tiny models, and transformers' own forward."""

from contextlib import contextmanager

import torch

from tests.indexer_reference import angles
from tests.transformers_models import BASE, MLA, modules_named, random_model

SHAPE = BASE | {"hidden_size": 64, "max_position_embeddings": 128, "initializer_range": 0.2, "num_hidden_layers": 3}
INDEXER = {"index_head_dim": 32, "index_n_heads": 32}
NEW_TOKENS = 20
FEW, ALL = 8, 64
"""Tokens to select: fewer than there are, and all."""


def make_model(top_k, model_type="deepseek_v32", device="cpu", **changes):
    """Random, but with indexers whose selections FP8 cannot change, so that every token must be the same with them.

    All but one of the values of a key are zero, and that one, without rotary positions, is positive: FP8 holds it
    exactly. All heads weigh the same, so that the error of a query does not change the order of keys. The keys of the
    first layer depend on the token alone, those of repeated tokens are tied: it selects all.
    """
    options = SHAPE | MLA | INDEXER | {"index_topk": top_k} | changes
    model = random_model(model_type, options, dtype=torch.float32)
    first, *_ = indexers = modules_named(model, "indexer")
    first.index_topk = ALL
    with torch.no_grad():
        for indexer in indexers:
            place = indexer.head_dim - 5
            for value, at_place in ((indexer.k_norm.weight, 1.0), (indexer.k_norm.bias, 8.0)):
                value.zero_()
                value[place] = at_place
            indexer.weights_proj.weight.copy_(indexer.weights_proj.weight[:1].clone())
    return model.to(device)


def random_indexer(top_k, **changes):
    """One without such care."""
    sizes = INDEXER | {"hidden_size": 64, "index_topk": top_k, "initializer_range": 0.2}
    return modules_named(random_model("deepseek_v32", BASE | MLA | sizes | changes), "indexer")[0]


def arguments(indexer, batch, tokens, dtype=torch.float32):
    """hidden_states, q_resid and (cos, sin) for its forward, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    hidden, q_resid = (
        torch.randn(batch, tokens, width, generator=generator).to(dtype)
        for width in (indexer.hidden_size, indexer.q_lora_rank)
    )
    cos, sin = angles(torch.arange(tokens), indexer.qk_rope_head_dim, dtype)
    return hidden, q_resid, (cos.expand(batch, -1, -1), sin.expand(batch, -1, -1))


def left_padded(ids, *padding):
    mask = torch.ones_like(ids)
    ids = ids.clone()
    for row, count in enumerate(padding):
        mask[row, :count] = ids[row, :count] = 0
    return ids, mask


def generate(model, ids, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, **options)


@contextmanager
def without(model, forward=None):
    """Its indexers run transformers' own forward, or another, as if `register` had not been called."""
    cls = type(modules_named(model, "indexer")[0])
    ours = cls.forward
    assert ours._fp8moe
    cls.forward = ours.__wrapped__ if forward is None else forward
    try:
        yield
    finally:
        cls.forward = ours
