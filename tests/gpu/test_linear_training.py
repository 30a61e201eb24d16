"""Training FP8Linear on the CUDA backend."""

import copy

import pytest
import torch
from torch import nn

from fp8moe.layers import master
from fp8moe.layers.linear import FP8Linear, replace_linears
from fp8moe.quant.quantize import quantize_128x128
from tests.backends import on_reference
from tests.compilers import CUDA_INDUCTOR
from tests.errors import relative_error
from tests.gpu.checks import captured, memory_of
from tests.layers.test_linear_training import ON_GPU, test_frozen_weights_pass_gradients  # noqa: F401
from tests.linear_training_reference import assert_follows, check_checkpointing, exact, gradients, same, train
from tests.waiting import no_waiting

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def make(in_features, out_features, bias=True, *, dtype=torch.bfloat16, master_dtype=torch.bfloat16):
    return FP8Linear(in_features, out_features, bias, dtype=dtype, device=DEVICE, master_dtype=master_dtype)


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("master_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [(576, 1536), (1536, 576), (131, 261), (16, 8), (24, 40), (1, 1)])
def test_gradients(features, dtype, master_dtype):
    torch.manual_seed(0)
    layer = make(*features, dtype=dtype, master_dtype=master_dtype)
    for lead in ((1,), (5,), (2, 64), (1000,)):
        x, grad = random(*lead, features[0], dtype=dtype), random(*lead, features[1], dtype=dtype)
        out, grads = gradients(layer, x, grad, layer.parameters())
        with torch.no_grad():
            assert relative_error(out, layer(x)) < ON_GPU[dtype]
        expected = (*exact(x, grad, quantize_128x128(layer.weight)), grad.double().flatten(0, -2).sum(0))
        for actual, other in zip(grads, expected, strict=True):
            # A single sum may cancel: its error is held to the size of what is summed.
            size = (x.double() * grad.double()).norm() if features == (1, 1) and actual is grads[1] else other.norm()
            difference = (actual.flatten(0, -2) if actual is grads[0] else actual).double() - other
            assert difference.norm() < ON_GPU[actual.dtype] * size
        if min(features) > 100 and lead == (1000,):
            _, reference = on_reference(gradients, layer, x, grad, layer.parameters())
            weight = layer.weight.double()
            plain = (grad.double() @ weight, grad.double().t() @ x.double(), grad.double().sum(0))
            for actual, other, wanted in zip(grads, reference, plain, strict=True):
                assert relative_error(actual, wanted) <= 6e-2
                assert relative_error(actual, wanted) <= 1.05 * relative_error(other, wanted) + 1e-6


def test_agrees_with_the_layer_on_the_cpu():
    layer = FP8Linear(272, 136, dtype=torch.float32, master_dtype=torch.float32)
    x, grad = torch.randn(3, 50, 272), torch.randn(3, 50, 136)
    on_gpu = copy.deepcopy(layer).to(DEVICE)
    _, expected = gradients(layer, x, grad, layer.parameters())
    _, grads = gradients(on_gpu, x.to(DEVICE), grad.to(DEVICE), on_gpu.parameters())
    for actual, other in zip(grads, expected, strict=True):
        assert relative_error(actual.cpu(), other) < 3e-4


def test_nothing_waits_for_the_gpu():
    layer = make(576, 1536)
    x, grad = random(300, 576), random(300, 1536)
    gradients(layer, x, grad, layer.parameters())
    master.invalidate()
    with no_waiting():
        gradients(layer, x, grad, layer.parameters())


def test_memory_that_is_kept():
    layer = make(4096, 2048)
    x = random(4096, 4096).requires_grad_()
    layer(x).sum().backward()
    out, _, kept = memory_of(lambda: layer(x), warm=False)
    # The allocator may leave up to a megabyte of a block unused.
    assert kept - out.nbytes <= 4096 * 4096 * 33 / 32 + (2 << 20)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
@pytest.mark.parametrize("master_dtype", [torch.bfloat16, torch.float32])
def test_training(options, master_dtype):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 256)).to(DEVICE, master_dtype)
    model = copy.deepcopy(plain)
    replace_linears(model, master_dtype=master_dtype)
    x, target = random(2, 3, 200, 256, dtype=master_dtype)
    losses, expected = (train(each, x, target, 0.02, lr=1e-3, **options)[0] for each in (model, plain))
    assert_follows(losses, expected)


@pytest.mark.parametrize("backend", ["aot_eager", CUDA_INDUCTOR])
def test_compile(backend, fresh_compiler):
    model = nn.Sequential(make(131, 48), nn.SiLU(), make(48, 64, False))
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for shape in ((2, 3), (40, 5)):
        x, grad = random(*shape, 131), random(*shape, 64)
        out, grads = gradients(model, x, grad, parameters)
        compiled_out, compiled_grads = gradients(compiled, x, grad, parameters)
        torch.testing.assert_close(compiled_out, out, rtol=0.05, atol=0.05)  # SiLU may round otherwise
        for actual, expected in zip(compiled_grads, grads, strict=True):
            assert relative_error(actual, expected) < 0.03
        for parameter, value in zip(parameters, grads[1:], strict=True):
            parameter.grad = value
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    check_checkpointing(make(576, 256, False), make(256, 576), random(2, 300, 576), reentrant)


def test_captured_training_steps():
    """Whole steps in a CUDA graph: replays quantize the weights that the optimizer in the graph has changed."""
    torch.manual_seed(0)
    model = nn.Sequential(make(256, 512), nn.SiLU(), make(512, 256))
    eager = copy.deepcopy(model)
    x, target = random(2, 200, 256)

    def step(each, optimizer):
        optimizer.zero_grad()
        loss = (each(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    eager_optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-3, capturable=True)
    graph, loss = captured(lambda: step(model, optimizer), warmups=3)
    for _ in range(3):
        step(eager, eager_optimizer)
    for _ in range(4):
        x.normal_()
        graph.replay()
        assert torch.equal(loss, step(eager, eager_optimizer))
        assert same(model.state_dict().values(), eager.state_dict().values())
        with torch.no_grad():  # no copy from before the replay
            assert torch.equal(model(x), eager(x))
