"""Uses of the public API that `make lint` checks with mypy, right ones with their types, wrong ones as errors.

Nothing here runs. An error that mypy does not find is an unused "type: ignore", and so an error itself.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor, nn

import fp8moe
from fp8moe import peft
from fp8moe.decode import GraphDecoder, NaNLogits
from fp8moe.distributed import ExpertParallel
from fp8moe.hf import (
    ModuleReport,
    RecordedRouting,
    load_model,
    on_policy,
    optimize,
    record_routing,
    register,
    replay_routing,
    report,
    unregister,
)
from fp8moe.weights import (
    DEFAULT_SKIP,
    CheckpointError,
    Format,
    convert_checkpoint,
    find_format,
    inspect_checkpoint,
    load_fp8_checkpoint,
    quantize_checkpoint,
    save_fp8_checkpoint,
)


def operations(x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    a = fp8moe.quantize_1x128(x, scale_format="ue8m0")
    b = fp8moe.quantize_128x128(weight)
    assert_type(fp8moe.quantize_128x128(weight, out=b), fp8moe.FP8Tensor)
    assert_type(a, fp8moe.FP8Tensor)
    assert_type(a.scale, Tensor)
    assert_type(fp8moe.quantize_128x1(x), fp8moe.FP8Tensor)
    packed = fp8moe.quantize_int4(weight, group=32)
    assert_type(fp8moe.quantize_mxfp4(weight), fp8moe.PackedTensor)
    assert_type(packed.tensor_scale, Tensor | None)
    assert_type(fp8moe.dequantize(packed), Tensor)
    assert_type(fp8moe.gemm(a, packed), Tensor)
    assert_type(fp8moe.experts(a, offsets, offsets, packed, packed), Tensor)
    assert_type(fp8moe.dequantize((a.data, a.scale), dtype=torch.bfloat16), Tensor)
    product = fp8moe.gemm(a, (b.data, b.scale), out_dtype=torch.float32)
    assert_type(fp8moe.gemm(a, b, bias=None, c=product, out=product), Tensor)
    assert_type(fp8moe.linear(x, (b.data, b.scale), bias=product), Tensor)
    assert_type(fp8moe.grouped_gemm((a.data, a.scale), b, offsets), Tensor)
    assert_type(fp8moe.grouped_gemm_masked(a, (b.data, b.scale), offsets, expected_m=3), Tensor)
    assert_type(fp8moe.experts(a, offsets, offsets, b, b, expert_map=offsets), Tensor)
    assert_type(fp8moe.experts_rows(offsets, offsets, b, b, out=offsets), Tensor)
    assert_type(fp8moe.experts_masked(a, offsets, b, b, expected_m=3), Tensor)
    assert_type(fp8moe.grouped_gemm_k((a.data, a.scale), b, offsets, out=product, accumulate=True), Tensor)
    assert_type(fp8moe.grouped_gemm_k(a, b, offsets, out=[product, product]), tuple[Tensor, ...])
    assert_type(fp8moe.mqa_logits(x, (a.data, a.scale), weight, offsets, offsets, fill_masked=False), Tensor)
    assert_type(fp8moe.mqa_logits(x, a, weight, offsets, offsets, max_range=64), Tensor)
    assert_type(fp8moe.paged_mqa_logits(x, x, weight, offsets, offsets, max_context_len=64), Tensor)
    assert_type(fp8moe.mqa_top_k(x, top_k=5, starts=offsets, ends=offsets), Tensor)
    assert_type(fp8moe.quantize_latents(x, value_size=512), Tensor)
    assert_type(fp8moe.latent_attention(x, x, offsets, value_size=512, scale=0.1, indices=offsets), Tensor)

    with fp8moe.batch_invariant() as nothing:
        assert_type(nothing, None)
    fp8moe.warm([(256, 128), (8, 96, 128, 2)], range(1, 65), bias=True, dtype=torch.float16)
    fp8moe.warm([(256, 128)], 64)  # type: ignore[arg-type]

    fp8moe.gemm(x, b)  # type: ignore[arg-type]
    fp8moe.gemm(a, b, product)  # type: ignore[call-arg]
    fp8moe.gemm(a, b, out_dtype="float32")  # type: ignore[arg-type]
    fp8moe.grouped_gemm(a, b)  # type: ignore[call-arg]
    fp8moe.grouped_gemm_masked(a, b, offsets, expected_m=2.5)  # type: ignore[arg-type]
    fp8moe.paged_mqa_logits(x, x, weight, offsets, offsets)  # type: ignore[call-arg]
    fp8moe.no_such_operation(x)  # type: ignore[attr-defined]


def layers(model: nn.Module, x: Tensor, index: Tensor) -> None:
    linear = fp8moe.FP8Linear(128, 256, bias=False, device="cuda", master_dtype=torch.float32)
    assert_type(fp8moe.FP8Linear.from_linear(nn.Linear(128, 256)), fp8moe.FP8Linear)
    assert_type(linear.train(), fp8moe.FP8Linear)
    assert_type(linear.weight, nn.Parameter)
    assert_type(linear.weight_scale_inv, nn.Parameter | None)
    assert_type(linear.forward(x), Tensor)
    experts = fp8moe.GroupedExperts(num_experts=8, hidden_size=128, intermediate_size=256)
    assert_type(fp8moe.GroupedExperts.from_experts(model, decode_capacity=8), fp8moe.GroupedExperts)
    assert_type(experts.forward(x, index, x, residual=x), Tensor)
    assert_type(experts.forward_rows(fp8moe.quantize_1x128(x), index), Tensor)
    assert_type(experts.down_proj, nn.Parameter)
    assert_type(fp8moe.replace_linears(model, skip=["lm_head", "*.gate"]), list[str])
    with fp8moe.refitting(model, names=["weight"]):
        assert_type(fp8moe.refit(model, [("weight", x)], strict=False), fp8moe.RefitReport)
    assert_type(fp8moe.refit(model, Path("checkpoint")).left, tuple[str, ...])
    indexer = fp8moe.FP8MQAIndexer(
        hidden_size=256, q_lora_rank=64, num_heads=32, head_dim=32, rope_head_dim=16, top_k=8
    )
    assert_type(indexer.forward(x, x, (x, x), index, index), Tensor)
    assert_type(ExpertParallel(method="gather", exact=True), ExpertParallel)

    fp8moe.FP8Linear("128", 256)  # type: ignore[arg-type]
    fp8moe.GroupedExperts(8, 128, 256)  # type: ignore[call-arg]
    experts.forward(x, index)  # type: ignore[call-arg]
    fp8moe.refit(model, 3)  # type: ignore[arg-type]
    fp8moe.replace_linears(model, skip=3)  # type: ignore[arg-type]
    ExpertParallel("gather")  # type: ignore[call-arg]


def checkpoints(model: nn.Module, directory: Path) -> None:
    save_fp8_checkpoint(model, directory, experts="fused")
    load_fp8_checkpoint(model, str(directory), ignore=["mtp.*"])
    quantize_checkpoint(directory, "fp8", skip=(*DEFAULT_SKIP, "lm_head"))
    assert_type(inspect_checkpoint(directory).problems, list[str])
    assert_type(find_format(directory), Format)
    assert_type(convert_checkpoint(directory, "blocks", requantize=True), float | None)
    try:
        load_fp8_checkpoint(model, directory)
    except CheckpointError as error:
        assert_type(error.problems, list[str])

    load_fp8_checkpoint(directory, model)  # type: ignore[arg-type]
    quantize_checkpoint(directory)  # type: ignore[call-arg]


def whole_models(directory: Path, ids: Tensor, requests: list[Mapping[str, Any]]) -> Iterator[Tensor]:
    assert_type(register(), None)
    assert_type(unregister(), None)
    model = load_model(directory, device="cuda")
    assert_type(report(model), list[ModuleReport])
    assert_type(optimize(model).restore(), None)
    with record_routing(model) as recorded:
        assert_type(recorded, RecordedRouting)
    assert_type(recorded.routing, Tensor | None)
    with on_policy(model):
        pass
    with replay_routing(model, torch.zeros(1)):
        pass
    decoder = GraphDecoder(model, batch_sizes=(1, 8), max_length=1024, prefill_chunk=512)
    assert_type(decoder.generate(ids, max_new_tokens=8, seed=[1, 2]), Tensor | tuple[Tensor, ...])
    GraphDecoder(model, max_length=1024, cache_dtype=torch.float8_e4m3fn, output_dtype=torch.float8_e4m3fn)
    decoder.generate(ids, max_new_tokens=8, return_routing=True)
    prefix = decoder.prefix(ids)
    for index, _ in decoder.run(requests, progress=True):
        assert_type(index, int)
    assert_type(decoder.stats().tokens_per_second, float | None)
    try:
        yield from decoder.stream(ids, max_new_tokens=8, prefix=prefix)
    except NaNLogits as error:
        assert_type(error.tokens, Tensor)
        assert_type(error.routing, Tensor | None)

    peft.register(None, model)
    merged, errors = peft.merge_and_unload(model, safe_merge=True)
    assert_type(merged, nn.Module)
    assert_type(list(errors), list[str])

    GraphDecoder(model)  # type: ignore[call-arg]
    decoder.generate(ids)  # type: ignore[call-arg]
    decoder.generate(ids, max_new_tokens="8")  # type: ignore[arg-type]
    decoder.stream(ids, max_new_tokens=8, top_k=0.5)  # type: ignore[arg-type]
