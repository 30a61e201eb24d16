"""Adapters that run other libraries on fp8moe's operands: DeepGEMM, cuBLAS, and experts of vLLM, transformers, Humming.

Each function does the one-time preparation that its library needs, and returns the call to time. The function raises
LookupError if no installed version of the library offers that call.
"""

import functools
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shapes import Model
from fp8moe import FP8Tensor, GroupedExperts, PackedTensor, dequantize
from fp8moe.kernels.indexer.mqa_cache import BLOCK_TOKENS
from fp8moe.quant.formats import BLOCK, align, empty_mn_major

DEEP_GEMMS = ("deep_gemm", "vllm.third_party.deep_gemm")
DISTRIBUTIONS = (
    *("sgl-deep-gemm", "deep-gemm", "apache-tvm-ffi", "vllm", "transformers", "triton"),
    *("humming-kernels", "sonic-moe", "quack-kernels"),
    *("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13"),
)


class Call(NamedTuple):
    """A call to time.

    result: maps what `run` returns to the tensor to compare with fp8moe's result; None: the two cannot be compared.
    """

    run: Callable[[], Any]
    result: Callable[[Any], Tensor] | None


def installed(name: str) -> bool:
    """Return whether a module of this name is installed, without importing it (its parent packages are imported)."""
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:  # importing a parent package may raise any exception
        return False


def versions() -> dict[str, str]:
    """Return the version of each installed distribution and DeepGEMM module, or the error of a failed import."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {name: _version(module) for name, module in _deep_gemm_modules().items()}


def _version(module: ModuleType | Exception) -> str:
    return str(getattr(module, "__version__", "?")) if isinstance(module, ModuleType) else f"fails: {module!r}"


@functools.cache
def _deep_gemm_modules() -> dict[str, ModuleType | Exception]:
    """Map each installed name in DEEP_GEMMS to its module or import error; leave out fp8moe's drop-in `deep_gemm`."""
    found: dict[str, ModuleType | Exception] = {}
    for name in filter(installed, DEEP_GEMMS):
        try:
            found[name] = importlib.import_module(name)
        except Exception as error:
            found[name] = error
    return {name: module for name, module in found.items() if "fp8moe" not in _version(module)}


def deep_gemms() -> list[ModuleType]:
    """Return every DeepGEMM module that can be imported, the standalone package first."""
    return [module for module in _deep_gemm_modules().values() if isinstance(module, ModuleType)]


def _deep_gemm(name: str) -> Callable:
    """Return the function of this name from the first DeepGEMM module that has it; LookupError if no module does."""
    for module in deep_gemms():
        if hasattr(module, name):
            return getattr(module, name)
    raise LookupError(f"no installed DeepGEMM has {name}")


def deep_gemm(a: FP8Tensor, b: FP8Tensor) -> Call:
    """Prepare DeepGEMM's dense GEMM: a (M, K), b (N, K) -> (M, N) bfloat16."""
    out = a.data.new_empty(len(a.data), len(b.data), dtype=torch.bfloat16)
    multiply = partial(_deep_gemm("fp8_gemm_nt"), tuple(a), tuple(b), out, compiled_dims="nk")
    return Call(multiply, lambda _: out)


def deep_gemm_contiguous(a: FP8Tensor, b: FP8Tensor, sizes: Sequence[int]) -> Call:
    """Prepare DeepGEMM's contiguous grouped GEMM: a (R, K), the rows sorted by group; b (E, N, K) -> (R, N).

    Before timing, each group is padded with zeros to DeepGEMM's alignment; the padding is not compared.
    """
    alignment = _deep_gemm("get_mk_alignment_for_contiguous_layout")()
    device, starts = a.data.device, [0, *accumulate(align(size, alignment) for size in sizes)]
    places = torch.cat([torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=False)]).to(
        device
    )
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device, torch.int32)
    layout = torch.full((starts[-1],), -1, dtype=torch.int32, device=device)
    layout[places] = group
    data = torch.zeros(starts[-1], a.data.shape[1], dtype=torch.uint8, device=device)
    data[places] = a.data.view(torch.uint8)
    scale = empty_mn_major((starts[-1], a.scale.shape[1]), device=device).fill_(1.0)
    scale[places] = a.scale
    out = torch.empty(starts[-1], b.data.shape[1], dtype=torch.bfloat16, device=device)
    multiply = _deep_gemm("m_grouped_fp8_gemm_nt_contiguous")
    return Call(
        partial(multiply, (data.view(a.data.dtype), scale), tuple(b), out, layout, compiled_dims="nk"),
        lambda _: out[places],
    )


def deep_gemm_masked(a: FP8Tensor, b: FP8Tensor, masked_m: Tensor, expected_m: int, rows: Tensor) -> Call:
    """Prepare DeepGEMM's masked grouped GEMM: a (E, max_m, K), b (E, N, K), masked_m (E,) -> (E, max_m, N).

    rows: indices of the rows in use, among all E * max_m rows; only these rows of the result are compared.
    """
    out = a.data.new_empty(*a.data.shape[:2], b.data.shape[1], dtype=torch.bfloat16)
    multiply = _deep_gemm("fp8_m_grouped_gemm_nt_masked")
    return Call(
        partial(multiply, tuple(a), tuple(b), out, masked_m, expected_m, compiled_dims="nk"),
        lambda _: out.flatten(0, 1)[rows],
    )


def deep_gemm_k(a: FP8Tensor, b: FP8Tensor, sizes: Sequence[int]) -> Call:
    """Prepare DeepGEMM's GEMM with groups along K: a (M, K), b (N, K).

    Each call adds to the same float32 result (E, M, N).
    """
    ends = [0, *accumulate(sizes)]
    operands = []
    for data, scale in (a, b):
        groups = [data[:, i:j].reshape(-1).view(torch.uint8) for i, j in zip(ends, ends[1:], strict=False)]
        operands.append((torch.cat(groups).view(data.dtype), scale))
    out = torch.zeros(len(sizes), len(a.data), len(b.data), device=a.data.device)
    sizes_there = torch.tensor(sizes, dtype=torch.int32, device=a.data.device)
    multiply = _deep_gemm("k_grouped_fp8_gemm_nt_contiguous")
    return Call(partial(multiply, *operands, out, list(sizes), sizes_there, out), lambda _: out)


def deep_gemm_mqa(
    q: Tensor, kv: FP8Tensor, weights: Tensor, starts: Tensor, ends: Tensor, fill: bool, seen: Tensor
) -> Call:
    """Prepare DeepGEMM's indexer logits (S, T). Logits are compared only where `seen` is True."""
    score = partial(_deep_gemm("fp8_mqa_logits"), q, tuple(kv), weights, starts, ends, clean_logits=fill)
    return Call(score, lambda out: out[:, : seen.shape[1]].masked_fill(~seen, 0))


def deep_gemm_paged(
    q: Tensor, cache: Tensor, weights: Tensor, visible: Tensor, table: Tensor, max_context_len: int, seen: Tensor
) -> Call:
    """Prepare DeepGEMM's indexer logits over a paged cache. visible (B, next_n) int32: keys that each query sees.

    DeepGEMM's scheduling metadata is computed before timing. Logits are compared only where `seen` is True.
    """
    metadata = _deep_gemm("get_paged_mqa_logits_metadata")(visible, BLOCK_TOKENS, _deep_gemm("get_num_sms")())
    score = partial(_deep_gemm("fp8_paged_mqa_logits"), q, cache, weights, visible, table, metadata, max_context_len)
    return Call(partial(score, clean_logits=False), lambda out: out[:, : seen.shape[1]].masked_fill(~seen, 0))


def cublas_block(a: FP8Tensor, b: FP8Tensor) -> Call:
    """Prepare a cuBLAS GEMM with block scales in cuBLAS's layout: a (M, K), b (N, K) -> (M, N) bfloat16."""
    m, blocks = a.scale.shape
    scale_a = torch.empty_strided((m, blocks), (1, m), device=a.data.device).copy_(a.scale)
    scale_b = F.pad(b.scale, (0, align(blocks, 4) - blocks)).t()
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    multiply = partial(F.scaled_mm, a.data, b.data.t(), scale_a, recipes[0], scale_b, recipes[1])
    return Call(partial(multiply, output_dtype=torch.bfloat16), lambda out: out)


def cublas_one_scale(a: Tensor, b: Tensor) -> Call:
    """Prepare a cuBLAS GEMM with one scale per operand: E4M3 a (M, K), b (N, K).

    Its speed is an upper bound for GEMMs with block scales.
    """
    one = torch.ones((), device=a.device)
    multiply = partial(torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one)
    return Call(partial(multiply, out_dtype=torch.bfloat16, use_fast_accum=True), None)


def vllm_experts(layer: GroupedExperts, x: Tensor, index: Tensor, weights: Tensor) -> Call:
    """Prepare vLLM's Triton kernels for experts with FP8 block scales, on the weights of `layer`."""
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    up, up_scale, down, down_scale = (getattr(layer, name).data for name in layer.weight_names)
    config = fp8_w8a8_moe_quant_config(w1_scale=up_scale, w2_scale=down_scale, block_shape=[BLOCK, BLOCK])
    forward = partial(fused_experts, x, up, down, weights, index.int(), quant_config=config)
    return Call(forward, lambda out: out)


def vllm_latent_attention(q: Tensor, latents: Tensor, lengths: Tensor, scale: float) -> Call:
    """Prepare vLLM's Triton kernels of latent attention for one query a sequence, with vLLM's number of splits.

    q: (B, 1, heads, 576). latents: (B, tokens, 576), tokens a multiple of 64, read in blocks of 64.
    """
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    batch, tokens, width = latents.shape
    heads, value = q.shape[2], 512
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = min(1 << max(0, tokens // 512 - 1).bit_length(), 2 * sms)
    blocks = latents.view(-1, 64, 1, width)
    table = torch.arange(len(blocks), dtype=torch.int32, device=q.device).view(batch, -1)
    out, sums = q.new_empty(batch, heads, value), q.new_empty(batch, heads)
    parts = q.new_empty((batch, heads, splits, value + 1), dtype=torch.float32)
    one = torch.ones((), device=q.device)

    def forward() -> Tensor:
        operands = (q[:, 0], blocks, blocks[..., :value], out, sums, table, lengths, parts, splits, scale, 64)
        decode_attention_fwd(*operands, k_scale=one, v_scale=one, is_mla=True)
        return out[:, None]

    return Call(forward, lambda found: found)


def humming_experts(up: PackedTensor, down: PackedTensor, x: Tensor, index: Tensor) -> Call:
    """Prepare Humming's experts with MXFP4 weights and FP8 activations in groups of 128, up to a result for each row.

    Rows are sorted beforehand, and the weighted sum is left out.
    """
    from humming.forward import may_process_input
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    flat = index.flatten().long()
    rows, count = len(flat), len(up.data)
    order = flat.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(rows, device=x.device)
    place = place.view_as(index).int()
    offsets = F.pad(torch.bincount(flat, minlength=count).cumsum(0), (1, 0))

    def prepared(weight: PackedTensor) -> tuple[Any, Callable]:
        n, k = weight.data.shape[1], 2 * weight.data.shape[2]
        with torch.device(x.device):
            layer = HummingLayer(
                shape_n=n,
                shape_k=k,
                weight_config={"quant_method": "mxfp4"},
                input_config={"dtype": "float8e4m3", "group_size": 128},
                pad_n_to_multiple=128,
                pad_k_to_multiple=128,
                num_experts=count,
                torch_dtype=torch.bfloat16,
            )
        layer.to(x.device)
        layer.weight.data.copy_(weight.data)
        layer.weight_scale.data.copy_(weight.scale)
        layer.transform()
        config, kind = layer.humming_config, "grouped_contiguous"
        options = {
            "compute_config": json.dumps({"gemm_type": kind}),
            "tuning_config": json.dumps(get_heuristics_config(config, shape_m=rows, gemm_type=kind, device=0)),
            "expert_layout": offsets,
        }
        out = x.new_empty(rows, n)

        def multiply(a: Tensor, groups: Tensor | None, tokens: Tensor | None) -> Tensor:
            layer(a, outputs=out, input_scale=tokens if groups is None else groups, **options)
            return out

        return config, multiply

    (first, project), (second, combine) = prepared(up), prepared(down)
    swiglu = {"activation_type": "binary_split", "activation_impl": "a / (1.0f + __expf(-a)) * b"}

    def chain() -> Tensor:
        h = project(*may_process_input(first, x, layout="scatter", scatter_idx=place))
        return combine(*may_process_input(second, h, **swiglu))

    return Call(chain, None)


class SonicExperts(nn.Module):
    """SonicMoE's experts in bfloat16, arXiv:2512.14080, with the weights of transformers'; it sorts tokens itself."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        gate, up = experts.gate_up_proj.detach().chunk(2, 1)
        self.gate_up_proj = nn.Parameter(torch.stack([gate, up], 2).flatten(1, 2))  # rows of gate and up take turns
        self.down_proj = nn.Parameter(experts.down_proj.detach().clone())

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import TC_topk_router_metadata_triton, _DownProjection, _UpProjection

        (tokens, top_k), experts, rows = index.shape, len(self.down_proj), index.numel()
        sizes, offsets = (index.new_empty(experts + more, dtype=torch.int32) for more in (0, 1))
        order, back, gather = (index.new_empty(rows, dtype=torch.int32) for _ in range(3))
        TC_topk_router_metadata_triton(index.int(), experts, sizes, offsets, gather, order, back)
        places = gather, order, back
        swiglu, up, down = ActivationType.SWIGLU, self.gate_up_proj.permute(1, 2, 0), self.down_proj.permute(1, 2, 0)
        # None: no biases, and as many experts for each token; False: keep what a backward reads
        projected = _UpProjection.apply(x, up, None, offsets, rows, top_k, *places, None, False, swiglu, False, False)
        last = offsets, tokens, top_k, *places, None, False, swiglu
        return _DownProjection.apply(*projected, down, None, weights, *last)


def in_plain_order(name: str, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return output and gradients of a `Pass`, those of gate and up in transformers' order if they are SonicMoE's."""
    if name != "sonic":
        return found
    *others, gate_up, down = found
    return *others, gate_up.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2), down


def transformers_experts(model: Model, *, device: str = "cuda") -> nn.Module:
    """Build transformers' experts in bfloat16 ("grouped_mm"), with normal weights that preserve variance."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": model.hidden, "moe_intermediate_size": model.intermediate, "num_experts": model.experts}
    config = Qwen3MoeConfig(**sizes, hidden_act="silu")
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.to(torch.bfloat16).to_empty(device=device)
    for weight in module.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return module


@torch.no_grad()
def dequantized_experts(layer: GroupedExperts, model: Model) -> nn.Module:
    """Build transformers' experts in bfloat16 with the dequantized weights of an FP8 layer."""
    up, up_scale, down, down_scale = (getattr(layer, name) for name in layer.weight_names)
    module = transformers_experts(model, device=up.device.type)
    for target, data, scale in ((module.gate_up_proj, up, up_scale), (module.down_proj, down, down_scale)):
        for expert, weight in enumerate(target):
            weight.copy_(dequantize(FP8Tensor(data[expert], scale[expert])))
    return module
