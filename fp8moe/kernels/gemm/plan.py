"""How ``cuda/gemm.cu`` is launched, dense or grouped: `Plan`, built once for each problem; a call puts its pointers."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from fp8moe.kernels.gemm.config import GemmConfig, unstaged
from fp8moe.kernels.gemm.epilogue import Epilogue
from fp8moe.kernels.gemm.source import arguments_type, kernel_spec
from fp8moe.kernels.gemm.tiles import choose_dense, choose_grouped, raster_group, row_tiles_bound
from fp8moe.kernels.gemm.variants import Family, families
from fp8moe.quant.formats import ceil_div
from fp8moe.runtime import config
from fp8moe.runtime.jit import load
from fp8moe.runtime.launch import Launcher, num_sms, tensor_map


class Plan:
    """A variant with everything that does not change from call to call. The operands' device is to be current.

    Args:
        a, a_scale: (M, K) float8_e4m3fn, rows 16-byte aligned; (M, ceil(K / 128)) float32, MN-major, 16-byte aligned.
        b: (N, K) float8_e4m3fn, rows 16-byte aligned, or (E, N, K), contiguous: a matrix for each group of rows.
        out: a result, (M, N) of the epilogue's dtype, or (M, N / 2) where the epilogue joins gate and up; None where it
            goes to peers.
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
        if cfg is None and max_m is None:
            families.add(Family(n, k, groups, epilogue.kind))
        if groups:
            if expected_m is None:
                rows, of = whole or (m, groups)
                expected_m = rows / of
            options = {"max_m": max_m, "swiglu": epilogue.gated, "whole": whole}
            cfg = cfg or choose_grouped(m, groups, expected_m, n, k, sms, **options)
        else:
            cfg = cfg or choose_dense(m, n, k, sms)
        if out is None:
            cfg = unstaged(cfg, k)
        if config.settings.print_configs:
            problem = f"grouped_gemm m={m} groups={groups} expected_m={expected_m}" if groups else f"gemm m={m}"
            print(f"fp8moe {problem} n={n} k={k} {epilogue}: {cfg}")

        b_rows = cfg.block_n // 2 if epilogue.gated else cfg.block_n  # of gate, and as many of up
        blocks = a_scale.shape[1]
        # Groups may end within a tile: without swap their tokens are loaded 64 rows at a time.
        a_rows = 64 if groups and not cfg.swap else cfg.block_m
        self._a = tensor_map(a, shape=(m, k), strides=(a.stride(0), 1), box=(a_rows, 128), swizzle=128)
        self._a_scale = tensor_map(
            a_scale, shape=(blocks, m), strides=(a_scale.stride(1), 1), box=(1, cfg.scale_box), l2_promotion=0
        )
        self._b = tensor_map(
            b, shape=(max(groups, 1) * n, k), strides=(b.stride(-2), 1), box=(b_rows, 128), swizzle=128
        )
        # Of a contiguous result; one with another pitch is written without it.
        self._out = None
        if cfg.staged and out is not None and out.dtype == torch.bfloat16 and out.stride(0) == n:
            self._out = tensor_map(out, shape=self.shape, strides=(n, 1), box=(64, 64), swizzle=128)

        tiles = row_tiles_bound(cfg.block_m, m, max(groups, 1), max_m) * ceil_div(n, cfg.block_n)
        # A block has one tile, or a resident grid walks over them.
        concurrent = tiles if cfg.single_tile else min(tiles, sms * cfg.blocks_per_sm)
        self._arguments = arguments_type(epilogue)(m=m, max_m=max_m or 0, raster=raster_group(cfg, m, concurrent))
        for name, value in epilogue.values.items():
            setattr(self._arguments, name, value)
        # b_scale and the epilogue's addresses and pitches are set at once, in less time than one by one.
        count = 1 + sum(kind is ctypes.c_int64 for _, kind in epilogue.fields)
        self._addresses = (ctypes.c_int64 * count).from_buffer(self._arguments)
        self._launcher = Launcher(
            load(kernel_spec(cfg, n, k, epilogue)),
            grid=concurrent * cfg.split_k,
            block=cfg.threads,
            cluster=cfg.split_k,
            smem=cfg.shared_bytes,
            pdl=pdl,
            args=(self._a, self._a_scale, self._b, self._out or self._a, self._arguments),
        )

    def launch(
        self, stream: int, a: int, a_scale: int, b: int, b_scale: int, groups: int, out: tuple[int, ...]
    ) -> None:
        """Enqueue the kernel. The operands are addresses; those of a, a_scale, b and the result multiples of 16.

        groups: int32 offsets (E + 1,) of the groups' rows or, with `max_m`, rows in use (E,); 0 of a dense GEMM.
        out: the epilogue's addresses and pitches, in the order of its `fields`; the first is the result's.
        """
        launcher = self._launcher
        with launcher.lock:
            self._a.replace_address(a)
            self._a_scale.replace_address(a_scale)
            self._b.replace_address(b)
            if self._out is not None:
                self._out.replace_address(out[0])
            self._addresses[:] = (b_scale, *out)
            self._arguments.groups = groups
            launcher.launch(stream)
