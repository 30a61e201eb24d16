"""DeepSeek-V3's attention over its latents gives what the module gives over the keys and values made of them."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from fp8moe import FP8Linear
from fp8moe.decode import GraphDecoder
from fp8moe.hf import optimize
from fp8moe.hf.fused import known_forwards, latent_attention, linears
from tests.latent_attention_cases import (
    SHAPE,
    attention_of,
    distance,
    fused_step_of,
    in_float64,
    in_fp8,
    inputs,
    make_model,
    step_of,
    with_exact_latents,
)
from tests.transformers_models import left_padded, prompts, random_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

# Without experts, which rounding may choose otherwise; small weights, as in trained models.
SMOOTH = {"first_k_dense_replace": 2, "initializer_range": 0.05}
VARIANTS = {
    "interleaved": {},
    "in halves": {"rope_interleave": False},
    "without q_lora": {"q_lora_rank": None},
    "biased": {"attention_bias": True},
}
CACHES = {
    "dynamic": lambda config: transformers.DynamicCache(config=config),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=24),
}
NEW = 3


@torch.no_grad()
def logits(model, cache="dynamic", padding=(0, 4)):
    """(B, NEW + 1, vocabulary) after a prompt, and after each of a few tokens that follow it in the cache."""
    ids = prompts(len(padding), 12 + NEW)
    mask = left_padded(ids, *padding)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    past = CACHES[cache](model.config)
    found = []
    for first, last in [(0, 12), *((n, n + 1) for n in range(12, 12 + NEW))]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = model(
                input_ids=ids[:, first:last],
                attention_mask=mask[:, :last] if any(padding) else None,
                position_ids=positions[:, first:last],
                past_key_values=past,
                use_cache=True,
            )
        found.append(output.logits[:, -1])
    return torch.stack(found, 1)


@pytest.fixture
def absorbed(monkeypatch):
    """Counts the calls that attend over the latents."""
    calls = []
    attend = latent_attention._absorbed

    def counted(*args):
        calls.append(args)
        return attend(*args)

    monkeypatch.setattr(latent_attention, "_absorbed", counted)
    return calls


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("padding", [(0, 0), (0, 4)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_in_float32(variant, padding, cache, attention, absorbed):
    model = make_model(attention=attention, **VARIANTS[variant])
    before = logits(model, cache, padding)
    changed = optimize(model)
    assert "norms and residuals, queries and latents as one, latent attention" in {row.what for row in changed}
    assert distance(logits(model, cache, padding), before) <= 1e-5
    assert len(absorbed) == 2 * NEW
    changed.restore()
    assert torch.equal(logits(model, cache, padding), before) and len(absorbed) == 2 * NEW


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_in_16_bits(dtype, absorbed):
    model, exact = make_model(dtype, **SMOOTH), make_model(**SMOOTH)
    exact.load_state_dict(model.state_dict())
    before, expected = logits(model), logits(exact)
    optimize(model)
    after = logits(model)
    assert absorbed and after.dtype is dtype
    assert distance(after, before) <= 1e-2 * (torch.finfo(dtype).eps / torch.finfo(torch.bfloat16).eps)
    assert distance(after, expected) <= 1.2 * distance(before, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, torch.bool, torch.float32, torch.bfloat16])
def test_over_latents_as_over_keys_and_values_in_float64(kind, dtype):
    batch, heads, length, sizes = 3, 5, 17, {"pass": 24, "rot": 8, "latent": 48, "value": 16}
    q_pass, q_rot = (torch.randn(batch, heads, sizes[name]).to(dtype) for name in ("pass", "rot"))
    latent, k_rot = (torch.randn(batch, length, sizes[name]).to(dtype) for name in ("latent", "rot"))
    weight = (torch.randn(heads * (24 + 16), 48) / 7).to(dtype)
    visible = torch.rand(batch, 1, length) < 0.7
    visible[:, :, 3] = True
    mask = visible if kind is torch.bool else torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    mask = None if kind is None else mask.to(kind)
    got = latent_attention._absorbed(q_pass, q_rot, latent, k_rot, weight, mask, 0.2)
    expected = in_float64(q_pass, q_rot, latent, k_rot, weight, None if kind is None else visible, 0.2)
    assert got.dtype is dtype
    assert distance(got, expected) <= (1e-6 if dtype is torch.float32 else 1e-2)


def test_a_row_that_sees_nothing_is_finite_and_alone():
    q_pass, q_rot, latent, k_rot = (torch.randn(2, n, 16) for n in (4, 4, 9, 9))
    weight, mask = torch.randn(4 * 32, 16), torch.ones(2, 1, 9, dtype=torch.bool)
    seen = latent_attention._absorbed(q_pass, q_rot, latent, k_rot, weight, mask, 0.25)
    mask[1] = False
    got = latent_attention._absorbed(q_pass, q_rot, latent, k_rot, weight, mask, 0.25)
    assert got.isfinite().all() and torch.equal(got[0], seen[0]) and not torch.equal(got[1], seen[1])


@pytest.mark.parametrize("q_lora_rank", [128, None])
def test_fp8_steps_take_the_latents_as_they_are(q_lora_rank, absorbed):
    attention = attention_of(in_fp8(q_lora_rank=q_lora_rank))
    assert isinstance(attention.kv_b_proj, FP8Linear)
    expected = step_of(with_exact_latents(attention))
    assert distance(step_of(attention), expected) > 1e-3
    assert distance(fused_step_of(attention), expected) <= 1e-5 and len(absorbed) == 1


def test_projections_of_the_input_are_one():
    model = in_fp8()
    before = logits(model)
    changed = optimize(model)
    assert sum("queries and latents as one, latent attention" in row.what for row in changed) == 2
    attention = attention_of(model)
    parts = [linears.weights(part) for part in (attention.q_a_proj, attention.kv_a_proj_with_mqa)]
    assert linears.joined(parts).data.shape == (128 + 64 + 16, 128)
    after = logits(model)
    assert torch.equal(after[:, 0], before[:, 0])  # of a prompt, whose latents are expanded as before
    attention.kv_a_proj_with_mqa.weight.data = attention.kv_a_proj_with_mqa.weight.data.clone()
    assert torch.equal(logits(model), after)


def test_weights_that_change_are_read_anew_where_they_lay():
    attention = attention_of(in_fp8())
    first = fused_step_of(attention)
    kept = latent_attention._weight_cache[attention.kv_b_proj].values
    assert torch.equal(fused_step_of(attention), first)
    assert latent_attention._weight_cache[attention.kv_b_proj].values is kept
    with torch.no_grad():
        attention.kv_b_proj.weight_scale_inv.mul_(1.5)
    changed = fused_step_of(attention)
    assert distance(changed, step_of(with_exact_latents(attention))) <= 1e-5 and not torch.equal(changed, first)
    assert latent_attention._weight_cache[attention.kv_b_proj].values is kept  # a graph reads it
    attention.kv_b_proj.weight.data = attention.kv_b_proj.weight.data.flip(0)
    assert distance(fused_step_of(attention), step_of(with_exact_latents(attention))) <= 1e-5


def test_what_is_kept_is_no_part_of_the_module():
    attention = attention_of(in_fp8())
    names = set(attention.state_dict())
    fused_step_of(attention)
    other = copy.deepcopy(attention)
    assert set(attention.state_dict()) == names == set(other.state_dict())
    assert (
        attention.kv_b_proj in latent_attention._weight_cache and other.kv_b_proj not in latent_attention._weight_cache
    )
    values = weakref.ref(latent_attention._weight_cache[attention.kv_b_proj].values)
    del attention
    gc.collect()
    assert values() is None


def test_a_plain_weight_is_not_copied():
    attention = attention_of(make_model(torch.bfloat16))
    weight = latent_attention.up_weight(attention.kv_b_proj, torch.bfloat16)
    assert weight is attention.kv_b_proj.weight
    assert latent_attention.up_weight(attention.kv_b_proj, torch.float16) is None


@pytest.mark.parametrize("change", ["hook", "bias", "another class"])
def test_expansions_that_cannot_be_absorbed_run(change, absorbed):
    attention = attention_of(make_model())
    up = attention.kv_b_proj
    if change == "hook":
        up.register_forward_hook(lambda module, inputs, output: 2 * output)
    elif change == "bias":
        up.bias = nn.Parameter(torch.randn(up.out_features))
    else:
        attention.kv_b_proj = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * up(x)})(2, 2, bias=False)
    assert distance(fused_step_of(attention), step_of(attention)) <= 1e-6 and not absorbed


MASKS = {
    "integers": torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1, 1]] * 2),
    "of each head": torch.zeros(2, 4, 1, 10).index_fill(1, torch.tensor(1), -3.0),
    "additive": torch.zeros(2, 1, 1, 10).index_fill(3, torch.arange(4), -torch.inf),
    "visible": torch.ones(2, 1, 1, 10, dtype=torch.bool).index_fill(3, torch.arange(4), False),
    "of all rows": torch.zeros(1, 1, 1, 10).index_fill(3, torch.arange(4), -1.5),
}


@pytest.mark.parametrize("mask", [name for name in MASKS if name != "integers"])
def test_masks(mask, absorbed):
    attention = attention_of(make_model())
    got = fused_step_of(attention, MASKS[mask])
    assert distance(got, step_of(attention, MASKS[mask])) <= 1e-5
    assert not torch.equal(got, fused_step_of(attention))
    assert len(absorbed) == 1 + (mask != "of each head")


@pytest.mark.parametrize("mask", ["integers", "visible"])
def test_an_implementation_of_the_users_own_attends(mask, absorbed):
    seen = []

    def attend(module, query, key, value, attention_mask, **options):
        seen.append(attention_mask)
        return value.mean(2, keepdim=True).transpose(1, 2), None

    transformers.AttentionInterface.register("of_a_test", attend)
    attention = attention_of(make_model())
    attention.config._attn_implementation = "of_a_test"
    assert distance(fused_step_of(attention, MASKS[mask]), step_of(attention, MASKS[mask])) <= 1e-6
    assert len(seen) == 2 and all(given is MASKS[mask] for given in seen) and not absorbed


def test_arguments_that_are_not_known_go_to_the_attention(absorbed):
    attention = attention_of(make_model())
    bias = torch.randn(1, 4, 1, 10)
    assert distance(fused_step_of(attention, position_bias=bias), step_of(attention, position_bias=bias)) <= 1e-6
    assert not absorbed
    fused_step_of(attention, use_cache=True, position_ids=torch.zeros(2, 1), softcap=None)
    assert len(absorbed) == 1


def test_other_code_is_not_known():
    attention = attention_of(make_model())
    assert known_forwards.form_of(attention, known_forwards.LATENT_ATTENTION)

    class Other(type(attention)):
        def expand_kv(self, kv_nope, k_rot):
            return super().expand_kv(kv_nope, 2 * k_rot)

    attention.__class__ = Other
    _, hidden, embeddings, _ = inputs(attention, 9)
    assert latent_attention.prepare(attention) is None
    assert not latent_attention.serves(attention, hidden.dtype, embeddings)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generate(name, cache, absorbed):
    options = SHAPE | {"head_dim": 16, "mlp_layer_types": ["dense", "sparse"]}
    model = random_model(name, options)
    ids = prompts()
    how = {"attention_mask": left_padded(ids, 0, 5, 2), "max_new_tokens": 8, "do_sample": False}
    how["cache_implementation"] = cache
    before = model.generate(ids, **how)
    optimize(model)
    assert torch.equal(model.generate(ids, **how), before) and absorbed


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_graph_decoder(attention, absorbed):
    model = make_model(attention=attention)
    ids = prompts()
    how = {"attention_mask": left_padded(ids, 0, 5, 2), "max_new_tokens": 8}
    expected = model.generate(ids, do_sample=False, **how)
    optimize(model)
    decoder = GraphDecoder(model, batch_sizes=(1, 4), max_length=32)
    absorbed.clear()
    assert torch.equal(decoder.generate(ids, **how), expected) and len(absorbed) >= 2 * 7
    prefix = decoder.prefix(ids[0, :5])
    alone = model.generate(torch.cat([ids[0, :5], ids[1]])[None], do_sample=False, max_new_tokens=6)
    assert torch.equal(decoder.generate(ids[1:2], max_new_tokens=6, prefix=prefix)[0, -6:], alone[0, -6:])
