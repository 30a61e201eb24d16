"""ExpertParallel in several processes on the CPU against the layer of one process: inference."""

import copy
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from fp8moe.distributed import ExpertParallel, agreement, local
from fp8moe.distributed.transport import choose_method
from fp8moe.layers.experts import GroupedExperts
from tests.errors import relative_error
from tests.experts_cases import BIASED, VARIANTS, inputs, make, make_trained
from tests.processes import in_processes, run_each
from tests.small_checkpoints import bits

METHODS = (
    {"method": "gather"},
    {"method": "gather", "payload": "bf16"},
    {"method": "gather", "uniform": True},
    {"method": "all_to_all"},
    {"method": "all_to_all", "payload": "bf16"},
    {"method": "replicated"},
    {"exact": True},
    {"method": "all_to_all", "exact": True, "payload": "bf16"},
    {},
)
EACH = ({"method": "gather"}, {"method": "all_to_all"}, {"method": "replicated"}, {"exact": True})
EXPERTS = 8


def parallel(layer, **options):
    """A copy of the layer with its experts spread over all processes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(copy.deepcopy(layer), mesh, ExpertParallel(**options))


def share(values, counts):
    """This rank's rows of each value."""
    return [value.split(counts)[dist.get_rank()] for value in values]


def agree(got, expected, exact=False):
    """The same bits; or, except for one in 10000, and those one step of bfloat16 away."""
    assert got.shape == expected.shape and got.dtype == expected.dtype and got.is_contiguous()
    if exact or not got.numel():
        assert torch.equal(got, expected)
    elif got.dtype is torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    else:
        assert (got != expected).sum() <= max(1, got.numel() // 10000)
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)


def check(layer, counts, top_k=2, dtype=torch.bfloat16, route=None, residual=False, **options):
    """A call with so many tokens on each rank against the whole layer on all of them."""
    total, hidden = sum(counts), layer.hidden_size
    x, index, weights, added = inputs(total, layer.num_experts, top_k, hidden, dtype)
    index = index if route is None else route(index)
    added = added if residual else None
    expected = layer(x, index, weights, residual=added)
    everywhere = options.get("method") == "replicated"
    if everywhere:
        counts = [total] * dist.get_world_size()
    mine = (lambda values: values) if everywhere else partial(share, counts=counts)
    spread = parallel(layer, **options)
    x, index, weights, expected, *added = mine([x, index, weights, expected, *([added] if residual else [])])
    outs = [spread(x, index, weights, residual=added[0] if added else None) for _ in range(2)]
    assert torch.equal(*outs)
    agree(outs[0], expected, options.get("exact", False))


def uneven(world):
    return [7, 0, 12, 1][:world] if world > 2 else [3, 9]


# Cases, each called in all processes.


def methods(world):
    layer = make(EXPERTS)
    for options in METHODS:
        check(layer, [6] * world if options.get("uniform") else uneven(world), **options)


def sizes_and_dtypes(world):
    """Sizes that are no multiples, more dtypes, one expert a token, and residuals."""
    variants = (VARIANTS | BIASED).values()
    for variant, dtype in zip(variants, (torch.float32, torch.float16, torch.bfloat16) * 3, strict=False):
        layer = make(EXPERTS, 131, 77, **variant)
        for options in EACH:
            check(layer, uneven(world), top_k=1 + 2 * (dtype is torch.float32), dtype=dtype, residual=True, **options)


def unusual_routing(world):
    layer = make(EXPERTS)
    first = torch.tensor([0, 1])
    outside = torch.tensor([-1, EXPERTS])
    routes = {
        "all to the experts of one rank": lambda index: first.expand_as(index),
        "to none": lambda index: outside.expand_as(index),
        "some to none": lambda index: torch.where(torch.arange(len(index))[:, None] % 3 == 0, outside, index),
        "the same expert twice": lambda index: index[:, :1].expand_as(index),
        "int32": lambda index: index.int(),
        "past int32": lambda index: torch.where(index == 0, index + (1 << 32), index),
    }
    for route in routes.values():
        for options in EACH:
            check(layer, uneven(world), route=route, **options)
    for options in EACH:
        check(layer, uneven(world), top_k=0, **options)


def ranks_without_tokens(world):
    layer = make(EXPERTS)
    for options in METHODS:
        if not options.get("uniform"):
            check(layer, [0] * (world - 1) + [5], **options)
        check(layer, [0] * world, **options)


def more_dimensions(world):
    layer, spread = (step(make(EXPERTS)) for step in (nn.Identity(), parallel))
    x, index, weights, residual = (value.view(2, 3, -1) for value in inputs(6, EXPERTS))
    agree(spread(x, index, weights, residual=residual), layer(x, index, weights, residual=residual))
    with torch.inference_mode():
        agree(spread(x, index, weights), layer(x, index, weights))


def several_passes(world):
    """All tokens to one rank: more rows than it has room for, in memory for its share."""
    layer, tokens = make(EXPERTS, 32, 32), 300
    here = dist.get_rank() == 0
    run, calls = local.experts_partial, []

    def watched(*arguments, **options):
        calls.append((arguments[-1].num_rows, arguments[-1].first_row))
        return run(*arguments, **options)

    route = {"route": lambda index: torch.tensor([0, 1]).expand_as(index)}
    room = max(int(tokens * 2 * 1.25), 256 * 2)
    with patch.object(local, "experts_partial", watched):
        for method in ("gather", "all_to_all"):
            calls.clear()
            check(layer, [tokens] * world, method=method, **route)
            needed = tokens * 2 * world if here else 0
            expected = [(room, first) for first in reversed(range(0, max(needed, 1), room))]
            if method == "all_to_all":
                expected = [(min(room, needed), first) for _, first in expected]
            assert calls == 2 * expected and len(expected) == (-(-needed // room) if here else 1)
        calls.clear()
        check(layer, [tokens] * world, method="gather")
        assert calls == [(room, 0)] * 2


def replicated_slices(world):
    """So many tokens that every rank adds up a slice of them."""
    layer = make(EXPERTS, 1024, 32)
    check(layer, [(4 << 20) // 4096 + 1] + [0] * (world - 1), method="replicated", residual=True)


def parameters(world):
    plain, rank = make(EXPERTS), dist.get_rank()
    spread = parallel(plain)
    assert spread.num_experts == EXPERTS
    for name, value in plain.named_parameters():
        part = getattr(spread, name)
        assert isinstance(part, DTensor) and isinstance(part, nn.Parameter) and part.placements == (Shard(0),)
        assert not part.requires_grad and part.shape == value.shape
        held = part.to_local()
        assert held.untyped_storage().nbytes() == value.nbytes // world
        bits = value.view(torch.uint8)
        assert torch.equal(held.view(torch.uint8), bits.chunk(world)[rank])
    again = parallelize_module(spread, spread.down_proj.device_mesh, ExpertParallel())
    assert all(one is other for one, other in zip(again.parameters(), spread.parameters(), strict=True))
    x, index, weights, _ = inputs(6, EXPERTS)
    for copied in (copy.deepcopy(spread), spread.half()):
        agree(copied(x, index, weights), plain(x, index, weights))


def values_of_rank_0(world):
    """As with PyTorch's styles, unless src_data_rank is None."""
    layers, rank = [make(EXPERTS, seed=seed) for seed in range(world)], dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    for source, held in ((0, 0), (None, rank)):
        spread = parallelize_module(copy.deepcopy(layers[rank]), mesh, ExpertParallel(), src_data_rank=source)
        for name, value in layers[held].named_parameters():
            part = getattr(spread, name).to_local().view(torch.uint8)
            assert torch.equal(part, value.view(torch.uint8).chunk(world)[rank])


def without_data(world):
    with torch.device("meta"):
        layer = GroupedExperts(num_experts=EXPERTS, hidden_size=144, intermediate_size=96)
    spread = parallel(layer)
    assert all(value.is_meta and value.to_local().shape[0] == EXPERTS // world for value in spread.parameters())
    spread.to_empty(device="cpu")
    spread.reset_parameters()
    x, index, weights, _ = inputs(6, EXPERTS)
    assert spread(x, index, weights).isfinite().all()


def rows_of_the_experts_here(world):
    """What other libraries that dispatch tokens call: groups are those of the experts of this rank."""
    plain, rows = make(EXPERTS), inputs(12)[0]
    groups = torch.tensor([0, 5, 7, 8, 12][: EXPERTS // world + 1], dtype=torch.int32)
    before = dist.get_rank() * (EXPERTS // world)
    whole = torch.cat([groups[:1].expand(before), groups, groups[-1:].expand(EXPERTS - len(groups) + 1 - before)])
    assert torch.equal(parallel(plain).forward_rows(rows, groups), plain.forward_rows(rows, whole))


def groups_without_a_cpu(world):
    """NCCL's: each slice of a mesh then has a group of its own over gloo, made once."""
    plain = make(EXPERTS)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))["ep"]
    with patch.object(agreement.dist, "get_backend_config", lambda group: "cuda:nccl"):
        layers = [parallelize_module(copy.deepcopy(plain), mesh, ExpertParallel()) for _ in range(2)]
    assert layers[0].parallel.agreement is layers[1].parallel.agreement
    group = layers[0].parallel.agreement.group
    assert group is not mesh.get_group()
    assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(mesh.get_group())
    x, index, weights, _ = inputs(6, EXPERTS)
    agree(layers[0](x, index, weights), plain(x, index, weights))


class Fused(nn.Module):
    """Experts as transformers has them."""

    def __init__(self, layer):
        super().__init__()
        self.num_experts = layer.num_experts
        for name, value in layer.named_parameters():
            setattr(self, name, value)


def other_modules(world):
    """What forwards is kept beside them; a layer of the local shards can use it."""
    plain = make(EXPERTS)
    fused = parallel(Fused(plain))
    assert all(isinstance(value, DTensor) for value in fused.parameters())
    held = GroupedExperts(num_experts=EXPERTS // world, hidden_size=144, intermediate_size=96)
    for name, value in fused.named_parameters():
        setattr(held, name, nn.Parameter(value.to_local(), requires_grad=False))
    held.parallel = fused._fp8moe_parallel
    x, index, weights, _ = inputs(6, EXPERTS)
    agree(held(x, index, weights), plain(x, index, weights))


def compiled(world):
    plain = make(EXPERTS)
    model = torch.compile(nn.ModuleList([parallel(plain)])[0], backend="eager")
    x, index, weights, _ = inputs(6, EXPERTS)
    agree(model(x, index, weights), plain(x, index, weights))


def four_bits(world):
    """Results, gradients, states and what is rounded to them."""
    trained = make_trained(EXPERTS, 256, 128)
    for form, ways in (("mxfp4", EACH), ("int4", ({},)), ("nvfp4", ({},))):
        plain, other = (make(EXPERTS, 256, 128, seed=seed, weight_format=form) for seed in (0, 1))
        for options in ways:
            check(plain, uneven(world), residual=True, **options)
        if form == "int4":
            plain.load_state_dict(
                {name: value.float() if name.endswith("scale") else value for name, value in plain.state_dict().items()}
            )
        spread, loaded = parallel(plain), parallel(other)
        state, expected = spread.state_dict(), plain.state_dict()
        loaded.load_state_dict(state)
        x, index, weights, grad = inputs(6, EXPERTS, hidden=256)
        found = []
        for layer in (plain, spread, loaded):
            leaf = x.clone().requires_grad_()
            layer(leaf, index, weights).backward(grad)
            found.append(leaf.grad)
            agree(layer(x, index, weights), plain(x, index, weights))
        assert relative_error(found[1], found[0]) < 1e-3 and torch.equal(found[1], found[2])
        for name, value in state.items():
            assert isinstance(value, DTensor) and value.shape == expected[name].shape
            here = expected[name].chunk(world)[dist.get_rank()]
            assert value.dtype == here.dtype and torch.equal(bits(value.to_local()), bits(here))
        if form == "nvfp4":
            # Whole tensor scales, as PyTorch leaves them in a whole state whose other tensors it has sharded.
            doubled = {name: 2 * value for name, value in expected.items() if name.endswith("tensor_scale")}
            loaded.load_state_dict(state | doubled)
            for name, value in doubled.items():
                assert torch.equal(loaded.state_dict()[name].to_local(), value.chunk(world)[dist.get_rank()])
            whole = distribute_tensor(expected["down_proj_tensor_scale"], loaded.down_proj.device_mesh, [Replicate()])
            sentence = "down_proj_scale: expected all that belongs to it with (Shard(dim=0),), got (Replicate(),)"
            fails(partial(loaded.load_state_dict, state | {"down_proj_tensor_scale": whole}), sentence)
        layers = [GroupedExperts.from_experts(experts, weight_format=form) for experts in (parallel(trained), trained)]
        for one, other in zip(*(layer.state_dict().values() for layer in layers), strict=True):
            assert torch.equal(bits(one.to_local()), bits(other.chunk(world)[dist.get_rank()]))
        empty = parallel(layers[1].to("meta")).to_empty(device="cpu")
        empty.reset_parameters()
        assert empty(x, index, weights).isfinite().all()


def fails(work, sentence):
    """That it raises this ValueError, which is the same in all processes."""
    try:
        work()
    except ValueError as error:
        text = str(error)
    else:
        text = "no error"
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert set(texts) == {sentence}, texts


def wrong_modules(world):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    last = rank == world - 1

    def apply(module, **options):
        return lambda: parallelize_module(module, mesh, ExpertParallel(**options))

    ranks = "rank 0" if world == 2 else "ranks 0, 1, 2"
    fails(apply(make(world + 1)), f"num_experts: expected a multiple of the {world} ranks of the mesh, got {world + 1}")
    kind = "module: expected experts with num_experts, and parameters of that many experts each, got Linear"
    fails(apply(nn.Linear(4, 4)), kind)
    fails(apply(nn.Linear(4, 4) if last else make(EXPERTS)), f"rank {world - 1}: {kind}")
    fp8 = (
        "GroupedExperts with gate_up_proj float8_e4m3fn (8, 192, 144), gate_up_proj_scale_inv float32 (8, 2, 2), "
        "down_proj float8_e4m3fn (8, 144, 96), down_proj_scale_inv float32 (8, 2, 1)"
    )
    bf16 = "GroupedExperts with gate_up_proj bfloat16 (8, 192, 144), down_proj bfloat16 (8, 144, 96)"
    trained = GroupedExperts(num_experts=8, hidden_size=144, intermediate_size=96, master_dtype=torch.bfloat16)
    fails(
        apply(trained if last else make(EXPERTS)),
        f"module: expected the same experts on all ranks, got {fp8} on {ranks}; {bf16} on rank {world - 1}",
    )
    one, other = (
        f"Options(method='{method}', payload='fp8', exact=False, uniform=False)" for method in ("auto", "gather")
    )
    fails(
        apply(make(EXPERTS), method="gather" if last else "auto"),
        f"ExpertParallel: expected the same options on all ranks, got {one} on {ranks}; {other} on rank {world - 1}",
    )
    square = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    fails(
        lambda: ExpertParallel()._apply(make(EXPERTS), square),
        "device_mesh: expected one dimension, got 2: take a slice of it",
    )


def wrong_calls(world):
    """One rank is wrong, all say so; the next call is right."""
    plain = make(EXPERTS)
    last = dist.get_rank() == world - 1
    ranks, it = ("rank 0" if world == 2 else "ranks 0, 1, 2"), f"rank {world - 1}"
    x, index, weights, _ = inputs(6, EXPERTS)
    two = [parallel(plain) for _ in range(2)]
    for options in METHODS:
        if options.get("uniform"):
            continue
        spread = parallel(plain, **options)

        def call(x=x, index=index, weights=weights, layer=spread):
            return lambda: layer(x, index, weights)

        fails(
            call(x=x[:, :100] if last else x),
            f"{it}: hidden_states: expected shape (T, 144) to match gate_up_proj ({EXPERTS // world}, 192, 144), "
            "got (6, 100)",
        )
        fails(
            call(weights=None if last else weights), f"{it}: top_k_weights: expected a torch.Tensor, got NoneType None"
        )
        fails(call(index=index.float()), "top_k_index: expected int32 or int64, got torch.float32")
        fails(
            call(x=x.float() if last else x),
            "hidden_states: expected the same dtype on all ranks, "
            f"got torch.bfloat16 on {ranks}; torch.float32 on {it}",
        )
        fails(
            call(index=index[:, :1] if last else index, weights=weights[:, :1] if last else weights),
            f"top_k_index: expected the same number of experts a token on all ranks, got 2 on {ranks}; 1 on {it}",
        )
        fails(
            call(x=x.clone().requires_grad_(last)),
            "expected the same mode and the same gradients on all ranks, "
            f"got none on {ranks}; training and hidden_states on {it}",
        )
        agree(spread(x, index, weights), plain(x, index, weights), options.get("exact", False))
    numbers = [layer.parallel.layer for layer in two]
    fails(
        lambda: two[int(last)](x, index, weights),
        f"expected all ranks to call the same layer, got the {numbers[0]}. of those made parallel on {ranks}; "
        f"the {numbers[1]}. of those made parallel on {it}",
    )
    spread, tokens = parallel(plain, method="replicated"), 5 if last else 6
    fails(
        lambda: spread(x[:tokens], index[:tokens], weights[:tokens]),
        f"hidden_states: expected the same tokens on all ranks, got {[6] * (world - 1) + [5]} tokens",
    )


CASES = (methods, ranks_without_tokens, several_passes, parameters, wrong_modules, wrong_calls)
MORE_CASES = {
    2: (
        *(sizes_and_dtypes, unusual_routing, more_dimensions, replicated_slices, values_of_rank_0, without_data),
        *(rows_of_the_experts_here, other_modules, four_bits, compiled),
    ),
    4: (groups_without_a_cpu,),
}


def work(world):
    run_each((*CASES, *MORE_CASES[world]), world)


@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_compute_what_one_does(world):
    in_processes(work, world, world=world)


def test_auto_is_all_to_all_where_it_sends_much_less():
    assert {choose_method(tokens, 8, 2) for tokens in (0, 64, 4096)} == {
        "gather"
    }  # nearly every token goes to both ranks
    assert [choose_method(tokens, 8, 64) for tokens in (1, 64, 4096)] == ["gather", "gather", "all_to_all"]
    assert (choose_method(256, 8, 64), choose_method(256, 256, 64)) == ("all_to_all", "gather")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "ring"}, "method: expected one of 'auto', 'gather', 'all_to_all', 'replicated', got 'ring'"),
        ({"payload": "int8"}, "payload: expected one of 'fp8', 'bf16', got 'int8'"),
        ({"method": "gather", "exact": True}, "exact: expected False with method 'gather'"),
    ],
)
def test_unknown_options(options, message):
    with pytest.raises(ValueError, match=message):
        ExpertParallel(**options)
