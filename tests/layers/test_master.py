"""Masters and their FP8 copies where PyTorch computes, reuses or differentiates weights in its own ways."""

import copy
import functools
import gc
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fp8moe import FP8Linear, GroupedExperts, replace_linears
from fp8moe.layers import master
from fp8moe.layers.separate_masters import experts_rows_training, experts_tokens_training
from fp8moe.quant import transpose
from tests.compilers import INDUCTOR
from tests.errors import refused, relative_error
from tests.layers.test_fsdp import quantizations

ROUNDING = 0.1  # what FP8 costs in two layers; another layer's weight would cost 1


def plain_and_fp8(layers=2, size=256):
    plain, fp8 = (nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers))) for _ in range(2))
    fp8.load_state_dict(plain.state_dict())
    replace_linears(fp8, master_dtype=torch.float32)
    return plain, fp8


def doubled(model, x):
    """With computed weights: inductor has one buffer for all of them."""
    for layer in model:
        x = torch.func.functional_call(layer, {"weight": layer.weight * 2}, (x,))
    return x


def double(model, x):
    """With weights that the graph itself has changed."""
    for layer in model:
        layer.weight.mul_(2)
    return model(x)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("run", [doubled, double])
def test_weights_that_a_compiled_graph_makes(run, backend, fresh_compiler):
    plain, fp8 = plain_and_fp8()
    x = torch.randn(8, 256)
    assert relative_error(torch.compile(run, backend=backend)(fp8, x), run(plain, x)) < ROUNDING
    assert relative_error(fp8(x), plain(x)) < ROUNDING


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_a_compiled_graph_quantizes_masters_once(backend, fresh_compiler):
    _, fp8 = plain_and_fp8()
    experts = GroupedExperts(num_experts=2, hidden_size=256, intermediate_size=128, master_dtype=torch.float32)
    routing = torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1)
    run = torch.compile(lambda x: experts(fp8(x), *routing), backend=backend)
    with quantizations(gathered=False) as weights:
        for _ in range(3):
            run(torch.randn(8, 256)).sum().backward()
    assert len(weights) == 4  # of two linears, and the experts' up and down


class GateUp(master.MasterModule):
    """Masters of another library's names, gate and up apart."""

    trainable = True

    def __init__(self):
        super().__init__()
        for name, shape in {"w1": (2, 128, 256), "w3": (2, 128, 256), "w2": (2, 256, 128)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 16))

    def forward(self, x):
        offsets = torch.tensor([0, 5, 8], dtype=torch.int32)
        return experts_rows_training(x, offsets, self.w1, self.w3, self.w2)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gate_and_up_are_quantized_once(backend, fresh_compiler):
    experts = GateUp()
    run = experts if backend is None else torch.compile(experts, backend=backend)
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    x = torch.randn(8, 256)
    # Fewer micro-batches each time, so that no forward is the last that is expected.
    for change, count, batches in (
        (lambda: None, 3, 9),
        (optimizer.step, 3, 8),
        (lambda: (experts.w3.data.mul_(2), master.invalidate()), 3, 2),
        (lambda: setattr(experts, "w3", nn.Parameter(experts.w3.data)), 2, 2),
        (lambda: setattr(experts, "w1", nn.Parameter(experts.w1.data)), 2, 2),
    ):
        change()
        with quantizations(gathered=False) as weights:
            for _ in range(batches):
                out = run(x)
                out.sum().backward()
        assert len(weights) == count
        expected = GateUp()
        for name, weight in experts.named_parameters():
            setattr(expected, name, nn.Parameter(weight.detach().clone()))
        assert torch.equal(out, expected(x))


class Watched(torch.optim.SGD):
    """With whether there were copies of masters at the beginning of each step."""

    found = ()

    @torch.no_grad()
    def step(self, closure=None):
        copies = [getattr(weight.untyped_storage(), master._ATTRIBUTE) for weight in self.param_groups[0]["params"]]
        self.found = *self.found, any(kept.value is not None for each in copies for kept in each.by_layout.values())
        super().step(closure)


def test_a_step_has_the_memory_of_the_copies():
    _, fp8 = plain_and_fp8()
    optimizer = Watched(fp8.parameters(), lr=0.1)
    for batches in (1, 3, 2):
        for _ in range(batches):
            fp8(torch.randn(8, 256)).sum().backward()
        with torch.no_grad():
            fp8(torch.randn(8, 256))  # leaves copies
        optimizer.step()
    assert optimizer.found == (False,) * 3


def test_optimizers_of_single_weights_search_for_copies_once():
    _, fp8 = plain_and_fp8()
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in fp8.parameters()]
    for _ in range(3):
        fp8(torch.randn(8, 256)).sum().backward()
        assert len(master._held) >= len(optimizers)
        for optimizer in optimizers:
            optimizer.step()
            assert not master._held


KINDS = "linear", "experts", "experts of rows", "rows, gate and up apart", "tokens, gate and up apart"


def trained(kind):
    """A module with masters, and a function of x (8, 256) that trains it."""
    torch.manual_seed(0)
    routing, offsets = (torch.tensor([[0], [1]] * 4), torch.ones(8, 1)), torch.tensor([0, 5, 8], dtype=torch.int32)
    if kind == "linear":
        module = run = FP8Linear(256, 256, bias=False, master_dtype=torch.float32)
    elif kind.startswith("experts"):
        module = GroupedExperts(num_experts=2, hidden_size=256, intermediate_size=128, master_dtype=torch.float32)
        run = lambda x: module(x, *routing)  # noqa: E731
        if kind == "experts of rows":
            run = lambda x: module.forward_rows(x, offsets)  # noqa: E731
    else:
        module = run = GateUp()
        if kind == "tokens, gate and up apart":
            run = lambda x: experts_tokens_training(x, *routing, module.w1, module.w3, module.w2)  # noqa: E731
    for weight in module.parameters():
        nn.init.normal_(weight, std=1 / 16)
    return module, run


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["kept", "recomputed", "recomputed reentrantly"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_forward_before_a_step_keeps_no_copies(kind, use_reentrant):
    module, run = trained(kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(8, 256, requires_grad=True)
    whole = None
    for batches, expected in (
        (2, [True, True]),  # how many there will be is not known yet
        (2, [True, False]),
        (3, [True, False, True]),  # one more than expected
        (3, [True, True, False]),
        (1, [True]),
        (1, [False]),
    ):
        held = []
        with quantizations(gathered=False) as weights:
            for _ in range(batches):
                out = run(x) if use_reentrant is None else checkpoint(run, x, use_reentrant=use_reentrant)
                out.sum().backward()
                copies = [getattr(weight.untyped_storage(), master._ATTRIBUTE) for weight in module.parameters()]
                found = [kept for each in copies for kept in each.by_layout.values()]
                held.append(any(kept.value is not None for kept in found))
        whole = whole or len(weights)
        assert held == expected
        assert len(weights) == whole * (1 + (expected == [True, False, True]))
        optimizer.step()
        assert all(kept.value is None for kept in found)
        optimizer.zero_grad()
    assert {kept.uses for kept in found} == {1 if use_reentrant is not False else 2}


@pytest.mark.parametrize("hooks", [nullcontext, save_on_cpu], ids=["kept", "on the CPU"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_dropped_copies_are_those_of_kept_ones(kind, hooks, monkeypatch):
    def gradients():
        module, run = trained(kind)
        optimizer, found = torch.optim.SGD(module.parameters(), lr=0.1), []
        for batches in (1, 1, 3):
            for seed in range(batches):
                x = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed)).requires_grad_()
                with hooks():
                    out = run(x)
                out.square().mean().backward()
                found.append(x.grad)
            found += [weight.grad.clone() for weight in module.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    dropped = gradients()
    monkeypatch.setattr(master._Copy, "last_use", lambda self: False)
    assert all(torch.equal(*pair) for pair in zip(dropped, gradients(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_between_forward_and_backward_there_are_transposes_alone(kind, monkeypatch):
    module, run = trained(kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(8, 256, requires_grad=True)
    made, quantize = [], master._quantize

    def watched(*weights, both_ways=False):
        copy = quantize(*weights, both_ways=both_ways)
        made.append((weakref.ref(copy.data.untyped_storage()), both_ways))
        return copy

    monkeypatch.setattr(master, "_quantize", watched)
    monkeypatch.delattr(transpose, "transpose_fp8")  # not called
    for expected in (True, False):  # how many forwards there will be is not known in the first step
        made.clear()
        out = run(x)
        gc.collect()
        assert made and all((rows() is not None, both_ways) == (expected, True) for rows, both_ways in made)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def exchanged(model):
    """With other Parameters in the same memory."""
    for layer in model:
        layer.weight = nn.Parameter(layer.weight.data)
    return model


@pytest.mark.parametrize(
    "change", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), nn.Module.bfloat16, exchanged]
)
def test_copied_and_moved_masters_are_quantized_once(change, fresh_compiler):
    run = torch.compile(change(plain_and_fp8()[1]), backend="aot_eager")
    with quantizations(gathered=False) as weights:
        for _ in range(2):
            run(torch.randn(8, 256)).sum().backward()
    assert len(weights) == 2


def test_experts_that_were_cast_are_refused_until_they_are_cast_back():
    layer = GroupedExperts(num_experts=2, hidden_size=128, intermediate_size=128, master_dtype=torch.float32)
    arguments = torch.randn(4, 128), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    for dtype in (torch.float16, torch.float64):
        layer.to(dtype)
        refused(TypeError, r"gate_up_proj: expected bfloat16 or float32, got torch.float", layer, *arguments)
    assert layer.float()(*arguments).isfinite().all() and layer.trainable


def layers():
    sizes = {"num_experts": 2, "hidden_size": 128, "intermediate_size": 128}
    routing = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    for options in ({}, {"master_dtype": torch.float32}):
        yield FP8Linear(128, 128, **options)
        experts = GroupedExperts(**sizes, **options)
        yield lambda x, experts=experts: experts(x, *routing)


def test_forward_mode_differentiation_is_refused():
    x = torch.randn(4, 128)
    for layer in layers():
        refused(RuntimeError, "forward-mode", torch.func.jvp, layer, (x,), (x,))
        with torch.autograd.forward_ad.dual_level():
            layer(x)  # without a tangent nothing is lost
            refused(RuntimeError, "forward-mode", layer, torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize("compiled", [False, True])
def test_nested_and_compiled_forward_mode_is_refused(compiled, fresh_compiler):
    x = torch.randn(4, 128)
    for layer in layers():
        run = torch.compile(layer, backend="aot_eager") if compiled else layer
        with pytest.raises(Exception, match="forward-mode"):  # the compiler raises an error of its own
            torch.func.jvp(lambda a, run=run: torch.func.jvp(lambda b: run(a) + b, (x,), (x,))[0], (x,), (x,))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(Exception, match="forward-mode"):
            run(torch.autograd.forward_ad.make_dual(x, x))


@torch.no_grad()
def test_vmap_over_weights():
    _, fp8 = plain_and_fp8()
    weights, x = torch.stack([layer.weight for layer in fp8]), torch.randn(8, 256)
    out = torch.vmap(lambda weight: torch.func.functional_call(fp8[0], {"weight": weight}, (x,)))(weights)
    assert torch.equal(out, torch.stack([layer(x) for layer in fp8]))


def test_selective_checkpointing_after_another_optimizers_step():
    _, fp8 = plain_and_fp8()
    other = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    saved = torch.ops.fp8moe.linear_training.default

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is saved else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(8, 256)
    with torch.no_grad():
        fp8(x)  # now there are copies, and the forward need not quantize
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(fp8, x, use_reentrant=False, context_fn=contexts)
    other(torch.ones(4)).backward()
    optimizer.step()  # makes them old
    out.sum().backward()
    expected = [layer.weight.grad.clone() for layer in fp8]
    fp8.zero_grad()
    fp8(x).sum().backward()
    assert all(torch.equal(layer.weight.grad, grad) for layer, grad in zip(fp8, expected, strict=True))


def test_a_change_that_nothing_tells_of_counts_after_invalidate():
    layer = FP8Linear(128, 128, bias=False, master_dtype=torch.float32)
    before, x = master.Fingerprint([layer.weight]), torch.eye(128)
    old = layer(x)
    layer.weight.data.mul_(2)
    assert before.matches([layer.weight])
    assert torch.equal(layer(x), old)
    master.invalidate()
    assert not before.matches([layer.weight])
    torch.testing.assert_close(layer(x), 2 * old)


def test_weights_that_a_captured_step_changes(monkeypatch):
    layer = FP8Linear(128, 128, bias=False, master_dtype=torch.float32)
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    x = torch.randn(4, 128)
    layer(x).sum().backward()
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_initialized", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        optimizer.step()
    before = layer(x)
    layer.weight.data.mul_(2)  # as a replay does, without a change of the version
    torch.testing.assert_close(layer(x), 2 * before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_scales_whose_numbers_are_codes_are_refused(dtype):
    for layer in (
        FP8Linear(64, 64, bias=False),
        GroupedExperts(num_experts=2, hidden_size=64, intermediate_size=64),
        torch.nn.ModuleDict({"indexer": FP8Linear(64, 64, bias=False)}),
    ):
        state = {name: value.clone() for name, value in layer.state_dict().items()}
        scale = next(name for name in state if name.endswith("_scale_inv"))
        wrong = state | {scale: torch.ones_like(state[scale]).to(dtype)}
        refused(RuntimeError, rf"{scale}: expected scales in float32, .*, got {dtype}", layer.load_state_dict, wrong)
        assert all(torch.equal(value.float(), state[name].float()) for name, value in layer.state_dict().items())
        layer.load_state_dict(state | {scale: torch.full_like(state[scale], 0.5).to(torch.float8_e8m0fnu)})
        assert (layer.state_dict()[scale] == 0.5).all()
