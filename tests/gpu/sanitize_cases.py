"""A reduced set of operations for compute-sanitizer: `PYTHONPATH=. python tests/gpu/sanitize_cases.py [GROUP]`.

Few and small, because a sanitizer slows a kernel down by orders of magnitude, yet together they reach every kind of
kernel of the group, of `tools.variants.GROUPS`. Exits with 1 if a result is wrong.
"""

import sys

import torch

from tests.gpu.sanitize_block_cases import CASES as BLOCK_CASES
from tests.gpu.sanitize_gemm_cases import CASES as GEMM_CASES
from tests.gpu.sanitize_latent_cases import CASES as LATENT_CASES
from tests.gpu.sanitize_moe_cases import CASES as MOE_CASES

CASES = {"kernels": GEMM_CASES + MOE_CASES + BLOCK_CASES, "latent": LATENT_CASES}


def main(group: str = "kernels") -> None:
    torch.manual_seed(0)
    cases, wrong = CASES[group], 0
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
    main(*sys.argv[1:])
