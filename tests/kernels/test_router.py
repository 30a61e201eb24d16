"""Routers: reference backend against float64 and transformers' modules, errors, operators, the compiled kernels."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.decoder_ops import router
from fp8moe.kernels.decoder_ops.router import Form, router_logits
from fp8moe.kernels.experts import sort_by_expert
from fp8moe.runtime.checks import FLOATING
from tests.errors import error_in_its_dtype, refused
from tests.ptxas import without_spills
from tests.router_cases import DEEPSEEK, FORMS, SOFTMAX, arguments, dense, exact_route, route

SMS = 132
# x's and the weight's dtype, the result's, tokens, experts, H
LOGITS = (
    (torch.bfloat16, torch.bfloat16, 1, 128, 2048),
    (torch.bfloat16, torch.float32, 8, 128, 2048),
    (torch.bfloat16, torch.float32, 18, 256, 7168),
    (torch.bfloat16, torch.float32, 64, 128, 2048),
    (torch.float32, torch.float32, 32, 128, 2048),
    *((dtype, torch.float32, 18, 128, 7168) for dtype in FLOATING[:2]),
    (torch.float16, torch.float32, 64, 128, 131),
    *((dtype, torch.float32, 16, 256, 7168) for dtype in FLOATING),
    (torch.float16, torch.float16, 3, 300, 1000),
    (torch.bfloat16, torch.float32, 2, 60, 130),
    (torch.float32, torch.float32, 18, 256, 7168),
    (torch.float32, torch.float32, 5, 1024, 8192),
    (torch.bfloat16, torch.bfloat16, 16, 5000, 16384),
    (torch.float32, torch.bfloat16, 64, 5000, 8),
)


# ---- logits ----


@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATING, FLOATING)), ids=str)
@pytest.mark.parametrize("tokens,experts,hidden", [(1, 128, 256), (5, 7, 33), (0, 4, 8), (3, 0, 8), (2, 4, 0)])
def test_logits(dtypes, tokens, experts, hidden):
    dtype, out_dtype = dtypes
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(experts, hidden).to(dtype)
    for bias in (None, torch.randn(experts).to(dtype)):
        logits = router_logits(x, weight, bias=bias, dtype=out_dtype)
        assert logits.dtype is out_dtype and logits.shape == (tokens, experts)
        limit = 1e-6 if out_dtype is torch.float32 else 1e-3
        expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        assert error_in_its_dtype(logits, expected) < limit


# ---- route ----


@pytest.mark.parametrize("experts,top_k,form", FORMS, ids=str)
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATING, FLOATING)), ids=str)
def test_route_against_float64(experts, top_k, form, dtypes):
    dtype, out_dtype = dtypes
    logits, form = 2 * torch.randn(200, experts), arguments(experts, form)
    routing = route(logits.to(dtype), top_k, **form, dtype=out_dtype)
    assert routing.index.dtype is torch.int64 and routing.weights.dtype is out_dtype
    assert routing.index.shape == routing.weights.shape == (200, top_k)
    assert all(len(set(row)) == top_k for row in routing.index.tolist())
    weights, missed = exact_route(logits.to(dtype), routing.index, **form)
    assert missed.max() < 1e-6
    assert error_in_its_dtype(routing.weights, weights) < (1e-6 if out_dtype is torch.float32 else 1e-3)


def test_choices_are_in_order():
    logits = torch.tensor([[0.0, 3.0, -1.0, 3.0, 4.0, -0.0]])
    for score in ("softmax", "sigmoid"):
        routing = route(logits, 6, score=score, normalize=False, dtype=torch.float32)
        assert routing.index.tolist() == [[4, 1, 3, 0, 5, 2]]  # of equal ones the first
    # Probabilities that are 0, or equal by rounding, have an order too.
    logits = torch.tensor([[-1000.0, 0.0, -900.0, -800.0], [30.0, 40.0, 50.0, 60.0]])
    assert route(logits, 3, **SOFTMAX, dtype=torch.float32).index.tolist() == [[1, 3, 2], [3, 2, 1]]
    assert route(logits, 3, **DEEPSEEK, dtype=torch.float32).index.tolist() == [[1, 3, 2], [3, 2, 1]]


def test_groups_and_bias():
    logits = torch.tensor([[1.5, -9.0, -9.0, 1.0, 1.0, -9.0, 0.0, 0.0, 0.5]])
    groups = {"num_groups": 3, "top_groups": 1, "normalize": False, "dtype": torch.float32}
    # The second group has the largest sum of two, without the largest score.
    for score in ("softmax", "sigmoid"):
        assert route(logits, 2, score=score, **groups).index.tolist() == [[3, 4]]
    # A bias decides the choice, not the weights.
    bias = torch.zeros(9)
    bias[7] = 10
    routing = route(logits, 2, score="sigmoid", bias=bias, **groups)
    assert routing.index.tolist() == [[7, 8]]
    assert torch.equal(routing.weights, logits.sigmoid()[:, 7:])
    # Of equal groups the first.
    assert route(torch.zeros(1, 9), 2, score="sigmoid", **groups).index.tolist() == [[0, 1]]


@pytest.mark.parametrize("experts,top_k,form", FORMS, ids=str)
def test_nan_and_infinity_stay_in_their_tokens(experts, top_k, form):
    logits, form = torch.randn(6, experts), arguments(experts, form) | {"dtype": torch.float32}
    expected = route(logits, top_k, **form)
    logits[1, experts // 2], logits[2], logits[3, -1], logits[4] = math.nan, math.nan, math.inf, -math.inf
    routing = route(logits, top_k, **form)
    for row in routing.index.tolist():
        assert len(set(row)) == top_k and min(row) >= 0 and max(row) < experts
    assert routing.index[1, 0] == experts // 2 or form["score"] == "softmax"
    assert routing.weights[1, 0].isnan() and routing.weights[2].isnan().all()
    if form["score"] == "softmax" or form["normalize"]:
        assert routing.weights[1].isnan().all()
    if form["score"] == "softmax":
        assert routing.weights[3].isnan().all() and routing.weights[4].isnan().all()
    else:
        assert routing.weights[3].isfinite().all() and (routing.weights[4] == 0).all()
    for row in (0, 5):
        assert torch.equal(routing.index[row], expected.index[row])
        assert torch.equal(routing.weights[row], expected.weights[row])


def own_router(name: str, classes: tuple[str, str], **options):
    """A router of transformers with weights that are not 0."""
    models = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    config = pytest.importorskip(f"transformers.models.{name}.configuration_{name}")
    router = getattr(models, classes[0])(getattr(config, classes[1])(hidden_size=64, **options))
    torch.nn.init.normal_(router.weight, std=0.3)
    if hasattr(router, "e_score_correction_bias"):
        torch.nn.init.normal_(router.e_score_correction_bias, std=0.2)
    return router.requires_grad_(False)


_DEEPSEEK = {"n_group": 8, "topk_group": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
# Module of transformers, its class and that of its configuration, options, whether its logits are float32 and whether
# its weights are; the arguments of `route`.
OWN = (
    (
        *("qwen3_moe", ("Qwen3MoeTopKRouter", "Qwen3MoeConfig")),
        *({"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}, False, False, SOFTMAX),
    ),
    (
        *("qwen3_moe", ("Qwen3MoeTopKRouter", "Qwen3MoeConfig")),
        *({"num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False}, False, False),
        SOFTMAX | {"normalize": False},
    ),
    (
        *("qwen3_vl_moe", ("Qwen3VLMoeTextTopKRouter", "Qwen3VLMoeTextConfig")),
        *({"num_experts": 128, "num_experts_per_tok": 8}, False, False, SOFTMAX),
    ),
    (
        *("olmoe", ("OlmoeTopKRouter", "OlmoeConfig")),
        *({"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False}, False, False),
        SOFTMAX | {"normalize": False},
    ),
    (
        *("mixtral", ("MixtralTopKRouter", "MixtralConfig")),
        *({"num_local_experts": 8, "num_experts_per_tok": 2}, False, True, SOFTMAX),
    ),
    (
        *("deepseek_v3", ("DeepseekV3TopkRouter", "DeepseekV3Config")),
        *({"n_routed_experts": 256, "num_experts_per_tok": 8, **_DEEPSEEK}, True, True),
        DEEPSEEK | {"num_groups": 8, "top_groups": 3},
    ),
    (
        *("deepseek_v3", ("DeepseekV3TopkRouter", "DeepseekV3Config")),
        *({"n_routed_experts": 32, "num_experts_per_tok": 6, **_DEEPSEEK, "norm_topk_prob": False}, True, True),
        DEEPSEEK | {"num_groups": 8, "top_groups": 3, "normalize": False},
    ),
    (
        *("glm4_moe", ("Glm4MoeTopkRouter", "Glm4MoeConfig")),
        *({"n_routed_experts": 128, "num_experts_per_tok": 8, **_DEEPSEEK, "n_group": 1, "topk_group": 1}, True, True),
        DEEPSEEK,
    ),
)


@pytest.mark.parametrize("name,classes,options,float_logits,float_weights,form", OWN, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_router_of_transformers(name, classes, options, float_logits, float_weights, form, dtype):
    router = own_router(name, classes, **options)
    router.weight.data = router.weight.to(dtype)  # alone, as from_pretrained keeps the bias in float32
    x = torch.randn(50, 64).to(dtype)
    logits, weights, index = router(x)
    bias = getattr(router, "e_score_correction_bias", None)
    form = form | {"bias": bias, "dtype": torch.float32 if float_weights else dtype}
    routing = route(logits, router.top_k, **form)
    experts = logits.shape[1]
    assert routing.weights.dtype is weights.dtype and routing.index.dtype is index.dtype
    ours, theirs = dense(routing, experts), dense((index, weights), experts)
    if logits.dtype is torch.bfloat16:  # of equal logits they choose any
        same = (ours.isnan() == theirs.isnan()).all(-1)
        assert same.float().mean() > 0.9
        ours, theirs = ours[same], theirs[same]
    assert torch.equal(ours.isnan(), theirs.isnan())
    limit = 1e-6 if weights.dtype is torch.float32 else 1e-3
    assert error_in_its_dtype(ours.nan_to_num(), theirs.nan_to_num().double()) < limit
    own_logits = router_logits(x, router.weight, dtype=torch.float32 if float_logits else dtype)
    assert own_logits.dtype is logits.dtype
    assert error_in_its_dtype(own_logits, logits.double()) < (1e-6 if logits.dtype is torch.float32 else 1e-3)


@pytest.mark.parametrize("experts,top_k,form", [*FORMS, (512, 8, SOFTMAX), (513, 8, SOFTMAX)], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 5, 9, 16, 17])
def test_sorted_with_the_choice(tokens, experts, top_k, form, device):
    form = arguments(experts, form, device)
    for dtype, out_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        logits = torch.randn(tokens, 2 * experts, device=device).to(dtype)[:, ::2]
        expected = route(logits, top_k, **form, dtype=out_dtype)
        assert expected.groups is None and expected.rows is None
        routing = route(logits, top_k, **form, dtype=out_dtype, sort=True)
        assert torch.equal(routing.index, expected.index) and torch.equal(routing.weights, expected.weights)
        if tokens > 16 or experts > 512:
            assert routing.groups is None and routing.rows is None
        else:
            assert all(map(torch.equal, routing[2:], sort_by_expert(expected.index, experts)))


# ---- errors ----


def test_errors_of_logits():
    x, weight = torch.zeros(4, 16), torch.zeros(8, 16)
    refused(TypeError, "^x: expected a torch.Tensor, got NoneType", router_logits, None, weight, dtype=torch.float32)
    refused(TypeError, "^weight: expected a torch.Tensor, got list", router_logits, x, [1.0], dtype=torch.float32)
    with pytest.raises(TypeError, match="^x: expected bfloat16, float16 or float32, got torch.float64"):
        router_logits(x.double(), weight, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^x: expected shape \(T, H\), got \(1, 4, 16\)"):
        router_logits(x[None], weight, dtype=torch.float32)
    with pytest.raises(TypeError, match="^weight: expected float32, got torch.bfloat16"):
        router_logits(x, weight.bfloat16(), dtype=torch.float32)
    for wrong in (weight[:, :8], weight[0]):
        refused(ValueError, r"^weight: expected shape \(E, 16\), got", router_logits, x, wrong, dtype=torch.float32)
    with pytest.raises(TypeError, match="^dtype: expected bfloat16, float16 or float32, got torch.float64"):
        router_logits(x, weight, dtype=torch.float64)
    for bias in (weight[0, :3], weight[0].bfloat16()):
        refused((TypeError, ValueError), "^bias: expected", router_logits, x, weight, bias=bias, dtype=torch.float32)


def test_errors_of_route():
    zeros = torch.zeros(4, 16)

    def fails(error, match, logits=zeros, top_k=2, **changed):
        refused(error, match, route, logits, top_k, **SOFTMAX | {"dtype": torch.float32} | changed)

    fails(TypeError, "^logits: expected a torch.Tensor, got int 1", logits=1)
    fails(TypeError, "^logits: expected bfloat16, float16 or float32", logits=torch.zeros(4, 16).long())
    for shape in ((16,), (4, 0), (4, 1025)):
        fails(ValueError, r"^logits: expected shape \(T, E\) with E from 1 to 1024, got", logits=torch.zeros(shape))
    fails(ValueError, r"^score: expected one of \('softmax', 'sigmoid'\), got 'tanh'", score="tanh")
    fails(TypeError, "^bias: expected a torch.Tensor, got float 1.0", bias=1.0)
    fails(TypeError, "^bias: expected float32, got torch.bfloat16", bias=torch.zeros(16, dtype=torch.bfloat16))
    fails(ValueError, r"^bias: expected shape \(16,\), got \(8,\)", bias=torch.zeros(8))
    for name in ("top_k", "num_groups", "top_groups"):
        fails(TypeError, f"^{name}: expected an int, got float 1.0", **{name: 1.0})
    fails(ValueError, "^score: .* got None", score=None)
    for num_groups in (0, 3, 16, 64):
        fails(ValueError, f"^num_groups: expected 1, or up to 32 .* got {num_groups}$", num_groups=num_groups)
    for top_groups in (0, 5):
        fails(ValueError, f"^top_groups: expected 1 to 4, got {top_groups}", num_groups=4, top_groups=top_groups)
    for top_k in (0, 17):
        fails(ValueError, f"^top_k: expected 1 to 16 of 16 experts, got {top_k}", top_k=top_k)
    fails(ValueError, "^top_k: expected 1 to 4 of 16 experts, got 5", top_k=5, num_groups=4)
    fails(ValueError, "^top_k: expected 1 to 32 of 64 experts, got 33", logits=torch.zeros(4, 64), top_k=33)
    fails(TypeError, "^scale: expected a number, got NoneType", scale=None)
    fails(TypeError, "^dtype: expected bfloat16, float16 or float32, got torch.int32", dtype=torch.int32)


def test_what_one_thread_block_does_not_sort():
    for tokens, experts in ((17, 16), (4, 513)):
        with pytest.raises(ValueError, match=rf"^logits: .* 16 tokens and 512 experts .* got \({tokens}, {experts}\)"):
            form = 2, "softmax", True, 1, 1, 1.0, None, torch.float32
            torch.ops.fp8moe.route_sorted(torch.zeros(tokens, experts), *form)


def test_backward_raises():
    x, weight = torch.randn(4, 16), torch.randn(8, 16)
    for operands in ((x.clone().requires_grad_(), weight), (x, weight.clone().requires_grad_())):
        logits = router_logits(*operands, dtype=torch.float32)
        with pytest.raises(RuntimeError, match="router_logits has no backward"):
            logits.sum().backward()
    routing = route(torch.randn(4, 16, requires_grad=True), 2, **SOFTMAX, dtype=torch.float32)
    assert not routing.index.requires_grad
    with pytest.raises(RuntimeError, match="route has no backward"):
        routing.weights.sum().backward()


# ---- kernels ----


def test_shares_of_a_thread_block():
    for experts in (1, 8, 60, 128, 132, 133, 160, 256, 512, 1024, 5000):
        for tokens in (1, 2, 3, 8, 9, 64):
            block_experts, block_tokens = router.logits_block(tokens, experts, SMS)
            assert block_experts * block_tokens <= 32 and block_experts.bit_count() == block_tokens.bit_count() == 1
            assert block_tokens < 2 * tokens and (block_tokens >= tokens or block_experts * block_tokens == 32)
            assert experts <= block_experts * SMS or block_experts == 8
            assert block_experts == 1 or experts > block_experts // 2 * SMS
    for row_bytes, most in ((0, 0), (2, 64), (4096, 64), (8192, 32), (14336, 18), (32768, 8), (32770, 0)):
        assert router.by_kernel(most, row_bytes) == (most > 0) and not router.by_kernel(most + 1, row_bytes)


@pytest.mark.parametrize("dtype,out_dtype,tokens,experts,hidden", LOGITS, ids=str)
def test_every_variant_of_logits_compiles_without_spills(dtype, out_dtype, tokens, experts, hidden):
    vector = hidden * dtype.itemsize % 16 == 0
    block = router.logits_block(tokens, experts, SMS)
    report = without_spills(router.logits_spec(block, experts, hidden, dtype, out_dtype, vector))
    assert report.static_smem <= 48 << 10


@pytest.mark.parametrize("experts,top_k,form", FORMS, ids=str)
def test_every_variant_of_route_compiles_without_spills(experts, top_k, form):
    sigmoid, groups = form["score"] == "sigmoid", (form.get("num_groups", 1), form.get("top_groups", 1))
    compiled_form = Form(top_k, sigmoid, bool(form.get("bias")), *groups, form["normalize"])
    for dtype, out_dtype in zip(FLOATING, (torch.float16, torch.float32, torch.bfloat16), strict=True):
        report = without_spills(router.route_spec(experts, compiled_form, dtype, out_dtype))
        assert report.static_smem == 0
        assert report.registers <= (96 if experts > 512 else 48)


@given(tokens=st.integers(0, router.MAX_SORTED_TOKENS), experts=st.integers(1, router.MAX_SORTED_EXPERTS))
def test_thread_block_that_sorts(tokens, experts):
    counters, warps, blocks = shape = router.sorted_shape(tokens, experts)
    assert blocks == 1 and experts <= counters <= 32 * warps <= 1024 and tokens <= warps
    assert shape.shared_bytes <= 227 << 10


@pytest.mark.parametrize(
    "experts,top_k,form", [*FORMS[:10], (384, 8, DEEPSEEK | {"bias": True}), (512, 10, SOFTMAX)], ids=str
)
def test_every_variant_that_sorts_compiles_without_spills(experts, top_k, form):
    sigmoid, groups = form["score"] == "sigmoid", (form.get("num_groups", 1), form.get("top_groups", 1))
    compiled_form = Form(top_k, sigmoid, bool(form.get("bias")), *groups, form["normalize"])
    for tokens, dtype, out_dtype in ((1, torch.bfloat16, torch.float16), (16, torch.float32, torch.float32)):
        spec = router.sorted_spec(tokens, experts, compiled_form, dtype, out_dtype)
        report = without_spills(spec)
        assert report.static_smem == 0
        assert report.registers * dict(spec.defines)["WARPS"] * 32 <= 65536
