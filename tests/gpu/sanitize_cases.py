"""A reduced set of operations for compute-sanitizer: `PYTHONPATH=. python tests/gpu/sanitize_cases.py`.

Few and small, because a sanitizer slows a kernel down by orders of magnitude, yet together they reach every kind of
kernel: few rows with K split over a cluster, ragged sizes, persistent tiles over several waves, both output types,
bias, every quantizer, and what the other `sanitize_*_cases.py` list. Operands are drawn and results are checked on the
CPU, so that the only kernels that run are those of this package. Exits with 1 if a result is wrong.
"""

import copy

import torch

import fp8moe
from benchmarks.operands import exact, relative_error, rounded_error
from fp8moe.kernels.gemm.launch import GemmOperands, multiply_with
from fp8moe.kernels.gemm.sm90 import TileConfig, with_stages
from tests.gpu.sanitize_block_cases import CASES as BLOCK_CASES
from tests.gpu.sanitize_layout_cases import CASES as LAYOUT_CASES
from tests.gpu.sanitize_moe_cases import CASES as MOE_CASES
from tests.gpu.sanitize_moe_cases import on_cpu
from tests.gpu.sanitize_mqa_cases import CASES as MQA_CASES
from tests.gpu.sanitize_sampling_cases import CASES as SAMPLING_CASES
from tests.gpu.sanitize_training_cases import CASES as TRAINING_CASES

# m, n, k, output type, bias
GEMMS = (
    (1, 256, 4096, torch.bfloat16, False),
    (5, 136, 272, torch.bfloat16, True),
    (16, 2112, 1024, torch.float32, False),
    (24, 576, 2048, torch.bfloat16, False),
    (64, 512, 2048, torch.float32, True),
    (100, 392, 528, torch.bfloat16, False),
    (128, 1024, 1024, torch.bfloat16, False),
    (300, 1040, 384, torch.bfloat16, True),
    (1032, 2056, 256, torch.float32, False),
    (1500, 4104, 272, torch.bfloat16, False),
)
# op, rows, columns, input type, scale format
QUANTIZATIONS = (
    ("quantize_1x128", 1, 7168, torch.bfloat16, "float32"),
    ("quantize_1x128", 37, 272, torch.float16, "ue8m0"),
    ("quantize_1x128", 515, 1040, torch.float32, "float32"),
    ("quantize_128x128", 200, 300, torch.bfloat16, "float32"),
    ("quantize_128x128", 384, 1024, torch.float32, "ue8m0"),
)
# m, n, k, block_m, block_n, parts of K that a block sums: in registers, with two products under way or one; the rest in
# shared memory, with one product across a tile or two. The last has more tiles than SMs.
PARTS = (
    (200, 200, 1024, 128, 64, 4),
    (200, 200, 1152, 128, 128, 2),
    (300, 392, 1280, 128, 160, 3),
    (1500, 2120, 256, 128, 192, 2),
)
# m, n, k, block_m, block_n, whether TMA writes the result: the 21 tiles of a second wave are halved
HALVED = ((1032, 4104, 272, 128, 256, False), (1032, 4104, 272, 128, 256, True))
COLUMNWISE = ((256, 72, torch.bfloat16), (300, 136, torch.float32))  # rows, columns, input type
LINEARS = ((3, 576, 1000, True), (130, 1000, 576, False))  # tokens, in, out, bias
E4M3_ERROR = 4e-2
# Against float64 over the quantized operands, beyond the rounding of the result.
GEMM_ERROR = {torch.bfloat16: 3e-4, torch.float32: 3e-4}


def gemm_error(m: int, n: int, k: int, out_dtype: torch.dtype, with_bias: bool) -> float:
    a = fp8moe.quantize_1x128(torch.randn(m, k, dtype=torch.bfloat16).cuda())
    b = fp8moe.quantize_128x128(torch.randn(n, k, dtype=torch.bfloat16).cuda())
    bias = torch.randn(n, dtype=torch.bfloat16) if with_bias else None
    out = torch.full((m, n), float("nan"), dtype=out_dtype).cuda()
    fp8moe.gemm(a, b, bias=None if bias is None else bias.cuda(), out=out, out_dtype=out_dtype)
    expected = exact(on_cpu(a)) @ exact(on_cpu(b)).T
    return rounded_error(out.cpu(), expected if bias is None else expected + bias.double())


def accumulation_error(m: int, n: int, k: int, out_dtype: torch.dtype) -> float:
    a = fp8moe.quantize_1x128(torch.randn(m, k, dtype=torch.bfloat16).cuda())
    b = fp8moe.quantize_128x128(torch.randn(n, k, dtype=torch.bfloat16).cuda())
    total = torch.randn(m, n, dtype=out_dtype).cuda()
    expected = exact(on_cpu(a)) @ exact(on_cpu(b)).T + total.cpu().double()
    return rounded_error(fp8moe.gemm(a, b, c=total, out=total).cpu(), expected)


def parts_error(m: int, n: int, k: int, block_m: int, block_n: int, parts: int) -> float:
    return tile_error(m, n, k, TileConfig(block_m, block_n, k_parts=parts), torch.float32)


def halved_error(m: int, n: int, k: int, block_m: int, block_n: int, staged: bool) -> float:
    return tile_error(m, n, k, TileConfig(block_m, block_n, half_tiles=True, tma_store=staged), torch.bfloat16)


def tile_error(m: int, n: int, k: int, tile: TileConfig, out_dtype: torch.dtype) -> float:
    a = fp8moe.quantize_1x128(torch.randn(m, k, dtype=torch.bfloat16).cuda())
    b = fp8moe.quantize_128x128(torch.randn(n, k, dtype=torch.bfloat16).cuda())
    out = torch.full((m, n), float("nan"), dtype=out_dtype).cuda()
    multiply_with(with_stages(tile, k), GemmOperands(*a, *b), out)
    return rounded_error(out.cpu(), exact(on_cpu(a)) @ exact(on_cpu(b)).T)


def quantization_error(op: str, rows: int, columns: int, dtype: torch.dtype, scale_format: str) -> float:
    x = torch.randn(rows, columns).to(dtype)
    return relative_error(exact(on_cpu(getattr(fp8moe, op)(x.cuda(), scale_format=scale_format))), x.double())


def columnwise_error(rows: int, columns: int, dtype: torch.dtype) -> float:
    x = torch.randn(rows, columns).to(dtype)
    return relative_error(exact(on_cpu(fp8moe.quantize_128x1(x.cuda()))), x.double().T)


def linear_error(tokens: int, in_features: int, out_features: int, with_bias: bool) -> float:
    source = torch.nn.Linear(in_features, out_features, with_bias, dtype=torch.bfloat16)
    x = torch.randn(tokens, in_features, dtype=torch.bfloat16)
    layer = fp8moe.FP8Linear.from_linear(copy.deepcopy(source))  # which shares the bias
    return relative_error(layer.cuda()(x.cuda()).cpu(), source.double()(x.double()))


def main() -> None:
    torch.manual_seed(0)
    cases = [(gemm_error, case, GEMM_ERROR[case[3]]) for case in GEMMS]
    cases += [(accumulation_error, case[:4], GEMM_ERROR[case[3]]) for case in GEMMS]
    cases += [(parts_error, case, GEMM_ERROR[torch.float32]) for case in PARTS]
    cases += [(halved_error, case, GEMM_ERROR[torch.bfloat16]) for case in HALVED]
    cases += [(quantization_error, case, E4M3_ERROR) for case in QUANTIZATIONS]
    cases += [(columnwise_error, case, E4M3_ERROR) for case in COLUMNWISE]
    # Two rounded operands: their errors add in squares.
    cases += [(linear_error, case, 1.5 * E4M3_ERROR) for case in LINEARS]
    cases += MOE_CASES + LAYOUT_CASES + BLOCK_CASES + SAMPLING_CASES + TRAINING_CASES + MQA_CASES
    wrong = 0
    with torch.no_grad():
        for function, case, limit in cases:
            error = function(*case)
            correct = error <= limit
            wrong += not correct
            print(f"{'ok   ' if correct else 'WRONG'} {function.__name__} {case}: {error:.2e} (<= {limit})", flush=True)
    if wrong:
        raise SystemExit(f"{wrong} of {len(cases)} cases are wrong")
    print(f"{len(cases)} cases correct")


if __name__ == "__main__":
    main()
