"""fp8moe.hf.replay_routing and record_routing, on the CPU."""

import copy
import functools
import itertools
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fp8moe import hf
from fp8moe.decode import GraphDecoder
from fp8moe.hf import replaced, versions
from fp8moe.hf import routing as module
from fp8moe.hf.fused import feed_forward
from fp8moe.layers import GroupedExperts, master
from tests.errors import relative_error
from tests.processes import in_processes
from tests.tiny_moe_models import MODELS
from tests.transformers_models import left_padded, prompts

REFUSED = {
    "DiffusionGemmaForBlockDiffusion": "DiffusionGemmaDecoderModel reads no input_ids",
    "DogeForCausalLM": "a router of its is not known",
    "Ernie4_5_VLMoeForConditionalGeneration": "expected one router in a layer, got .*text_moe.* and .*vision_moe",
    "Inkling2LoopForCausalLM": "runs its layers several times",
    "Inkling2LoopForConditionalGeneration": "runs its layers several times",
    "JetMoeForCausalLM": "the router of .*JetMoeParallelExperts.* is not known",
    "PhimoeForCausalLM": "the router of .*PhimoeExperts.* is not known",
}
if versions.has_styles():  # transformers 5.17, where the experts of Aria route by themselves
    REFUSED |= dict.fromkeys(("AriaForConditionalGeneration", "AriaTextForCausalLM"), "the router of .*AriaExperts")
BROKEN = ("Llama4ForConditionalGeneration",)  # the code of transformers fails
KNOWN = sorted(MODELS.keys() - REFUSED.keys() - set(BROKEN))
IDS = prompts(2, 7)


def build(name, **how):
    """A tiny model whose parameters are not zero: some routers begin with the same scores for all experts."""
    tiny = MODELS[name]
    if name == "DeepseekV4ForCausalLM":
        tiny = tiny._replace(options=tiny.options | {"mlp_layer_types": ["hash_moe", "moe"]})
    model = tiny.build(**how)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, value in [*model.named_parameters(), *model.named_buffers()]:
            if path.endswith("tid2eid"):
                value.copy_(torch.rand(len(value), 8, generator=generator).argsort(-1)[:, : value.shape[1]])
            elif value.is_floating_point() and value.ndim and not value.any():
                value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    return model


def logits_of(model, **inputs):
    inputs = {"input_ids": IDS, "use_cache": False} | inputs
    return model(**inputs).logits


def taken(model, run):
    """What run() gives, and the experts (layers, T, K) that modules of experts have got, as the model itself tells."""
    found = []

    def note(experts, args, kwargs):
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        found.extend(value.reshape(-1, value.shape[-1]) for value in tensors if not value.is_floating_point())

    def note_scores(router, args, output):  # Llama 4 gives its experts scores, 0 for those that are not chosen
        found.append(output[0].topk(router.top_k)[1])

    modules = [each for each in model.get_decoder().modules() if re.search(r"Experts$", type(each).__name__)]
    hooks = [each.register_forward_pre_hook(note, with_kwargs=True) for each in modules]
    routers = [each for each in model.modules() if type(each).__name__ == "Llama4Router"]
    hooks += [each.register_forward_hook(note_scores) for each in routers]
    try:
        return run(), torch.stack(found)
    finally:
        for hook in hooks:
            hook.remove()


def as_taken(model, routing):
    """A routing as `taken` gives it: Zaya gives a token that skips its experts expert 0, with weight 0."""
    routing = routing.flatten(0, 1).transpose(0, 1).long()
    skips = type(model).__name__.startswith("Zaya")
    return routing.masked_fill(routing == model.config.num_experts, 0) if skips else routing


def others(routing, model):
    """Other experts for each token."""
    counts = [layer.num_experts for layer in module._layers_of(model)]
    return ((routing + 1) % torch.tensor(counts, dtype=torch.int16)[:, None]).contiguous()


@torch.no_grad()
@pytest.mark.parametrize("name", KNOWN)
def test_each_model(name):
    model = build(name)
    plain, own = taken(model, lambda: logits_of(model))
    with hf.record_routing(model) as recorded:
        assert torch.equal(logits_of(model), plain)
    routing = recorded.routing
    layers = own.shape[0]
    assert routing.dtype is torch.int16
    assert routing.shape == (*IDS.shape, layers, own.shape[-1])
    assert torch.equal(as_taken(model, routing).sort(-1)[0], own.sort(-1)[0])
    with hf.replay_routing(model, routing):
        assert torch.equal(logits_of(model), plain)
    given = others(routing, model)
    with hf.record_routing(model) as again, hf.replay_routing(model, given):
        logits, got = taken(model, lambda: logits_of(model))
    assert torch.equal(as_taken(model, given).sort(-1)[0], got.sort(-1)[0])
    assert torch.equal(again.routing, given)
    assert name.startswith("Gemma4") or not torch.equal(logits, plain)  # tiny ones of Gemma 4 take all experts
    assert torch.equal(logits_of(model), plain)


def test_number_of_models():
    assert len(KNOWN) >= (50 if versions.has_styles() else 60)  # transformers 5.17 has fewer


@pytest.mark.parametrize("name", sorted(REFUSED.keys() & MODELS.keys()))
def test_models_without_known_routers_are_refused_by_name(name):
    model = MODELS[name].build()
    for block in (hf.record_routing(model), hf.replay_routing(model, torch.zeros(2, 7, 2, 2, dtype=torch.int16))):
        with pytest.raises(ValueError, match=f"^model: {name} .*{REFUSED[name]}"), block:
            pass


# The formulas of routers, with gradients.


def softmax_first(router, logits, index):
    return logits.softmax(-1).gather(1, index)


def normalized(router, logits, index):
    weights = softmax_first(router, logits, index)
    return weights / weights.sum(-1, keepdim=True)


def softmax_last(router, logits, index):
    return logits.gather(1, index).softmax(-1)


def sigmoid(router, logits, index):
    weights = logits.sigmoid().gather(1, index)
    return weights / weights.sum(-1, keepdim=True) * getattr(router, "routed_scaling_factor", 1.0)


FORMULAS = {
    "OlmoeForCausalLM": softmax_first,
    "Qwen3VLMoeForConditionalGeneration": normalized,
    "MixtralForCausalLM": normalized,
    "GptOssForCausalLM": softmax_last,
    "GraniteMoeForCausalLM": softmax_last,
    "DeepseekV3ForCausalLM": sigmoid,
    "MiniMaxM3VLForCausalLM": sigmoid,
    "DeepseekV2ForCausalLM": softmax_first,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_gradient_of_router(name):
    options = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1} if "V2" in name else {}
    tiny = MODELS[name]
    model = tiny._replace(options=tiny.options | options).build()
    layers = module._layers_of(model)
    (router,) = layers[0].routers
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(14, 128, generator=generator)
    index = torch.rand(14, 8, generator=generator).argsort(-1)[:, :2]
    given = index.view(2, 7, 1, 2).expand(2, 7, len(layers), 2).short()
    factors = torch.randn(14, 2, generator=generator)
    with hf.replay_routing(model, given):
        found = [out for out in router(x) if out.shape == index.shape]
    weights, chosen = sorted(found, key=lambda out: out.dtype.itemsize)
    assert torch.equal(chosen, index)
    (weights * factors).sum().backward()
    weight = router.weight.detach().double().requires_grad_()
    bias = getattr(router, "bias", None)
    logits = F.linear(x.double(), weight, None if bias is None else bias.detach().double())
    expected = FORMULAS[name](router, logits, index)
    (expected * factors.double()).sum().backward()
    assert torch.allclose(weights.double(), expected, rtol=1e-4, atol=1e-6)
    assert (router.weight.grad - weight.grad).norm() < 1e-2 * weight.grad.norm()


# Gradient checkpointing and micro-batches.


def qwen(**how):
    return MODELS["Qwen3MoeForCausalLM"].build(**how)


def gradients(model, batches, checkpointed=None, order=(1, 0)):
    """Gradients of the parameters, after a replay of each batch and then the backwards in this order."""
    model = copy.deepcopy(model).train()
    if checkpointed is not None:
        checkpointed(model)
    losses = []
    buffer = batches[0][1].clone()
    for ids, routing in batches:
        buffer.copy_(routing)
        with hf.replay_routing(model, buffer):
            losses.append(logits_of(model, input_ids=ids).float().square().mean())
    assert not replaced._held
    for index in order:
        losses[index].backward()
    assert not replaced._held
    return [value.grad for value in model.parameters()]


def reentrant(model):
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})


def not_reentrant(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})


def by_wrapper(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)


def by_hand(model):
    for layer in model.model.layers:
        forward = layer.mlp.forward
        layer.mlp.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)


def batches_of(model):
    """Two batches of one shape, with experts that the model itself would not take."""
    found = []
    for seed in (3, 4):
        ids = prompts(2, 7, seed=seed)
        with torch.no_grad(), hf.record_routing(model) as recorded:
            logits_of(model, input_ids=ids)
        found.append((ids, others(recorded.routing, model)))
    return found


@pytest.mark.parametrize("checkpointed", (reentrant, not_reentrant, by_wrapper, by_hand))
@pytest.mark.parametrize("order", ((0, 1), (1, 0)))
def test_recomputed_forwards_take_the_same_experts(checkpointed, order):
    model = qwen()
    batches = batches_of(model)
    expected = gradients(model, batches, order=order)
    got = gradients(model, batches, checkpointed, order)
    for value, other in zip(expected, got, strict=True):
        assert (value is None) == (other is None)
        assert value is None or torch.equal(value, other)


def test_backward_in_the_block_of_another_batch():
    model = qwen().train()
    not_reentrant(model)
    (ids, routing), (_, later) = batches_of(model)
    expected = gradients(model, [(ids, routing)], order=(0,))
    with hf.replay_routing(model, routing):
        loss = logits_of(model, input_ids=ids).float().square().mean()
    with hf.replay_routing(model, later), hf.record_routing(model) as recorded:
        loss.backward()
    assert recorded.routing is None
    assert all(
        value is None or torch.equal(value, parameter.grad)
        for value, parameter in zip(expected, model.parameters(), strict=True)
    )


# What is given.


@torch.no_grad()
def test_tokens_without_experts_are_routed_by_the_model():
    model = qwen()
    ids = prompts(3, 7)
    mask = left_padded(ids, 0, 2, 3)
    with hf.record_routing(model) as recorded:
        plain = logits_of(model, input_ids=ids, attention_mask=mask)
    routing = recorded.routing
    assert torch.equal((routing == -1).all(-1).all(-1), mask == 0)
    assert (routing[mask.bool()] >= 0).all()
    with hf.replay_routing(model, routing):
        assert torch.equal(logits_of(model, input_ids=ids, attention_mask=mask), plain)
    part = others(routing, model)
    part[:, :4] = -1
    with hf.replay_routing(model, part), hf.record_routing(model) as recorded:
        logits_of(model, input_ids=ids)
    assert torch.equal(recorded.routing[:, 4:], part[:, 4:])
    with hf.record_routing(model) as own:
        logits_of(model, input_ids=ids[:, :4])
    assert torch.equal(recorded.routing[:, :4], own.routing)


@torch.no_grad()
def test_packed_sequences():
    model = qwen()
    parts = [prompts(1, length, seed=length) for length in (4, 6)]
    routings, logits = [], []
    for ids in parts:
        with hf.record_routing(model) as recorded:
            logits_of(model, input_ids=ids)
        routings.append(others(recorded.routing, model))
        with hf.replay_routing(model, routings[-1]):
            logits.append(logits_of(model, input_ids=ids))
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in parts])[None]
    with hf.replay_routing(model, torch.cat(routings, 1)):
        packed = logits_of(model, input_ids=torch.cat(parts, 1), position_ids=positions)
    assert torch.allclose(packed, torch.cat(logits, 1), rtol=1e-4, atol=1e-4)


GOOD = torch.zeros(2, 7, 2, 2, dtype=torch.int16)


def changed(value):
    routing = GOOD.clone()
    routing[1, 3, 1, 0] = value
    return routing


@pytest.mark.parametrize(
    ("routing", "error", "message"),
    (
        (GOOD.tolist(), TypeError, "routing: expected an int16 tensor, got list"),
        (GOOD.int(), TypeError, "routing: expected an int16 tensor, got torch.int32"),
        (GOOD[0], ValueError, r"routing: expected shape \(B, L, layers, K\) = \(B, L, 2, 2\), got \(7, 2, 2\)"),
        (GOOD[:, :, :1], ValueError, r"= \(B, L, 2, 2\), got \(2, 7, 1, 2\)"),
        (GOOD[..., :1], ValueError, r"= \(B, L, 2, 2\), got \(2, 7, 2, 1\)"),
        (changed(8), ValueError, r"from 0 to 7, or -1, for layer 1 \(layers.1.mlp.gate\), got 8"),
        (changed(-2), ValueError, r"from 0 to 7, or -1, for layer 1 .*, got -2"),
        (changed(-1), ValueError, "routing: expected -1 in all K experts of a token or in none"),
        (GOOD[:, :6], ValueError, r"\(B, L\) = \(2, 7\) of input_ids, got \(2, 6\)"),
        (GOOD.reshape(7, 2, 2, 2), ValueError, r"\(B, L\) = \(2, 7\) of input_ids, got \(7, 2\)"),
    ),
)
def test_wrong_routing_is_refused_before_a_layer_runs(routing, error, message):
    model = qwen()
    ran = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(error, match=message), hf.replay_routing(model, routing):
        model(IDS)
    assert not ran
    assert not replaced._held
    logits_of(model)


def test_wrong_models_are_refused():
    for model, error, message in (
        (torch.nn.Linear(2, 2), TypeError, "model: expected a model of transformers, got Linear"),
        (torch.nn.DataParallel(qwen()), ValueError, "got DataParallel"),
    ):
        with pytest.raises(error, match=message), hf.record_routing(model):
            pass


def test_base_model_and_router_alone():
    model = qwen()
    with torch.no_grad(), hf.record_routing(model) as recorded:
        model.model(input_ids=IDS)
    given = others(recorded.routing, model)
    with hf.replay_routing(model, given), hf.record_routing(model.model) as again:
        with pytest.raises(ValueError, match=r"of the 5 tokens .* got \(B, L\) = \(2, 7\)"):
            model.model.layers[0].mlp.gate(torch.zeros(5, 128))
        model.model(inputs_embeds=model.get_input_embeddings()(IDS))
    assert torch.equal(again.routing, given)


def test_decoders_are_refused_in_a_block():
    """Its graphs would not see the block. Those of another model are not meant."""
    model, other = (build("Qwen3MoeForCausalLM") for _ in range(2))
    decoder = GraphDecoder(model, max_length=16)
    expected = decoder.generate(IDS[:1], max_new_tokens=2)
    with hf.record_routing(model) as recorded:
        logits_of(model)
    for block in (hf.replay_routing(model, recorded.routing), hf.record_routing(model)):
        with block:
            for call in (
                lambda: decoder.generate(IDS[:1], max_new_tokens=2),
                lambda: next(decoder.stream(IDS[:1], max_new_tokens=2)),
                lambda: GraphDecoder(model, max_length=16),
            ):
                with pytest.raises(RuntimeError, match=r"^GraphDecoder: its graphs do not see this block"):
                    call()
    with hf.record_routing(other):
        assert torch.equal(decoder.generate(IDS[:1], max_new_tokens=2), expected)


def test_a_layer_that_runs_twice_is_an_error():
    model = qwen()
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(RuntimeError, match=r"has run the router layers.0.mlp.gate twice"), hf.record_routing(model):
        model(IDS)
    assert not replaced._held


# Blocks in one another, one after the other, and in other threads.


@torch.no_grad()
def test_blocks():
    model = qwen()
    before = {name: dict(vars(each)) for name, each in model.named_modules()}
    with hf.record_routing(model) as recorded:
        plain = logits_of(model)
    outer, inner = others(recorded.routing, model), others(others(recorded.routing, model), model)
    with hf.replay_routing(model, outer):
        first = logits_of(model)
        with hf.replay_routing(model, inner), hf.record_routing(model) as nested:
            logits_of(model)
        assert torch.equal(nested.routing, inner)
        with pytest.raises(ZeroDivisionError), hf.replay_routing(model, inner):
            raise ZeroDivisionError
        assert torch.equal(logits_of(model), first)
        found = []

        @torch.no_grad()
        def run():
            found.append(logits_of(model))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert torch.equal(found[0], plain)
    assert not replaced._held
    assert before == {name: dict(vars(each)) for name, each in model.named_modules()}


@torch.no_grad()
def test_a_copy_made_in_a_block():
    model = qwen()
    with hf.record_routing(model) as recorded:
        plain = logits_of(model)
    routing = others(recorded.routing, model)
    with hf.replay_routing(model, routing):
        expected, copied = logits_of(model), copy.deepcopy(model)
    assert torch.equal(logits_of(copied), plain)
    with hf.replay_routing(copied, routing):
        assert torch.equal(logits_of(copied), expected)
    assert torch.equal(logits_of(copied), plain)


# Models as they are used.


def routed(model, inner=None, ids=IDS):
    """Check that a model takes other experts than its own; return the logits."""
    inner = model if inner is None else inner
    with torch.no_grad(), hf.record_routing(model) as recorded:
        plain = model(input_ids=ids).logits
    given = others(recorded.routing, inner)
    with torch.no_grad(), hf.replay_routing(model, given), hf.record_routing(model) as again:
        logits = model(input_ids=ids).logits
    assert torch.equal(again.routing, given)
    assert not torch.equal(logits, plain)
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, plain)
    return logits


@pytest.mark.parametrize("outside", (False, True))
def test_compiled_models(outside):
    model = qwen()
    expected = routed(model)
    counts = CompileCounter()
    if outside:
        compiled = torch.compile(model, backend=counts)
    else:
        compiled = model
        model.compile(backend=counts)
    with torch.no_grad():
        compiled(input_ids=IDS)
    for _ in range(2):
        assert torch.allclose(routed(compiled, model), expected, atol=1e-5)
    frames = counts.frame_count
    for _ in range(3):  # no compilation in further blocks
        routed(compiled, model)
    assert counts.frame_count == frames


def test_peft():
    peft = pytest.importorskip("peft")
    model = qwen()
    expected = routed(model)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"])
    adapted = peft.get_peft_model(model, config)
    assert torch.allclose(routed(adapted, model), expected, atol=1e-5)
    with adapted.disable_adapter():
        routed(adapted, model)


@pytest.mark.parametrize("experts", ("fp8moe", "masters", "grouped_mm", "eager"))
def test_implementations_of_experts(experts):
    model = qwen(dtype=torch.bfloat16)
    if experts == "masters":
        for layer in model.model.layers:
            layer.mlp.experts = GroupedExperts.from_experts(layer.mlp.experts, master_dtype=torch.bfloat16)
    else:
        hf.register()
        model.set_experts_implementation(experts)
    try:
        routed(model)
    finally:
        hf.unregister()
    if experts == "masters":
        (ids, routing), _ = batches_of(model)
        got = [gradients(model, [(ids, routing)], checkpointed, order=(0,)) for checkpointed in (None, not_reentrant)]
        assert got[0][-1].any()
        assert all(value is None or torch.equal(value, other) for value, other in zip(*got, strict=True))


def test_optimized_models():
    model = MODELS["DeepseekV3ForCausalLM"].build(torch.bfloat16)
    optimized = hf.optimize(model)
    routed(model)
    optimized.restore()
    routed(model)


@torch.no_grad()
def test_routers_that_run_fused_are_recorded(monkeypatch):
    model, chosen, mine = build("MixtralForCausalLM"), [], []
    with hf.record_routing(model) as unfused:
        logits_of(model)
    first, second = (layer.mlp.gate for layer in model.model.layers)
    hf.optimize(model)
    plain = logits_of(model)
    for name in ("norm_route", "route"):  # of a block, and of a router alone
        choose = getattr(feed_forward, name)
        counted = lambda *args, choose=choose, **how: chosen.append(choose(*args, **how)) or chosen[-1]  # noqa: E731
        monkeypatch.setattr(feed_forward, name, counted)
    with hf.record_routing(model) as recorded:
        assert torch.equal(logits_of(model), plain)
    assert torch.equal(recorded.routing, unfused.routing) and len(chosen) == 2
    fused = first.forward
    first.forward = lambda x: mine.append(1) or fused(x)  # a user's own, which a fused block would not call
    with hf.record_routing(model) as recorded:
        logits_of(model)
    assert torch.equal(recorded.routing, unfused.routing) and mine == [1]
    with hf.replay_routing(model, unfused.routing):
        logits_of(model)
    assert len(chosen) == 3 and second.forward.func is feed_forward.forward_router


# Experts that run through experts_implementation="fp8moe", and whose weights want gradients.

TRAINED = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM")


def on_fp8moe(name="Qwen3MoeForCausalLM", dtype=torch.bfloat16):
    model = MODELS[name].build(dtype)
    model.set_experts_implementation("fp8moe")
    return model


def with_masters(model):
    model = copy.deepcopy(model)
    for name, experts in [*model.named_modules()]:
        if name.endswith(".experts"):
            masters = GroupedExperts.from_experts(experts, master_dtype=experts.down_proj.dtype)
            model.set_submodule(name, masters)
    return model


def replayed(model, ids, routing):
    """Logits, and the gradients that parameters got from a replay."""
    with hf.replay_routing(model, routing):
        logits = logits_of(model, input_ids=ids)
    logits.float().square().mean().backward()
    return {"logits": logits.detach()} | {
        name: value.grad for name, value in model.named_parameters() if value.grad is not None
    }


def assert_equal_bits(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.usefixtures("one_thread", "registered")
@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("name", TRAINED)
def test_experts_get_the_gradients_of_masters(name, dtype, training):
    model = on_fp8moe(name, dtype).train(training)
    (ids, routing), _ = batches_of(model)
    before = {path: dict(vars(each)) for path, each in model.named_modules()}
    got = replayed(model, ids, routing)
    assert_equal_bits(got, replayed(with_masters(model), ids, routing))
    weights = [value for path, value in got.items() if ".experts." in path]
    assert len(weights) == sum(".experts." in path for path, _ in model.named_parameters())
    assert all(value.any() and value.dtype == dtype for value in weights)
    for path, each in model.named_modules():
        assert vars(each).keys() - before[path].keys() <= {"_fp8moe_masters"}
    with pytest.raises(RuntimeError, match="has no backward"):
        logits_of(model).sum().backward()
    model.eval()
    with torch.no_grad(), hf.record_routing(model) as recorded:
        plain = logits_of(model)
    with torch.no_grad(), hf.replay_routing(model, recorded.routing):
        assert torch.equal(logits_of(model), plain)


@pytest.mark.usefixtures("one_thread", "registered")
@pytest.mark.parametrize("compiled", (False, True))
def test_another_thread_trains_no_experts(compiled):
    model = on_fp8moe().train()
    (ids, routing), _ = batches_of(model)
    plain, alone = logits_of(model).detach(), copy.deepcopy(model)
    for each in (model, alone) if compiled else ():
        each.compile(backend="eager")
    expected = replayed(alone, ids, routing)

    def outside():
        logits = logits_of(model)
        assert torch.equal(logits, plain)
        with pytest.raises(RuntimeError, match="has no backward"):
            logits.sum().backward()
        model.zero_grad()

    with ThreadPoolExecutor(1) as pool, hf.replay_routing(model, routing):
        for _ in range(2):
            pool.submit(outside).result()
            assert_equal_bits(replayed(model, ids, routing), expected)
    outside()


@pytest.mark.usefixtures("one_thread", "registered")
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_experts_against_float32(name):
    model = on_fp8moe(name, torch.float32).train()
    (ids, routing), _ = batches_of(model)
    exact = copy.deepcopy(model)
    exact.set_experts_implementation("eager")
    got, expected = (replayed(each, ids, routing) for each in (model, exact))
    for path, value in expected.items():
        # Each operand that is rounded to E4M3 costs 2.6%. Those of routers sum what nearly cancels.
        assert relative_error(got[path], value) < (0.08 if ".experts." in path else 0.2), path


@pytest.mark.usefixtures("one_thread", "registered")
def test_weights_are_quantized_once_for_each_step(monkeypatch):
    weights, quantize = [], master._quantize
    monkeypatch.setattr(
        master, "_quantize", lambda weight, **options: weights.append(weight.shape) or quantize(weight, **options)
    )
    model = on_fp8moe().train()
    batches = batches_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with torch.no_grad(), hf.replay_routing(model, batches[0][1]):
            after = logits_of(model, input_ids=batches[0][0])
        for ids, routing in batches:
            replayed(model, ids, routing)
        assert len(weights) == 4 * (step + 1)
        optimizer.step()
    first = model.model.layers[0].mlp.experts
    first.down_proj = torch.nn.Parameter(first.down_proj.detach() * 2)
    ids, routing = batches[0]
    got = replayed(model, ids, routing)
    assert len(weights) == 12 and not torch.equal(got["logits"], after)
    for other in (with_masters(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for each in (model, other):
            each.zero_grad()
        assert_equal_bits(replayed(other, ids, routing), replayed(model, ids, routing))


@pytest.mark.usefixtures("one_thread", "registered")
@pytest.mark.parametrize("checkpointed", (reentrant, not_reentrant, by_wrapper, by_hand))
def test_recomputed_experts_get_the_same_gradients(checkpointed):
    model = on_fp8moe()
    batches = batches_of(model)
    expected = gradients(with_masters(model), batches)
    for value, other in zip(gradients(model, batches, checkpointed), expected, strict=True):
        assert (value is None) == (other is None)
        assert value is None or torch.equal(value, other)


@pytest.mark.usefixtures("one_thread", "registered")
def test_experts_of_models_as_they_are_used():
    """Frozen in part, in a copy of peft's, compiled, and after unregister."""
    peft = pytest.importorskip("peft")
    model = on_fp8moe().train()
    (ids, routing), _ = batches_of(model)
    masters = with_masters(model)

    found = []
    for each in (model, masters):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"])
        found.append(replayed(peft.get_peft_model(copy.deepcopy(each), config), ids, routing))
    assert_equal_bits(*found)
    assert sum("modules_to_save" in name for name in found[0]) == 4

    for each in (model, masters):
        each.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
        each.model.layers[1].mlp.experts.requires_grad_(False)
    got = replayed(model, ids, routing)
    assert_equal_bits(got, replayed(masters, ids, routing))
    assert [name for name in got if ".experts." in name] == ["model.layers.0.mlp.experts.gate_up_proj"]

    for each in (model, masters):
        each.zero_grad()
        each.compile(backend="eager")
    assert_equal_bits(replayed(model, ids, routing), replayed(masters, ids, routing))

    model = on_fp8moe().train()
    expected = replayed(with_masters(model), ids, routing)
    hf.unregister()
    assert_equal_bits(replayed(model, ids, routing), expected)


@pytest.mark.usefixtures("one_thread", "registered")
@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    (
        ("GptOssForCausalLM", torch.bfloat16, "GptOssExperts cannot be trained with .*transposed or interleaved"),
        ("MixtralForCausalLM", torch.float16, "MixtralExperts cannot be trained with .*got torch.float16"),
    ),
)
def test_experts_that_cannot_be_trained_are_refused_before_a_layer_runs(name, dtype, message):
    model = on_fp8moe(name, dtype)
    (ids, routing), _ = batches_of(model)
    ran = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=message), hf.record_routing(model):
            replayed(model, ids, routing)
    assert not ran
    with torch.no_grad(), hf.replay_routing(model, routing), hf.record_routing(model) as recorded:
        logits_of(model, input_ids=ids)
    assert torch.equal(recorded.routing, routing)
    model.set_experts_implementation("eager")
    replayed(model, ids, routing)


def in_two_processes():
    """Each rank has its own batch, on a model of which a part is on the other, against the whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    from fp8moe.distributed import ExpertParallel

    model = qwen(dtype=torch.bfloat16)
    batches = batches_of(model)
    ids, routing = batches[dist.get_rank()]
    mesh = init_device_mesh("cpu", (2,))

    def masters():
        trained = copy.deepcopy(model).train()
        for layer in trained.model.layers:
            layer.mlp.experts = GroupedExperts.from_experts(layer.mlp.experts, master_dtype=torch.bfloat16)
        not_reentrant(trained)
        return trained

    def router_gradient(trained, own=None):
        loss = 0
        for tokens, experts in [(ids, routing)] if own is None else own:
            with hf.replay_routing(trained, experts), hf.record_routing(trained) as recorded:
                loss = loss + logits_of(trained, input_ids=tokens).float().square().mean()
            assert torch.equal(recorded.routing, experts)
        loss.backward()
        inner = getattr(trained, "module", trained)
        gradient = inner.model.layers[0].mlp.gate.weight.grad
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

    mean = router_gradient(masters(), batches) / 2
    sharded = masters()
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    spread = masters()
    parallelize_module(spread, mesh, {"model.layers.*.mlp.experts": ExpertParallel(exact=True)})
    for trained in (DistributedDataParallel(masters()), sharded):
        assert (router_gradient(trained) - mean).norm() < 2e-2 * mean.norm()
    alone = router_gradient(masters())
    assert (router_gradient(spread) - alone).norm() < 5e-2 * alone.norm()  # partial sums round otherwise


def experts_in_two_processes():
    """Steps by hand: no optimizer says that weights have changed, and FSDP2 gathers them into the same memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    from fp8moe.distributed import ExpertParallel

    hf.register()
    model = on_fp8moe()
    ids, routing = batches_of(model)[dist.get_rank()]
    mesh = init_device_mesh("cpu", (2,))

    def sharded(each, layers=True):
        for layer in each.model.layers if layers else ():
            fully_shard(layer, mesh=mesh)
        return fully_shard(each, mesh=mesh)

    def spread(each):
        return parallelize_module(each, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})

    def step(each):
        found = replayed(each, ids, routing)
        with torch.no_grad():
            for value in each.parameters():
                value.sub_(0.1 * value.grad)
                value.grad = None
            with hf.replay_routing(each, routing):
                found["after"] = logits_of(each, input_ids=ids)
            found["outside"] = logits_of(each, input_ids=ids)
        return {
            name: value.to_local() if isinstance(value, DTensor) else value.clone() for name, value in found.items()
        }

    for wrapped in (DistributedDataParallel, sharded, functools.partial(sharded, layers=False), spread):
        pair = [each.train() for each in (copy.deepcopy(model), with_masters(model))]
        for each in pair:
            not_reentrant(each)
        pair = [wrapped(each) for each in pair]
        logits = []
        for _ in range(3):
            got, expected = map(step, pair)
            logits.append((got["after"], got.pop("outside")))
            del expected["outside"]  # of masters, which round otherwise than frozen copies
            assert_equal_bits(got, expected)
        for before, later in itertools.pairwise(logits):
            assert not any(map(torch.equal, before, later))
        with torch.no_grad():
            outside = []
            for _ in range(8):  # memory of gathered weights may have another address, too
                if isinstance(pair[0], FSDPModule):
                    pair[0].reshard()
                for name, value in pair[0].named_parameters():
                    value.mul_(1.1 if ".experts." in name else 1)
                outside.append(logits_of(pair[0], input_ids=ids))
        assert not any(itertools.starmap(torch.equal, itertools.pairwise(outside)))


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("work", (in_two_processes, experts_in_two_processes))
def test_several_processes(work):
    in_processes(work)
