"""What GroupedExperts.from_experts, FP8Linear.from_linear and replace_linears must not take for what they compute."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8moe import FP8Linear, GroupedExperts, replace_linears
from fp8moe.kernels.activation import FUNCTIONS, Activation
from tests.experts_cases import MLP
from tests.global_settings import default_dtype
from tests.transformers_models import BASE, TOKENS, modules_named, random_model

COUNT = 5  # experts, of which the fourth is another


def experts(*change):
    """A list of MLPs, and the fourth changed."""
    modules = nn.ModuleList(MLP() for _ in range(COUNT))
    for apply in change:
        apply(modules[3])
    return modules


def silu_up_to(limit):
    return lambda x: F.silu(x).clamp(max=limit)


class Changed(MLP):
    """silu(gate) * up with something more to it."""

    before = between = after = staticmethod(lambda x: x)

    def forward(self, x):
        x = self.before(x)
        h = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.after(self.down_proj(self.between(h)))


def becomes(**changes):
    cls = type("Changed", (Changed,), {name: staticmethod(change) for name, change in changes.items()})
    return lambda expert: setattr(expert, "__class__", cls)


class Adapter(nn.Module):
    """A linear with a low-rank product beside it, 0 at first, as PEFT puts them in."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


def set_to(name, value):
    return lambda expert: setattr(expert, name, value)


def dropout(expert):
    becomes(between=functools.partial(F.dropout, p=0.1, training=expert.training))(expert)


def hooked(register, *path):
    return lambda expert: getattr(expert.get_submodule(".".join(path)), register)(lambda *_: None)


ACTIVATION = r"^module\[3\]: its activation is none of those that GroupedExperts has; closest is Activation\(limit=None"
CHANGES = {
    **{f"another activation: {name}": (set_to("act_fn", FUNCTIONS[name]), ACTIVATION) for name in ("gelu", "relu")},
    "sigmoid of another slope": (set_to("act_fn", lambda x: x * torch.sigmoid(1.02 * x)), ACTIVATION),
    **{f"clamp at {limit:g}": (set_to("act_fn", silu_up_to(limit)), ACTIVATION) for limit in (7, 30, 1e4, 1e8, 1e16)},
    "clamp of negative values": (becomes(between=lambda x: x.clamp(min=-1e6)), ACTIVATION),
    "dropout": (dropout, ACTIVATION),
    "input": (becomes(before=lambda x: 2 * x), r"^module\[3\]: expected .* to run once each, all but the last on the "),
    "clamped input": (becomes(before=lambda x: x.clamp(max=1e5)), r"^module\[3\]: expected .* on the input as it is"),
    "result": (
        becomes(after=lambda x: 2.5 * x),
        r"^module\[3\]: expected the result of down_proj to be returned as it",
    ),
    "clamped result": (becomes(after=lambda x: x.clamp(-1e5, 1e5)), r"^module\[3\]: expected the result of down_proj"),
    "no forward": (set_to("__class__", nn.Module), r"^module\[3\]: cannot tell its activation, its function fails: "),
    "hook": (hooked("register_forward_hook"), r"^module\[3\]: expected no hooks, .* got forward hooks$"),
    "pre-hook": (hooked("register_forward_pre_hook"), r"^module\[3\]: expected no hooks, .* got forward pre hooks$"),
    "hook of a linear": (hooked("register_forward_hook", "up_proj"), r"^module\[3\]\.up_proj: expected no hooks, "),
    "hook for gradients": (
        hooked("register_full_backward_hook", "down_proj"),
        r"^module\[3\]\.down_proj: expected no hooks, .* got backward hooks$",
    ),
    "replaced forward": (set_to("forward", lambda x: x), r"^module\[3\]: expected no hooks, .* a forward of its own$"),
    "replaced forward of a linear": (
        lambda expert: setattr(expert.gate_proj, "forward", lambda x: x),
        r"^module\[3\]\.gate_proj: expected no hooks, .* got a forward of its own$",
    ),
    "adapter": (
        lambda expert: setattr(expert, "up_proj", Adapter(expert.up_proj)),
        r"^module\[3\]\.up_proj: expected the parameters weight and bias only, got also \['base_layer.weight', 'lora_A",
    ),
    "subclass of nn.Linear": (
        lambda expert: setattr(expert.up_proj, "__class__", Doubled),
        r"^module\[3\]\.up_proj: expected the forward of nn.Linear, got that of Doubled$",
    ),
    "parametrization": (
        lambda expert: nn.utils.parametrize.register_parametrization(expert.up_proj, "weight", Half()),
        r"^module\[3\]\.up_proj: expected the parameters weight and bias only, got also \['parametrizations",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_expert_that_is_other_than_the_first(change):
    apply, message = CHANGES[change]
    GroupedExperts.from_experts(experts())
    with pytest.raises((TypeError, ValueError), match=message):
        GroupedExperts.from_experts(experts(apply))


def test_dropout_in_eval_mode_is_none():
    modules = experts(lambda expert: expert.eval(), dropout)
    assert GroupedExperts.from_experts(modules).activation == Activation()


@pytest.mark.parametrize("form", ["FP8", "meta", "float16"])
def test_experts_whose_forward_cannot_run_as_they_are(form):
    """Nothing is multiplied by their weights."""
    limited, other = experts(set_to("act_fn", silu_up_to(30))), experts()
    for modules in (limited, other):
        for expert in modules if form == "FP8" else ():
            for name in expert.names:
                setattr(expert, name, FP8Linear.from_linear(getattr(expert, name)))
        modules.to(**{"float16": {"dtype": torch.float16}, "meta": {"device": "meta"}, "FP8": {}}[form])
    assert GroupedExperts.from_experts(other).activation == Activation()
    with pytest.raises(ValueError, match=ACTIVATION):
        GroupedExperts.from_experts(limited)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_activations_are_told_apart_whatever_the_default_dtype_is(name, dtype):
    modules = nn.ModuleList(MLP(act_fn=FUNCTIONS[name]) for _ in range(2))
    expected = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new"}.get(name, name)
    with default_dtype(dtype):
        assert GroupedExperts.from_experts(modules).activation == Activation(name=expected)


def test_what_is_read_stays_as_it_was():
    modules = experts()
    before = {name: copy.copy(vars(module)) for name, module in modules.named_modules()}
    random = torch.get_rng_state()
    GroupedExperts.from_experts(modules)
    assert {name: vars(module) for name, module in modules.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), random)


# Fused experts.


class ClampedSiLU(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def forward(self, x):
        return F.silu(x).clamp(max=self.limit)


def fused():
    module = nn.Module()
    module.gate_up_proj = nn.Parameter(torch.randn(2, 64, 32))
    module.down_proj = nn.Parameter(torch.randn(2, 32, 32))
    module.act_fn = nn.SiLU()
    return module


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: module.register_forward_hook(print), r"^module: expected no hooks, .* got forward hooks"),
        (lambda module: module.act_fn.register_forward_pre_hook(print), r"^module\.act_fn: expected no hooks"),
        (set_to("forward", print), r"^module: expected no hooks, .* got a forward of its own"),
        (set_to("act_fn", ClampedSiLU(30)), r"^module: expected an activation among"),
        (set_to("act_fn", ClampedSiLU(1e12)), r"^module: expected an activation among"),
        (
            set_to("_apply_gate", lambda x: (F.silu(x[..., :32]) * x[..., 32:]).clamp(max=1e12)),
            r"^module: its activation is none of those",
        ),
    ],
)
def test_fused_experts(change, message):
    GroupedExperts.from_experts(fused())
    module = fused()
    change(module)
    with pytest.raises(ValueError, match=message):
        GroupedExperts.from_experts(module)


# Linears.


@pytest.mark.parametrize("change", ["hook", "replaced forward"])
def test_linears(change):
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)))
    CHANGES[change][0](model[1][0])
    with pytest.raises(ValueError, match=r"^1\.0: expected no hooks, as none would run any more, got "):
        replace_linears(model)
    assert all(type(module) is not FP8Linear for module in model.modules())
    with pytest.raises(ValueError, match=r"^linear: expected no hooks"):
        FP8Linear.from_linear(model[1][0])
    assert replace_linears(model, skip=("1.0",)) == ["0"]


def test_a_linear_that_computes_something_else():
    with pytest.raises(TypeError, match=r"^linear: expected the forward of nn\.Linear, got that of Doubled"):
        FP8Linear.from_linear(Doubled(32, 32))
    linear = nn.utils.parametrize.register_parametrization(nn.Linear(32, 32), "weight", Half())
    with pytest.raises(ValueError, match=r"^linear: expected the parameters weight and bias only, got also \['param"):
        FP8Linear.from_linear(linear)


# accelerate's hooks on the modules of a model on several devices, and on those that it keeps elsewhere.


def test_hooks_that_only_move_inputs_may_go():
    hooks = pytest.importorskip("accelerate.hooks")
    model = nn.ModuleDict({"experts": experts(), "linear": nn.Linear(32, 32)})
    hooks.attach_execution_device_hook(model, "cpu")
    assert hasattr(model["experts"][3].up_proj, "_hf_hook")
    GroupedExperts.from_experts(model["experts"])
    assert replace_linears(model, skip=("experts*",)) == ["linear"]


def test_hooks_that_load_weights_may_not():
    hooks = pytest.importorskip("accelerate.hooks")
    model = nn.Sequential(nn.Linear(32, 32))
    hooks.attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=model.state_dict())
    with pytest.raises(ValueError, match=r"^0: expected no hooks, .* got a forward of its own"):
        replace_linears(model)
    hooks.remove_hook_from_module(model, recurse=True)
    assert replace_linears(model) == ["0"]


# Under register() transformers' module goes on running, and its hooks with it.


@pytest.fixture
def model(registered):
    options = BASE | {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 2, "num_key_value_heads": 4}
    model = random_model("mixtral", options, dtype=torch.float32)
    model.set_experts_implementation("fp8moe")
    return model


@torch.no_grad()
def test_hooks_of_experts_that_transformers_runs(model):
    hooks = pytest.importorskip("accelerate.hooks")
    module, other = modules_named(model, "experts")
    arguments = torch.randn(4, 32), torch.tensor([[0, 1]] * 4), torch.ones(4, 2)
    expected = module(*arguments)
    del module._fp8moe
    seen = []
    module.register_forward_hook(lambda *_: seen.append("hook"))
    hooks.attach_execution_device_hook(model, "cpu")
    assert "forward" in vars(module)
    assert torch.equal(module(*arguments), expected) and seen == ["hook"]
    other.act_fn.register_forward_hook(lambda *_: seen.append("lost"))
    with pytest.raises(
        ValueError, match=r"cannot run with experts_implementation='fp8moe': module\.act_fn: expected no "
    ):
        other(*arguments)
    with pytest.raises(ValueError, match=r"^module: expected no hooks, .* got forward hooks$"):
        GroupedExperts.from_experts(module)


@torch.no_grad()
def test_experts_whose_weights_accelerate_loads(model):
    hooks = pytest.importorskip("accelerate.hooks")
    expected = model(TOKENS).logits
    weights_map = {name: value.clone() for name, value in model.state_dict().items()}
    hooks.attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights_map)
    assert all(value.is_meta for value in modules_named(model, "experts")[0].parameters())
    assert torch.equal(model(TOKENS).logits, expected)
