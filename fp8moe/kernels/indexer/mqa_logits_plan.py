"""Launches ``cuda/mqa_logits.cu``: plans built once per problem, in which a call puts its pointers."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fp8moe.kernels.gemm.plan import remember
from fp8moe.kernels.indexer.source import TILE, MqaConfig, kernel_spec, paged_config, prefill_config
from fp8moe.runtime import config
from fp8moe.runtime.jit import load
from fp8moe.runtime.launch import Launcher, TensorMap, current_stream, device_guard, num_sms, tensor_map


class Ranges(ctypes.Structure):
    """``struct Ranges`` of cuda/mqa_logits.cu."""

    _fields_ = (
        ("starts", ctypes.c_int64),
        ("ends", ctypes.c_int64),
        ("queries", ctypes.c_int),
        ("limit", ctypes.c_int),
        ("per_query", ctypes.c_int),
    )


class Plan:
    """How to run a variant on operands of given shapes, strides and device, which is to be current.

    q (S * H, D), contiguous. kv, kv_scale: maps of the keys. ranges, table_pitch, num_blocks, columns, fill_masked: as
    the kernel takes them.
    """

    def __init__(
        self,
        cfg: MqaConfig,
        q: Tensor,
        kv: TensorMap,
        kv_scale: TensorMap,
        ranges: Ranges,
        table_pitch: int,
        num_blocks: int,
        columns: int,
        fill_masked: bool,
    ):
        if config.settings.print_configs:
            print(f"fp8moe mqa_logits queries={ranges.queries} columns={columns}: {cfg}")
        box = (cfg.columns, cfg.head_dim)
        self.q = tensor_map(q, shape=q.shape, strides=(cfg.head_dim, 1), box=box, swizzle=cfg.head_dim)
        self.kv, self.kv_scale, self.ranges = kv, kv_scale, ranges
        self.weights, self.blocks, self.out = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_int64()
        self.launcher = Launcher(
            load(kernel_spec(cfg)),
            grid=num_sms(q.get_device()),
            block=cfg.threads,
            smem=cfg.shared_bytes,
            args=(
                *(self.q, self.kv, self.kv_scale, self.weights, ranges),
                *(self.blocks, ctypes.c_int(table_pitch), ctypes.c_int(num_blocks)),
                *(self.out, ctypes.c_int(columns), ctypes.c_int(fill_masked)),
            ),
        )

    def launch(
        self, stream: int, q: int, kv: int, kv_scale: int, weights: int, starts: int, ends: int, blocks: int, out: int
    ) -> None:
        """Enqueue the kernel. All but `stream` are addresses; those of q, kv, kv_scale and weights multiples of 16."""
        launcher = self.launcher
        with launcher.lock:
            self.q.replace_address(q)
            self.kv.replace_address(kv)
            self.kv_scale.replace_address(kv_scale)
            self.weights.value = weights
            self.ranges.starts = starts
            self.ranges.ends = ends
            self.blocks.value = blocks
            self.out.value = out
            launcher.launch(stream)


_plans: dict[tuple, Plan] = {}


def mqa_logits(
    q: Tensor,
    kv: Tensor,
    kv_scale: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    out: Tensor,
    *,
    fill_masked: bool,
    cfg: MqaConfig | None = None,
) -> None:
    """The scores of operands that ``kernels.mqa_logits`` has checked, into out (S, T) float32, contiguous, not empty.

    cfg: the variant to run instead of the usual one.
    """
    queries, heads, head_dim = q.shape
    tokens = kv.shape[0]
    q, kv_scale, weights = _aligned(q), _aligned(kv_scale), _aligned(weights)
    starts, ends = starts.contiguous(), ends.contiguous()
    pitch, element = kv.stride()
    if element != 1 or pitch % 16 or pitch < head_dim or kv.data_ptr() % 16:
        kv = kv.clone(memory_format=torch.contiguous_format)
        pitch = head_dim
    index = q.get_device()
    key = (q.shape, kv.shape, pitch, fill_masked, cfg, index)
    with device_guard(index):
        plan = _plans.get(key)
        if plan is None:
            cfg = cfg or prefill_config(heads, head_dim)
            maps = (
                tensor_map(kv, shape=kv.shape, strides=(pitch, 1), box=(TILE, head_dim), swizzle=head_dim),
                tensor_map(kv_scale, shape=(1, tokens), strides=(tokens, 1), box=(1, TILE), l2_promotion=0),
            )
            ranges = Ranges(queries=queries, limit=tokens)
            plan = Plan(cfg, q.view(-1, head_dim), *maps, ranges, 0, 0, tokens, fill_masked)
            remember(_plans, key, plan)
        plan.launch(
            current_stream(index),
            *(q.data_ptr(), kv.data_ptr(), kv_scale.data_ptr(), weights.data_ptr()),
            *(starts.data_ptr(), ends.data_ptr(), 0, out.data_ptr()),
        )


def paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    out: Tensor,
    *,
    fill_masked: bool,
    cfg: MqaConfig | None = None,
) -> None:
    """The same of a paged cache, for ``kernels.paged_mqa_logits``; out (B * next_n, max_context_len)."""
    batch, next_n, heads, head_dim = q.shape
    num_blocks, max_blocks = kv_cache.shape[0], block_table.shape[1]
    if not num_blocks or not max_blocks:
        if fill_masked:
            out.fill_(-torch.inf)
        return
    q, weights, context_lens = _aligned(q), _aligned(weights), context_lens.contiguous()
    if block_table.stride(1) != 1 or block_table.stride(0) < max_blocks:
        block_table = block_table.contiguous()
    table_pitch = block_table.stride(0)
    index = q.get_device()
    key = (q.shape, num_blocks, context_lens.dim(), max_blocks, table_pitch, out.shape[1], fill_masked, cfg, index)
    with device_guard(index):
        plan = _plans.get(key)
        if plan is None:
            cfg = cfg or paged_config(heads, head_dim, next_n)
            # The cache as rows of one key: a block's 64, and those that its scales take up.
            rows = TILE + 4 * TILE // head_dim
            shape, box = (num_blocks * rows, head_dim), (rows, head_dim)
            kv = tensor_map(kv_cache, shape=shape, strides=(head_dim, 1), box=box, swizzle=head_dim)
            ranges = Ranges(
                queries=batch * next_n,
                limit=min(out.shape[1], TILE * max_blocks),
                per_query=context_lens.dim() == 2,
            )
            plan = Plan(cfg, q.view(-1, head_dim), kv, kv, ranges, table_pitch, num_blocks, out.shape[1], fill_masked)
            remember(_plans, key, plan)
        cache = kv_cache.data_ptr()
        plan.launch(
            current_stream(index),
            *(q.data_ptr(), cache, cache, weights.data_ptr()),
            *(0, context_lens.data_ptr(), block_table.data_ptr(), out.data_ptr()),
        )


def _aligned(x: Tensor) -> Tensor:
    """x contiguous, at a multiple of 16 bytes: itself where it lies so, otherwise a copy."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
