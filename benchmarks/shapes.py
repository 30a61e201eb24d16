"""Sizes of linear layers, experts and indexers in known models, which benchmarks measure and the digest records."""

from typing import NamedTuple

# (n, k) of the linear layers of DeepSeek-V3.
DENSE_SHAPES = ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
DENSE_M = (1, 16, 64, 128, 512, 4096)


class Model(NamedTuple):
    """The sizes of one experts layer of a model."""

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
FOUR_BITS = {
    "qwen3_30b": MODELS["qwen3_30b"],
    "gpt_oss_20b": Model(2880, 2880, 32, 4),
    "gpt_oss_120b": Model(2880, 2880, 128, 4),
    "dsv3": MODELS["dsv3"],
}
"""Models whose experts are measured in four bits as well. Those of GPT-OSS have biases, which are left out."""

MODEL_NAMES = {
    "dsv3": "DeepSeek-V3",
    "dsv3_ep8": "DeepSeek-V3, 32 of its 256 experts",
    "qwen3_30b": "Qwen3-30B-A3B",
    "qwen3_235b": "Qwen3-235B-A22B",
    "gpt_oss_20b": "GPT-OSS-20b",
    "gpt_oss_120b": "GPT-OSS-120b",
}

QWEN = "qwen3-30b-a3b"
WHOLE_MODEL_NAMES = {QWEN: "Qwen3-30B-A3B", "gpt-oss-20b": "GPT-OSS-20b"}
"""Whole models that are measured beside other libraries. Rows that name none are of QWEN."""

EXPERT_SHAPES = ((6144, 7168), (7168, 3072), (4096, 7168), (7168, 2048))
"""(n, k) of the two GEMMs of experts, for two models.

Cases with 256 experts leave out the first (n, k), which does not fit into memory.
"""


def room(mean_rows: int) -> int:
    """Return max_m of the masked layout: the rows that each group has space for."""
    return 4096 if mean_rows >= 192 else 1024


def _grouped(*kinds: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [(*kind[:2], *shape, *kind[2:]) for kind in kinds for shape in EXPERT_SHAPES[kind[0] == 256 :]]


def _named(names: tuple[str, ...], sizes: list[tuple[int, ...]]) -> list[dict[str, int]]:
    return [dict(zip(names, one, strict=True)) for one in sizes]


GEMM = _named(("m", "n", "k"), [(m, *shape) for m in DENSE_M for shape in DENSE_SHAPES])
GROUPED = _named(("groups", "mean_rows", "n", "k"), _grouped((4, 8192), (8, 4096), (32, 256), (256, 64)))
MASKED = _named(
    ("groups", "mean_rows", "n", "k", "expected_m"),
    _grouped(*((32, 192, 230), (6, 1024, 1228), (32, 20, 24), (6, 20, 24), (32, 4, 4), (32, 1, 1), (256, 2, 2))),
)
ALONG_K = _named(
    ("groups", "m", "n", "total_k"),
    [(4, 4096, 7168, 33920), (4, 7168, 2048, 28800), (8, 4096, 7168, 36864), (16, 7168, 2048, 35200)],
)
SCORES = _named(("queries", "tokens"), [(2048, 8192), (4096, 16384), (4096, 65536)])
PAGED_SCORES = _named(
    ("batch", "context", "next_n"),
    [(*size, next_n) for size in ((64, 8192), (128, 16384), (256, 8192)) for next_n in (1, 2)],
)
