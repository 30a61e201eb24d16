"""What the drop-in launches on a GPU, recorded without one: kernels of the native functions, and at most one more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECORD = """
import json, sys
import torch
from fp8moe import gemm, grouped_gemm, grouped_gemm_k, grouped_gemm_masked, mqa_logits, paged_mqa_logits
from fp8moe.kernels.gemm import checks
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime.record import Recorder
from tools.digest import NUM_SMS
from tools.variants import Untouched
sys.path.insert(0, "integrations/deep_gemm")
import deep_gemm

make, recorder = Untouched(), Recorder(NUM_SMS)
zeros = lambda *shape, dtype=torch.bfloat16: make.zeros(*shape, dtype=dtype)
ints = lambda *shape: zeros(*shape, dtype=torch.int32)
m, n, k, groups = 65536, 512, 1024, 4
a, b, experts = make.rows(m, k), make.weights(n, k), make.weights(groups, n, k)
few = make.rows(16, k)
masked = FP8Tensor(a.data.view(groups, -1, k), a.scale.view(groups, -1, k // 128))
(x, y), along = (make.rows(rows, k) for rows in (272, 72)), zeros(groups, 272, 72, dtype=torch.float32)
columns = [(data.t(), scale.t()) for data, scale in (x, y)]
flat = [(value.data.view(-1), value.scale) for value in (x, y)]
q, w = make.codes(32, 64, 128), make.uniform(32, 64, mean=1.0)
kv = make.codes(256, 128), zeros(256, dtype=torch.float32)
index = ints(32), ints(32)
paged = q.view(16, 2, 64, 128), make.kv_cache(8, 128), w, ints(16), ints(16, 4)

pairs = {
    "dense": (
        lambda: gemm(few, b, out=zeros(16, n)),
        lambda: deep_gemm.fp8_gemm_nt(few, b, zeros(16, n)),
    ),
    "dense, c": (
        lambda: gemm(a, b, c=zeros(m, n), out=zeros(m, n)),
        lambda: deep_gemm.fp8_gemm_nt(a, b, zeros(m, n), c=zeros(m, n)),
    ),
    "by rows": (
        lambda: grouped_gemm_k(x, y, ints(2), out=along[:1], accumulate=True),
        lambda: deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(x, y, along[0]),
    ),
    "contiguous": (
        lambda: grouped_gemm(a, experts, ints(groups + 1), out=zeros(m, n)),
        lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, experts, zeros(m, n), ints(m)),
    ),
    "psum": (
        lambda: grouped_gemm(a, experts, ints(groups + 1), out=zeros(m, n)),
        lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, experts, zeros(m, n), ints(groups), use_psum_layout=True),
    ),
    "masked": (
        lambda: grouped_gemm_masked(masked, experts, ints(groups), expected_m=9, out=zeros(groups, m // groups, n)),
        lambda: deep_gemm.fp8_m_grouped_gemm_nt_masked(masked, experts, zeros(groups, m // groups, n), ints(groups), 9),
    ),
    "along k": (
        lambda: grouped_gemm_k(x, y, ints(groups + 1), out=along, accumulate=True),
        lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*flat, along, [k, 0, 0, 0], ints(groups), along),
    ),
    "along k, columns": (
        lambda: grouped_gemm_k(x, y, ints(groups + 1), out=along),
        lambda: deep_gemm.k_grouped_fp8_gemm_tn_contiguous(*columns, along, None, ints(groups)),
    ),
    "index": (lambda: mqa_logits(q, kv, w, *index), lambda: deep_gemm.fp8_mqa_logits(q, kv, w, *index)),
    "paged index": (
        lambda: paged_mqa_logits(*paged, max_context_len=256, fill_masked=False),
        lambda: deep_gemm.fp8_paged_mqa_logits(*paged, None, 256),
    ),
}
recorded = [[name, *map(recorder.record, calls)] for name, calls in pairs.items()]
names = [spec.name for spec in recorder.kernels]

# Like those before, and like them but for an address.
moved = lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
scale = y.scale.new_zeros(y.scale.numel() + 1)[1:].as_strided(y.scale.t().shape, y.scale.t().stride())
again = {name: pairs[name][1] for name in ("contiguous", "psum", "along k", "along k, columns")}
again |= {
    "layout": lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, experts, zeros(m, n), moved(ints(m))),
    "scale": lambda: deep_gemm.k_grouped_fp8_gemm_tn_contiguous(
        columns[0], (columns[1][0], scale), along, None, ints(groups)
    ),
}
checked = []
for check in ("rows_of_experts", "matrices_along_k"):
    function = getattr(checks, check)
    setattr(checks, check, lambda *operands, function=function: checked.append(name) or function(*operands))
for name, call in again.items():
    call()
print(json.dumps({"pairs": recorded, "names": names, "checked": checked}))
"""

ONE_MORE = {
    **dict.fromkeys(("contiguous", "psum"), "group_ranges"),
    **dict.fromkeys(("along k", "along k, columns"), "join_groups"),
}


@pytest.fixture(scope="module")
def recorded():
    done = subprocess.run(
        [sys.executable, "-c", RECORD], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_same_kernels_and_at_most_one_more(recorded):
    names = recorded["names"]
    assert {name for name, _, _ in recorded["pairs"]} >= set(ONE_MORE)
    for name, native, ours in recorded["pairs"]:
        if name in ONE_MORE:
            assert names[ours.pop(0)["kernel"]] == ONE_MORE[name]
        assert [launch["kernel"] for launch in ours] == [launch["kernel"] for launch in native]
        for launch, expected in zip(ours, native, strict=True):
            if name in ("contiguous", "psum"):  # ranges of rows, not offsets
                (*maps, values), (*other_maps, other_values) = launch.pop("arguments"), expected.pop("arguments")
                assert maps == other_maps and values != other_values
            assert launch == expected


def test_operands_like_others_are_not_checked_again(recorded):
    assert recorded["checked"] == ["layout", "scale"]
