"""The packed cases of sanitize_gemm_cases alone."""
import torch
from tests.gpu.sanitize_gemm_cases import PACKED, packed_error, GEMM_ERROR
torch.manual_seed(0)
for case in PACKED:
    e = packed_error(*case); torch.cuda.synchronize()
    print("ok" if e <= GEMM_ERROR else "WRONG", e, case, flush=True)
