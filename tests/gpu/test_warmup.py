"""After `fp8moe warmup` or `fp8moe.warm` nothing is compiled on a GPU."""

import pytest
import torch

import fp8moe
from fp8moe.cli import main
from fp8moe.decode import GraphDecoder
from fp8moe.kernels.gemm.warmup import families
from fp8moe.layers.experts import PACKED_WEIGHTS
from fp8moe.runtime import compilers, config, jit
from tests.experts_cases import packed
from tests.transformers_models import BASE, random_model, write_checkpoints

pytestmark = pytest.mark.gpu

# No other test has plans of these sizes.
SIZES = {"hidden_size": 384, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024}
EXPERTS = {"intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 8}
LENGTHS = (*range(1, 40), 64, 65, 128, 129, 200, 300, 511, 690)


def test_nothing_is_compiled_any_more(tmp_path, monkeypatch, registered):
    from fp8moe.hf import load_model

    _, directory = write_checkpoints(random_model("qwen3_moe", BASE | SIZES | EXPERTS), tmp_path)
    kernels = tmp_path / "kernels"
    options = ["--batch-sizes", "1", "4", "--max-length", "700", "--tokens", "700", "--output", str(kernels)]
    assert main(["warmup", str(directory), *options]) == 0

    compiled = []
    compile_source = compilers.compile_source
    monkeypatch.setattr(compilers, "compile_source", lambda *call: compiled.append(call[1]) or compile_source(*call))
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setenv("FP8MOE_CACHE_DIR", str(kernels))
    config.reload()
    others = dict(families)  # of the models of other tests, which the decoder would compile for too
    families.clear()
    try:
        model = load_model(directory, device="cuda")
        decoder = GraphDecoder(model, batch_sizes=(1, 4), max_length=700)
        for length in LENGTHS:
            for rows in (1, 4):
                tokens = torch.ones(rows, length, dtype=torch.int64, device="cuda")
                decoder.generate(tokens, max_new_tokens=2, pad_token_id=0, eos_token_id=())
            with torch.no_grad():
                model(input_ids=tokens[:1])
        assert compiled == [] and len(jit._kernels) > 20
    finally:
        families.update(others)
        monkeypatch.undo()
        config.reload()


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_scales": "channel"}, *({"weight_format": form} for form in PACKED_WEIGHTS)],
)
def test_calls_after_warm_compile_nothing(tmp_path, monkeypatch, options):
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setenv("FP8MOE_CACHE_DIR", str(tmp_path))
    config.reload()
    hidden, size = (768, 256) if "weight_format" in options else (752, 208)
    fp8moe.warm([(880, hidden), (8, size, hidden, 2)], [2000], **options)
    assert len(jit._kernels) > 8
    # The constructors quantize random weights.
    linear = fp8moe.FP8Linear(hidden, 880, bias=False, device="cuda", **options if "weight_scales" in options else {})
    experts = fp8moe.GroupedExperts(num_experts=8, hidden_size=hidden, intermediate_size=size, device="cuda", **options)
    state, form = experts.state_dict(), experts.weight_format
    if form == "fp8":
        up, down = ((state[name], state[f"{name}_scale_inv"]) for name in ("gate_up_proj", "down_proj"))
    else:
        up, down = (packed(state, name, form) for name in ("gate_up_proj", "down_proj"))
    loaded = len(jit._kernels)
    with torch.no_grad():
        for tokens in (*range(1, 40), 64, 65, 128, 129, 500, 1000, 1999):
            x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
            index = torch.randint(0, 8, (tokens, 2), device="cuda")
            weights = torch.rand(tokens, 2, device="cuda")
            linear(x), experts(x, index, weights)
            fp8moe.experts(fp8moe.quantize_1x128(x), index.int(), weights.bfloat16(), up, down)
    assert len(jit._kernels) == loaded
    monkeypatch.undo()
    config.reload()
