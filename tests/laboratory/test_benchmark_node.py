"""benchmarks.node: a model whose experts are spread before they have values; everything but the timing."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import node, whole_models
from tests.processes import in_processes

pytest.importorskip("transformers")

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 64}


def build_shrunk(free_bytes):
    model_type, options = whole_models.CONFIGS[node.MODEL]
    whole_models.CONFIGS[node.MODEL] = model_type, options | SIZES
    torch.cuda.mem_get_info = lambda: (free_bytes, free_bytes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return whole_models.build(node.MODEL, layers=2, device="cpu", prepare=lambda model: node.spread(model, mesh))


def run_on_cpus():
    model = build_shrunk(1 << 30)
    experts = model.model.layers[1].mlp.experts
    assert experts.gate_up_proj.shape == (8, 256, 128) and experts.gate_up_proj.to_local().shape == (4, 256, 128)
    assert not any(parameter.is_meta for parameter in model.parameters())
    whole, used = node.read_bytes(model, 10**6), node.read_bytes(model, 1)
    local = 2 * 4 * (256 * 128 + 128 * 128 + 4 * (2 + 1))
    assert whole - used == pytest.approx(0.75 * local)  # of eight experts a token has two
    tokens, logits = torch.arange(10)[None], {}
    for method in ("gather", "replicated"):
        node.set_method(model, method)
        with torch.no_grad():
            logits[method] = model(tokens).logits
    assert logits["gather"].isfinite().all() and logits["gather"].std() > 0
    assert logits["gather"].equal(logits["replicated"])  # the ranks have the same tokens


def refuse():
    with pytest.raises(ValueError, match=r"^qwen3-235b-a22b: 0 GB of weights on each rank, its GPU has 0 GB free$"):
        build_shrunk(1000)


def test_experts_are_spread_before_they_have_values():
    in_processes(run_on_cpus)


def test_what_no_gpu_holds_is_refused_before_it_is_made():
    in_processes(refuse)
