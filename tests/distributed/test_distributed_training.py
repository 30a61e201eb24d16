"""ExpertParallel in several processes on the CPU against the layer of one process: gradients and training."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from fp8moe.distributed import ExpertParallel
from fp8moe.distributed import local as local_experts
from tests.distributed.test_distributed import EXPERTS, agree, parallel, share, uneven
from tests.errors import relative_error
from tests.experts_cases import VARIANTS, inputs, make, make_trained
from tests.layers.test_fsdp import quantizations
from tests.processes import in_processes, run_each

METHODS = ({"method": "gather"}, {"method": "all_to_all"}, {"exact": True}, {"method": "replicated"})
TOLERANCE = 3e-2
# In one process routing weights multiply the activation, in several the gradients that are sent: each is then rounded
# to E4M3 elsewhere, and a product of two such roundings differs by their error.
DOWN_TOLERANCE = 6e-2


def tolerance(name):
    return DOWN_TOLERANCE if name.endswith("down_proj") else TOLERANCE


def backward(layer, x, index, weights, grad, residual=None):
    """The result, and gradients of the inputs and the masters."""
    x, weights = (value.detach().clone().requires_grad_() for value in (x, weights))
    residual = None if residual is None else residual.detach().clone().requires_grad_()
    layer.zero_grad()
    out = layer(x, index, weights, residual=residual)
    out.backward(grad)
    found = {"x": x.grad, "weights": weights.grad}
    if residual is not None:
        found["residual"] = residual.grad
    return out.detach(), found | {name: value.grad for name, value in layer.named_parameters() if value.requires_grad}


def check(layer, counts, top_k=2, dtype=torch.bfloat16, residual=False, **options):
    total, world = sum(counts), dist.get_world_size()
    x, index, weights, grad = inputs(total, EXPERTS, top_k, layer.hidden_size, dtype)
    added = [x.flip(0)] if residual else []
    everywhere = options.get("method") == "replicated"
    out, expected = backward(layer, x, index, weights, grad, *added)
    mine = (lambda values: values) if everywhere else (lambda values: share(values, counts))
    spread = parallel(layer, **options)
    arguments = mine([x, index, weights, grad, *added])
    ours, grads = backward(spread, *arguments)
    again, repeated = backward(spread, *arguments)
    agree(ours, *mine([out]), options.get("exact", False))
    assert torch.equal(ours, again) and grads.keys() == expected.keys()
    for name, value in expected.items():
        got = grads[name]
        assert got.dtype == value.dtype
        if name in dict(layer.named_parameters()):
            assert isinstance(got, DTensor) and got.placements == (Shard(0),)
            assert torch.equal(got.to_local(), repeated[name].to_local())
            part = value.chunk(world)[dist.get_rank()]
            limit = tolerance(name)
            assert relative_error(got.to_local(), part) <= limit if part.any() else not got.to_local().any(), name
            assert not value.any() or relative_error(got.full_tensor(), value) <= limit, name
        else:
            assert got.shape == mine([value])[0].shape and torch.equal(got, repeated[name])
            parts = [None] * world
            dist.all_gather_object(parts, got)
            error = relative_error(got if everywhere else torch.cat(parts), value)
            assert error <= TOLERANCE, (options, name, error)


def gradients(world):
    for dtype in (torch.bfloat16, torch.float32) if world == 2 else (torch.bfloat16,):
        for options in METHODS:
            check(make_trained(EXPERTS, master_dtype=dtype), uneven(world), dtype=dtype, residual=True, **options)
    check(make_trained(EXPERTS), [0] * (world - 1) + [5], payload="bf16")
    check(make_trained(EXPERTS), [0] * (world - 1) + [5], exact=True)
    check(make_trained(EXPERTS), [4] * world, uniform=True, top_k=1)


def sizes(world):
    """No multiples of 8, and activations that are PyTorch's."""
    for variant, options in zip(("gelu", "relu2, no gate", "alpha", "limit"), METHODS, strict=True):
        layer = make_trained(EXPERTS, 131, 77, **VARIANTS[variant])
        check(layer, [4 * count for count in uneven(world)], dtype=torch.float16, **options)


def frozen(world):
    for options in METHODS:
        check(make(EXPERTS), uneven(world), **options)


def one_of_the_inputs(world):
    """Only what asks for a gradient is sent back."""
    layer = make_trained(EXPERTS)
    x, index, weights, grad = inputs(6, EXPERTS)
    for options in METHODS:
        spread = parallel(layer, **options)
        out = spread(x, index, weights)
        out.backward(grad)
        assert all(value.grad is not None for value in spread.parameters())
        routing = weights.clone().requires_grad_()
        spread.requires_grad_(False)(x, index, routing).backward(grad)
        assert routing.grad.any()


def ranks_without_rows(world):
    """All tokens go to the experts of one rank, or to none; the others' masters get zeros."""
    layer = make_trained(EXPERTS)
    x, index, weights, grad = inputs(6, EXPERTS)
    for route in (index % 2, torch.full_like(index, -1)):
        _, expected = backward(layer, x, route, weights, grad)
        for options in METHODS:
            if options.get("method") == "replicated":
                mine = x, route, weights, grad
            else:
                mine = share([x, route, weights, grad], [6] + [0] * (world - 1))
            _, grads = backward(parallel(layer, **options), *mine)
            for name in ("up_proj", "down_proj"):
                (got,) = (value.full_tensor() for key, value in grads.items() if key.endswith(name))
                (value,) = (value for key, value in expected.items() if key.endswith(name))
                assert relative_error(got, value) <= tolerance(name) if value.any() else not got.any()
            for name in ("x", "weights"):
                value = expected[name][: len(grads[name])]
                assert relative_error(grads[name], value) <= TOLERANCE if value.any() else not grads[name].any()


def more_rows_than_an_even_share(world):
    """Rows that do not fit run again: once behind calls whose rows did, and not at all behind calls whose did not."""
    layer = make_trained(EXPERTS)
    x, index, weights, grad = inputs(40, EXPERTS)
    counts = [40 // world] * world
    for options in ({"method": "gather"}, {"method": "replicated"}, {"method": "gather", "uniform": True}):
        spread = parallel(layer, **options)
        everywhere = options["method"] == "replicated"
        for route, passes in ((index, 1), (index % 2, 2), (index % 2, 1), (index, 1), (index % 2, 2)):
            out, expected = backward(layer, x, route, weights, grad)
            arguments = x, route, weights, grad
            arguments = arguments if everywhere else share(arguments, counts)
            with (
                patch.object(local_experts, "_ALWAYS", 0),
                patch.object(local_experts, "experts_training", wraps=local_experts.experts_training) as runs,
            ):
                ours, grads = backward(spread, *arguments)
                assert runs.call_count == (passes if dist.get_rank() == 0 else 1)
                repeated, again = backward(checkpointed(parallel(layer, **options)), *arguments)
                assert repeated.equal(ours) and all(local(again[key]).equal(local(grads[key])) for key in grads)
            agree(ours, *([out] if everywhere else share([out], counts)))
            for name in ("gate_up_proj", "down_proj"):
                assert relative_error(grads[name].full_tensor(), expected[name]) <= tolerance(name)


def experts_that_are_not_a_part(world):
    for here, total in ((EXPERTS, EXPERTS), (EXPERTS // world, EXPERTS + 1)):
        with pytest.raises(
            ValueError, match=f"^num_experts: expected {world} ranks with {here} experts each, got {total}$"
        ):
            ExpertParallel().connect(make_trained(here), dist.group.WORLD, total)


def uniform_calls_that_are_not(world):
    """What training assumes to be equal is compared while it computes."""
    x, index, weights, _ = inputs(6, EXPERTS)
    mine = [value[: 6 - 2 * dist.get_rank()] for value in (x, index, weights)]
    for method in ("replicated", "all_to_all"):  # the only ones whose collectives do not depend on it
        spread = parallel(make_trained(EXPERTS), method=method, uniform=True)
        spread(x, index, weights)
        sentence = r"^hidden_states: expected the same number of tokens on all ranks, got 6 on rank 0; 4 on rank 1$"
        with pytest.raises(ValueError, match=sentence):
            spread(*mine)


def checkpointed(layer, reentrant=False):
    """The layer, recomputed in its backward."""

    def run(*arguments, residual=None):
        return checkpoint(layer, *arguments, use_reentrant=reentrant)

    run.zero_grad, run.named_parameters = layer.zero_grad, layer.named_parameters
    return run


def same_bits_without_gradients(world):
    """In training mode, as checkpointing needs it; and checkpointing itself."""
    layer = make_trained(EXPERTS)
    x, index, weights, grad = inputs(6, EXPERTS)
    for options in METHODS:
        spread = parallel(layer, **options)
        out, grads = backward(spread, x, index, weights, grad)
        with torch.no_grad():
            assert torch.equal(spread(x, index, weights), out)
        for reentrant in (False, True):
            again, repeated = backward(checkpointed(spread, reentrant), x, index, weights, grad)
            assert torch.equal(again, out)
            assert all(torch.equal(local(repeated[name]), local(value)) for name, value in grads.items())


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


class Block(nn.Module):
    """A router and its experts, all in float32."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(144, EXPERTS)
        self.experts = make_trained(EXPERTS)

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, index, weights)


def optimizers(world):
    """Steps of AdamW on DTensors, with clipping and masters that are quantized once a step."""
    plain = make_trained(EXPERTS)
    spread = parallel(plain)
    both = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, spread)]
    x, index, weights, target = inputs(4 * world, EXPERTS, dtype=torch.float32)
    mine = share([x, index, weights, target], [4] * world)
    for _ in range(3):
        norms = []
        for model, optimizer, (x_, index_, weights_, target_) in zip(
            (plain, spread), both, ((x, index, weights, target), mine), strict=True
        ):
            optimizer.zero_grad()
            with quantizations(gathered=False) as made:
                for _ in range(2):
                    (model(x_, index_, weights_) - target_).square().sum().backward()
            assert len(made) == 2 and {len(value) for value in made} == {EXPERTS // (world if model is spread else 1)}
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            optimizer.step()
        assert relative_error(norms[1], norms[0]) <= 1e-3
        for ours, theirs in zip(spread.parameters(), plain.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            # AdamW turns the sign of the smallest gradients into whole steps.
            assert relative_error(ours.full_tensor(), theirs) <= TOLERANCE


def changed_masters(world):
    """A backward after an optimizer's step says so; a change shows in the next forward."""
    spread = parallel(make_trained(EXPERTS))
    x, index, weights, grad = inputs(6, EXPERTS)
    out = spread(x, index, weights)
    with torch.no_grad():
        spread.down_proj.mul_(2)
    with pytest.raises(
        RuntimeError, match="down_proj, shape .* has been changed in place between forward and backward"
    ):
        out.backward(grad)
    agree(spread(x, index, weights), 2 * out.detach())


def no_second_derivatives(world):
    """As in one process they are an error: what has gone over a collective would be missing from them."""
    x, index, weights, _ = inputs(6, EXPERTS, dtype=torch.float32)
    for layer in (make(EXPERTS), make_trained(EXPERTS)):
        for options in METHODS:
            spread = parallel(layer, **options)
            for asks in ((True, False), (False, True)):
                leaves = [value.clone().requires_grad_(ask) for value, ask in zip((x, weights), asks, strict=True)]
                out = spread(leaves[0], index, leaves[1])
                (leaf,) = (value for value in leaves if value.requires_grad)
                (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
                with pytest.raises(RuntimeError, match="^fp8moe.GroupedExperts: there is no double backward"):
                    grad.square().sum().backward()


def a_rank_without_a_backward(world):
    """The others would wait for it in theirs: all refuse the forward."""
    x, index, weights, _ = inputs(6, EXPERTS)
    spread, last = parallel(make_trained(EXPERTS)), dist.get_rank() == world - 1
    sentence = "gradients on all ranks, got training and parameters on rank 0; training on rank 1$"
    with torch.set_grad_enabled(not last), pytest.raises(ValueError, match=sentence):
        spread(x, index, weights)
    spread.requires_grad_(not last)
    with pytest.raises(ValueError, match=sentence):
        spread(x, index, weights)


def beside_fsdp(world):
    """FSDP2 on the other axis of a mesh: data parallel groups, each with all experts."""
    plain = Block()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    parallelize_module(model, mesh["ep"], {"experts": ExpertParallel()})
    fully_shard(model.experts, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    x, target = torch.randn(2, world, 6, 144, generator=torch.Generator().manual_seed(1))
    both = [torch.optim.SGD(value.parameters(), lr=0.1) for value in (plain, model)]
    rank = dist.get_rank()
    for _ in range(3):
        for optimizer in both:
            optimizer.zero_grad()
        for part in range(world):
            (plain(x[part]) - target[part]).square().sum().backward()
        # FSDP divides by the size of its axis; the ranks of the other see different tokens too.
        ((model(x[rank]) - target[rank]).square().sum() * (world // 2)).backward()
        for value in model.gate.parameters():
            dist.all_reduce(value.grad.to_local(), group=mesh["ep"].get_group())
        for name, value in plain.named_parameters():
            got = model.get_parameter(name).grad
            assert isinstance(got, DTensor) and relative_error(got.full_tensor(), value.grad) <= TOLERANCE, name
        for values, like in zip(*([m.experts.parameters(), m.gate.parameters()] for m in (model, plain)), strict=True):
            norm = nn.utils.clip_grad_norm_(values, 0.1).full_tensor()
            assert relative_error(norm, nn.utils.clip_grad_norm_(like, 0.1)) <= TOLERANCE
        for optimizer in both:
            optimizer.step()
    for name, value in plain.named_parameters():
        assert relative_error(model.get_parameter(name).full_tensor(), value) <= TOLERANCE, name
    assert {value.device_mesh.ndim for value in model.experts.parameters()} == {2}
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = [value.full_tensor().clone() for value in model.parameters()]
    adam.step()
    assert not any(torch.equal(value.full_tensor(), old) for value, old in zip(model.parameters(), before, strict=True))


CASES = {
    2: (
        *(gradients, sizes, frozen, one_of_the_inputs, same_bits_without_gradients, optimizers, changed_masters),
        *(ranks_without_rows, no_second_derivatives, a_rank_without_a_backward),
        *(more_rows_than_an_even_share, uniform_calls_that_are_not, experts_that_are_not_a_part),
    ),
    4: (gradients, beside_fsdp),
}


def work(world):
    run_each(CASES[world], world)


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_one_process(world):
    in_processes(work, world, world=world)
