"""Experts that are shared out among processes: from_experts of them, and their states at other world sizes."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from fp8moe import FP8Linear, GroupedExperts, replace_linears
from fp8moe.distributed import ExpertParallel
from fp8moe.layers import experts_tokens_training
from fp8moe.quant.arranged import ARRANGED
from tests.processes import in_processes
from tests.small_checkpoints import bits

EXPERTS, HIDDEN, TOKENS = 8, 144, 24
SIZES = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": 72}

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def by_hand(layer, mesh, placement):
    """The parameters as DTensors: also of experts that the ranks do not divide."""
    for name, value in list(layer.named_parameters()):
        part = distribute_tensor(value.detach(), mesh, [placement], src_data_rank=None)
        setattr(layer, name, nn.Parameter(part, requires_grad=value.requires_grad))
    return layer


def equal(sharded, whole):
    """Whether this process has its part of the parameters, and requires the same gradients."""
    assert [name for name, _ in sharded.named_parameters()] == [name for name, _ in whole.named_parameters()]
    for name, value in whole.named_parameters():
        part = sharded.get_parameter(name)
        assert isinstance(part, DTensor) and part.placements == (Shard(0),) and part.shape == value.shape
        expected = distribute_tensor(value.detach(), part.device_mesh, [Shard(0)], src_data_rank=None)
        assert part.dtype == value.dtype and part.requires_grad == value.requires_grad
        assert torch.equal(bits(part.detach().to_local()), bits(expected.to_local())), name


def same_memory(first, second):
    return first.to_local().untyped_storage().data_ptr() == second.to_local().untyped_storage().data_ptr()


def inputs(experts=EXPERTS):
    """All tokens, as many for each of 4 ranks."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    weights, index = torch.rand(TOKENS, experts, generator=generator).softmax(-1).topk(2)
    return x, index, weights


def conversions():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dtype, gated in ((torch.bfloat16, True), (torch.float32, False)):
        torch.manual_seed(0)
        masters = GroupedExperts(**SIZES, master_dtype=dtype, gated=gated)
        frozen = GroupedExperts.from_experts(masters, scale_format="ue8m0")
        again = GroupedExperts.from_experts(frozen, master_dtype=dtype)
        sharded = parallelize_module(copy.deepcopy(masters), mesh, ExpertParallel(exact=True))
        sharded_frozen = GroupedExperts.from_experts(sharded, scale_format="ue8m0")
        equal(sharded_frozen, frozen)
        equal(GroupedExperts.from_experts(sharded_frozen, master_dtype=dtype), again)
        assert GroupedExperts.from_experts(sharded, master_dtype=dtype).down_proj is sharded.down_proj
        assert same_memory(GroupedExperts.from_experts(sharded_frozen).down_proj, sharded_frozen.down_proj)
        mine = [value.chunk(dist.get_world_size())[dist.get_rank()] for value in inputs()]
        with torch.no_grad():
            assert torch.equal(sharded_frozen(*mine), frozen(*mine))

    # Of three experts the last of four ranks has none.
    torch.manual_seed(0)
    three = GroupedExperts(**SIZES | {"num_experts": 3}, master_dtype=torch.bfloat16)
    three.requires_grad_(False)
    sharded = by_hand(copy.deepcopy(three), mesh, Shard(0))
    equal(GroupedExperts.from_experts(sharded), GroupedExperts.from_experts(three))
    as_float = (GroupedExperts.from_experts(layer, master_dtype=torch.float32) for layer in (sharded, three))
    equal(*as_float)


def refusals():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    masters = by_hand(GroupedExperts(**SIZES, master_dtype=torch.bfloat16), mesh, Shard(1))
    with pytest.raises(
        ValueError, match=r"^module.gate_up_proj: expected whole experts on each rank, .*Shard\(dim=1\)"
    ):
        GroupedExperts.from_experts(masters)
    masters = by_hand(GroupedExperts(**SIZES, master_dtype=torch.bfloat16), mesh, Shard(0))
    masters.down_proj = nn.Parameter(masters.down_proj.detach().to_local().repeat(dist.get_world_size(), 1, 1))
    with pytest.raises(
        ValueError, match=r"^module.gate_up_proj: expected placements None, as of down_proj, got .*Shard"
    ):
        GroupedExperts.from_experts(masters)
    linears = nn.Sequential(nn.Linear(256, 256), FP8Linear(256, 256, master_dtype=torch.float32))
    fully_shard(linears, mesh=mesh)
    before = list(linears)
    with pytest.raises(ValueError, match="^0.weight: expected a whole weight to quantize, got a DTensor with"):
        replace_linears(linears)
    with pytest.raises(ValueError, match="^0.weight: expected a whole weight to quantize, got a DTensor with"):
        replace_linears(linears, master_dtype=torch.float32)  # FSDP2 would go on gathering those of the old modules
    assert list(linears) == before
    with pytest.raises(ValueError, match="^linear.weight: expected a whole weight to quantize, got a DTensor with"):
        FP8Linear.from_linear(linears[1])


def parts_of_experts():
    """What FSDP2 has not gathered, as it does for calls of the module that it was applied to, are not all experts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dtype in (None, torch.bfloat16):
        model = nn.Sequential(GroupedExperts(**SIZES, master_dtype=dtype))
        fully_shard(model, mesh=mesh)
        with pytest.raises(
            ValueError, match=r"^down_proj: expected all of it on this rank, got \(2, 144, 72\) of a DT"
        ):
            model[0](*inputs())
    gate, down = (distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]) for shape in ((4, 72, 144), (4, 144, 72)))
    index, weights = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"^gate: expected all of it on this rank, got \(1, 72, 144\) of a DT"):
        experts_tokens_training(torch.zeros(3, 144), index, weights, gate, gate, down)


def all_conversions():
    conversions()
    refusals()
    parts_of_experts()


def test_experts_are_quantized_where_they_are():
    in_processes(all_conversions, world=4)


class Layer(nn.Module):
    """Experts that are trained, and experts that are not, in FP8 and in the formats of four bits that are arranged."""

    def __init__(self):
        super().__init__()
        self.trained = GroupedExperts(**SIZES, dtype=torch.float32, master_dtype=torch.float32)
        self.frozen = GroupedExperts(**SIZES)
        for form in ARRANGED:
            four = GroupedExperts(num_experts=8, hidden_size=64, intermediate_size=96, weight_format=form)
            self.add_module(form, four)

    def forward(self, x, index, weights):
        return self.trained(x, index, weights) + self.frozen(x, index, weights)


def new_layer(seed):
    torch.manual_seed(seed)
    layer = Layer()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(layer, mesh, dict.fromkeys(("trained", "frozen", *ARRANGED), ExpertParallel()))
    return layer, torch.optim.AdamW(layer.trained.parameters(), lr=1e-2)


def step(layer, optimizer):
    """With the mean of all tokens; the gradients are sums over the ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    out = layer(*(value.chunk(world)[rank] for value in inputs()))
    (out.float().square().sum() / TOKENS).backward()
    optimizer.step()
    optimizer.zero_grad()


def save(layer, optimizer, directory):
    states = get_state_dict(layer, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=directory)


def load(layer, optimizer, directory):
    states = get_state_dict(layer, optimizer)
    loaded = dict(zip(("model", "optimizer"), states, strict=True))
    dcp.load(loaded, checkpoint_id=directory)
    set_state_dict(layer, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])


def train_on_two(directory):
    layer, optimizer = new_layer(0)
    for _ in range(2):
        step(layer, optimizer)
    save(layer, optimizer, directory / "2")


def go_on_on_four(directory):
    layer, optimizer = new_layer(1)
    layer(*inputs())  # its FP8 copies are of other weights
    load(layer, optimizer, directory / "2")
    save(layer, optimizer, directory / "4")
    step(layer, optimizer)
    save(layer, optimizer, directory / "stepped")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_are_loaded_at_other_world_sizes(tmp_path):
    in_processes(train_on_two, tmp_path, world=2)
    in_processes(go_on_on_four, tmp_path, world=4)
    trained, loaded, loaded_too, stepped, other = (new_layer(seed) for seed in (0, 1, 2, 3, 1))
    load(*loaded, tmp_path / "2")
    load(*loaded_too, tmp_path / "4")
    load(*stepped, tmp_path / "stepped")
    states = [get_state_dict(*pair) for pair in (loaded, loaded_too)]
    for kind in range(2):
        values, same = (torch.utils._pytree.tree_leaves(state[kind]) for state in states)
        assert len(values) == len(same) > 4
        for value, other_value in zip(values, same, strict=True):
            equal_bits = isinstance(value, torch.Tensor) and torch.equal(bits(value), bits(other_value))
            assert equal_bits or value == other_value
    for _ in range(2):
        step(*trained)
    close(loaded[0], trained[0], other[0])
    for kind in ("frozen", *ARRANGED):
        for name, value in trained[0].get_submodule(kind).named_parameters():
            assert torch.equal(bits(loaded[0].get_parameter(f"{kind}.{name}")), bits(value))
    step(*loaded)
    close(stepped[0], loaded[0], trained[0])


def close(layer, expected, other):
    """Whether the masters are as expected but for rounding, and not as others."""
    for name, value in expected.trained.named_parameters():
        found = layer.trained.get_parameter(name)
        change = (value - other.trained.get_parameter(name)).norm()
        assert (found - value).norm() < 0.02 * change
