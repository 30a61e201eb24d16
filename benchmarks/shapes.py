"""Sizes that benchmarks measure: linears and experts of known models."""

from typing import NamedTuple

# (n, k) of the linears of DeepSeek-V3.
DENSE_SHAPES = (
    (2112, 7168),
    (576, 7168),
    (24576, 1536),
    (32768, 512),
    (7168, 16384),
    (4096, 7168),
    (7168, 2048),
)
DENSE_M = (1, 16, 64, 128, 512, 4096)


class Model(NamedTuple):
    """The experts of one layer of a model."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


MODELS = {
    "dsv3_ep8": Model(7168, 2048, 32, 8),
    "qwen3_30b": Model(2048, 768, 128, 8),
    "qwen3_235b": Model(4096, 1536, 128, 8),
    "dsv3": Model(7168, 2048, 256, 8),
}
