"""A model that the ranks of benchmarks.node hold together: two processes, and what they compute beside one alone."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh

from benchmarks import decode, node, whole_models
from fp8moe.layers.parameters import local
from tests.processes import in_processes

TINY = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
}
SHARDED = {  # the dimension
    "q_b_proj.weight": 0,
    "kv_b_proj.weight": 0,
    "o_proj.weight": 1,
    "layers.0.mlp.gate_proj.weight": 0,
    "layers.0.mlp.up_proj.weight": 0,
    "layers.0.mlp.down_proj.weight": 1,
    "experts.gate_up_proj": 0,
    "experts.down_proj": 0,
    "lm_head.weight": 0,
}
IDS = torch.arange(24).view(2, 12) * 5 % 96


def begin():
    model_type, options = whole_models.CONFIGS["deepseek-v3"]
    whole_models.CONFIGS["tiny"] = model_type, options | TINY


def rows(path):
    """Those of the part, tiny and without what only GPUs have."""
    node.PROMPT, node.ROOM, decode.MANY = 12, 20, 5
    node.AT_ONCE, node.MANY = 24, decode.MANY
    node.torch.cuda.mem_get_info = lambda: (5e9, 6e9)
    kernels = [("gemm", 6), ("combine", 1), ("ncclDevKernel_AllReduce", 3), ("dispatch", 1)]
    node.timing.profile = lambda work: work() or [SimpleNamespace(name=name, duration_ns=ns) for name, ns in kernels]
    found = list(node.measure((1, 4), **TINY))
    (path / f"rows{dist.get_rank()}.json").write_text(json.dumps(found))


@torch.no_grad()
def measure(path):
    rows(path)
    begin()
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    alone = whole_models.build("tiny", device="cpu")
    model = whole_models.build("tiny", device="cpu", mesh=mesh)
    expected = dict(alone.named_parameters())
    parts, sizes = {}, {}
    for name, value in model.named_parameters():
        value, whole = local(value).float(), expected[name].float()
        dims = [dim for dim in range(value.dim()) if value.shape[dim] < whole.shape[dim]]
        sizes[name] = [value.numel(), whole.numel()]
        for dim in dims:
            whole = whole.chunk(2, dim)[rank]
        parts[name] = [dims, bool(value.equal(whole))]
    hit = decode.experts_hit(model, IDS)
    size = decode.step_bytes(model, IDS, 1000), sum(local(value).nbytes for value in model.parameters())
    embedding = model.get_input_embeddings().weight.nbytes
    logits, want = (one.float()(IDS).logits for one in (model, alone))  # where bfloat16 would hide small errors
    found = {
        "parts": parts,
        "sizes": sizes,
        "error": ((logits - want).norm() / want.norm()).item(),
        "logits": logits.double().sum().item(),
        "shape": list(logits.shape),
        "hit": list(hit.values()),
        "hit alone": list(decode.experts_hit(alone, IDS).values()),
        "bytes": size,
        "experts": [local(value).nbytes for value in model.model.layers[1].mlp.experts.parameters()],
        "embedding": embedding,
    }
    (path / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("node")
    in_processes(measure, path)
    ranks = [json.loads((path / f"{rank}.json").read_text()) for rank in range(2)]
    return [found | {"rows": json.loads((path / f"rows{rank}.json").read_text())} for rank, found in enumerate(ranks)]


def test_parameters_are_parts_of_the_whole_model(found):
    for rank in found:
        for name, (dims, equal) in rank["parts"].items():
            kind = name.removesuffix("_scale_inv")
            expected = [dim for end, dim in SHARDED.items() if kind.endswith(end)]
            assert dims == expected and equal, name
    assert found[0]["sizes"] == found[1]["sizes"]
    for name, (mine, whole) in found[0]["sizes"].items():
        sharded = any(name.removesuffix("_scale_inv").endswith(end) for end in SHARDED)
        assert mine * (1 + sharded) == whole, name


def test_logits_are_those_of_the_whole_model(found):
    assert found[0]["logits"] == found[1]["logits"] and found[0]["shape"] == [2, 12, 96]
    assert found[0]["error"] < 1e-3


def test_the_floor_counts_what_this_rank_reads(found):
    for rank in found:
        experts = len(rank["hit"]) * sum(rank["experts"])
        read = sum(sum(rank["experts"]) * hit // 4 for hit in rank["hit"])
        bytes_read, bytes_here = rank["bytes"]
        assert bytes_read == bytes_here - rank["embedding"] - experts + read + 1000
    both = [sum(pair) for pair in zip(found[0]["hit"], found[1]["hit"], strict=True)]
    assert both == found[0]["hit alone"] == found[1]["hit alone"]


def test_rows_are_those_of_the_whole_model_and_all_ranks(found):
    first, second = (rank["rows"] for rank in found)
    assert first == second
    assert [(row["what"], row["batch"]) for row in first] == [(what, n) for n in (1, 4) for what in ("node", "traffic")]
    one, traffic, four, _ = first
    assert (one["same"], four["same"]) == (True, None)  # only prompts of few tokens are read twice
    assert one["x_floor"] == pytest.approx(one["ms"] / one["floor_ms"])
    assert 0 < one["floor_ms"] < four["floor_ms"] and one["free_gb"] == 5
    assert traffic["share"] == pytest.approx(4 / 11)
