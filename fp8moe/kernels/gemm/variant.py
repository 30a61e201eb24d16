"""One compiled variant of ``cuda/gemm.cu`` for one problem: tensor maps, arguments, launcher."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fp8moe.kernels.gemm.config import GemmConfig, tokens_of_tile
from fp8moe.kernels.gemm.epilogue import Epilogue
from fp8moe.kernels.gemm.source import arguments_type, kernel_spec
from fp8moe.kernels.gemm.tiles import raster_group, row_tiles_bound
from fp8moe.quant.formats import ceil_div
from fp8moe.runtime.jit import load
from fp8moe.runtime.launch import Launcher, tensor_map


class Variant:
    """Everything that does not change from call to call, but for the compiled kernel, which `load` brings.

    operands, max_m, ranges, pdl: of `plan.Plan`. sms: that the kernel may occupy.
    """

    def __init__(
        self,
        cfg: GemmConfig,
        operands: tuple[Tensor, Tensor, Tensor, Tensor | None],
        epilogue: Epilogue,
        sms: int,
        *,
        max_m: int | None,
        ranges: bool,
        pdl: bool,
    ):
        a, a_scale, b, out = operands
        m, k = a.shape
        n, groups = b.shape[-2], b.shape[0] if b.dim() == 3 else 0
        # Of gate, and as many of up; or of half a tile.
        b_rows = cfg.block_n // 2 if epilogue.gated or cfg.halves else cfg.block_n
        blocks = a_scale.shape[1]
        tile_m = tokens_of_tile(cfg, m)
        # Groups may end within a tile: without swap their tokens are loaded 64 rows at a time.
        a_rows = 64 if groups and not cfg.swap else tile_m
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
            self._out = tensor_map(out, shape=tuple(out.shape), strides=(n, 1), box=(64, 64), swizzle=128)

        tile_rows = row_tiles_bound(tile_m, m, max(groups, 1), max_m)
        tiles = tile_rows * ceil_div(n, cfg.block_n)
        # A block has one tile, or a resident grid walks over them.
        concurrent = tiles if cfg.single_tile else min(tiles, sms * cfg.blocks_per_sm)
        raster = raster_group(cfg, m, k, concurrent)
        self._arguments = arguments_type(epilogue)(
            m=m, max_m=max_m or 0, raster=raster, group_pitch=1 + ranges, tile_m=tile_m, tile_rows=tile_rows
        )
        # Their weights are loaded ahead of any tokens, which may have to wait for the kernel in front.
        self._arguments.early_stages = cfg.stages if pdl else cfg.first_stages
        for name, value in epilogue.values.items():
            setattr(self._arguments, name, value)
        # b_scale and the epilogue's addresses and pitches are set at once, in less time than one by one.
        count = 1 + sum(kind is ctypes.c_int64 for _, kind in epilogue.fields)
        self._addresses = (ctypes.c_int64 * count).from_buffer(self._arguments)
        self.spec = kernel_spec(cfg, n, k, epilogue)
        self._cfg, self._grid, self._pdl = cfg, concurrent * cfg.split_k, pdl
        self._problem = f"n={n} k={k} groups={groups}"

    def __str__(self) -> str:
        return f"{self._cfg} {self._problem}"

    def load(self) -> None:
        """Bring the kernel, compiled if it is not yet. The operands' device is to be current."""
        cfg = self._cfg
        self._launcher = Launcher(
            load(self.spec),
            grid=self._grid,
            block=cfg.threads,
            cluster=cfg.split_k,
            smem=cfg.shared_bytes,
            pdl=self._pdl,
            args=(self._a, self._a_scale, self._b, self._out or self._a, self._arguments),
        )

    def launch(
        self, stream: int, a: int, a_scale: int, b: int, b_scale: int, groups: int, out: tuple[int, ...]
    ) -> None:
        """As `plan.Plan.launch`."""
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
