"""The part of `sanitize_cases.py` that is about grouped GEMMs in DeepGEMM's layouts."""

import torch

from benchmarks.operands import rounded_error
from fp8moe import FP8Tensor
from fp8moe.kernels.gemm.layouts import grouped_gemm_by_layout, grouped_gemm_k_by_sizes
from fp8moe.kernels.gemm.reference import group_ranges
from tests.deep_gemm_cases import by_ends, by_rows, flat_groups
from tests.gpu.sanitize_moe_cases import groups_error, on_cpu, random_experts, random_rows

GEMM_ERROR = 3e-4
# sizes of the groups, their order, alignment of a layout of ends; n, k
LAYOUTS = (
    ((3, 0, 7, 8), (2, 0, 3, 1), None, 136, 272),
    ((200, 0, 131, 1), (3, 2, 1, 0), None, 264, 144),
    ((5, 0, 300), None, 128, 136, 272),
    ((1,), None, 8, 24, 48),
)
# sizes of the groups; m, n
FLAT = (((128, 0, 256), 72, 40), ((384,), 5, 8), ((128,) * 5, 130, 136))


def layout_error(sizes: tuple[int, ...], order: tuple[int, ...] | None, alignment: int | None, n: int, k: int) -> float:
    layout = by_ends(sizes, alignment=alignment)[0] if alignment else by_rows(sizes, order, alignment=8, behind=9)[0]
    m = int(layout[-1]) + 5 if alignment else len(layout)
    a, b = random_rows(m, k), random_experts(len(sizes), n, k)
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16).cuda()
    grouped_gemm_by_layout(a, b, layout.cuda(), out, alignment=alignment, expected_m=max(1, sum(sizes) // len(sizes)))
    return groups_error(on_cpu(a), on_cpu(b), group_ranges(layout, len(sizes), alignment), out.cpu(), None)


def flat_error(sizes: tuple[int, ...], m: int, n: int) -> float:
    (a, a_values), (b, b_values) = flat_groups(m, sizes), flat_groups(n, sizes, seed=1)
    before = torch.randn(len(sizes), m, n)
    out, on_gpu = before.cuda(), [FP8Tensor(data.cuda(), scale.cuda()) for data, scale in (a, b)]
    grouped_gemm_k_by_sizes(*on_gpu, torch.tensor(sizes, dtype=torch.int32).cuda(), out, accumulate=True)
    parts = zip(a_values.split(sizes, dim=1), b_values.split(sizes, dim=1), strict=True)
    return rounded_error(out.cpu(), before.double() + torch.stack([x @ y.T for x, y in parts]))


# function, its arguments, the largest result that is correct
CASES = [
    *((layout_error, case, GEMM_ERROR) for case in LAYOUTS),
    *((flat_error, case, GEMM_ERROR) for case in FLAT),
]
