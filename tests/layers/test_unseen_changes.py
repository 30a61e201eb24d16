"""Weights that change where no version counter shows it: which changes these are, and what helps.

docs/training.md lists them. The copies are those of masters, and those that register() keeps of transformers' experts.
"""

import ctypes

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8moe import FP8Linear, GroupedExperts
from fp8moe.layers import master
from fp8moe.layers.master import Fingerprint
from tests.errors import relative_error
from tests.transformers_models import BASE, modules_named, random_model

X = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
ROUTING = torch.tensor([[0, 1]] * 4), torch.ones(4, 2)


# Each returns what doubles the weight without a word.


def through_data(weight):
    return lambda: weight.data.copy_(2 * weight.data)


def through_the_storage(weight):
    return lambda: weight.untyped_storage().copy_((2 * weight.detach()).untyped_storage())


def through_dlpack(weight):
    other = torch.from_dlpack(weight.detach())
    return lambda: other.mul_(2)


def through_numpy(weight):
    array = weight.detach().numpy()
    return lambda: array.__imul__(2)


def through_what_became_its_data(weight):
    other = weight.data = weight.detach().clone()
    return lambda: other.add_(other)


def through_a_vector(weight):
    vector = weight.detach().flatten().clone()
    nn.utils.vector_to_parameters(vector, [weight])
    return lambda: nn.utils.vector_to_parameters(vector.mul_(2), [weight])


def through_the_address(weight):
    """As a kernel or another process does that has the memory of the weight."""
    doubled = 2 * weight.detach()
    return lambda: ctypes.memmove(weight.data_ptr(), doubled.data_ptr(), weight.nbytes)


def with_the_version_put_back(weight):
    def change():
        with torch.autograd._unsafe_preserve_version_counter(weight):
            weight.mul_(2)

    return change


UNSEEN = [
    through_data,
    through_the_storage,
    through_dlpack,
    through_numpy,
    through_what_became_its_data,
    through_a_vector,
    through_the_address,
    with_the_version_put_back,
]


def linear():
    layer = FP8Linear(128, 128, bias=False, master_dtype=torch.float32)
    return layer, layer.weight, lambda: layer(X)


def experts():
    layer = GroupedExperts(num_experts=2, hidden_size=128, intermediate_size=128, master_dtype=torch.float32)
    return layer, layer.down_proj, lambda: layer(X, *ROUTING)


def registered_experts():
    options = BASE | {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 2, "num_key_value_heads": 4}
    model = random_model("mixtral", options, dtype=torch.float32)
    model.set_experts_implementation("fp8moe")
    module = modules_named(model, "experts")[0]
    return model, module.down_proj, lambda: module(X, *ROUTING)


def switch(model):
    model.train(not model.training)


@torch.no_grad()
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("change", UNSEEN)
@pytest.mark.parametrize("remedy", [lambda model: master.invalidate(), switch], ids=["invalidate", "train or eval"])
@pytest.mark.parametrize("make", [linear, experts, registered_experts])
def test_what_helps(make, remedy, change):
    model, weight, call = make()
    double = change(weight)
    before = call()
    double()
    assert torch.equal(call(), before), "it shows: docs/training.md need not list it"
    remedy(model)
    assert relative_error(call(), 2 * before) < 0.05  # in training mode some roundings are others


@torch.no_grad()
@pytest.mark.usefixtures("registered")
def test_frozen_experts_are_not_quantized_again_while_the_mode_stays():
    model, _, call = registered_experts()
    call()
    kept = modules_named(model, "experts")[0]._fp8moe
    model.eval()
    call()
    assert modules_named(model, "experts")[0]._fp8moe is kept


# DTensors, which have no memory of their own.


@pytest.fixture
def mesh():
    if not dist.is_available():
        pytest.skip("needs torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fingerprints_of_dtensors(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    def sharded(values):
        return nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))

    def seen(tensor, change):
        taken = Fingerprint([tensor])
        assert taken.matches([tensor])
        change()
        return not taken.matches([tensor])

    weight = sharded(torch.randn(4, 8))
    assert weight.data_ptr() == 0
    with torch.no_grad():
        assert seen(weight, lambda: weight.mul_(2))
        assert seen(weight, lambda: weight.to_local().mul_(2))
        assert seen(weight, lambda: weight.copy_(sharded(torch.randn(4, 8))))
    assert not Fingerprint([weight]).matches([sharded(torch.randn(4, 8))])
    assert seen(weight, master.invalidate)
    assert not seen(weight, lambda: weight.to_local())
