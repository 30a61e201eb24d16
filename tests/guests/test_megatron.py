"""integrations/megatron on Megatron-Core 0.19.2, on the CPU over gloo; benchmarks/megatron.py is the test on GPUs."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests import megatron_cases as cases
from tests.processes import in_processes

try:
    VERSION = version("megatron-core")
except PackageNotFoundError:
    pytest.skip("megatron-core is not installed", allow_module_level=True)
if VERSION.startswith("0.16"):
    pytest.skip("megatron-core 0.16's router needs TransformerEngine", allow_module_level=True)
pytest.importorskip("triton", reason="megatron-core imports triton, which is not part of PyTorch's CPU build")

sys.path.append(str(Path(__file__).parents[2] / "integrations/megatron"))


@pytest.mark.parametrize(
    "case",
    [
        cases.sums_of_any_dtype_and_in_compiled_graphs,
        cases.experts_compute_and_start_as_sequential_ones,
        cases.layers_under_graphs_and_other_routers,
        cases.weights_that_change_without_a_step_are_quantized_anew,
        cases.refused,
    ],
)
def test_one_process(case):
    in_processes(case, world=1)


LAYERS = pytest.mark.parametrize(
    "config",
    [
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-3, "moe_router_dtype": "fp32"},
        {"moe_shared_expert_intermediate_size": 128, "moe_token_dispatcher_type": "alltoall"},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"], "moe_router_dtype": "fp64"},
        {"moe_expert_capacity_factor": 0.6, "moe_token_dispatcher_type": "alltoall"},
        {
            **{"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
            "moe_token_dispatcher_type": "alltoall",
        },
    ],
    ids=["allgather", "shared", "recomputed", "dropped", "padded"],
)


@LAYERS
def test_layers(config):
    in_processes(cases.layers_agree, config, world=1)


@LAYERS
def test_layers_of_two_ranks(config):
    in_processes(cases.layers_of_two_ranks_agree, config | {"moe_token_dispatcher_type": "alltoall"})


def test_layers_leave_rows_to_the_dispatcher():
    in_processes(cases.layers_leave_rows_to_the_dispatcher)


@pytest.mark.parametrize("expert_parallel, expert_tensor_parallel", [(2, 1), (1, 2)])
@pytest.mark.parametrize(
    "case",
    [
        cases.checkpoints_are_those_of_sequential_experts,
        cases.whole_runs,
    ],
)
def test_two_processes(case, expert_parallel, expert_tensor_parallel):
    in_processes(case, expert_parallel, expert_tensor_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_linears_under_tensor_parallelism(sequence_parallel):
    in_processes(cases.linears_of_two_ranks, sequence_parallel)
