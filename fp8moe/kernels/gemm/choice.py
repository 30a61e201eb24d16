"""The variant that a plan takes."""

from __future__ import annotations

from fp8moe.kernels.gemm.config import GemmConfig, unstaged
from fp8moe.kernels.gemm.epilogue import Epilogue, PeerStore
from fp8moe.kernels.gemm.tiles import choose_dense, choose_grouped, invariant_parts
from fp8moe.runtime import config


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
) -> GemmConfig:
    """What is expected to be fastest.

    m: rows of all groups; groups 0: of a dense GEMM. The others are those of `plan.Plan`.
    """
    if groups:
        options = {"max_m": max_m, "swiglu": epilogue.gated, "whole": whole}
        return served(grouped_choice(m, groups, expected_m, n, k, num_sms, **options), k, epilogue)
    return served(dense_choice(m, n, k, num_sms), k, epilogue)
