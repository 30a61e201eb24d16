import itertools
import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from tests.parallel_models import FORMS, NAMES, WAYS, bytes_read, config_of, digest, has_sizes, load, write_checkpoints
from tests.processes import in_processes

IDS = torch.arange(24).view(2, 12) * 5 % 128
LAYERS = {"MixtralForCausalLM": 2, "Qwen3MoeForCausalLM": 2, "DeepseekV3ForCausalLM": 1}
"""How many have experts."""
DECODED = {("MixtralForCausalLM", "fp8"), ("DeepseekV3ForCausalLM", "bf16")}
BOTH = DECODED | {("Qwen3MoeForCausalLM", "bf16")}
"""What has tensor and expert parallelism at once, too."""
CASES = [(*case, way) for case in itertools.product(NAMES, FORMS) for way in WAYS if case in BOTH or way != "tp and ep"]
DECODER_CASES = [case for case in CASES if case[:2] in DECODED]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("parallel")
    write_checkpoints(path)
    return path


@pytest.fixture(scope="module")
def found(root):
    """For each rank of two: case -> what `_measure` and `_decode` have found."""
    in_processes(_measure_all, root)
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(2)]


def _begin(root: Path) -> None:
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils import logging

    from fp8moe.hf import register

    register()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    FineGrainedFP8HfQuantizer.validate_environment = lambda *_, **__: None  # keep FP8 where there is no GPU


def _measure_all(root: Path) -> None:
    _begin(root)
    results = {}
    for name in NAMES:
        for form in FORMS:
            directory = root / f"{name}-{form}"
            alone, decoded = load(directory), (name, form) in DECODED
            alone_in_bf16 = load(directory, dtype=torch.bfloat16)
            expected, tokens = _logits(alone), _generated(_decoder(alone)) if decoded else None
            for way in (way for *case, way in CASES if case == [name, form]):
                results[f"{name} {form} {way}"] = found = _measure(
                    directory, config_of(way, directory), expected, decoded
                )
                if decoded:
                    found["decoder"]["alone"] = tokens
            in_bf16 = load(directory, dtype=torch.bfloat16, distributed_config=config_of("ep", directory))
            results[f"{name} {form} ep"]["same in bf16"] = _same(_logits(in_bf16), _logits(alone_in_bf16))
    results["refusals"] = _refusals(root)
    results["own tokens"] = _own_tokens(root)
    results["experts"] = _experts(root)
    (root / f"{dist.get_rank()}.json").write_text(json.dumps(results))


@torch.no_grad()
def _measure(directory, config, expected, decoded) -> dict:
    from fp8moe.hf import experts, optimize, report

    made, make = [], experts._make_cached
    experts._make_cached = lambda module: (made.append(module), make(module))[1]
    with bytes_read() as read:
        model = load(directory, distributed_config=config)
    for _ in range(2):
        logits = _logits(model)
    experts._make_cached = make
    reported = {row.runs_on for row in report(model)}
    hooked = {path for path, module in model.named_modules() if "forward" in module.__dict__}
    optimized = optimize(model)
    fused = _logits(model)
    optimized.restore()
    return {
        "error": _error(logits, expected),
        "fused error": _error(fused, expected),
        "fused": sorted({module.what for module in optimized}),
        "fused and hooked": sorted(hooked & {module.name for module in optimized}),
        "digest": digest(logits),
        "cached layers": len(made),
        "reported": sorted(reported),
        "read": {kind: _share(read, kind) for kind in ("mlp.experts", "block_sparse_moe.experts", "self_attn.q_proj")},
        "decoder": _decode(model) if decoded else None,
    }


@torch.no_grad()
def _logits(model, ids=IDS) -> torch.Tensor:
    return model(ids).logits


def _same(values, expected) -> float:
    """The share of values that are the same."""
    return (values == expected).float().mean().item()


def _error(values, expected) -> float:
    return ((values - expected).norm() / expected.norm()).item()


def _share(read: dict, kind: str) -> float | None:
    """Of the bytes of tensors with this in their names, how many were read."""
    counts = [count for name, count in read.items() if kind in name]
    return sum(count for count, _ in counts) / sum(size for _, size in counts) if counts else None


def _decoder(model):
    from fp8moe.decode import GraphDecoder

    return GraphDecoder(model, batch_sizes=(2,), max_length=32)


def _generated(decoder) -> tuple[list, list, list]:
    how = {"eos_token_id": (), "return_logprobs": True, "return_routing": True}
    tokens, logprobs, routing = decoder.generate(IDS, max_new_tokens=8, **how)
    return tokens.tolist(), logprobs[:, 0].tolist(), routing.tolist()


def _decode(model) -> dict:
    from fp8moe.decode import step

    rank, decoder = dist.get_rank(), _decoder(model)
    found = {"here": _generated(decoder)}
    torch.manual_seed(rank)
    found["sampled"] = decoder.generate(IDS, max_new_tokens=8, eos_token_id=(), do_sample=True).tolist()
    requests = [{"input_ids": IDS[0, :length], "max_new_tokens": 3, "do_sample": True} for length in (3, 5, 8, 2)]
    found["run"] = [(index, tokens.tolist()) for index, tokens in decoder.run(requests)]
    found["ranks"] = [dist.get_world_size(group) for group in decoder.ranks.groups]
    found["key heads"] = [decoder.ranks.key_heads, decoder.steps[2].metadata.ranks]
    found["unfused"] = decoder.capabilities.fused is None
    columns, step.columns_at_a_time = step.columns_at_a_time, lambda *_, **how: 4 + 2 * rank
    found["chunk"] = decoder.steps[2]._chunk(24, None)
    step.columns_at_a_time = columns
    return found


def _refusals(root: Path) -> dict:
    """Of shards that are no blocks, and of experts that cannot be shared; and how many tensors were read of each."""
    found = {}
    for directory, way in (("broken-fp8", "tp"), ("odd-bf16", "ep")):
        with bytes_read() as read:
            try:
                load(root / directory, distributed_config=config_of(way, root / directory))
            except ValueError as error:
                found[directory] = str(error), sum(count for count, _ in read.values())
    return found


def _own_tokens(root: Path) -> dict:
    """Logits of prompts of its own on each rank, with experts that `parallelize_module` has spread."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from fp8moe.distributed import ExpertParallel
    from fp8moe.hf import optimize

    rank, found = dist.get_rank(), {}
    mine = IDS[rank : rank + 1, : 12 - 5 * rank]
    for form in FORMS:
        model = load(root / f"Qwen3MoeForCausalLM-{form}", dtype=torch.bfloat16)
        expected = _logits(model, mine)
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"model.layers.*.mlp.experts": ExpertParallel()})
        assert model.model.layers[0].mlp.experts.gate_up_proj.to_local().shape[0] == 4
        found[form] = _same(_logits(model, mine), expected)
        model = load(root / f"Qwen3MoeForCausalLM-{form}", dtype=torch.float32)
        expected = _logits(model, mine)
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"model.layers.*.mlp.experts": ExpertParallel()})
        optimize(model)
        found[f"{form} fused"] = _error(_logits(model, mine), expected)
    return found


@torch.no_grad()
def _experts(root: Path) -> dict:
    """Rows that a rank makes room for, and experts that the tiles are chosen for, of 600 tokens with two each."""
    from fp8moe.distributed import local

    theirs, calls = local.experts_partial, []

    def spy(*arguments, **options):
        calls.append(arguments[-1])
        return theirs(*arguments, **options)

    directory = root / "Qwen3MoeForCausalLM-fp8"
    model = load(directory, distributed_config=config_of("ep", directory))
    torch.manual_seed(0)
    index = torch.stack([torch.randperm(8)[:2] for _ in range(600)])
    local.experts_partial = spy
    experts, arguments = model.model.layers[0].mlp.experts, (torch.randn(600, 256), index, torch.rand(600, 2))
    experts(*arguments)
    local.experts_partial = theirs
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(ValueError, match="experts_implementation: expected 'fp8moe' for experts .* got 'grouped_mm'"):
        experts(*arguments)
    return {name: getattr(calls[0], name) for name in ("num_rows", "num_experts")}


@pytest.mark.parametrize(("name", "form", "way"), CASES)
def test_logits(found, name, form, way):
    results = [rank[f"{name} {form} {way}"] for rank in found]
    assert results[0]["digest"] == results[1]["digest"]
    for result in results:
        # In TP, sums in another order change FP8 codes of what follows now and then.
        assert result["error"] < 1e-3 and result["fused error"] < 1e-3
        assert result["fused"] and result["fused and hooked"] == []
        # transformers' tensor parallelism wraps the norms of heads, and q, k and v.
        heads = any("heads and cache" in what for what in result["fused"])
        assert heads == ("Deepseek" not in name and (way == "ep" or "Qwen3" not in name))
        assert way == "ep" or not any("as one" in what for what in result["fused"]) or "Deepseek" in name
        assert result["cached layers"] == LAYERS[name]
        assert "refused" not in result["reported"] and "transformers" not in result["reported"]


@pytest.mark.parametrize(("name", "form"), [case[:2] for case in CASES if case[2] == "ep"])
def test_experts_alone_give_the_bits_of_one_process(found, name, form):
    result = found[0][f"{name} {form} ep"]
    assert result["same in bf16"] >= 0.9999 and result["error"] < 1e-6


@pytest.mark.parametrize(("name", "form", "way"), CASES)
def test_a_rank_reads_its_shard_of_the_files(found, name, form, way):
    for rank in found:
        read = rank[f"{name} {form} {way}"]["read"]
        experts = [share for kind, share in read.items() if "experts" in kind and share is not None]
        assert experts == [0.5]
        if "Deepseek" not in name:
            assert read["self_attn.q_proj"] == (1 if way == "ep" else 0.5)


@pytest.mark.parametrize(("name", "form", "way"), DECODER_CASES)
def test_decoder(found, name, form, way):
    results = [rank[f"{name} {form} {way}"]["decoder"] for rank in found]
    for result in results:
        assert result["ranks"] == [2] and not result["unfused"]
        assert result["key heads"] == [2 if way != "ep" and "Deepseek" not in name else 1] * 2
        assert result["chunk"] == 4
        assert torch.tensor(result["here"][1]).allclose(torch.tensor(result["alone"][1]), atol=1e-2)
    for what in ("here", "sampled", "run"):
        assert results[0][what] == results[1][what]
    assert results[0]["sampled"] != [row[:20] for row in results[0]["here"][0]]
    if way == "ep":
        assert results[0]["here"][::2] == results[0]["alone"][::2]


def test_shards_that_are_no_blocks_are_refused_on_all_ranks(found):
    sentence, read = found[0]["refusals"]["broken-fp8"]
    assert sentence == (
        "distributed_config: 2 ranks cannot share the 2 x 128 rows of model.layers.0.mlp.experts.gate_up_proj in whole "
        "blocks of 128; expected a tp_size of 1, or expert parallelism, which keeps each expert whole"
    )
    assert read == 0
    assert found[0]["refusals"] == found[1]["refusals"]


def test_experts_that_cannot_be_shared_are_refused_on_all_ranks(found):
    sentence, read = found[0]["refusals"]["odd-bf16"]
    assert "7 experts across 2" in sentence and read == 0


def test_experts_of_a_model_take_tokens_of_each_rank(found):
    for rank in found:
        for form in FORMS:
            assert rank["own tokens"][form] >= 0.9999
            assert rank["own tokens"][f"{form} fused"] < 1e-3


def test_tiles_and_scratch_are_those_of_a_rank(found):
    assert found[0]["experts"] == found[1]["experts"] == {"num_rows": 750, "num_experts": 8}


def _four(root: Path) -> None:
    from transformers.distributed import DistributedConfig

    _begin(root)
    directory, rank = root / "Qwen3MoeForCausalLM-bf16", dist.get_rank()
    mine = IDS[rank // 2 :][:1, : 12 - rank // 2]  # ranks of one tensor-parallel group have the same tokens
    config = DistributedConfig(tp_size=2, fsdp_size=2, ep_size=4)
    expected = _logits(load(directory), mine)
    assert _error(_logits(load(directory, distributed_config=config), mine), expected) < 1e-3


@pytest.mark.skipif(not has_sizes(), reason="transformers shards whole experts over TP and FSDP from 5.21 on")
def test_ranks_with_other_batches_share_experts(root):
    in_processes(_four, root, world=4)


def test_sizes_that_work():
    from fp8moe.hf import parallel

    def weights(*sizes):
        return [parallel._ShardedWeight(f"{i}.weight", "rows", size, 1, 8, False) for i, size in enumerate(sizes)]

    for sizes, expected in (((1024, 512), "1 or 2 or 4"), ((1024, 1024 + 256), "1 or 2"), ((1024, 200), "1")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parallel, "_sharded_weights", lambda _, sizes=sizes: weights(*sizes))
            with pytest.raises(ValueError, match=f"expected a tp_size of {expected}$"):
                parallel.check_whole_blocks(None)


@pytest.mark.skipif(not has_sizes(), reason="needs EPImplementationInterface, of transformers 5.21")
def test_auto_is_fp8moe_for_its_experts_alone(registered, monkeypatch):
    from transformers.distributed import expert_parallel

    from fp8moe.hf import parallel

    class Experts(torch.nn.Module):
        def __init__(self, implementation):
            super().__init__()
            self.config = type("Config", (), {"_experts_implementation": implementation})()

    implementations, spread = expert_parallel.EPImplementationInterface(), []
    with pytest.raises(ValueError, match="experts_implementation: expected 'fp8moe'"):
        implementations["fp8moe"](Experts("grouped_mm"), None, None)
    monkeypatch.setattr(expert_parallel.EPImplementation, "__init__", lambda self, *_: None)
    monkeypatch.setattr(expert_parallel.EPImplementation, "shares_batch", True, raising=False)
    monkeypatch.setattr(parallel, "spread", lambda *arguments: spread.append(arguments))
    theirs = implementations["auto"](Experts("grouped_mm"), None, None)
    assert type(theirs) is expert_parallel.AutoEP and not spread
    ours = implementations["auto"](experts := Experts("fp8moe"), "ep mesh", "tp mesh")
    assert type(ours) is implementations["fp8moe"] and spread == [(experts, "ep mesh", True)]


def test_visible_rows_are_those_of_the_key_heads_here():
    from transformers import MixtralConfig
    from transformers.masking_utils import causal_mask_function

    from fp8moe.decode import attention

    zero = torch.zeros(2, dtype=torch.int64)
    config = MixtralConfig(num_key_value_heads=4)
    builder = attention.AttentionMetadataBuilder(zero, zero, 64, ranks=2)
    model = type("Model", (), {"config": config})()
    with attention.used_by(model, None, builder):
        metadata = attention.attention_metadata(2, 1, mask_function=causal_mask_function, config=config)
    assert metadata.key_heads == 2


def _replay(root: Path) -> None:
    """Backwards in `replay_routing`, whole and on two ranks, against masters."""
    from fp8moe import GroupedExperts
    from fp8moe.hf import record_routing, replay_routing

    _begin(root)
    directory = root / "Qwen3MoeForCausalLM-bf16"
    whole = load(directory).train()
    for layer in whole.model.layers:
        layer.mlp.experts = GroupedExperts.from_experts(layer.mlp.experts, master_dtype=torch.float32)
    with record_routing(whole) as recorded:
        _logits(whole)

    def gradients(model) -> list[torch.Tensor]:
        with replay_routing(model, recorded.routing):
            model(IDS).logits.square().mean().backward()
        found = [parameter.grad for layer in model.model.layers for parameter in layer.mlp.experts.parameters()]
        return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in found]

    expected = gradients(whole)
    for way in WAYS:
        model = load(directory, distributed_config=config_of(way, directory)).train()
        if way == "tp":
            with pytest.raises(ValueError, match="^Qwen3MoeExperts cannot be trained .*: expected placements"):
                gradients(model)
            continue
        for value, other in zip(gradients(model), expected, strict=True):
            assert _error(value, other) < 1e-2  # partial sums may round to another FP8 code


def test_gradients_in_a_replay_of_routing(root):
    in_processes(_replay, root)
