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
        cases.experts_compute_and_start_as_sequential_ones,
        cases.weights_that_change_without_a_step_are_quantized_anew,
        cases.refused,
    ],
)
def test_one_process(case):
    in_processes(case, world=1)


@pytest.mark.parametrize("expert_parallel, expert_tensor_parallel", [(2, 1), (1, 2)])
@pytest.mark.parametrize("case", [cases.checkpoints_are_those_of_sequential_experts, cases.whole_runs])
def test_two_processes(case, expert_parallel, expert_tensor_parallel):
    in_processes(case, expert_parallel, expert_tensor_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_linears_under_tensor_parallelism(sequence_parallel):
    in_processes(cases.linears_of_two_ranks, sequence_parallel)
