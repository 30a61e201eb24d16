"""Lists, None and the like for tensors and modules: every public name refuses them in one sentence."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import fp8moe
from fp8moe.kernels.experts.combine import combine
from fp8moe.kernels.experts.permute import permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.indexer.mqa_cache import append_kv, new_kv_cache, read_kv
from fp8moe.quant.transpose import quantize_with_transpose, transpose_fp8
from tests.errors import refused
from tests.gemm_cases import activations, int32, weights
from tests.graph_cases import CASES

A, B = activations(4, 144), weights(2, 24, 144)
K = fp8moe.quantize_128x1(torch.randn(128, 8))
OFFSETS = int32([0, 2, 4])
INDEX, X = torch.zeros(4, 1, dtype=torch.int64), torch.randn(4, 144)
SIZES = {"num_experts": 2, "hidden_size": 144, "intermediate_size": 32}
EXPERTS = fp8moe.GroupedExperts(**SIZES)
CACHE = new_kv_cache(1, 32, device="cpu")
UP, DOWN = weights(2, 256, 144), weights(2, 144, 128)
MASKED = {"a": tuple(t.unflatten(0, (2, 2)) for t in A), "masked_m": int32([2, 2])}


def calls_of_graphs():
    """What tests/graph_cases.py calls."""
    for name, case in CASES.items():
        if name != "gemm, c and out":  # which are one tensor there
            layers = [layer() for layer in case.layers]
            named = case.named_arguments(6)
            yield name, (lambda case=case, layers=layers, **named: case.function(*layers, *named.values()), named)


# Under the name that is called: the function, its arguments, and those of them that are tensors, or pairs of them.
CALLS = dict(calls_of_graphs()) | {
    "FP8Linear.from_linear": (fp8moe.FP8Linear.from_linear, {"linear": nn.Linear(4, 4)}),
    "FP8MQAIndexer.from_transformers": (fp8moe.FP8MQAIndexer.from_transformers, {"indexer": None}),
    "FP8Tensor": None,  # a pair, whatever is in it
    "PackedTensor": None,
    "RefitReport": None,
    "batch_invariant": None,
    "GroupedExperts.from_experts": (fp8moe.GroupedExperts.from_experts, {"module": EXPERTS}),
    "gemm, c": (fp8moe.gemm, {"a": A, "b": (B.data[0], B.scale[0]), "c": torch.ones(4, 24), "out": torch.ones(4, 24)}),
    "experts_masked, out": (
        fp8moe.experts_masked,
        {"x": MASKED["a"], "masked_m": MASKED["masked_m"], "up": UP, "down": DOWN, "out": torch.ones(2, 2, 144)},
    ),
    "experts_rows, out": (
        fp8moe.experts_rows,
        {"rows": X, "group_offsets": OFFSETS, "up": UP, "down": DOWN, "out": torch.ones(4, 144)},
    ),
    "grouped_gemm_masked, out": (fp8moe.grouped_gemm_masked, MASKED | {"b": B, "out": torch.ones(2, 2, 24)}),
    "refit": (fp8moe.refit, {"model": nn.Sequential(), "tensors": {}}),
    "refitting": None,  # a context: test_refit.py
    "replace_linears": (fp8moe.replace_linears, {"model": nn.Sequential()}),
    # Not at the top of the package, but for callers too.
    "append_kv": (append_kv, {"kv_cache": CACHE, "k": torch.ones(1, 32), "slots": int32([0])}),
    "combine": (
        combine,
        {"y": torch.ones(4, 8), "rows": int32([[0]]), "weights": torch.ones(1, 1), "out_dtype": torch.float32},
    ),
    "permute_quantize": (permute_quantize, {"x": X, "rows": int32([[0]] * 4), "num_rows": 4}),
    "quantize_with_transpose": (quantize_with_transpose, {"x": X, "group_offsets": OFFSETS, "tokens": int32([0])}),
    "read_kv": (read_kv, {"kv_cache": CACHE, "slots": int32([0])}),
    "sort_by_expert": (sort_by_expert, {"top_k_index": INDEX, "num_experts": 2}),
    "transpose_fp8": (transpose_fp8, {"w": B}),
    "warm": None,  # it takes no tensors: test_warmup.py
}
OPTIONAL = (
    *("bias", "c", "expert_map", "out", "group_offsets of quantize_with_transpose", "tokens"),
    *("starts of mqa_top_k", "ends of mqa_top_k"),
)
OTHERS = ("tensors", "num_rows", "num_experts", "out_dtype")
BAD = {"None": None, "list": [[1.0, 2.0], [3.0, 4.0]], "array": np.ones((2, 2)), "number": 1.5, "string": "x"}


def test_every_public_name_is_here():
    assert {re.split("[.,]", name)[0] for name in CALLS} >= set(fp8moe.__all__)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name, call in CALLS.items()
        for argument in (call[1] if call else ())
        if argument not in OTHERS
    ],
)
def test_a_tensor_that_is_none(name, argument, bad):
    if bad == "None" and (argument in OPTIONAL or f"{argument} of {name}" in OPTIONAL):
        return
    function, arguments = CALLS[name]
    with torch.no_grad():
        for value in (BAD[bad], *pairs(arguments[argument], BAD[bad])):
            with pytest.raises(TypeError) as error:
                function(**arguments | {argument: value})
            message = str(error.value)
            assert message.startswith(argument) and ": expected " in message and ", got " in message
            assert "\n" not in message and len(message) < 250


def pairs(good, bad):
    """The pairs with something else in one place."""
    if isinstance(good, tuple):
        yield from ((bad, good[1]), (good[0], bad))


def test_the_arguments_are_right_otherwise():
    for name, call in CALLS.items():
        if call is not None and name != "FP8MQAIndexer.from_transformers":
            with torch.no_grad():
                call[0](**call[1])


@pytest.mark.parametrize("size", [None, True, 1.5, "3", [3], torch.ones(2)])
def test_sizes_that_are_none(size):
    for module, sizes in (
        (fp8moe.GroupedExperts, SIZES),
        (fp8moe.FP8Linear, {"in_features": 4, "out_features": 4}),
        (
            fp8moe.FP8MQAIndexer,
            {"hidden_size": 144, "q_lora_rank": 32, "num_heads": 32, "head_dim": 32, "rope_head_dim": 16, "top_k": 2},
        ),
    ):
        module(**sizes)
        for name in sizes:
            refused(TypeError, rf"^{name}: expected an int, got ", module, **sizes | {name: size})
    refused(ValueError, "^out_features: expected 0 or more, got -1", fp8moe.FP8Linear, 4, -1)
