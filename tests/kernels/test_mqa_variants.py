"""The variants of the MQA logits kernel: their layout, and that each compiles."""

import pytest

from fp8moe.kernels.indexer.checks import HEAD_DIMS, MAX_NEXT_N, NUM_HEADS
from fp8moe.kernels.indexer.sm90 import MqaConfig, kernel_spec, paged_config, prefill_config
from fp8moe.runtime.sm90 import SHARED_LIMIT
from tests.ptxas import without_spills

CONFIGS = [prefill_config(heads, head_dim) for heads in NUM_HEADS for head_dim in HEAD_DIMS] + [
    paged_config(heads, head_dim, next_n)
    for heads in NUM_HEADS
    for head_dim in HEAD_DIMS
    for next_n in range(1, MAX_NEXT_N + 1)
]


def label(cfg: MqaConfig) -> str:
    return f"{'paged' if cfg.paged else 'prefill'}-{cfg.heads}-{cfg.head_dim}-{cfg.queries}"


@pytest.mark.parametrize("cfg", CONFIGS, ids=label)
def test_layout(cfg):
    assert cfg.queries % cfg.column_groups == 0
    assert cfg.columns <= 128
    assert cfg.shared_bytes <= SHARED_LIMIT
    assert cfg.stages % cfg.row_groups == 0
    # Every math warpgroup has a tile to work on and one on its way.
    assert cfg.stages >= 2 * cfg.row_groups


def test_enough_bytes_are_on_their_way():
    """An H200 needs about 60 KB for each SM: 4.2 TB/s for 2 us."""
    for cfg in CONFIGS:
        assert cfg.stages * 64 * (cfg.head_dim + 4) >= 60 << 10


@pytest.mark.parametrize("cfg", CONFIGS, ids=label)
def test_every_variant_compiles_without_spills(cfg):
    assert without_spills(kernel_spec(cfg)).static_smem == 0
