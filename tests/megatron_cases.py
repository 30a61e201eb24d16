"""Cases of tests/guests/test_megatron.py, each in processes of its own: they replace parts of torch.cuda."""

import gc
import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fp8moe.layers import linear_of_master
from tests.errors import relative_error
from tests.megatron_cpu import stand_in

ROUNDING = 0.1  # what FP8 costs in an expert
SIZES = {
    **{"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "channels": 32, "experts": 4, "top_k": 2},
    **{"inter": 128, "vocabulary": 64, "sequence": 32, "batch": 2},
}


def started(expert_parallel=1, expert_tensor_parallel=1, **config):
    """A config of Megatron-Core, its groups made."""
    warnings.simplefilter("ignore")
    stand_in()
    from benchmarks import megatron

    megatron.start(None, expert_parallel, expert_tensor_parallel, cpu=True)
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{"num_layers": 1, "hidden_size": 128, "num_attention_heads": 4, "num_moe_experts": 4, "moe_router_topk": 2},
        **{"moe_ffn_hidden_size": 256, "ffn_hidden_size": 256, "use_cpu_initialization": True},
        **{"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False},
        **{"expert_model_parallel_size": expert_parallel, "expert_tensor_parallel_size": expert_tensor_parallel},
        **{"gradient_accumulation_fusion": False, "bias_activation_fusion": False} | config,
    )


def experts_of(config):
    """SequentialMLP and FP8Experts of one seed."""
    from fp8moe_megatron import FP8Experts
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    groups = ProcessGroupCollection.use_mpu_process_groups()
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    local = config.num_moe_experts // config.expert_model_parallel_size
    made = []
    for kind in (SequentialMLP, FP8Experts):
        torch.manual_seed(0)
        made.append(kind(local, config, submodules, pg_collection=groups))
    return made


def stacked(module, name, values=lambda weight: weight):
    return torch.stack([values(getattr(expert, name).weight) for expert in module.local_experts])


def sums_of_any_dtype_and_in_compiled_graphs():
    from fp8moe_megatron.main_grad import with_main_grad

    started()
    x = torch.randn(4, 128)

    def run(weight):
        return linear_of_master(x, weight, receiver=with_main_grad(weight))

    for dtype, compiled in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        weight = torch.nn.Parameter(torch.randn(256, 128))
        (expected,) = torch.autograd.grad(linear_of_master(x, weight).sum(), weight)
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight, dtype=dtype), False
        (torch.compile(run, backend="aot_eager") if compiled else run)(weight).sum().backward()
        assert weight.grad_added_to_main_grad, (dtype, compiled)
        assert relative_error(weight.main_grad, 1 + expected.double()) < 4e-3, (dtype, compiled)


def experts_compute_and_start_as_sequential_ones():
    config = started()
    plain, ours = experts_of(config)
    weights = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}
    for name, module in weights.items():
        assert torch.equal(getattr(ours, name), stacked(plain, module))
    for weight in ours.parameters():
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight, dtype=torch.float32), False
    counts = torch.tensor([5, 0, 130, 3])
    for _ in range(2):  # micro-batches
        results = []
        for module in (plain, ours):
            rows, probs = torch.randn(138, 128).requires_grad_(), torch.rand(138).requires_grad_()
            torch.manual_seed(3)
            rows.data.normal_(), probs.data.uniform_()
            out, bias = module(rows, counts, probs)
            assert bias is None
            torch.manual_seed(4)
            out.backward(torch.randn(out.shape))
            results.append((out, rows.grad, probs.grad))
        for expected, found in zip(*results, strict=True):
            assert found.dtype is expected.dtype and relative_error(found, expected.double()) < ROUNDING
    for name, module in weights.items():
        weight, expected = getattr(ours, name), stacked(plain, module, lambda weight: weight.grad)
        assert weight.grad_added_to_main_grad
        assert relative_error(weight.main_grad - 1, expected.double()) < ROUNDING
    rows = torch.randn(140, 128)
    assert not ours(rows, counts, torch.rand(140))[0][138:].any()


def layers_of(expert_parallel=1, expert_tensor_parallel=1, **config):
    """MoELayers of one seed: Megatron's own, one that has FP8 experts behind Megatron's dispatcher, and an FP8MoELayer.

    The weights of the last two have a main_grad of zeros.
    """
    config = started(expert_parallel, expert_tensor_parallel, **config)
    from functools import partial

    from fp8moe_megatron import FP8MoELayer, in_fp8
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    plain = get_gpt_layer_local_spec(num_experts=4).submodules.mlp
    ours = in_fp8(plain)
    assert plain.func is MoELayer and ours.func is FP8MoELayer
    made = []
    for build in (plain, partial(MoELayer, **ours.keywords), ours):
        torch.manual_seed(0)
        made.append(build(config=config))
        made[-1].set_layer_number(1)
    for layer in made[1:]:
        for weight in layer.experts.parameters():
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=torch.float32), False
    return made


def trained_once(layer, x, gradient):
    """The result of a layer, and gradients of x, the router and the experts."""
    x.grad = None
    out, bias = layer(x)
    assert bias is None and out.shape == x.shape
    out.backward(gradient)
    experts = layer.experts
    if hasattr(experts, "local_experts"):
        weights = [stacked(experts, f"linear_fc{number}", lambda weight: weight.grad) for number in (1, 2)]
    else:
        weights = [experts.gate_up_proj.main_grad, experts.down_proj.main_grad]
        assert experts.gate_up_proj.grad_added_to_main_grad
    return out, x.grad, layer.router.weight.grad, *weights


def layers_agree(config):
    """Layers that give the experts whole tokens compute what those compute that dispatch rows."""
    plain, rows, tokens = layers = layers_of(**config)
    shapes = []
    for layer in layers[1:]:
        layer.experts.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    torch.manual_seed(2)
    x = torch.randn(60, 2, 128).bfloat16().float().requires_grad_()
    gradient = torch.randn(x.shape)
    expected, *found = (trained_once(layer, x, gradient) for layer in layers)
    for results in found:
        for result, wanted in zip(results, expected, strict=True):
            assert result.dtype is wanted.dtype and relative_error(result, wanted.double()) < ROUNDING
    # FP8MoELayer sums each token's rows before it rounds, and takes probabilities in the same precision.
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other.double()) < ROUNDING / 5
    assert shapes[0][0] <= 240 and shapes[-1] == (120, 128)
    if "moe_expert_capacity_factor" in config and not config.get("moe_pad_expert_input_to_capacity"):
        assert shapes[0][0] < 240  # some tokens have fewer than two experts
    with torch.no_grad():
        kept = [layer.eval()(x)[0] for layer in layers]
    assert all(relative_error(each, kept[0].double()) < ROUNDING for each in kept[1:])


def layers_of_two_ranks_agree(config):
    """Layers that send whole tokens to other ranks compute what those compute that dispatch rows."""
    equal = "moe_pad_expert_input_to_capacity" in config  # for Megatron's own layers
    plain, rows, tokens = layers = layers_of(expert_parallel=2, variable_seq_lengths=not equal, **config)
    assert type(plain.token_dispatcher) is not type(tokens.token_dispatcher) and rows.experts.parallel is None
    seen = []
    tokens.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    rank = dist.get_rank()
    for length in (60, 60 - 20 * rank)[: 2 - equal]:
        for layer in layers:
            layer.zero_grad()
            for weight in layer.experts.parameters():
                if layer is not plain:
                    weight.main_grad.zero_()
        torch.manual_seed(2 + rank)
        x = torch.randn(length, 2, 128).bfloat16().float().requires_grad_()
        gradient = torch.randn(x.shape)
        expected, *found = (trained_once(layer, x, gradient) for layer in layers)
        for results in found:
            for result, wanted in zip(results, expected, strict=True):
                assert result.dtype is wanted.dtype and relative_error(result, wanted.double()) < ROUNDING
        assert {*seen} == {(2 * length, 128)}  # once more where layers are recomputed
        with torch.no_grad():
            kept = [layer.eval()(x)[0] for layer in layers]
        assert all(relative_error(each, kept[0].double()) < ROUNDING for each in kept[1:])
        seen.clear(), [layer.train() for layer in layers]


def layers_leave_rows_to_the_dispatcher():
    plain, _, ours = layers_of(expert_tensor_parallel=2)
    assert type(ours.token_dispatcher) is type(plain.token_dispatcher)
    assert ours(torch.randn(6, 2, 128))[0].shape == (6, 2, 128)


def layers_under_graphs_and_other_routers():
    """Settings and classes for which an FP8MoELayer is a MoELayer."""
    *_, layer = layers_of()
    from fp8moe_megatron.layer import _WholeTokens, chosen_experts

    assert type(layer.token_dispatcher) is _WholeTokens
    layer.token_dispatcher = SimpleNamespace(ep_size=2, tp_size=1)
    for owner, name, value in (
        (layer.config, "cuda_graph_impl", "local"),
        (layer.config, "moe_shared_expert_overlap", True),
        (layer.config, "moe_token_dispatcher_type", "flex"),
        (layer.token_dispatcher, "tp_size", 2),
    ):
        before = getattr(owner, name)
        assert layer._takes_tokens()
        setattr(owner, name, value)
        assert not layer._takes_tokens()
        setattr(owner, name, before)
    layer.router.__class__ = type("Threshold", (type(layer.router),), {})
    assert not layer._takes_tokens()
    probs = torch.tensor([[0, 0.5, 0, 0.25], [0, 0, 0, 1.0], [0, 0, 0, 0]])
    for routing_map in (probs != 0, torch.ones(3, 4, dtype=torch.bool)):
        leaf = probs.clone().requires_grad_()
        index, picked = chosen_experts(leaf, routing_map, 2)
        found = [{*zip(*row, strict=True)} for row in zip(index.tolist(), picked.tolist(), strict=True)]
        assert found == [{(1, 0.5), (3, 0.25)}, {(3, 1.0), (4, 0.0)}, {(4, 0.0)}]
        (picked * (index + 1.0) * (index < 4)).sum().backward()
        assert leaf.grad.tolist() == [[0, 2, 0, 4], [0, 0, 0, 4], [0, 0, 0, 0]]
    lost = torch.tensor([[0, float("nan"), 0.5, 0]])
    assert {*chosen_experts(lost, lost != 0, 2)[0][0].tolist()} == {1, 2}  # NaN must not get lost


def weights_that_change_without_a_step_are_quantized_anew():
    _, ours = experts_of(started())
    rows, counts, probs = torch.randn(8, 128), torch.tensor([2, 2, 2, 2]), torch.rand(8)
    before = ours(rows, counts, probs)[0]
    ours.down_proj.data.zero_()  # as an all-gather of parameters writes
    ours.is_first_microbatch = True
    assert before.any() and not ours(rows, counts, probs)[0].any()


def checkpoints_are_those_of_sequential_experts(expert_parallel, expert_tensor_parallel):
    plain, ours = experts_of(started(expert_parallel, expert_tensor_parallel))
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, apply_factory_merges

    for singleton in (False, True):
        metadata = {"singleton_local_shards": singleton, "dp_cp_group": dist.group.WORLD}
        shards = []
        for module in (plain, ours):
            state = module.sharded_state_dict("experts.", metadata=dict(metadata))
            apply_factories(state)
            values = [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
            shards.append({(each.key, each.global_offset): each for each in values})
        assert shards[0].keys() == shards[1].keys() and len(shards[0]) == 3 * len(plain.local_experts)
        for place, expected in shards[0].items():
            found = shards[1][place]
            assert found.global_shape == expected.global_shape and torch.equal(found.data, expected.data)
            assert found.replica_id == expected.replica_id
        factories = ours.sharded_state_dict("", metadata=dict(metadata))
        built = {name: [each.data for each in factory.build()] for name, factory in factories.items()}
        for name, value in apply_factory_merges(built, factories).items():
            assert torch.equal(value, getattr(ours, name))
    state = plain.state_dict()
    torch.nn.init.zeros_(ours.gate_up_proj)
    ours.load_state_dict(state)
    assert torch.equal(ours.gate_up_proj, stacked(plain, "linear_fc1"))


def linears_of_two_ranks(sequence_parallel):
    config = started()
    config.sequence_parallel, config.tensor_model_parallel_size = sequence_parallel, 2
    from fp8moe_megatron import FP8ColumnParallelLinear, FP8RowParallelLinear
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    options = {"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": False, "skip_bias_add": False}
    options["tp_group"] = dist.group.WORLD
    results = []
    for column, row in ((ColumnParallelLinear, RowParallelLinear), (FP8ColumnParallelLinear, FP8RowParallelLinear)):
        torch.manual_seed(0)
        linears = column(128, 256, **options), row(256, 128, input_is_parallel=True, **options)
        torch.manual_seed(dist.get_rank() if sequence_parallel else 1)
        x = torch.randn(6, 2, 128).requires_grad_()
        out = linears[1](linears[0](x)[0])[0]
        torch.manual_seed(2)
        out.backward(torch.randn(out.shape))
        results.append((out, x.grad, *(linear.weight.grad for linear in linears)))
    for expected, found in zip(*results, strict=True):
        assert relative_error(found, expected.double()) < ROUNDING


def whole_runs(expert_parallel, expert_tensor_parallel):
    """The benchmark's program on the CPU: Megatron-Core's DistributedDataParallel and distributed optimizer."""
    started(expert_parallel, expert_tensor_parallel)
    from benchmarks import megatron

    result = megatron.compare_losses(SIZES, 6, cpu=True, rate=3e-3, seeds=2)
    assert result["passed"] and result["fair"], result
    plain = result["losses"]["bf16"]
    assert plain[-1] < 0.95 * plain[0] and len({tuple(each) for each in result["losses"].values()}) == 4
    from megatron.core.distributed import DistributedDataParallel

    assert not any(type(each) is DistributedDataParallel for each in gc.get_objects())  # its memory would count


def refused():
    config = started()
    import pytest
    from fp8moe_megatron import FP8Experts, in_fp8
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(ep=group, expt_tp=group, expt_dp=group)
    for name, value in (("add_bias_linear", True), ("moe_apply_probs_on_input", True), ("delay_wgrad_compute", True)):
        previous = getattr(config, name)
        setattr(config, name, value)
        with pytest.raises(NotImplementedError, match=name):
            FP8Experts(4, config, pg_collection=groups)
        setattr(config, name, previous)
    with pytest.raises(ValueError, match="expected experts of Megatron-Core, got none"):
        in_fp8(get_gpt_layer_local_spec())
    spec = get_gpt_layer_local_spec(num_experts=4)
    before = repr(spec)
    assert repr(in_fp8(spec, linears=False)).count("FP8Experts") == 1
    assert "FP8ColumnParallelLinear" in repr(in_fp8(spec)) and repr(spec) == before
