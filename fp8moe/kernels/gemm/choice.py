"""The variant that a plan takes, and with FP8MOE_JIT=background the one that serves while that is being compiled."""

from __future__ import annotations

from collections.abc import Callable

from fp8moe.kernels.gemm.config import GemmConfig
from fp8moe.kernels.gemm.cost import dense_time, grouped_time
from fp8moe.kernels.gemm.epilogue import Epilogue
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.kernels.gemm.tiles import choose_dense, choose_grouped, dense_candidates, grouped_candidates
from fp8moe.runtime import config
from fp8moe.runtime.jit import is_ready


def choose(
    m: int,
    groups: int,
    n: int,
    k: int,
    epilogue: Epilogue,
    num_sms: int,
    *,
    expected_m: float,
    max_m: int | None,
    whole: tuple[int, int] | None,
) -> tuple[GemmConfig, GemmConfig | None]:
    """What the cost model chooses, and what serves meanwhile: None where nothing does, or nothing has to.

    m: rows of all groups; groups 0: of a dense GEMM. The others are those of `plan.Plan`.
    """
    if groups:
        problem, options = (groups, expected_m, n, k, num_sms), {"max_m": max_m, "swiglu": epilogue.gated}
        best = choose_grouped(m, *problem, **options, whole=whole)
        candidates, time = (lambda: grouped_candidates(m, *problem, **options)), grouped_time
    else:
        problem = m, n, k, num_sms
        best = choose_dense(*problem)
        candidates, time = (lambda: dense_candidates(*problem)), dense_time

    def ready(variant: GemmConfig) -> bool:
        return is_ready(kernel_spec(variant, n, k, epilogue))

    if config.settings.jit != "background" or ready(best):
        return best, None
    return best, _substitute(best, candidates(), lambda variant: time(variant, *problem), ready)


def _substitute(
    best: GemmConfig,
    candidates: list[GemmConfig],
    time: Callable[[GemmConfig], float],
    ready: Callable[[GemmConfig], bool],
) -> GemmConfig | None:
    """The fastest that needs no compiler, of those that sum K in the same order: results keep their bits."""
    alike = sorted((variant for variant in candidates if variant.split_k == best.split_k), key=time)
    return next(filter(ready, alike), None)
