"""DeepGEMM's index scores on the drop-in, against float64 on the CPU."""

import itertools

import pytest
import torch

import deep_gemm
from fp8moe.kernels.indexer.mqa_logits import mqa_logits, paged_mqa_logits
from fp8moe.quant.quantize import dequantize, quantize_1x128
from tests.errors import relative_error
from tests.gemm_cases import int32


def index_operands(queries, tokens, heads=32, head_dim=64):
    q = quantize_1x128(torch.randn(queries, heads, head_dim)).data
    kv = quantize_1x128(torch.randn(tokens, head_dim))
    return q, (kv.data, kv.scale[:, 0]), torch.randn(queries, heads)


@pytest.mark.parametrize("pair", [False, True])
def test_mqa_logits(pair):
    q, kv, w = index_operands(9, 70)
    starts, ends = int32([0, 5, 69, 70, 3, 2, 0, 1, 60]), int32([70, 6, 70, 70, 2, 40, 0, 64, 99])
    function = deep_gemm.fp8_fp4_mqa_logits if pair else deep_gemm.fp8_mqa_logits
    out = function((q, None) if pair else q, kv, w, starts, ends)
    scores = torch.einsum("shd,td->sht", q.double(), kv[0].double() * kv[1].double()[:, None]).relu()
    expected = (scores * w.double()[..., None]).sum(1)
    column = torch.arange(70)
    seen = (column >= starts[:, None]) & (column < ends[:, None])
    assert out[~seen].isneginf().all() and relative_error(out[seen], expected[seen]) < 1e-5
    assert relative_error(out[seen], mqa_logits(q, kv, w, starts, ends)[seen]) < 1e-6
    loose = function((q, None) if pair else q, kv, w, starts, ends, clean_logits=False)
    assert torch.equal(loose[seen], out[seen])


SHIFTED = {
    "vLLM 0.33": lambda q, *operands: deep_gemm.fp8_fp4_mqa_logits((q, None), *operands, 50),
    "SGLang 0.5.23": lambda *operands: deep_gemm.fp8_mqa_logits(*operands, clean_logits=False, max_seqlen_k=50),
    "DeepGEMM 2.5": lambda q, *operands: deep_gemm.fp8_fp4_mqa_logits((q, None), *operands, False, 50, torch.float32),
    "cleaned": lambda *operands: deep_gemm.fp8_mqa_logits(*operands, max_seqlen_k=50),
}


@pytest.mark.parametrize("form", SHIFTED)
def test_each_row_from_its_start(form):
    """Scores (S, max_seqlen_k): what memory for (S, T) would be lost on in a batch of many sequences."""
    q, kv, w = index_operands(9, 70)
    starts, ends = int32([0, 5, 69, 70, 3, 20, 0, 1, 60]), int32([50, 6, 70, 70, 2, 70, 0, 44, 99])
    out, whole = SHIFTED[form](q, kv, w, starts, ends), mqa_logits(q, kv, w, starts, ends)
    assert out.shape == (9, 50) and out.stride() == (256, 1)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.clamp(max=70).tolist(), strict=True)):
        length = max(end - start, 0)
        assert torch.equal(out[row, :length], whole[row, start : start + length])
        assert form != "cleaned" or out[row, length:].isneginf().all()


def test_bfloat16_scores_are_rounded_ones():
    q, kv, w = index_operands(9, 70)
    ranges = int32([0, 5, 69, 70, 3, 20, 0, 1, 60]), int32([50, 6, 70, 70, 2, 70, 0, 44, 99])
    whole = deep_gemm.fp8_mqa_logits(q, kv, w, *ranges)
    out = deep_gemm.fp8_mqa_logits(q, kv, w, *ranges, logits_dtype=torch.bfloat16)
    assert out.stride() == (512, 1) and torch.equal(out, whole.bfloat16())
    compressed = deep_gemm.fp8_mqa_logits(q, kv, w, *ranges, max_seqlen_k=50, logits_dtype=torch.bfloat16)
    assert compressed.shape == (9, 50) and compressed.stride() == (512, 1)
    assert torch.equal(compressed, deep_gemm.fp8_mqa_logits(q, kv, w, *ranges, max_seqlen_k=50).bfloat16())


@pytest.mark.parametrize(("queries", "keys"), [(0, 70), (3, 0), (0, 0)])
def test_empty(queries, keys):
    q, w, ranges = torch.zeros(queries, 32, 64).to(torch.float8_e4m3fn), torch.zeros(queries, 32), int32([0] * queries)
    kv = torch.zeros(keys, 64).to(torch.float8_e4m3fn), torch.zeros(keys)
    assert deep_gemm.fp8_mqa_logits(q, kv, w, ranges, ranges).shape == (queries, keys)
    out = deep_gemm.fp8_mqa_logits(q, kv, w, ranges, ranges, max_seqlen_k=5)
    assert out.shape == (queries, 5) and out.isneginf().all()


@pytest.mark.parametrize("keys", [1, 70, 255, 256, 257])
def test_rows_begin_at_aligned_addresses(keys):
    """SGLang's top-k takes only rows a multiple of 16 bytes apart, vLLM's fastest of 1 KB."""
    q, kv, w = index_operands(3, keys)
    ranges = int32([0, 0, keys // 2]), int32([keys, 1 << 30, keys])
    out, expected = deep_gemm.fp8_mqa_logits(q, kv, w, *ranges), mqa_logits(q, kv, w, *ranges)
    assert out.shape == (3, keys) and out.stride(1) == 1 and out.stride(0) % 256 == 0
    assert torch.equal(out.isneginf(), expected.isneginf())
    assert relative_error(out.nan_to_num(neginf=0), expected.nan_to_num(neginf=0)) < 1e-6


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("per_query", [False, True])
def test_paged_mqa_logits(pair, per_query):
    batch, next_n, heads, head_dim = 3, 2, 32, 64
    cache = torch.zeros(5, 64, 1, head_dim + 4, dtype=torch.uint8)
    keys = quantize_1x128(torch.randn(5 * 64, head_dim))
    flat = cache.view(5, -1)
    flat[:, : 64 * head_dim] = keys.data.view(torch.uint8).view(5, -1)
    flat[:, 64 * head_dim :] = keys.scale[:, 0].contiguous().view(torch.uint8).view(5, -1)
    q = quantize_1x128(torch.randn(batch, next_n, heads, head_dim)).data
    w, table = torch.randn(batch * next_n, heads), int32([[4, 1], [0, 3], [2, 2]])
    lengths = int32([[100, 101], [5, 6], [64, 128]]) if per_query else int32([101, 6, 128])
    meta = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, deep_gemm.get_num_sms())
    assert meta.shape == (deep_gemm.get_num_sms() + 1, 2) and meta.dtype is torch.int32
    function = deep_gemm.fp8_fp4_paged_mqa_logits if pair else deep_gemm.fp8_paged_mqa_logits
    arguments = (q, None) if pair else q, cache, w, lengths, table, meta, 130
    out = function(*arguments, clean_logits=True)
    assert out.shape == (6, 130) and out.stride() == (256, 1)
    assert torch.equal(out, paged_mqa_logits(q, cache, w, lengths, table, max_context_len=130))
    values = dequantize(keys, dtype=torch.float64).view(5, 64, head_dim)
    for b, j in itertools.product(range(batch), range(next_n)):
        length = int(lengths[b, j]) if per_query else int(lengths[b]) - next_n + 1 + j
        scores = (values[table[b].long()].flatten(0, 1)[:length] @ q[b, j].double().T).relu()
        row = out[b * next_n + j]
        assert relative_error(row[:length], scores @ w[b * next_n + j].double()) < 1e-5
        assert row[length:].isneginf().all()
        loose = function(*arguments)[b * next_n + j]
        assert torch.equal(loose[:length], row[:length])
    rounded = function(*arguments, True, torch.bfloat16)
    assert rounded.stride() == (512, 1) and torch.equal(rounded, out.bfloat16())


def test_nothing_is_recorded_for_gradients():
    q, (data, scale), w = index_operands(2, 70)
    operands = q, (data, scale.clone().requires_grad_()), w.requires_grad_(), int32([0, 9]), int32([70, 70])
    for columns in (0, 70):
        assert not deep_gemm.fp8_mqa_logits(*operands, max_seqlen_k=columns).requires_grad


def test_index_scores_wrong_arguments():
    q, kv, w = index_operands(2, 70)
    with pytest.raises(ValueError, match="cu_seq_len_k_end: expected shape"):
        deep_gemm.fp8_mqa_logits(q, kv, w, int32([0, 0]), int32([70]))
    with pytest.raises(NotImplementedError, match="q: FP4"):
        deep_gemm.fp8_fp4_mqa_logits((q, w), kv, w, int32([0, 0]), int32([70, 70]))
    with pytest.raises(TypeError, match="q: expected a pair"):
        deep_gemm.fp8_fp4_mqa_logits(q, kv, w, int32([0, 0]), int32([70, 70]))
    with pytest.raises(NotImplementedError, match="block_size: expected 64"):
        deep_gemm.get_paged_mqa_logits_metadata(int32([5]), 32, 132)
    ranges = int32([0, 0]), int32([70, 70])
    for options, error, match in (
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k: expected 0 to"),
        ({"clean_logits": 2.0}, TypeError, "max_seqlen_k: expected an int"),
        ({"logits_dtype": torch.float16}, NotImplementedError, "logits_dtype: expected float32 or bfloat16"),
    ):
        with pytest.raises(error, match=match):
            deep_gemm.fp8_mqa_logits(q, kv, w, *ranges, **options)
    for max_seqlen_k in (0, 5):
        with pytest.raises(ValueError, match=r"kv.scale: expected shape \(T,\) = \(70,\), got \(69,\)"):
            deep_gemm.fp8_mqa_logits(q, (kv[0], kv[1][1:]), w, *ranges, max_seqlen_k=max_seqlen_k)
        with pytest.raises(ValueError, match="kv.data: expected shape"):
            deep_gemm.fp8_mqa_logits(q, (kv[0][0, 0], kv[1]), w, *ranges, max_seqlen_k=max_seqlen_k)
        with pytest.raises(TypeError, match="weights: expected a torch.Tensor"):
            deep_gemm.fp8_mqa_logits(q, kv, [w], *ranges, max_seqlen_k=max_seqlen_k)
    with pytest.raises(NotImplementedError, match="indices: "):
        deep_gemm.get_paged_mqa_logits_metadata(int32([5]), 64, 132, indices=int32([0]))
