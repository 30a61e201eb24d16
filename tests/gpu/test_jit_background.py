"""FP8MOE_JIT=background on a GPU: the slower kernel and the one that takes its place give the same bits."""

import pytest
import torch

from fp8moe.kernels.gemm import dense_plan
from fp8moe.kernels.gemm.epilogue import PlainStore
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.kernels.gemm.tiles import choose_dense, dense_candidates
from fp8moe.runtime import background, config, jit
from fp8moe.runtime.launch import num_sms
from tests import gemm_cases

pytestmark = pytest.mark.gpu


@pytest.fixture
def in_background(monkeypatch, tmp_path):
    monkeypatch.setenv("FP8MOE_JIT", "background")
    monkeypatch.setenv("FP8MOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_kernels", {})
    config.reload()
    yield
    background.finish()
    monkeypatch.undo()
    config.reload()


@pytest.mark.parametrize("m", [8, 300])
def test_bits_stay_when_the_better_kernel_comes(in_background, m):
    n, k = 4104, 2064  # no other test has compiled them
    a, b = gemm_cases.operands(m, n, k, device="cuda")
    operands = dense_plan.Operands(*a, *b)
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    sms = num_sms(torch.cuda.current_device())
    best = choose_dense(m, n, k, sms)
    other = next(c for c in dense_candidates(m, n, k, sms) if c != best and c.split_k == best.split_k)
    dense_plan.gemm(operands, out, cfg=other)  # the only one that is compiled
    expected = out.clone()

    plan = dense_plan.make(operands, out.dtype)
    assert plan._better is not None
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    background.finish()
    with torch.cuda.graph(graph, stream=stream):
        dense_plan.run(plan, operands, out)
    assert plan._better is not None  # not while it was captured
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)

    out.zero_()
    dense_plan.run(plan, operands, out)
    assert plan._better is None
    assert plan._variant.spec == kernel_spec(best, n, k, PlainStore(out.dtype))
    assert torch.equal(out, expected)
