"""Every public op and layer as a module to compile and export, with arguments for any number of tokens."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fp8moe
from fp8moe import FP8Linear, FP8MQAIndexer, GroupedExperts
from fp8moe.kernels.indexer.mqa_cache import append_kv, new_kv_cache
from tests.gemm_cases import int32
from tests.operators import on_device

EXPERTS, HIDDEN, INTERMEDIATE = 4, 256, 128
HEADS, HEAD_DIM = 32, 32


class Call(nn.Module):
    """A function as a module, which `torch.export` takes; `layers` are modules that it calls."""

    def __init__(self, function: Callable, *layers: nn.Module):
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(layers)

    def forward(self, *arguments: Any) -> Any:
        return self.function(*self.layers, *arguments)


class Case:
    """What is traced, and its arguments: equal ones at each call for the same number of tokens and device."""

    def __init__(self, function: Callable, arguments: Callable[[int], tuple], *layers: Callable[[], nn.Module]):
        self.function, self.make, self.layers = function, arguments, layers

    def module(self, device: str) -> nn.Module:
        torch.manual_seed(0)
        return Call(self.function, *(layer() for layer in self.layers)).to(device)

    def arguments(self, tokens: int, device: str) -> tuple:
        torch.manual_seed(tokens)
        return torch.utils._pytree.tree_map(lambda value: on_device(device, value), self.make(tokens))

    def named_arguments(self, tokens: int) -> dict[str, Any]:
        """Those on the CPU, under the names that the op, or the layer, gives them."""
        names = inspect.signature(self.layers[0]().forward if self.function is _call else self.function).parameters
        given = [name for name in names if name not in ("layer", "indexer")]
        return dict(zip(given, self.arguments(tokens, "cpu"), strict=False))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def _activations(tokens: int) -> fp8moe.FP8Tensor:
    return fp8moe.quantize_1x128(_normal(tokens, HIDDEN))


def _weights(*lead: int) -> fp8moe.FP8Tensor:
    return fp8moe.quantize_128x128(_normal(*lead, INTERMEDIATE, HIDDEN))


def _blocks(tokens: int) -> tuple:
    return (_normal(128 * tokens + 5, HIDDEN),)  # several blocks of rows: PyTorch makes sizes of one constants


def _offsets(rows: int, multiple: int = 1) -> Tensor:
    bounds = [rows * part // EXPERTS // multiple * multiple for part in range(EXPERTS)]
    return torch.tensor([*bounds, rows], dtype=torch.int32)


def _routing(tokens: int) -> tuple[Tensor, Tensor]:
    weights, index = torch.rand(tokens, EXPERTS).softmax(-1).topk(2)
    return index, weights


def _masked(tokens: int) -> tuple:
    return fp8moe.quantize_1x128(_normal(EXPERTS, tokens, HIDDEN)), int32([tokens, 0, tokens - 1, 1])


def _used(out: Tensor, masked_m: Tensor) -> Tensor:
    used = torch.arange(out.shape[1], device=out.device) < masked_m[:, None]
    return torch.where(used[..., None], out, 0)  # the others are uninitialized


def _layer_weights() -> tuple:
    gate_up = fp8moe.quantize_128x128(_normal(EXPERTS, 256, HIDDEN))
    return gate_up, fp8moe.quantize_128x128(_normal(EXPERTS, HIDDEN, 128))


def _along_k(tokens: int) -> tuple:
    columns = 128 * tokens
    a, b = (fp8moe.quantize_128x1(_normal(columns, size)) for size in (INTERMEDIATE, HIDDEN))
    return a, b, _offsets(columns, 128)


def _scores(tokens: int) -> tuple:
    q, kv = (fp8moe.quantize_1x128(_normal(*lead, HEAD_DIM)) for lead in ((tokens, HEADS), (tokens,)))
    starts, ends = torch.zeros(tokens, dtype=torch.int32), torch.arange(1, tokens + 1, dtype=torch.int32)
    return q.data, fp8moe.FP8Tensor(kv.data, kv.scale[:, 0]), torch.randn(tokens, HEADS), starts, ends


def _paged(sequences: int) -> tuple:
    cache = new_kv_cache(sequences, HEAD_DIM, device="cpu")
    append_kv(cache, _normal(64 * sequences, HEAD_DIM), torch.arange(64 * sequences, dtype=torch.int32))
    table = torch.arange(sequences, dtype=torch.int32)[:, None]
    q = fp8moe.quantize_1x128(_normal(sequences, 1, HEADS, HEAD_DIM)).data
    return q, cache, torch.randn(sequences, HEADS), torch.arange(sequences, dtype=torch.int32) % 64, table


def _indexer_inputs(tokens: int) -> tuple:
    positions = (torch.randn(tokens, 16), torch.randn(tokens, 16))
    ends = torch.arange(1, tokens + 1, dtype=torch.int32)
    return _normal(tokens, HIDDEN), _normal(tokens, 64), positions, torch.zeros_like(ends), ends


def _step_inputs(sequences: int) -> tuple:
    _, cache, _, lengths, table = _paged(sequences)
    return *_indexer_inputs(sequences)[:3], cache, lengths + 1, table


def _step(indexer, hidden_states, q_resid, position_embeddings, kv_cache, context_lens, block_table) -> Tensor:
    paged = {"kv_cache": kv_cache, "context_lens": context_lens, "block_table": block_table, "max_context_len": 64}
    return indexer.decode(hidden_states, q_resid, position_embeddings, **paged)


def _inputs(tokens: int) -> tuple:
    return (_normal(tokens, HIDDEN),)


def _routed(tokens: int) -> tuple:
    return *_inputs(tokens), *_routing(tokens)


def _linear(**options: Any) -> Callable[[], nn.Module]:
    return lambda: FP8Linear(HIDDEN, 72, **options)


def _experts(**options: Any) -> Callable[[], nn.Module]:
    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    return lambda: GroupedExperts(**sizes, **options)


def _indexer() -> nn.Module:
    sizes = {"num_heads": HEADS, "head_dim": HEAD_DIM, "rope_head_dim": 16, "top_k": 4}
    return FP8MQAIndexer(hidden_size=HIDDEN, q_lora_rank=64, **sizes)


def _call(layer: nn.Module, *arguments: Any) -> Any:
    return layer(*arguments)


CASES = {
    "quantize_1x128": Case(fp8moe.quantize_1x128, _inputs),
    "quantize_128x128": Case(fp8moe.quantize_128x128, _blocks),
    "quantize_128x1": Case(fp8moe.quantize_128x1, _blocks),
    # Saved programs return no str, so only the tensors of a PackedTensor.
    "quantize_mxfp4": Case(lambda w: fp8moe.quantize_mxfp4(w)[:2], _inputs),
    "quantize_int4": Case(lambda w: fp8moe.quantize_int4(w)[:2], _inputs),
    "dequantize": Case(fp8moe.dequantize, lambda tokens: (_activations(tokens),)),
    "dequantize, mxfp4": Case(fp8moe.dequantize, lambda tokens: (fp8moe.quantize_mxfp4(_normal(tokens, HIDDEN)),)),
    "gemm, bias": Case(
        lambda a, b, bias: fp8moe.gemm(a, b, bias=bias),
        lambda tokens: (_activations(tokens), _weights(), torch.randn(INTERMEDIATE)),
    ),
    "gemm, c and out": Case(
        lambda a, b, out: fp8moe.gemm(a, b, c=out, out=out),
        lambda tokens: (_activations(tokens), _weights(), torch.randn(tokens, INTERMEDIATE)),
    ),
    "gemm, int4": Case(
        fp8moe.gemm, lambda tokens: (_activations(tokens), fp8moe.quantize_int4(_normal(INTERMEDIATE, HIDDEN)))
    ),
    "linear": Case(
        fp8moe.linear,
        lambda tokens: (_normal(tokens, HIDDEN), fp8moe.quantize_128x128(_normal(72, HIDDEN)), _normal(72)),
    ),
    "grouped_gemm": Case(
        fp8moe.grouped_gemm, lambda tokens: (_activations(tokens), _weights(EXPERTS), _offsets(tokens))
    ),
    "experts": Case(fp8moe.experts, lambda tokens: (_activations(tokens), *_routing(tokens), *_layer_weights())),
    "experts, int4": Case(
        fp8moe.experts,
        lambda tokens: (
            *(_activations(tokens), *_routing(tokens)),
            *(fp8moe.quantize_int4(_normal(EXPERTS, *shape)) for shape in ((256, HIDDEN), (HIDDEN, 128))),
        ),
    ),
    "experts, out and expert_map": Case(
        lambda x, top_k_index, top_k_weights, up, down, out, expert_map: fp8moe.experts(
            x, top_k_index, top_k_weights, up, down, out=out, expert_map=expert_map
        ),
        lambda tokens: (
            *(_activations(tokens), *_routing(tokens), *_layer_weights()),
            *(_normal(tokens, HIDDEN), torch.arange(EXPERTS, dtype=torch.int32).flip(0)),
        ),
    ),
    "experts_masked": Case(
        lambda x, masked_m, up, down: _used(fp8moe.experts_masked(x, masked_m, up, down), masked_m),
        lambda tokens: (*_masked(tokens), *_layer_weights()),
    ),
    "experts_rows": Case(fp8moe.experts_rows, lambda tokens: (*_inputs(tokens), _offsets(tokens), *_layer_weights())),
    "grouped_gemm, out": Case(
        lambda a, b, group_offsets, out: fp8moe.grouped_gemm(a, b, group_offsets, out=out),
        lambda tokens: (
            *(_activations(tokens), _weights(EXPERTS), _offsets(tokens)),
            torch.zeros(tokens, INTERMEDIATE),
        ),
    ),
    "grouped_gemm_masked": Case(
        lambda a, masked_m, b: _used(fp8moe.grouped_gemm_masked(a, b, masked_m), masked_m),
        lambda tokens: (*_masked(tokens), _weights(EXPERTS)),
    ),
    "grouped_gemm_k": Case(fp8moe.grouped_gemm_k, _along_k),
    "grouped_gemm_k, out and accumulate": Case(
        lambda a, b, group_offsets, out: fp8moe.grouped_gemm_k(a, b, group_offsets, out=out, accumulate=True),
        lambda tokens: (*_along_k(tokens), torch.randn(EXPERTS, INTERMEDIATE, HIDDEN)),
    ),
    "mqa_logits": Case(fp8moe.mqa_logits, _scores),
    "mqa_top_k": Case(
        lambda logits, starts, ends: fp8moe.mqa_top_k(logits, top_k=5, starts=starts, ends=ends),
        lambda tokens: (torch.randn(tokens, 8 * tokens), *_scores(tokens)[3:]),
    ),
    "paged_mqa_logits": Case(
        lambda q, kv_cache, weights, context_lens, block_table: fp8moe.paged_mqa_logits(
            q, kv_cache, weights, context_lens, block_table, max_context_len=64
        ),
        _paged,
    ),
    "latent_attention": Case(
        lambda q, latents, lengths: fp8moe.latent_attention(q, latents, lengths, value_size=512, scale=0.04),
        lambda tokens: (
            *(_normal(tokens, 1, 3, 576), _normal(tokens, 9, 576)),
            torch.arange(tokens, dtype=torch.int32) % 9,
        ),
    ),
    "quantize_latents": Case(
        lambda latents: fp8moe.quantize_latents(latents, value_size=32), lambda tokens: (_normal(tokens, 40),)
    ),
    "FP8Linear": Case(_call, _inputs, _linear()),
    "FP8Linear, master_dtype": Case(_call, _inputs, _linear(master_dtype=torch.float32)),
    "GroupedExperts": Case(_call, _routed, _experts()),
    "GroupedExperts, decode_capacity": Case(_call, _routed, _experts(decode_capacity=8)),
    "GroupedExperts, forward_rows": Case(
        lambda layer, rows, group_offsets: layer.forward_rows(rows, group_offsets),
        lambda tokens: (*_inputs(tokens), _offsets(tokens)),
        _experts(),
    ),
    "GroupedExperts, master_dtype": Case(_call, _routed, _experts(master_dtype=torch.float32)),
    "FP8MQAIndexer": Case(_call, _indexer_inputs, _indexer),
    "FP8MQAIndexer, decode": Case(_step, _step_inputs, _indexer),
}


def missing_names() -> Iterator[str]:
    """Public ops and layers that no case calls."""
    called = {name.partition(",")[0] for name in CASES}
    others = {
        "FP8Tensor",
        "PackedTensor",
        "batch_invariant",
        "replace_linears",
        "warm",
        "refit",
        "refitting",
        "RefitReport",
    }
    yield from sorted({*fp8moe.__all__} - called - others)
