"""Models in wrappers at every entry that reads or replaces weights by name: as without the wrapper, or refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8moe import refit, replace_linears
from fp8moe.weights import load_fp8_checkpoint, save_fp8_checkpoint
from fp8moe.weights.place import state_of
from tests.small_checkpoints import same

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from fp8moe.decode import GraphDecoder  # noqa: E402
from fp8moe.hf import load_model  # noqa: E402
from fp8moe.peft import register  # noqa: E402
from tests.decode_models import tiny_mixtral  # noqa: E402
from tests.transformers_models import write_checkpoints  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")

TINY = {"num_hidden_layers": 1, "num_local_experts": 2, "hidden_size": 32, "intermediate_size": 32}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
IDS = torch.arange(3, 9)[None]


def in_place(model):
    model.compile(backend="eager")
    return model


def compiled_layer(model):
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    return model


def adapted(model, **targets):
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **targets)
    fp8 = any(value.dtype == torch.float8_e4m3fn for value in model.parameters())
    return peft.get_peft_model(model, register(config, model) if fp8 else config, autocast_adapter_dtype=False).eval()


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


WRAPPERS = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": in_place,
    "compiled layer": compiled_layer,
    "DDP": lambda model: nn.parallel.DistributedDataParallel(model, init_sync=False),
    "LoRA of linears": lambda model: adapted(model, target_modules=["q_proj"]),
    "LoRA of experts": lambda model: adapted(model, target_modules=[], target_parameters=EXPERTS),
    "FSDP2": sharded,
}
"""Wrappers of a model, in FP8 or not."""

LEFT_OUT = r"lora_A.default.weight \(and \d+ more\) of peft would be left out; merge_and_unload"
HELD = "model: expected modules to replace that no other module has taken over, got some in "
LORA = ("LoRA of linears", "LoRA of experts")
REFUSED = (
    {("save", name): f"model: base_model.*{LEFT_OUT}" for name in LORA}
    | {("source", name): f"tensors: base_model.*{LEFT_OUT}" for name in LORA}
    | {("replace", name): f"{HELD}PeftModelForCausalLM" for name in LORA}
    | {("replace", "DDP"): f"{HELD}DistributedDataParallel"}
    | {("replace", "FSDP2"): "q_proj.weight: expected a whole weight to quantize, got a DTensor"}
)


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The FP8 checkpoints of two models of one shape."""
    directory, model = tmp_path_factory.mktemp("wrapped"), tiny_mixtral(**TINY).bfloat16()
    _, first = write_checkpoints(model, directory / "first")
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * 0.2)
    return first, write_checkpoints(model, directory / "second")[1]


def values(model):
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state_of(model).items()
    }


def save(wrap, first, second, directory):
    save_fp8_checkpoint(wrap(load_model(first)), directory / "saved")
    same(load_model(directory / "saved").state_dict(), load_model(first).state_dict())


def load(wrap, first, second, directory):
    model = wrap(load_model(first))
    load_fp8_checkpoint(model, second)
    same(values(model), load_model(second).state_dict())


def target(wrap, first, second, directory):
    model = wrap(load_model(first))
    report = refit(model, load_model(second))
    same(values(model), load_model(second).state_dict())
    assert {*report.updated} == {*load_model(second).state_dict()} and not report.left


def source(wrap, first, second, directory):
    model = load_model(first)
    refit(model, wrap(load_model(second)))
    same(model.state_dict(), load_model(second).state_dict())


def replace(wrap, first, second, directory):
    model = wrap(tiny_mixtral(**TINY))
    plain = tiny_mixtral(**TINY)
    assert replace_linears(model, skip=("lm_head", "model.layers.0.self_attn.k_proj")) == replace_linears(
        plain, skip=("lm_head", "model.layers.0.self_attn.k_proj")
    )
    same(values(model), plain.state_dict())
    assert torch.equal(model(IDS).logits, plain(IDS).logits)


def decode(wrap, first, second, directory):
    wanted = GraphDecoder(load_model(first), max_length=32).generate(IDS, max_new_tokens=4)
    model = wrap(load_model(first))
    assert torch.equal(GraphDecoder(model, max_length=32).generate(IDS, max_new_tokens=4), wanted)


ENTRIES = (save, load, target, source, replace, decode)
CASES = [
    (entry, wrapper)
    for entry in ENTRIES
    for wrapper in WRAPPERS
    if entry is not decode or wrapper not in ("compiled in place", "compiled layer")  # which take half a minute each
]


@pytest.mark.parametrize(("entry", "wrapper"), CASES, ids=lambda value: getattr(value, "__name__", value))
@torch.no_grad()
def test_a_wrapped_model(entry, wrapper, checkpoints, group, tmp_path):
    message = REFUSED.get((entry.__name__, wrapper))
    if message is None:
        entry(WRAPPERS[wrapper], *checkpoints, tmp_path)
        return
    with pytest.raises(ValueError, match=message):
        entry(WRAPPERS[wrapper], *checkpoints, tmp_path)
    assert not (tmp_path / "saved").exists()


def random_factors(model, seed):
    torch.manual_seed(seed)
    for name, value in model.named_parameters():
        if "lora_" in name:
            value.data.normal_(std=0.2)
    return model


@torch.no_grad()
def test_adapters_are_in_the_weights_or_beside_them(checkpoints, tmp_path):
    """Merged they are saved and given away, and nothing is loaded under them; beside the weights they stay."""
    first, second = checkpoints
    model, plain = (
        random_factors(adapted(load_model(first), target_modules=["q_proj"], target_parameters=EXPERTS), 0)
        for _ in range(2)
    )
    factors = {name: value.clone() for name, value in model.named_parameters() if "lora_" in name}
    before = model(IDS).logits
    refit(model, second)
    load_fp8_checkpoint(model, first)
    assert all(torch.equal(model.get_parameter(name), value) for name, value in factors.items())
    assert torch.equal(model(IDS).logits, before)

    model.merge_adapter()
    save_fp8_checkpoint(model, tmp_path / "merged")
    merged, target = load_model(tmp_path / "merged"), load_model(second)
    same(merged.state_dict(), plain.merge_and_unload().state_dict())
    refit(target, model)
    same(target.state_dict(), merged.state_dict())
    for entry in (refit, load_fp8_checkpoint):
        with pytest.raises(
            ValueError, match="^model: base_model.*merged into weights that would be replaced; call unmerge"
        ):
            entry(model, second)
    same(values(model), merged.state_dict())


def test_wrappers_that_hold_something_of_their_own_are_refused(checkpoints, tmp_path):
    model = peft.get_peft_model(
        load_model(checkpoints[0]), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    ).eval()
    with pytest.raises(ValueError, match="model: PeftModelForCausalLM has prompt_encoder.* beside the model in it"):
        GraphDecoder(model, max_length=32)
    with pytest.raises(ValueError, match="model: prompt_encoder.*would be left out"):
        save_fp8_checkpoint(model, tmp_path / "saved")
    saved = adapted(load_model(checkpoints[0]), target_modules=["q_proj"], modules_to_save=["gate"])
    saved.merge_adapter()
    with pytest.raises(ValueError, match="model: .*gate.modules_to_save.default.weight.* would be left out"):
        save_fp8_checkpoint(saved, tmp_path / "saved")

    fsdp = type("FullyShardedDataParallel", (nn.Sequential,), {})(nn.Linear(2, 2))
    for call in (lambda: refit(fsdp, {}), lambda: save_fp8_checkpoint(fsdp, tmp_path), lambda: replace_linears(fsdp)):
        with pytest.raises(ValueError, match="^model: FullyShardedDataParallel keeps weights in a form of its own"):
            call()
    with pytest.raises(
        ValueError, match="^fc: expected a linear to replace, got a compiled one; compile it afterwards"
    ):
        replace_linears(nn.ModuleDict({"fc": torch.compile(nn.Linear(16, 16))}))


def test_a_refit_of_the_model_inside_opens_the_wrapper():
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="missing"):
        refit(compiled, [])
    with pytest.raises(ValueError, match="missing"):
        refit(model, {"weight": torch.ones(2, 2)}, strict=False)
    refit(model, nn.Linear(2, 2))
    assert compiled(torch.ones(2)).shape == (2,)
