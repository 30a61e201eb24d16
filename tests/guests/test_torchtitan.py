"""integrations/torchtitan: its overrides and modules on torchtitan 0.3.0, its converter on the modules of 0.2.2.

tools/titan_training.py is the test of whole runs.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.errors import relative_error

try:
    VERSION = version("torchtitan")
except PackageNotFoundError:
    pytest.skip("torchtitan is not installed", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "integrations/torchtitan"))
ROUNDING = 0.1  # what FP8 costs in an expert
new = pytest.mark.skipif(VERSION.startswith("0.2"), reason="for 0.3")
old = pytest.mark.skipif(not VERSION.startswith("0.2"), reason="for 0.2")


def rows_of(counts, dim=256, behind=0, dtype=torch.bfloat16):
    return torch.randn(sum(counts) + behind, dim).to(dtype).requires_grad_(), torch.tensor(counts)


def train_once(module, *arguments):
    """The result, and gradients of the first argument and of all parameters."""
    out = module(*arguments)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [arguments[0], *module.parameters()], grad)]


def compare(plain, fp8, *arguments):
    """A module and its form in FP8, of the same parameters."""
    for name, weight in plain.named_parameters():
        nn.init.normal_(weight, std=0.05)
        fp8.get_parameter(name).data.copy_(weight.data)
    for expected, found in zip(train_once(plain, *arguments), train_once(fp8, *arguments), strict=True):
        assert found.dtype is expected.dtype and relative_error(found, expected.double()) < ROUNDING


@pytest.fixture
def model():
    """A configuration of the trainer with the debug MoE, its overrides applied."""
    pytest.importorskip("torchtitan.config.override")
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    config = qwen3_moe_debug()
    overrides = OverrideConfig(imports=["fp8moe_torchtitan.experts", "fp8moe_torchtitan.linears"])
    return config, apply_overrides(overrides, config)


@new
def test_overrides_claim_experts_and_linears_alone(model):
    config, lines = model
    layers = config.model_spec.model.layers
    claimed = [line.split()[2].removeprefix("model_spec.model.layers.") for line in lines]
    of_layer = ("moe.routed_experts.inner_experts", "attention.qkv_linear.wqkv", "attention.wo")
    assert sorted(claimed) == sorted(f"{layer}.{name}" for layer in range(len(layers)) for name in of_layer)
    for layer in layers:
        assert type(layer.moe.routed_experts.inner_experts).__qualname__ == "FP8GroupedExperts.Config"
        assert type(layer.moe.router.gate).__qualname__ == "Linear.Config"
    assert type(config.model_spec.model.lm_head).__qualname__ == "Linear.Config"


@new
def test_token_dispatchers_may_be_overridden_too():
    pytest.importorskip("torchtitan.config.override")
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    config = qwen3_moe_debug()
    layers = config.model_spec.model.layers
    for layer in layers:
        layer.moe.routed_experts.token_dispatcher = HybridEPTokenDispatcher.Config(num_experts=8, top_k=2)
    capacity = "torchtitan.overrides.moe_token_dispatcher.hybridep_override", {"capacity_factor": 0.5}
    lines = apply_overrides(OverrideConfig(imports=["fp8moe_torchtitan.experts", capacity]), config)
    assert len(lines) == 2 * len(layers)


@new
def test_modules_have_the_parameters_and_initializers_of_torchtitan(model):
    from fp8moe_torchtitan import converted
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
    from torchtitan.protocols.module import Module

    models = []
    for config in (model[0], qwen3_moe_debug()):
        torch.manual_seed(0)
        spec = config.model_spec.model
        spec.layers = spec.layers[:1]
        built = spec.build()
        assert all(isinstance(module, Module) for module in built.modules())
        built.init_states()
        models.append(built)
    ours, theirs = (model.state_dict() for model in models)
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert set(converted(models[0]).values()) == {"FP8GroupedExperts", "FP8TitanLinear"}
    assert len(converted(models[0])) == 3 and not converted(models[1])


@new
@pytest.mark.parametrize("counts", [(5, 0, 7, 130), (0, 0, 0, 0)])
def test_experts(counts):
    from fp8moe_torchtitan.v0_3 import FP8GroupedExperts
    from torchtitan.models.common.moe import GroupedExperts

    sizes = {"dim": 256, "hidden_dim": 160, "num_experts": 4}
    modules = GroupedExperts.Config(**sizes).build(), FP8GroupedExperts.Config(**sizes).build()
    if sum(counts):
        compare(*modules, *rows_of(counts))
    rows, counts = rows_of(counts, behind=3)
    assert not modules[1](rows, counts)[-3:].any()


@new
@pytest.mark.parametrize("bias", [False, True])
def test_linears_take_inputs_as_linears_do(bias):
    from fp8moe_torchtitan.v0_3 import FP8TitanLinear
    from torchtitan.models.common.linear import Linear

    sizes = {"in_features": 256, "out_features": 96, "bias": bias}
    plain, fp8 = (kind.Config(**sizes).build() for kind in (Linear, FP8TitanLinear))
    compare(plain, fp8, torch.randn(7, 256).requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        assert fp8(torch.randn(7, 256)).dtype is plain(torch.randn(7, 256)).dtype is torch.bfloat16
    with pytest.raises(NotImplementedError, match=r"fp8moe_torchtitan\.linears: tensor parallelism of 2 ranks"):
        fp8.parallelize(SimpleNamespace(tp=2))


@old
def test_converter():
    from fp8moe_torchtitan import converted
    from fp8moe_torchtitan.v0_2 import Converter
    from torchtitan.models.moe import FeedForward
    from torchtitan.models.moe.moe import GroupedExperts, TokenChoiceTopKRouter
    from torchtitan.protocols.model_converter import _registry_model_converter_cls as registry

    assert registry["fp8moe"] is Converter
    with torch.device("meta"):
        router = TokenChoiceTopKRouter(256, 4, None, None, 2, "softmax", False, 1.0, False)
        parts = {"experts": GroupedExperts(256, 160, 4, False), "router": router, "mlp": FeedForward(256, 96)}
        model = nn.ModuleDict(parts | {"output": nn.Linear(256, 96)})
    names = list(model.state_dict())
    with pytest.raises(NotImplementedError, match=r"fp8moe_torchtitan\.linears: tensor parallelism of 2 ranks"):
        Converter(None, SimpleNamespace(tp=2)).convert(model)
    Converter(None, SimpleNamespace(tp=1)).convert(model)
    kinds = {f"mlp.w{number}": "Linear" for number in (1, 2, 3)} | {"experts": "FP8GroupedExperts"}
    assert converted(model) == kinds and list(model.state_dict()) == names
    rows = rows_of((5, 0, 7, 30), dtype=torch.float32)
    compare(GroupedExperts(256, 160, 4, False), model.to_empty(device="cpu")["experts"], *rows)
    compare(FeedForward(256, 96), model["mlp"], torch.randn(7, 256).requires_grad_())


@old
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("shared", [0, 2])
def test_a_layer(before, shared):
    """Whole layers, and layers whose experts get sorted rows as they do under expert parallelism, agree."""
    from fp8moe_torchtitan.v0_2 import Converter, FP8MoE
    from torchtitan.models.moe.moe import MoE, MoEArgs

    arguments = MoEArgs(
        **{"num_experts": 4, "num_shared_experts": shared, "top_k": 2, "score_func": "softmax", "route_norm": True},
        **{"score_before_experts": before, "use_grouped_mm": False, "load_balance_coeff": None},
    )
    plain, whole, spread = layers = [MoE(arguments, 256, 160) for _ in range(3)]
    for weight in plain.parameters():
        nn.init.normal_(weight, std=0.05)
    for layer in layers[1:]:
        layer.load_state_dict(plain.state_dict())
        Converter(None, SimpleNamespace(tp=1)).convert(nn.ModuleDict({"moe": layer}))
        assert type(layer) is FP8MoE
    # Expert parallelism hooks into the experts, and so do others that work on rows.
    seen = []
    spread.experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    x = torch.randn(2, 60, 256).bfloat16().float().requires_grad_()
    expected, *found = (train_once(layer, x) for layer in layers)
    assert seen == [(240, 256)]
    for results in found:
        assert results[0].shape == x.shape
        for result, wanted in zip(results, expected, strict=True):
            assert result.dtype is wanted.dtype and relative_error(result, wanted.double()) < ROUNDING
    assert all(torch.equal(layer.tokens_per_expert, plain.tokens_per_expert) for layer in layers)
    assert plain.tokens_per_expert.sum() == 240


def moe_of(fp8, dispatcher="AllToAllTokenDispatcher", **sizes):
    """A layer of torchtitan 0.3 with shared experts; 4 experts of 160, hidden size 256."""
    import fp8moe_torchtitan
    from torchtitan.models.common import config_utils, token_dispatcher

    shape = {"dim": 256, "num_experts": 4, "top_k": 2}
    routed = config_utils.make_routed_experts_config(**shape, hidden_dim=160, param_init={}, comm_backend="standard")
    kind = getattr(token_dispatcher, dispatcher)
    routed.token_dispatcher = kind.Config(num_experts=4, top_k=2, **sizes)
    if fp8:
        routed.inner_experts = fp8moe_torchtitan.experts(routed.inner_experts)
    router = config_utils.make_router_config(**shape, gate_param_init={}, score_func="softmax", route_norm=True)
    shared = config_utils.make_ffn_config(dim=256, hidden_dim=160, w1_param_init={}, w2w3_param_init={})
    made = config_utils.make_moe_config(num_experts=4, router=router, routed_experts=routed, shared_experts=shared)
    return made.build()


@new
def test_a_layer_moves_no_rows_without_parallel_experts(monkeypatch):
    """Whole layers, and layers whose experts get sorted rows as they do under expert parallelism, agree."""
    from fp8moe_torchtitan.v0_3 import FP8RoutedExperts, is_local
    from torch.utils.checkpoint import checkpoint
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    layers = [moe_of(False), moe_of(True), moe_of(True, "LocalTokenDispatcher"), moe_of(True)]
    plain, whole, local, hooked = layers
    assert type(plain.routed_experts) is RoutedExperts
    for weight in plain.parameters():
        nn.init.normal_(weight, std=0.05)
    for layer in layers[1:]:
        layer.load_state_dict(plain.state_dict())
        assert type(layer.routed_experts) is FP8RoutedExperts
    seen, sort = [], LocalTokenDispatcher._local_reorder
    monkeypatch.setattr(LocalTokenDispatcher, "_local_reorder", lambda *given: seen.append(given[0]) or sort(*given))
    hooked.routed_experts.inner_experts.register_forward_hook(lambda module, inputs, out: None)
    x = torch.randn(2, 60, 256).bfloat16().float().requires_grad_()
    expected, *found = (train_once(layer, x) for layer in layers)
    assert seen == [layer.routed_experts.token_dispatcher for layer in (plain, hooked)]
    for results in found:
        assert results[0].shape == x.shape
        for result, wanted in zip(results, expected, strict=True):
            assert result.dtype is wanted.dtype and relative_error(result, wanted.double()) < ROUNDING
    assert all(torch.equal(layer.tokens_per_expert_E, plain.tokens_per_expert_E) for layer in layers)
    assert plain.tokens_per_expert_E.sum() == 240
    again = checkpoint(whole, x, use_reentrant=False), train_once(local, x)
    assert torch.equal(again[0], found[0][0]) and all(map(torch.equal, again[1], found[0]))
    dispatchers = [layer.routed_experts.token_dispatcher for layer in (whole, local)]
    assert all(map(is_local, dispatchers))
    dispatchers[0].ep_mesh = object()
    padding = moe_of(True, "TorchAOTokenDispatcher", pad_multiple=16).routed_experts.token_dispatcher
    assert not is_local(dispatchers[0]) and not is_local(padding)


@new
def test_a_compiled_layer(fresh_compiler):
    layer = moe_of(True)
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.05)
    x = torch.randn(2, 60, 256).requires_grad_()
    expected = train_once(layer, x)
    layer.compile(backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, train_once(layer, x), expected))
