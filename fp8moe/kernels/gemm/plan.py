"""How ``cuda/gemm.cu`` is launched, dense or grouped: `Plan`, built once for each problem; a call puts its pointers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fp8moe.kernels.gemm.choice import choose
from fp8moe.kernels.gemm.config import GemmConfig
from fp8moe.kernels.gemm.epilogue import Epilogue
from fp8moe.kernels.gemm.variant import Variant
from fp8moe.kernels.gemm.variants import Family, note
from fp8moe.runtime import config
from fp8moe.runtime.launch import num_sms


class Plan:
    """A variant for a problem, which `launch` runs. The operands' device is to be current.

    Args:
        a, a_scale: (M, K) float8_e4m3fn, rows 16-byte aligned; (M, ceil(K / 128)) float32, MN-major, 16-byte aligned.
        b: (N, K) float8_e4m3fn, rows 16-byte aligned, or (E, N, K), contiguous: a matrix for each group of rows.
        out: a result, (M, N) of the epilogue's dtype, or (M, N / 2) where the epilogue joins gate and up; None where it
            goes to peers.
        ranges: groups are ranges of rows (E, 2), not offsets.
        max_m: of the masked layout of groups, where M = E * max_m. expected_m: rows that a group is expected to have;
            by default M / E.
        whole: of the contiguous layout: rows and groups of a GEMM of which this is a part. A group is expected to have
            as many rows as there, and K is summed in the same order.
        cfg: the variant instead of the cost model's choice.
        pdl: start before the kernel in front of this one has ended.

    Attributes:
        shape: of the result. new_out: call it for an uninitialized one like `out`.
    """

    def __init__(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        out: Tensor | None,
        epilogue: Epilogue,
        *,
        ranges: bool = False,
        max_m: int | None = None,
        expected_m: float | None = None,
        whole: tuple[int, int] | None = None,
        cfg: GemmConfig | None = None,
        pdl: bool = False,
    ):
        m, k = a.shape
        n, groups = b.shape[-2], b.shape[0] if b.dim() == 3 else 0
        self.index = a.get_device()
        if out is not None:
            self.shape = tuple(out.shape)
            # With strides, and bound beforehand, an allocation takes half the time of torch.empty.
            self.new_out = functools.partial(
                torch.empty_strided, self.shape, out.stride(), dtype=out.dtype, device=out.device
            )
        sms = num_sms(self.index)
        if groups and expected_m is None:
            rows, of = whole or (m, groups)
            expected_m = rows / of
        if cfg is None:
            if max_m is None:
                # A part may have any number of rows.
                note(Family(n, k, groups, epilogue.kind), whole[0] if whole else m)
            options = {"expected_m": expected_m, "max_m": max_m, "whole": whole}
            cfg = choose(m, groups, n, k, epilogue, sms, **options)
        if config.settings.print_configs:
            problem = f"grouped_gemm m={m} groups={groups} expected_m={expected_m}" if groups else f"gemm m={m}"
            print(f"fp8moe {problem} n={n} k={k} {epilogue}: {cfg}")

        layout = {"ranges": ranges, "max_m": max_m, "pdl": pdl}
        self._variant = Variant(cfg, (a, a_scale, b, out), epilogue, sms, **layout)
        self._variant.load()

    def launch(
        self, stream: int, a: int, a_scale: int, b: int, b_scale: int, groups: int, out: tuple[int, ...]
    ) -> None:
        """Enqueue the kernel. The operands are addresses; those of a, a_scale, b and the result multiples of 16.

        groups: int32 offsets (E + 1,) of the groups' rows, their ranges (E, 2) with `ranges`, or rows in use (E,) with
            `max_m`; 0 of a dense GEMM.
        out: the epilogue's addresses and pitches, in the order of its `fields`; the first is the result's.
        """
        self._variant.launch(stream, a, a_scale, b, b_scale, groups, out)
