"""New weights under CUDA graphs: the graphs that were captured give the tokens of a model made with these weights."""

import pytest
import torch

from fp8moe import FP8Tensor, GroupedExperts, quantize_128x128, refit, refitting, replace_linears
from fp8moe.decode import GraphDecoder
from fp8moe.hf import register
from fp8moe.runtime import jit
from tests.small_checkpoints import Model, same, unquantized
from tests.transformers_models import BASE, MLA, modules_named, prompts, random_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu

MODELS = {
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 8, "num_key_value_heads": 2, "head_dim": 32},
    "deepseek_v3": MLA | {"moe_intermediate_size": 128},
}


def make_model(name, experts, values=None):
    """In FP8; experts "fp8moe": those of transformers, with an FP8 copy beside them."""
    register()
    options = BASE | {"hidden_size": 128, "max_position_embeddings": 128, "initializer_range": 0.2} | MODELS[name]
    model = random_model(name, options, dtype=torch.bfloat16, experts_implementation="fp8moe").cuda()
    if values is not None:
        model.load_state_dict(values)
    replace_linears(model, skip=("lm_head", "gate"))
    if experts == "grouped":
        for module in modules_named(model, "mlp"):
            if hasattr(module, "experts"):
                module.experts = GroupedExperts.from_experts(module.experts).eval()
    return model


@pytest.mark.parametrize("experts", ["grouped", "fp8moe"])
@pytest.mark.parametrize("name", MODELS)
def test_captured_graphs_go_on_with_new_weights(name, experts):
    options = BASE | {"hidden_size": 128, "max_position_embeddings": 128, "initializer_range": 0.2} | MODELS[name]
    plain = random_model(name, options, dtype=torch.bfloat16).cuda()
    values = {key: torch.randn_like(value) * 0.2 for key, value in plain.state_dict().items()}
    model, fresh = make_model(name, experts), make_model(name, experts, values)
    decoder = GraphDecoder(model, batch_sizes=(1, 3), max_length=64)
    expected = GraphDecoder(fresh, batch_sizes=(1, 3), max_length=64)
    batches = [prompts(1, 7, device="cuda"), prompts(3, 20, device="cuda")]
    for ids in batches * 3:  # short prompts have graphs from the second call on
        before = decoder.generate(ids, max_new_tokens=16)
    prefix = decoder.prefix(batches[0][0])
    addresses = {key: value.data_ptr() for key, value in model.state_dict().items()}
    graphs, kernels = {size: step.graph for size, step in decoder.steps.items()}, {*jit._kernels}

    with refitting(model):
        refit(model, values)
        for call in (decoder.generate, model.generate):
            with pytest.raises(RuntimeError, match="are being replaced by fp8moe.refit"):
                call(batches[0], max_new_tokens=2)
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == addresses
    for key, value in fresh.state_dict().items():
        assert torch.equal(model.state_dict()[key].view(torch.uint8), value.view(torch.uint8)), key
    for ids in batches:
        tokens = decoder.generate(ids, max_new_tokens=16)
        assert torch.equal(tokens, expected.generate(ids, max_new_tokens=16))
    assert not torch.equal(tokens, before)
    assert {size: step.graph for size, step in decoder.steps.items()} == graphs
    assert {*jit._kernels} == kernels
    with pytest.raises(ValueError, match="prefix: the model's weights were refitted since it was made"):
        decoder.generate(batches[0], max_new_tokens=2, prefix=prefix)


def test_memory_and_reads_of_the_device():
    """Scratch is no more than the largest tensor, and the host waits for the device once."""
    experts = GroupedExperts(num_experts=8, hidden_size=1024, intermediate_size=512, device="cuda")
    tensors = {
        f"experts.{name}": torch.randn(value.shape, device="cuda").bfloat16()
        for name, value in experts.state_dict().items()
        if not name.endswith("_scale_inv")
    }
    model = torch.nn.ModuleDict({"experts": experts})
    refit(model, tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    refit(model, tensors)
    assert torch.cuda.max_memory_allocated() - before <= max(value.nbytes for value in tensors.values())
    with refitting(model), torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            refit(model, tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_what_a_gpu_quantizes_has_the_bits_of_a_cpu():
    """Names that came before, too: the second time only their kernels are launched."""
    model, other = Model().cuda(), Model()
    for tensors in (unquantized(1), unquantized(2), unquantized(3, fused=True), unquantized(4, fused=True)):
        for source in (tensors, {name: value.cuda() for name, value in tensors.items()}):
            refit(model, {name: torch.zeros_like(value) for name, value in source.items()})
            refit(model, source)
            refit(other, tensors)
            same({name: value.cpu() for name, value in model.state_dict().items()}, other.state_dict())
    tensors["layers.0.experts.gate_up_proj"][1, 3, 3] = torch.nan
    with pytest.raises(ValueError, match="layers.0.experts.gate_up_proj: holds a NaN or an infinity"):
        refit(model, tensors)


def test_names_that_came_before_are_checked_again():
    model, tensors = Model().cuda(), {name: value.cuda() for name, value in unquantized(1).items()}
    name = next(name for name in tensors if name.endswith("experts.1.up_proj.weight"))
    for _ in range(2):
        refit(model, tensors)
    right = {key: value.clone() for key, value in model.state_dict().items()}
    versions = {key: value._version for key, value in model.state_dict(keep_vars=True).items()}
    storage = torch.empty(tensors[name].numel() + 1, dtype=tensors[name].dtype, device="cuda")
    at_no_multiple = storage[1:].view(tensors[name].shape).copy_(tensors[name])
    in_columns = tensors[name].t().contiguous().t()
    for value in (at_no_multiple, in_columns, tensors[name].float(), tensors[name].cpu()):
        refit(model, {key: torch.zeros_like(value) for key, value in tensors.items()})
        refit(model, tensors | {name: value})
        same(model.state_dict(), right)
    assert all(value._version > versions[key] for key, value in model.state_dict(keep_vars=True).items())

    with pytest.raises(ValueError, match=f"{name}: came before"):
        refit(model, [*tensors.items(), (name, tensors[name])])
    with pytest.raises(ValueError, match=f"{name}: shape"):
        refit(model, tensors | {name: tensors[name][:-1]})
    with pytest.raises(ValueError, match=f"{name}: holds a NaN or an infinity"):
        refit(model, tensors | {name: tensors[name].index_fill(0, torch.zeros(1, dtype=int, device="cuda"), torch.nan)})
    quantized = Model().cuda()
    refit(quantized, tensors)
    for _ in range(2):  # in FP8 after bfloat16
        refit(model, quantized)
        same(model.state_dict(), right)
    model = model.cpu().cuda()  # in other memory
    refit(model, tensors)
    same(model.state_dict(), right)


def test_a_kernel_that_writes_to_a_tensor_counts_a_version():
    x = torch.randn(256, 256, device="cuda")
    out = FP8Tensor(*(torch.empty_like(value) for value in quantize_128x128(x)))
    versions = [value._version for value in out]
    quantize_128x128(x, out=out)
    assert [value._version for value in out] == [version + 1 for version in versions]
