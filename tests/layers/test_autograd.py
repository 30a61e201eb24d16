"""FP8Linear and GroupedExperts under what watches, traces or batches calls, and what a call keeps for its backward."""

import io
import weakref

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from fp8moe import FP8Linear, GroupedExperts
from fp8moe.layers.linear import linear_of_master

SIZE, TOKENS = 128, 40


def caller(layer):
    """What calls a layer on tokens, always with the same experts."""
    if isinstance(layer, FP8Linear):
        return layer

    with torch.inference_mode(False):
        weights, index = torch.rand(TOKENS, 4).softmax(-1).topk(2)
    return lambda x: layer(x, *(each.view(*x.shape[:-1], 2) for each in (index, weights)))


def trained(kind):
    """A layer, the name of a weight, and what calls it on tokens."""
    if kind == "linear":
        layer = FP8Linear(SIZE, SIZE, master_dtype=torch.float32)
        return layer, "weight", layer
    layer = GroupedExperts(num_experts=4, hidden_size=SIZE, intermediate_size=SIZE, master_dtype=torch.float32)
    return layer, "down_proj", caller(layer)


KINDS = pytest.mark.parametrize("kind", ["linear", "experts"])


def gradients(call, layer, x, grad):
    x = x.detach().requires_grad_()
    layer.zero_grad()
    call(x).backward(grad)
    return [x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


@KINDS
def test_graphs_traced_before_dispatch_have_the_same_gradients(kind):
    layer, _, call = trained(kind)
    x, grad = torch.randn(2, TOKENS, SIZE).bfloat16()
    expected = gradients(call, layer, x, grad)
    graph = make_fx(call, pre_dispatch=True)(x.requires_grad_())
    assert any("_training" in str(node.target) for node in graph.graph.nodes)
    assert all(map(torch.equal, gradients(graph, layer, x, grad), expected))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("master", [None, torch.float32])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced_linears_can_be_stored(master, grad):
    layer, x = FP8Linear(SIZE, 2 * SIZE, master_dtype=master), torch.randn(4, SIZE, requires_grad=grad)
    stored = io.BytesIO()
    torch.jit.save(torch.jit.trace(layer, (x,), check_trace=False), stored)
    stored.seek(0)
    assert torch.equal(torch.jit.load(stored)(x), layer(x))


@KINDS
def test_function_modes_see_the_operator(kind):
    seen = []

    class See(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    _, _, call = trained(kind)
    with See():
        call(torch.randn(TOKENS, SIZE)).sum()
    assert sum("_training" in name for name in seen) == 1 and not any("gemm" in name for name in seen)


class Twice(nn.Module):
    """A parametrization that remembers what it computes."""

    def __init__(self):
        super().__init__()
        self.made = []

    def forward(self, weight):
        result = weight * 2
        self.made.append(weakref.ref(result))
        return result


@KINDS
def test_computed_weights_are_computed_once_and_freed(kind):
    layer, name, call = trained(kind)
    twice = Twice()
    parametrize.register_parametrization(layer, name, twice)
    x, grad = torch.randn(2, TOKENS, SIZE)
    twice.made.clear()
    result = call(x)
    assert len(twice.made) == 1 and twice.made[0]() is None  # the backward does not read it
    result.backward(grad)
    found = layer.parametrizations[name].original.grad
    parametrize.remove_parametrizations(layer, name)  # the weight is twice as much now
    layer.zero_grad()
    call(x).backward(grad)
    assert torch.equal(found, 2 * getattr(layer, name).grad)


@KINDS
def test_a_computed_weight_changed_before_the_backward(kind):
    layer, name, call = trained(kind)
    kept = []
    twice = Twice()
    twice.register_forward_hook(lambda module, inputs, result: kept.append(result))
    parametrize.register_parametrization(layer, name, twice)
    result = call(torch.randn(TOKENS, SIZE))
    with torch.no_grad():
        kept[-1].add_(1)
    with pytest.raises(RuntimeError, match=f"{name}, shape .* has been changed in place between forward and backward"):
        result.sum().backward()


@KINDS
def test_a_parameter_changed_under_a_view_of_it(kind):
    """Parametrized by a view, of which nothing else keeps the object."""

    class View(nn.Module):
        def forward(self, weight):
            return weight.view(weight.shape)

    layer, name, call = trained(kind)
    parametrize.register_parametrization(layer, name, View())
    result = call(torch.randn(TOKENS, SIZE))
    with torch.no_grad():
        layer.parametrizations[name].original.add_(1)
    with pytest.raises(RuntimeError, match=f"{name}, shape .* has been changed in place between forward and backward"):
        result.sum().backward()


@KINDS
def test_gradients_in_a_batch_are_those_of_a_loop(kind):
    layer, _, call = trained(kind)
    x, grads = torch.randn(TOKENS, SIZE, requires_grad=True), torch.randn(3, TOKENS, SIZE)
    wanted = x, *layer.parameters()
    result = call(x)
    each = [torch.autograd.grad(result, wanted, grad, retain_graph=True) for grad in grads]
    together = torch.autograd.grad(result, wanted, grads, is_grads_batched=True)
    assert all(map(torch.equal, together, map(torch.stack, zip(*each, strict=True))))


@KINDS
@pytest.mark.parametrize("shape", [(TOKENS, SIZE), (4, 10, SIZE)])
def test_results_can_be_detached_in_place(kind, shape):
    layer, _, call = trained(kind)
    for training in (True, False):
        layer.train(training)
        result = call(torch.randn(shape))
        assert result.requires_grad and not result.detach_().requires_grad


@KINDS
def test_weights_of_inference_mode(kind):
    with torch.inference_mode():
        layer, name, call = trained(kind)
    x = torch.randn(TOKENS, SIZE)
    with pytest.raises(RuntimeError, match=rf"{type(layer).__name__}: \w+ is a tensor of inference mode.*clone it"):
        call(x)
    with torch.no_grad():
        expected = call(x)
    for key, parameter in list(layer.named_parameters()):
        setattr(layer, key, nn.Parameter(parameter.clone()))
    assert torch.equal(call(x), expected)


def test_a_gradient_in_another_dtype():
    layer, x = FP8Linear(SIZE, SIZE, bias=False, master_dtype=torch.float32), torch.randn(4, SIZE)
    receiver = torch.zeros(SIZE, SIZE, dtype=torch.float64, requires_grad=True)
    linear_of_master(x, layer.weight, receiver=receiver).sum().backward()
    layer(x).sum().backward()
    assert torch.equal(receiver.grad, layer.weight.grad.double())
