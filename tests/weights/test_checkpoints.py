"""FP8 checkpoints: written, read, quantized, inspected; refused by name; and exchanged with transformers."""

import gc
import json
import math
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8moe import FP8Linear, GroupedExperts, dequantize, replace_linears
from fp8moe.cli import main
from fp8moe.hf import load_model
from fp8moe.weights import (
    DEFAULT_SKIP,
    CheckpointError,
    inspect_checkpoint,
    load_fp8_checkpoint,
    quantize_checkpoint,
    save_fp8_checkpoint,
)
from fp8moe.weights import source as checkpoint_read
from fp8moe.weights.source import INDEX, SINGLE, Checkpoint, Reader, read_header
from tests.small_checkpoints import (
    EXPERTS,
    FORMATS,
    HIDDEN,
    INTERMEDIATE,
    E,
    Interrupted,
    Model,
    Q,
    bits,
    interrupt,
    read,
    same,
    truncate,
    unquantized,
    write,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def refused(model, directory, **options):
    """The problems for which the checkpoint is refused, having made sure that the model stays as it is."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        load_fp8_checkpoint(model, directory, **options)
    same(model.state_dict(), before)
    assert all(problem in str(error.value) for problem in error.value.problems[:100])
    return error.value.problems


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model and the tensors of its checkpoint, experts one by one. Not to be changed."""
    torch.manual_seed(1)
    model = Model()
    directory = tmp_path_factory.mktemp("saved")
    save_fp8_checkpoint(model, directory)
    return model, read(directory)


# Saving and loading.


@pytest.mark.parametrize("max_shard_size", [5_000_000_000, 60_000])
@pytest.mark.parametrize("experts", ["separate", "fused"])
@pytest.mark.parametrize("scale_format", FORMATS)
def test_round_trip(tmp_path, scale_format, experts, max_shard_size):
    model = Model().round_scales() if scale_format == "ue8m0" else Model()
    save_fp8_checkpoint(model, tmp_path, scale_format=scale_format, experts=experts, max_shard_size=max_shard_size)
    files = sorted(path.name for path in tmp_path.iterdir())
    if max_shard_size < 1_000_000:
        shards = files[:-1]
        assert files[-1] == INDEX and len(shards) > 4
        assert shards == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        assert all((tmp_path / shard).stat().st_size < 65_000 for shard in shards)
    else:
        assert files == [SINGLE]
    tensors = read(tmp_path)
    assert ("layers.1.experts.2.up_proj.weight" in tensors) == (experts == "separate")
    scales = {tensor.dtype for name, tensor in tensors.items() if name.endswith("_scale_inv")}
    assert scales == {torch.float8_e8m0fnu if scale_format == "ue8m0" else torch.float32}
    other = Model()
    load_fp8_checkpoint(other, tmp_path)
    same(other.state_dict(), model.state_dict())
    assert not inspect_checkpoint(tmp_path).problems


def test_what_is_written(saved):
    model, tensors = saved
    experts = model.layers[1].experts
    expected = {
        "gate_proj": (experts.gate_up_proj[2, :INTERMEDIATE], experts.gate_up_proj_scale_inv[2, :1]),
        "up_proj": (experts.gate_up_proj[2, INTERMEDIATE:], experts.gate_up_proj_scale_inv[2, 1:]),
        "down_proj": (experts.down_proj[2], experts.down_proj_scale_inv[2]),
    }
    for projection, (weight, scale) in expected.items():
        name = f"layers.1.experts.2.{projection}.weight"
        assert torch.equal(bits(tensors[name]), bits(weight)) and tensors[name].dtype == torch.float8_e4m3fn
        assert torch.equal(tensors[name + "_scale_inv"], scale)
    assert len(tensors) == 3 + 2 * (3 + 2 + 6 * EXPERTS)


def test_experts_without_a_gate(tmp_path):
    model, other = Model(gated=False), Model(gated=False)
    save_fp8_checkpoint(model, tmp_path)
    assert "layers.0.experts.1.up_proj.weight_scale_inv" in read(tmp_path)
    load_fp8_checkpoint(other, tmp_path)
    same(other.state_dict(), model.state_dict())


def rename(tensors, *pairs):
    for old, new in pairs:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: rename(tensors, ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
        lambda tensors: {n: t.squeeze() if "experts" in n and "inv" in n else t for n, t in tensors.items()},
    ],
)
def test_other_spellings(tmp_path, saved, change):
    tensors = change(saved[1])
    model = Model()
    load_fp8_checkpoint(model, write(tmp_path, tensors, shards=3))
    same(model.state_dict(), saved[0].state_dict())


def test_unquantized_tensors_are_converted(tmp_path, saved):
    tensors = saved[1] | {"layers.0.gate.weight": saved[1]["layers.0.gate.weight"].float() * 1.001}
    model = Model()
    load_fp8_checkpoint(model, write(tmp_path, tensors))
    assert torch.equal(model.layers[0].gate.weight, tensors["layers.0.gate.weight"].bfloat16())


@pytest.mark.parametrize("kept", ["embed_tokens.weight", "lm_head.weight"])
def test_tied_weights(tmp_path, kept):
    model = Model(tied=True)
    save_fp8_checkpoint(model, tmp_path / "saved")
    tensors = read(tmp_path / "saved")
    assert "lm_head.weight" not in tensors
    tensors[kept] = tensors.pop("embed_tokens.weight")
    for extra in ({}, {"lm_head.weight": tensors[kept].clone(), "embed_tokens.weight": tensors[kept]}):
        other = Model(tied=True)
        load_fp8_checkpoint(other, write(tmp_path / f"new{len(extra)}", tensors | extra))
        same(other.state_dict(), model.state_dict())
        assert other.lm_head.weight is other.embed_tokens.weight
    different = {"lm_head.weight": tensors[kept] + 1, "embed_tokens.weight": tensors[kept]}
    problems = refused(Model(tied=True), write(tmp_path / "different", tensors | different))
    assert problems == ["lm_head.weight: differs from embed_tokens.weight, but the model ties the two"]
    del tensors[kept]
    problems = refused(Model(tied=True), write(tmp_path / "neither", tensors))
    assert problems == ["embed_tokens.weight: missing (also called lm_head.weight)"]


def test_model_on_meta(tmp_path, saved):
    write(tmp_path, saved[1])
    with torch.device("meta"):
        model = Model(tied=True)
    assert refused_on_meta(tmp_path, model) == [
        "lm_head.weight: differs from embed_tokens.weight, but the model ties the two"
    ]
    with torch.device("meta"):
        model = Model()
    load_fp8_checkpoint(model, tmp_path, device="cpu")
    same(model.state_dict(), saved[0].state_dict())
    assert not any(value.requires_grad for name, value in model.named_parameters() if "experts" in name)
    model = Model().to("meta")
    model.register_buffer("inv_freq", torch.empty(3, device="meta"), persistent=False)
    problems = refused_on_meta(tmp_path, model)
    assert len(problems) == 1 and problems[0].startswith("inv_freq: a buffer on the meta device")
    with pytest.raises(ValueError, match=r"^model: has no data.*embed_tokens\.weight"):
        save_fp8_checkpoint(model, tmp_path / "new")


def refused_on_meta(directory, model):
    with pytest.raises(CheckpointError) as error:
        load_fp8_checkpoint(model, directory)
    assert all(value.is_meta for value in model.parameters())
    return error.value.problems


def test_ignored_tensors(tmp_path, saved):
    extra = {"layers.61.eh_proj.weight": torch.ones(2, 2), "rotary.inv_freq": torch.ones(3)}
    write(tmp_path, saved[1] | extra)
    model = Model()
    assert refused(model, tmp_path) == [f"{name}: extra, the model has no such tensor" for name in sorted(extra)]
    load_fp8_checkpoint(model, tmp_path, ignore=("*.inv_freq", "layers.61.*"))
    model._keys_to_ignore_on_load_unexpected = {r"layers\.61.*"}
    load_fp8_checkpoint(model, tmp_path, ignore=["rotary.*"])
    with pytest.raises(TypeError, match=r"^ignore: .* 'rotary'"):
        load_fp8_checkpoint(model, tmp_path, ignore="rotary")


# Refusing.


def changed(tensors, **changes):
    names = {"q": Q, "q_scale": Q + "_scale_inv", "e": E, "e_scale": E + "_scale_inv", "norm": "layers.0.norm.weight"}
    result = dict(tensors)
    for key, change in changes.items():
        value = change(result.pop(names[key]))
        if value is not None:
            result[names[key]] = value
    return result


def drop(tensor):
    return None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"q": drop}, [f"{Q}: missing"]),
        ({"q_scale": drop}, [f"{Q}_scale_inv: missing"]),
        ({"e": drop, "norm": drop}, ["layers.0.norm.weight: missing", f"{E}: missing"]),
        ({"e_scale": drop}, [f"{E}_scale_inv: missing"]),
        ({"q": lambda t: t[:-1].clone()}, [f"{Q}: shape (199, 144), expected (200, 144)"]),
        ({"e": lambda t: t[:, :-1].clone()}, [f"{E}: shape (72, 143), expected (72, 144)"]),
        ({"e_scale": lambda t: t.repeat(2, 1)}, [f"{E}_scale_inv: shape (2, 2), expected (1, 2)"]),
        (
            {"q": lambda t: t.view(torch.int8)},
            [f"INT8 ({Q}), which fp8moe does not run; take the model's FP8 or unquantized checkpoint"],
        ),
        (
            {"q": lambda t: t.bfloat16(), "q_scale": drop},
            [f"{Q}: BF16, but the model's module is FP8; quantize the checkpoint first (fp8moe quantize), or leave the "
             "module out with replace_linears(skip=[..., 'q_proj'])"],
        ),
        (
            {"q_scale": lambda t: t.double()},
            [f"{Q}_scale_inv: dtype F64, expected a scale in F32 or BF16 or F16 or F8_E8M0"],
        ),
        (
            {"norm": lambda t: t.to(torch.float8_e4m3fn)},
            ["layers.0.norm.weight: F8_E4M3, but the model's module is not FP8; put FP8Linear (replace_linears) or "
             "GroupedExperts there first"],
        ),
        ({"norm": lambda t: t.int()}, ["layers.0.norm.weight: dtype I32, expected torch.bfloat16"]),
    ],
)  # fmt: skip
def test_wrong_tensors_are_listed(tmp_path, saved, changes, expected):
    write(tmp_path, changed(saved[1], **changes), shards=2)
    assert sorted(refused(Model(), tmp_path)) == sorted(expected)


def test_everything_wrong_is_in_one_error(tmp_path, saved):
    tensors = changed(saved[1], q=drop, e=lambda t: t.float(), norm=lambda t: t[:5].clone())
    tensors |= {"layers.1.experts.9.up_proj.weight": torch.ones(1), "layers.7.norm.weight": torch.ones(1)}
    problems = refused(Model(), write(tmp_path, tensors, shards=2))
    assert len(problems) == 5
    for fragment in (
        f"{Q}: missing",
        f"{E}: F32, but the model's module is FP8; quantize the checkpoint first (fp8moe quantize)",
        "layers.0.norm.weight: shape (5,)",
        "layers.1.experts.9.up_proj.weight: extra",
        "layers.7.norm.weight: extra",
    ):
        assert any(fragment in problem for problem in problems)


def test_long_lists_are_cut_in_the_message_only(tmp_path):
    write(tmp_path, {f"x{i}": torch.ones(1) for i in range(150)})
    with pytest.raises(CheckpointError, match=r"and \d+ more$") as error:
        load_fp8_checkpoint(Model(layers=0), tmp_path)
    assert len(error.value.problems) == 153 and str(error.value).count("\n") == 101


def test_fused_and_separate_experts_together(tmp_path, saved):
    experts = saved[0].layers[1].experts
    write(tmp_path, saved[1] | {"layers.1.experts.gate_up_proj": experts.gate_up_proj.detach()})
    problems = refused(Model(), tmp_path)
    assert len(problems) == 2 * EXPERTS
    assert f"{E}: the checkpoint has it also in layers.1.experts.gate_up_proj" in problems


def test_two_spellings_of_one_tensor(tmp_path, saved):
    write(tmp_path, saved[1] | {Q.replace("weight", "scale"): saved[1][Q + "_scale_inv"].clone()})
    assert len(refused(Model(), tmp_path)) == 1


def test_fp8_checkpoint_for_an_unquantized_model(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(16, 16, dtype=torch.bfloat16)})
    replaced = nn.ModuleDict({"a": nn.Linear(16, 16, dtype=torch.bfloat16)})
    replace_linears(replaced)
    save_fp8_checkpoint(replaced, tmp_path)
    assert refused(model, tmp_path) == [
        "a.weight: F8_E4M3, but the model's module is not FP8; "
        "put FP8Linear (replace_linears) or GroupedExperts there first"
    ]
    replace_linears(model)
    load_fp8_checkpoint(model, tmp_path)
    same(model.state_dict(), replaced.state_dict())


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"more")


def empty(path):
    path.write_bytes(b"")


def garble(path):
    path.write_bytes(path.read_bytes().replace(b'"dtype"', b'"dtypo"', 1))


def not_json(path):
    path.write_bytes((20).to_bytes(8, "little") + b"x" * 100)


def wrong_size(path):
    path.write_bytes(path.read_bytes().replace(b'"shape":[50,', b'"shape":[51,', 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "is cut short: "),
        (lengthen, "is too long: "),
        (empty, "is cut short, or no safetensors file"),
        (garble, "has no valid safetensors header"),
        (not_json, "has no valid safetensors header"),
        (wrong_size, "which does not fit BF16"),
        (Path.unlink, "there is no such file"),
    ],
)
def test_damaged_shard(tmp_path, saved, damage, message):
    write(tmp_path, saved[1], shards=3)
    shard = "model-00001-of-00003.safetensors"  # the embedding is the first tensor
    damage(tmp_path / shard)
    (problem,) = refused(Model(), tmp_path)
    assert problem.startswith(f"{shard}: ") and message in problem
    assert "puts 17 tensors there, from embed_tokens.weight to" in problem
    assert inspect_checkpoint(tmp_path).problems == [problem]


def test_damaged_single_file(tmp_path, saved):
    truncate(write(tmp_path, saved[1]) / SINGLE)
    (problem,) = refused(Model(), tmp_path)
    assert problem.startswith("model.safetensors: is cut short")


def test_index_and_shards_disagree(tmp_path, saved):
    write(tmp_path, saved[1], shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost"] = index["weight_map"].pop(Q)
    index["weight_map"]["outside"] = "../elsewhere.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    problems = "\n".join(refused(Model(), tmp_path))
    assert f"{Q}: is in model-" in problems and "ghost: model.safetensors.index.json says" in problems
    assert "../elsewhere.safetensors: is not in the directory itself" in problems


def test_no_checkpoint(tmp_path):
    for directory, message in (
        (tmp_path, "neither model.safetensors nor model.safetensors.index.json"),
        (tmp_path / "none", "there is no such directory"),
        (Path(__file__), "it is not a directory"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_fp8_checkpoint(Model(layers=0), directory)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        load_fp8_checkpoint(Model(layers=0), tmp_path)


def test_refused_options(tmp_path, saved):
    model = saved[0]
    with pytest.raises(ValueError, match=r"^experts: .* got 'both'"):
        save_fp8_checkpoint(model, tmp_path, experts="both")
    with pytest.raises(ValueError, match=r"^scale_format: .* got 'e8m0'"):
        save_fp8_checkpoint(model, tmp_path, scale_format="e8m0")
    with pytest.raises(
        ValueError, match=r"not all scales are powers of two in layers\.0\.experts\.down_proj_scale_inv"
    ):
        save_fp8_checkpoint(model, tmp_path, scale_format="ue8m0")
    other = Model()
    other.register_buffer("phases", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="model: phases is in torch.complex64, which checkpoints do not have"):
        save_fp8_checkpoint(other, tmp_path)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path, {"x": torch.ones(1)})
    with pytest.raises(ValueError, match=r"already holds a checkpoint"):
        save_fp8_checkpoint(model, tmp_path)
    assert list(read(tmp_path)) == ["x"]


# Writing: nothing half-done under a final name, and little memory.


def test_interrupted_save(tmp_path, saved, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, 25)
        with pytest.raises(Interrupted):
            save_fp8_checkpoint(saved[0], tmp_path, max_shard_size=60_000)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names and INDEX not in names and not any("partial" in name for name in names)
    for name in names:
        read_header(tmp_path / name)
    with pytest.raises(CheckpointError, match="neither"):
        load_fp8_checkpoint(Model(), tmp_path)
    save_fp8_checkpoint(saved[0], tmp_path, max_shard_size=60_000)
    assert not inspect_checkpoint(tmp_path).problems


def test_a_weight_that_is_larger_than_a_shard_has_one_of_its_own(tmp_path, saved):
    save_fp8_checkpoint(saved[0], tmp_path, max_shard_size=20_000)
    files = [set(read_header(path)) for path in tmp_path.glob("*.safetensors")]
    assert {Q, f"{Q}_scale_inv"} in files  # 28,800 bytes, with its scale
    assert sum(map(len, files)) == len(saved[1]) and not inspect_checkpoint(tmp_path).problems
    load_fp8_checkpoint(Model(), tmp_path)


def test_what_a_killed_process_of_the_same_number_left_is_not_in_the_way(tmp_path, saved):
    for name in (SINGLE, "model-00001-of-00002.safetensors"):
        (tmp_path / f".{name}.{os.getpid()}.partial").write_bytes(b"half")
    save_fp8_checkpoint(saved[0], tmp_path)
    assert not inspect_checkpoint(tmp_path).problems


@pytest.fixture
def peak(monkeypatch):
    """The most bytes of tensors read from files that were alive at once, and the bytes read altogether."""
    counts = {"alive": 0, "peak": 0, "all": 0}

    def counting(*arguments):
        tensor = whole(*arguments)
        size = tensor.nbytes
        counts["alive"] += size
        counts["all"] += size
        counts["peak"] = max(counts["peak"], counts["alive"])
        weakref.finalize(tensor, lambda: counts.update(alive=counts["alive"] - size))
        return tensor

    whole = Reader.read
    gc.collect()
    monkeypatch.setattr(Reader, "read", counting)
    return counts


@pytest.mark.parametrize("fused", [False, True])
def test_memory_is_bounded_by_one_tensor_or_expert(tmp_path, peak, fused):
    write(tmp_path / "src", unquantized(fused=fused, layers=3), shards=2)
    quantize_checkpoint(tmp_path / "src", tmp_path / "dst")
    largest = 200 * HIDDEN * 2
    assert peak["all"] > 10 * largest
    assert peak["peak"] <= 2 * largest  # one is let go of when the next is there
    peak.update(alive=0, peak=0, all=0)
    load_fp8_checkpoint(Model(3), tmp_path / "dst")
    assert peak["all"] > 10 * largest / 2
    assert peak["peak"] <= largest


# Inspecting, and the command line.


def test_inspect(tmp_path, saved):
    report = inspect_checkpoint(write(tmp_path, saved[1], shards=2))
    layer = HIDDEN + 200 * HIDDEN + 200 + EXPERTS * HIDDEN + EXPERTS * 3 * HIDDEN * INTERMEDIATE
    parameters = 2 * 50 * HIDDEN + 1 + 2 * layer
    assert (report.files, report.tensors, report.parameters) == (2, len(saved[1]), parameters)
    assert report.nbytes == sum(tensor.nbytes for tensor in saved[1].values())
    assert report.fp8_nbytes == 2 * (200 * HIDDEN + EXPERTS * 3 * HIDDEN * INTERMEDIATE)
    assert (report.scale_format, report.format.scales, report.format.loads) == ("float32", "128x128", True)
    assert report.experts == [(2, EXPERTS, "separate")]
    assert report.problems == []
    assert report.unquantized == {
        "embed_tokens.weight": 50 * HIDDEN,
        "lm_head.weight": 50 * HIDDEN,
        "layers.*.gate.weight": 2 * EXPERTS * HIDDEN,
    }
    assert "3 in each of 2 layers, separate" in str(report)
    assert f"unquantized  embed_tokens.weight {50 * HIDDEN / parameters:.1%}, lm_head.weight" in str(report)


def test_inspect_of_empty_tensors(tmp_path):
    assert "unquantized  x 0.0%" in str(inspect_checkpoint(write(tmp_path, {"x": torch.empty(0, 4)})))


def test_inspect_reads_headers_and_scales_only(tmp_path, saved, monkeypatch):
    write(tmp_path, saved[1], shards=2)
    read_names = []

    def reading(*arguments):
        for info, value in read_unmapped(*arguments):
            read_names.append(info.name)
            yield info, value

    def cannot_map(*arguments, **options):
        raise RuntimeError("unable to mmap")

    read_unmapped = Checkpoint.read_unmapped
    monkeypatch.setattr(Checkpoint, "read_unmapped", reading)
    monkeypatch.setattr(checkpoint_read, "safe_open", cannot_map)
    assert inspect_checkpoint(tmp_path).problems == []
    tensors = checkpoint_read.open_checkpoint(tmp_path).tensors
    assert sorted(read_names) == sorted(name for name in tensors if name.endswith("_scale_inv"))
    assert refused(Model(), tmp_path) == [f"model-0000{i}-of-00002.safetensors: unable to mmap" for i in (1, 2)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"q_scale": drop}, f"{Q}: F8_E4M3 without a scale"),
        ({"q": drop}, f"{Q}_scale_inv: a scale without a weight"),
        ({"q": lambda t: t.bfloat16()}, f"{Q}_scale_inv: the scale of a weight in BF16"),
        ({"q_scale": lambda t: t[:1].clone()}, f"{Q}_scale_inv: shape (1, 2), expected (2, 2) for {Q} (200, 144)"),
        ({"q_scale": lambda t: t.int()}, f"{Q}_scale_inv: dtype I32, expected F32, BF16, F16, F8_E8M0"),
        ({"e": drop, "e_scale": drop}, "layers.1.experts.2: has no up_proj"),
    ],
)
def test_inspect_finds(tmp_path, saved, changes, expected, capsys):
    write(tmp_path, changed(saved[1], **changes))
    assert inspect_checkpoint(tmp_path).problems == [expected]
    assert main(["inspect", str(tmp_path)]) == 1
    assert expected in capsys.readouterr().out


def test_inspect_compares_with_the_configuration(tmp_path, saved):
    write(tmp_path, saved[1], config={"model_type": "x"})
    assert inspect_checkpoint(tmp_path).problems == [
        "config.json: has no quantization_config, but there are FP8 tensors"
    ]
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 64], "scale_fmt": "ue8m0"}
    write(tmp_path, saved[1], config={"quantization_config": quantization})
    report = inspect_checkpoint(tmp_path)
    assert report.problems == ["config.json: quantization_config: weight_block_size is [128, 64], expected [128, 128]"]
    assert not report.format.loads
    write(tmp_path, saved[1], config={"quantization_config": quantization | {"weight_block_size": [128, 128]}})
    report = inspect_checkpoint(tmp_path)
    assert (report.format.name, report.scale_format) == ("fp8-block-ue8m0", "ue8m0 in F32")


# transformers.

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
}
DEEPSEEK_V3 = {
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 128,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
CONFIGS = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V3 | {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 8},
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 4, "head_dim": 32, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
}


def tiny(model_type):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **CONFIGS[model_type], dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # from_pretrained has it in float32
            buffer.data = buffer.float()
    return model


def with_fp8_modules(model, skip=("lm_head", "weights_proj")):
    """Put GroupedExperts and FP8Linear where a quantized transformers model has FP8 modules."""
    for name, module in list(model.named_modules()):
        if name.endswith(".experts"):
            model.set_submodule(name, GroupedExperts.from_experts(module))
    replace_linears(model, skip=skip)
    return model


def dequantized(model):
    """The state dict in bfloat16, scales folded in."""
    state = model.state_dict()
    result = {}
    for name, value in state.items():
        if value.dtype == torch.float8_e4m3fn:
            value = dequantize((value, state[name + "_scale_inv"]), dtype=torch.bfloat16)
        if not name.endswith("_scale_inv"):
            result[name] = value
    return result


@pytest.fixture
def quantizer_on_cpu(monkeypatch):
    """transformers refuses FP8 modules without a GPU; its quantizer itself runs anywhere."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)


def test_replaced_linears_that_are_never_quantized(tmp_path):
    """DeepSeek-V3.2's indexer: quantizing its checkpoint again would not help, leaving its module out does."""
    tiny("deepseek_v32").save_pretrained(tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "fp8")
    with pytest.raises(ValueError, match="weights_proj: DeepseekV32Indexer casts the input to the dtype of its weight"):
        with_fp8_modules(tiny("deepseek_v32"), skip=("lm_head",))
    model = with_fp8_modules(tiny("deepseek_v32"))
    for name, module in [*model.named_modules()]:
        if name.endswith("weights_proj"):
            model.set_submodule(name, FP8Linear.from_linear(module))
    problems = refused(model, tmp_path / "fp8")
    assert [problem.partition(": ")[0] for problem in problems] == [
        f"model.layers.{i}.self_attn.indexer.weights_proj.weight" for i in range(2)
    ]
    assert all(
        "leave the module out with replace_linears(skip=[..., 'weights_proj'])" in problem for problem in problems
    )
    load_fp8_checkpoint(with_fp8_modules(tiny("deepseek_v32"), skip=DEFAULT_SKIP), tmp_path / "fp8")


@pytest.mark.parametrize("model_type", CONFIGS)
def test_transformers_dequantizes_what_is_written(tmp_path, model_type):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    model = with_fp8_modules(tiny(model_type))
    save_fp8_checkpoint(model, tmp_path, max_shard_size=300_000)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True), output_loading_info=True
    )
    assert not any(info.values())
    same(theirs.state_dict(), dequantized(model))


@pytest.mark.parametrize("experts", ["separate", "fused"])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_transformers_loads_what_is_written(tmp_path, quantizer_on_cpu, model_type, scale_format, experts):
    from transformers import AutoModelForCausalLM

    model = with_fp8_modules(tiny(model_type))
    if scale_format == "ue8m0":
        Model.round_scales(model)
    save_fp8_checkpoint(model, tmp_path, scale_format=scale_format, experts=experts)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    state = theirs.state_dict()
    if scale_format == "ue8m0":
        scales = [name for name in state if name.endswith("_scale_inv")]
        assert {state[name].dtype for name in scales} == {torch.float8_e8m0fnu}
        state = {name: value.float() if name in scales else value for name, value in state.items()}
    ours = model.state_dict()
    same({name: state[name] for name in ours}, ours)
    assert state.keys() == ours.keys()


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_transformers_writes_is_loaded(tmp_path, quantizer_on_cpu, model_type, scale_format):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    tiny(model_type).save_pretrained(tmp_path / "bf16")
    config = FineGrainedFP8Config(scale_fmt="ue8m0" if scale_format == "ue8m0" else "float")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", quantization_config=config)
    theirs.save_pretrained(tmp_path / "fp8")
    report = inspect_checkpoint(tmp_path / "fp8")
    assert not report.problems and report.scale_format == scale_format

    model = with_fp8_modules(tiny(model_type))
    load_fp8_checkpoint(model, tmp_path / "fp8")
    expected = {name: v.float() if name.endswith("_inv") else v for name, v in theirs.state_dict().items()}
    state = model.state_dict()
    assert state.keys() == expected.keys()
    same({name: expected[name] for name in state}, state)
    assert any(value.dtype == torch.float8_e4m3fn for value in state.values())


@pytest.mark.parametrize("model_type", CONFIGS)
def test_transformers_loads_what_is_quantized(tmp_path, model_type):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    source = tiny(model_type)
    source.save_pretrained(tmp_path / "bf16", max_shard_size="300KB")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "fp8")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    model = with_fp8_modules(source)  # quantized in memory: the same bits
    same(theirs.state_dict(), dequantized(model))
    other = with_fp8_modules(tiny(model_type))
    other.load_state_dict({name: torch.zeros_like(value) for name, value in other.state_dict().items()})
    load_fp8_checkpoint(other, tmp_path / "fp8")
    same(other.state_dict(), model.state_dict())
    tokens = torch.arange(12)[None]
    with torch.inference_mode():
        difference = other(tokens).logits.float() - theirs(tokens).logits.float()
        assert difference.norm() < 0.1 * theirs(tokens).logits.float().norm() and not math.isnan(difference.norm())


def test_sizes_that_are_not_multiples_of_the_block(tmp_path, quantizer_on_cpu, monkeypatch):
    """transformers can keep such weights, but not dequantize them."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setitem(CONFIGS["deepseek_v3"], "qk_rope_head_dim", 16)
    model = with_fp8_modules(tiny("deepseek_v3"))
    assert model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight.shape == (144, 128)
    save_fp8_checkpoint(model, tmp_path)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    same({name: theirs.state_dict()[name] for name in model.state_dict()}, model.state_dict())


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("phimoe", "model.layers.0.block_sparse_moe.experts.1.w2.weight"),
        ("jamba", "model.layers.1.feed_forward.experts.1.down_proj.weight"),
        ("granitemoe", "model.layers.0.block_sparse_moe.input_linear.weight"),  # fused in its checkpoints, too
    ],
)
def test_experts_are_called_what_transformers_calls_them(tmp_path, model_type, name):
    from transformers import AutoConfig, AutoModelForCausalLM

    counts = {"num_experts": 4} if model_type == "jamba" else {"num_local_experts": 4}
    config = AutoConfig.for_model(model_type, **SIZES, **counts, pad_token_id=0, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"^FP8 weights have only 0\.0% of the parameters in matrices"):
        save_fp8_checkpoint(model, tmp_path)
    assert name in read(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    same(theirs.state_dict(), model.state_dict())


def test_experts_of_a_class_of_ones_own_are_stored_one_by_one(tmp_path):
    from transformers import PretrainedConfig, PreTrainedModel

    class Own(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.mlp = nn.Module()
            self.mlp.experts = GroupedExperts(num_experts=2, hidden_size=128, intermediate_size=128)

    save_fp8_checkpoint(Own(PretrainedConfig()), tmp_path)
    assert "mlp.experts.1.gate_proj.weight" in read(tmp_path)


def test_a_tensor_that_would_not_be_read_back_is_refused(tmp_path, monkeypatch):
    from transformers import conversion_mapping, core_model_loading

    theirs = conversion_mapping.get_model_conversion_mapping

    def renaming_norms(model, *arguments, **options):
        to_nothing = core_model_loading.WeightRenaming("norm.weight", "embed_tokens.weight")
        return [*theirs(model, *arguments, **options), to_nothing]

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", renaming_norms)
    with pytest.raises(ValueError, match=r"^model: model\.norm\.weight cannot be stored: no name is known"):
        save_fp8_checkpoint(with_fp8_modules(tiny("mixtral")), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("beside", [None, "weight"])
def test_parameters_called_scale(tmp_path, beside):
    """X.scale is the scale of X.weight only if that is quantized: others may be zero."""

    class Scaled(Model):
        def __init__(self):
            super().__init__()
            self.softmax = nn.Module()
            for name in filter(None, ("scale", beside)):
                setattr(self.softmax, name, nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)))

    model = Scaled()
    save_fp8_checkpoint(model, tmp_path)
    assert not inspect_checkpoint(tmp_path).problems
    other = Scaled()
    nn.init.ones_(other.softmax.scale)
    load_fp8_checkpoint(other, tmp_path)
    same(other.state_dict(), model.state_dict())


def test_models_whose_checkpoints_transformers_renames(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("granitemoe", **SIZES, num_local_experts=4, pad_token_id=0, dtype=torch.bfloat16)
    model = with_fp8_modules(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    save_fp8_checkpoint(model, tmp_path / "ours")
    loaded = load_model(tmp_path / "ours")
    same(loaded.state_dict(), model.state_dict())
    tensors = read(tmp_path / "ours")
    theirs = {name.replace("experts.down_proj", "output_linear.weight"): value for name, value in tensors.items()}
    write(tmp_path / "theirs", theirs, config=json.loads((tmp_path / "ours" / "config.json").read_text()))
    same(load_model(tmp_path / "theirs").state_dict(), model.state_dict())
    truncate(tmp_path / "theirs" / SINGLE)
    with pytest.raises(CheckpointError, match=r"is cut short"):
        load_model(tmp_path / "theirs")


def test_configuration_that_is_written(tmp_path):
    from transformers import AutoConfig, GenerationConfig

    model = with_fp8_modules(tiny("mixtral"))
    model.generation_config.max_new_tokens = 17
    save_fp8_checkpoint(model, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.architectures, config.dtype) == (
        "mixtral",
        ["MixtralForCausalLM"],
        torch.bfloat16,
    )
    assert config.quantization_config["modules_to_not_convert"] == [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.block_sparse_moe.gate",
        "model.layers.0.mlp.gate",
        "model.layers.1.block_sparse_moe.gate",
        "model.layers.1.mlp.gate",
    ]
    assert GenerationConfig.from_pretrained(tmp_path).max_new_tokens == 17
    names = read(tmp_path)
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight_scale_inv" in names
    assert "model.layers.1.block_sparse_moe.gate.weight" in names
