"""Time of the first `gemm` call in this process, printed as one line of JSON: `python -m benchmarks.first_call M N K`.

Imports, the CUDA context and the operands are made before the clock starts, and the operands do not come from this
package's own kernels: the call measured is the first that compiles or loads one.
"""

import json
import sys
import time

import torch


def main() -> None:
    m, n, k = map(int, sys.argv[1:])
    start = time.perf_counter()
    import cuda.core  # noqa: F401

    from fp8moe import gemm

    imported = time.perf_counter()
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    k_blocks = -(-k // 128)
    a_scale = torch.rand(k_blocks, -(-m // 4) * 4, device="cuda").T[:m]
    b_scale = torch.rand(-(-n // 128), k_blocks, device="cuda")
    torch.cuda.synchronize()
    times = []
    for _ in range(2):
        before = time.perf_counter()
        gemm((a, a_scale), (b, b_scale))
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - before))
    print(json.dumps({"import_ms": 1e3 * (imported - start), "first_ms": times[0], "second_ms": times[1]}))


if __name__ == "__main__":
    main()
