"""Launches ``cuda/mqa_logits.cu``: plans built once per problem, in which a call puts its pointers."""

import torch
from torch import Tensor

from fp8moe.kernels.indexer.checks import Paged, Prefill
from fp8moe.kernels.indexer.source import TILE, Arguments, MqaConfig, kernel_spec, paged_config, prefill_config
from fp8moe.runtime import config
from fp8moe.runtime.checks import aligned, row_major
from fp8moe.runtime.jit import load
from fp8moe.runtime.launch import Launcher, TensorMap, current_stream, device_guard, num_sms, tensor_map
from fp8moe.runtime.plans import PlanCache


class Plan:
    """How to run a variant on operands of given shapes, strides and device, which is to be current.

    q (..., D), contiguous. kv, kv_scale: maps of the keys. arguments: all but the pointers.
    """

    def __init__(self, cfg: MqaConfig, q: Tensor, kv: TensorMap, kv_scale: TensorMap, arguments: Arguments):
        if config.settings.print_configs:
            print(f"fp8moe mqa_logits queries={arguments.queries} columns={arguments.columns}: {cfg}")
        rows, box = q.view(-1, cfg.head_dim), (cfg.columns, cfg.head_dim)
        self.q = tensor_map(rows, shape=rows.shape, strides=rows.stride(), box=box, swizzle=cfg.head_dim)
        self.kv, self.kv_scale, self.arguments = kv, kv_scale, arguments
        self.launcher = Launcher(
            load(kernel_spec(cfg)),
            grid=num_sms(q.get_device()),
            block=cfg.threads,
            smem=cfg.shared_bytes,
            args=(self.q, kv, kv_scale, arguments),
        )

    def launch(self, stream: int, q: int, kv: int, kv_scale: int, **pointers: int) -> None:
        """Enqueue the kernel. All but `stream` are addresses; those of q, kv, kv_scale and weights multiples of 16.

        pointers: the other pointers of the arguments that the variant uses.
        """
        launcher = self.launcher
        with launcher.lock:
            self.q.replace_address(q)
            self.kv.replace_address(kv)
            self.kv_scale.replace_address(kv_scale)
            for name, address in pointers.items():
                setattr(self.arguments, name, address)
            launcher.launch(stream)


_plans: PlanCache[Plan] = PlanCache()


def mqa_logits(
    operands: Prefill, out: Tensor, *, fill_masked: bool, from_starts: bool = False, cfg: MqaConfig | None = None
) -> None:
    """The scores of operands that the entry has checked, into out (S, columns) float32, contiguous, not empty.

    from_starts: the first column is the first key of each range, rather than key 0: then there may be fewer than T.
    cfg: the variant to run instead of the usual one.
    """
    q, kv, kv_scale, weights, starts, ends = operands
    queries, heads, head_dim = q.shape
    tokens, columns = kv.shape[0], out.shape[1]
    q, kv, kv_scale, weights = aligned(q), row_major(kv), aligned(kv_scale), aligned(weights)
    starts, ends = starts.contiguous(), ends.contiguous()
    index = q.get_device()

    def build() -> Plan:
        variant = cfg or prefill_config(heads, head_dim)
        box = (variant.tile_rows, head_dim)
        return Plan(
            variant,
            q,
            tensor_map(kv, shape=kv.shape, strides=kv.stride(), box=box, swizzle=head_dim),
            tensor_map(kv_scale, shape=(1, tokens), strides=(tokens, 1), box=(1, TILE), l2_promotion=0),
            Arguments(
                queries=queries,
                limit=tokens,
                longest=columns,
                columns=columns,
                from_starts=from_starts,
                fill_masked=fill_masked,
            ),
        )

    with device_guard(index):
        _plans.get((q.shape, kv.shape, kv.stride(0), columns, from_starts, fill_masked, cfg, index), build).launch(
            current_stream(index),
            *(q.data_ptr(), kv.data_ptr(), kv_scale.data_ptr()),
            weights=weights.data_ptr(),
            starts=starts.data_ptr(),
            ends=ends.data_ptr(),
            scores=out.data_ptr(),
        )


def paged_mqa_logits(operands: Paged, out: Tensor, *, fill_masked: bool, cfg: MqaConfig | None = None) -> None:
    """The same over a paged cache; out (B * next_n, max_context_len)."""
    q, kv_cache, weights, context_lens, block_table = operands
    batch, next_n, heads, head_dim = q.shape
    num_blocks, max_blocks = kv_cache.shape[0], block_table.shape[1]
    if not num_blocks or not max_blocks:
        if fill_masked:
            out.fill_(-torch.inf)
        return
    q, weights, context_lens = aligned(q), aligned(weights), context_lens.contiguous()
    if block_table.stride(1) != 1 or block_table.stride(0) < max_blocks:
        block_table = block_table.contiguous()
    columns, table_pitch, index = out.shape[1], block_table.stride(0), q.get_device()
    per_query = context_lens.dim() == 2

    def build() -> Plan:
        variant = cfg or paged_config(heads, head_dim, next_n)
        # The cache as rows of one key.
        shape, box = (num_blocks * variant.tile_rows, head_dim), (variant.tile_rows, head_dim)
        kv = tensor_map(kv_cache, shape=shape, strides=(head_dim, 1), box=box, swizzle=head_dim)
        arguments = Arguments(
            queries=batch * next_n,
            limit=min(columns, TILE * max_blocks),
            per_query=per_query,
            table_pitch=table_pitch,
            num_blocks=num_blocks,
            columns=columns,
            fill_masked=fill_masked,
        )
        return Plan(variant, q, kv, kv, arguments)

    key = (q.shape, num_blocks, per_query, max_blocks, table_pitch, columns, fill_masked, cfg, index)
    with device_guard(index):
        cache = kv_cache.data_ptr()
        _plans.get(key, build).launch(
            current_stream(index),
            *(q.data_ptr(), cache, cache),
            weights=weights.data_ptr(),
            ends=context_lens.data_ptr(),
            block_table=block_table.data_ptr(),
            scores=out.data_ptr(),
        )
