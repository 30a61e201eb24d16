"""Every public op and layer as a module to compile and export, with arguments for any number of tokens."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fp8moe
from fp8moe import FP8Linear, FP8MQAIndexer, GroupedExperts
from fp8moe.kernels.indexer.mqa_cache import append_kv, new_kv_cache

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
        return torch.utils._pytree.tree_map(lambda value: _on(device, value), self.make(tokens))


def _on(device: str, value: Tensor) -> Tensor:
    """In the same memory layout, which `.to` does not promise for scales with padding between their columns."""
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return moved.copy_(value)


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


def _gemm(tokens: int) -> tuple:
    return _activations(tokens), _weights(), torch.randn(INTERMEDIATE)


def _gemm_adding(tokens: int) -> tuple:
    return _activations(tokens), _weights(), torch.randn(tokens, INTERMEDIATE)


def _grouped(tokens: int) -> tuple:
    return _activations(tokens), _weights(EXPERTS), _offsets(tokens)


def _grouped_out(tokens: int) -> tuple:
    return *_grouped(tokens), torch.zeros(tokens, INTERMEDIATE)


def _masked(tokens: int) -> tuple:
    a = fp8moe.quantize_1x128(_normal(EXPERTS, tokens, HIDDEN))
    return a, _weights(EXPERTS), torch.tensor([tokens, 0, tokens - 1, 1], dtype=torch.int32)


def _masked_rows(a: fp8moe.FP8Tensor, b: fp8moe.FP8Tensor, masked_m: Tensor) -> Tensor:
    out = fp8moe.grouped_gemm_masked(a, b, masked_m)
    used = torch.arange(out.shape[1], device=out.device) < masked_m[:, None]
    return torch.where(used[..., None], out, 0)  # the others are uninitialized


def _layer_weights() -> tuple:
    gate_up = fp8moe.quantize_128x128(_normal(EXPERTS, 256, HIDDEN))
    return gate_up, fp8moe.quantize_128x128(_normal(EXPERTS, HIDDEN, 128))


def _held_experts(tokens: int) -> tuple:
    return _activations(tokens), *_routing(tokens), *_layer_weights()


def _held_experts_out(tokens: int) -> tuple:
    return *_held_experts(tokens), _normal(tokens, HIDDEN), torch.arange(EXPERTS, dtype=torch.int32).flip(0)


def _experts_out(*operands: Any) -> Tensor:
    *given, out, expert_map = operands
    return fp8moe.experts(*given, out=out, expert_map=expert_map)


def _held_rows(tokens: int) -> tuple:
    return _normal(tokens, HIDDEN), _offsets(tokens), *_layer_weights()


def _held_masked(tokens: int) -> tuple:
    a, _, masked_m = _masked(tokens)
    return a, masked_m, *_layer_weights()


def _masked_experts(x: fp8moe.FP8Tensor, masked_m: Tensor, *weights: fp8moe.FP8Tensor) -> Tensor:
    out = fp8moe.experts_masked(x, masked_m, *weights)
    used = torch.arange(out.shape[1], device=out.device) < masked_m[:, None]
    return torch.where(used[..., None], out, 0)


def _along_k(tokens: int) -> tuple:
    columns = 128 * tokens
    a, b = (fp8moe.quantize_128x1(_normal(columns, size)) for size in (INTERMEDIATE, HIDDEN))
    return a, b, _offsets(columns, 128)


def _along_k_adding(tokens: int) -> tuple:
    return *_along_k(tokens), torch.randn(EXPERTS, INTERMEDIATE, HIDDEN)


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


def _paged_logits(*arguments: Tensor) -> Tensor:
    return fp8moe.paged_mqa_logits(*arguments, max_context_len=64)


def _layer_inputs(tokens: int) -> tuple:
    return (_normal(tokens, HIDDEN),)


def _linear_inputs(tokens: int) -> tuple:
    return _normal(tokens, HIDDEN), fp8moe.quantize_128x128(_normal(72, HIDDEN)), _normal(72)


def _experts_inputs(tokens: int) -> tuple:
    return *_layer_inputs(tokens), *_routing(tokens)


def _rows_inputs(tokens: int) -> tuple:
    return *_layer_inputs(tokens), _offsets(tokens)


def _indexer_inputs(tokens: int) -> tuple:
    positions = (torch.randn(tokens, 16), torch.randn(tokens, 16))
    ends = torch.arange(1, tokens + 1, dtype=torch.int32)
    return _normal(tokens, HIDDEN), _normal(tokens, 64), positions, torch.zeros_like(ends), ends


def _step_inputs(sequences: int) -> tuple:
    hidden, q_resid, positions, *_ = _indexer_inputs(sequences)
    _, cache, _, lengths, table = _paged(sequences)
    return hidden, q_resid, positions, cache, lengths + 1, table


def _step(indexer: FP8MQAIndexer, *arguments: Any) -> Tensor:
    *inputs, cache, lengths, table = arguments
    return indexer.decode(*inputs, kv_cache=cache, context_lens=lengths, block_table=table, max_context_len=64)


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
    "quantize_1x128": Case(fp8moe.quantize_1x128, _layer_inputs),
    "quantize_128x128": Case(fp8moe.quantize_128x128, _blocks),
    "quantize_128x1": Case(fp8moe.quantize_128x1, _blocks),
    "dequantize": Case(fp8moe.dequantize, lambda tokens: (_activations(tokens),)),
    "gemm, bias": Case(lambda a, b, bias: fp8moe.gemm(a, b, bias=bias), _gemm),
    "gemm, c and out": Case(lambda a, b, out: fp8moe.gemm(a, b, c=out, out=out), _gemm_adding),
    "linear": Case(fp8moe.linear, _linear_inputs),
    "grouped_gemm": Case(fp8moe.grouped_gemm, _grouped),
    "experts": Case(fp8moe.experts, _held_experts),
    "experts, out and expert_map": Case(_experts_out, _held_experts_out),
    "experts_masked": Case(_masked_experts, _held_masked),
    "experts_rows": Case(fp8moe.experts_rows, _held_rows),
    "grouped_gemm, out": Case(lambda *operands: fp8moe.grouped_gemm(*operands[:3], out=operands[3]), _grouped_out),
    "grouped_gemm_masked": Case(_masked_rows, _masked),
    "grouped_gemm_k": Case(fp8moe.grouped_gemm_k, _along_k),
    "grouped_gemm_k, out and accumulate": Case(
        lambda *operands: fp8moe.grouped_gemm_k(*operands[:3], out=operands[3], accumulate=True), _along_k_adding
    ),
    "mqa_logits": Case(fp8moe.mqa_logits, _scores),
    "paged_mqa_logits": Case(_paged_logits, _paged),
    "FP8Linear": Case(_call, _layer_inputs, _linear()),
    "FP8Linear, master_dtype": Case(_call, _layer_inputs, _linear(master_dtype=torch.float32)),
    "GroupedExperts": Case(_call, _experts_inputs, _experts()),
    "GroupedExperts, decode_capacity": Case(_call, _experts_inputs, _experts(decode_capacity=8)),
    "GroupedExperts, forward_rows": Case(lambda layer, *rows: layer.forward_rows(*rows), _rows_inputs, _experts()),
    "GroupedExperts, master_dtype": Case(_call, _experts_inputs, _experts(master_dtype=torch.float32)),
    "FP8MQAIndexer": Case(_call, _indexer_inputs, _indexer),
    "FP8MQAIndexer, decode": Case(_step, _step_inputs, _indexer),
}


def missing_names() -> Iterator[str]:
    """Public ops and layers that no case calls."""
    called = {name.partition(",")[0] for name in CASES}
    others = {"FP8Tensor", "batch_invariant", "replace_linears", "warm", "refit", "refitting", "RefitReport"}
    yield from sorted({*fp8moe.__all__} - called - others)
