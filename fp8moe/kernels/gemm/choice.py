"""The variant that a plan takes, and with FP8MOE_JIT=background the one that serves while that is being compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fp8moe.kernels.gemm.config import GemmConfig, unstaged
from fp8moe.kernels.gemm.cost import dense_time, grouped_time
from fp8moe.kernels.gemm.epilogue import Epilogue, PeerStore
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.kernels.gemm.tiles import (
    choose_dense,
    choose_grouped,
    dense_candidates,
    grouped_candidates,
    invariant_parts,
)
from fp8moe.runtime import config
from fp8moe.runtime.jit import is_ready


def served(variant: GemmConfig, k: int, epilogue: Epilogue) -> GemmConfig:
    """``variant`` as it is for this epilogue: TMA does not write rows that go to peers."""
    return unstaged(variant, k) if isinstance(epilogue, PeerStore) else variant


def _parts(n: int, k: int) -> int | None:
    """Of K that are summed one by one, for any number of tokens; None where that may differ."""
    return invariant_parts(n, k) if config.settings.batch_invariant else None


def dense_choice(m: int, n: int, k: int, num_sms: int) -> GemmConfig:
    """`choose_dense` under the settings that hold."""
    return choose_dense(m, n, k, num_sms, _parts(n, k))


def grouped_choice(*problem: float, **options) -> GemmConfig:
    """`choose_grouped` under the settings that hold."""
    return choose_grouped(*problem, **options, unsplit=config.settings.batch_invariant)


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
    """What is expected to be fastest, and what serves meanwhile: None where nothing does, or nothing has to.

    m: rows of all groups; groups 0: of a dense GEMM. The others are those of `plan.Plan`.
    """
    if groups:
        problem, options = (groups, expected_m, n, k, num_sms), {"max_m": max_m, "swiglu": epilogue.gated}
        best = grouped_choice(m, *problem, **options, whole=whole)
        candidates = partial(grouped_candidates, m, *problem, **options)
        time = grouped_time
    else:
        problem = m, n, k, num_sms
        best = dense_choice(*problem)
        candidates = partial(dense_candidates, *problem, _parts(n, k))
        time = dense_time

    best = served(best, k, epilogue)

    def ready(variant: GemmConfig) -> bool:
        return is_ready(kernel_spec(variant, n, k, epilogue))

    if config.settings.jit != "background" or ready(best):
        return best, None
    served_by = [served(variant, k, epilogue) for variant in candidates()]
    return best, _substitute(best, served_by, lambda variant: time(variant, *problem), ready)


def _substitute(
    best: GemmConfig,
    candidates: list[GemmConfig],
    time: Callable[[GemmConfig], float],
    ready: Callable[[GemmConfig], bool],
) -> GemmConfig | None:
    """The fastest that needs no compiler, of those that sum K in the same order: results keep their bits."""
    parts = best.split_k * best.parts
    alike = sorted((variant for variant in candidates if variant.split_k * variant.parts == parts), key=time)
    return next(filter(ready, alike), None)
