"""fp8moe quantize: what it writes, resumes, refuses and says."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fp8moe import dequantize
from fp8moe.weights import (
    DEFAULT_SKIP,
    CheckpointError,
    inspect_checkpoint,
    load_fp8_checkpoint,
    quantize_checkpoint,
    save_fp8_checkpoint,
)
from fp8moe.weights.source import DTYPE_NAMES, INDEX, SINGLE, TensorSpec
from fp8moe.weights.write import ShardWriter
from tests.checkpoint_formats import as_gpt_oss
from tests.small_checkpoints import (
    EXPERTS,
    FORMATS,
    HIDDEN,
    INTERMEDIATE,
    Model,
    Q,
    expected_fp8,
    read,
    same,
    truncate,
    unquantized,
    write,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_shard_that_is_not_filled_is_not_kept(tmp_path):
    layout = {"a": TensorSpec("F32", (2, 3)), "b": TensorSpec("BF16", (4,))}
    with (
        pytest.raises(RuntimeError, match="not all was written of a"),
        ShardWriter(tmp_path / "x", layout) as writer,
    ):
        writer.put("b", torch.ones(4, dtype=torch.bfloat16))
        writer.put("a", torch.ones(3))
    with (
        pytest.raises(RuntimeError, match="does not fit"),
        ShardWriter(tmp_path / "x", layout) as writer,
    ):
        writer.put("b", torch.ones(4))
    assert list(tmp_path.iterdir()) == []


def test_files_are_those_of_the_library(tmp_path):
    tensors = {
        "byte": torch.arange(3, dtype=torch.uint8),
        "wide": torch.randn(2, 3, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(True),
        "strided": torch.randn(4, 6).t(),
        "fp8": torch.randn(3, 5, 7).to(torch.float8_e4m3fn),
        "e8m0": torch.ones(5).to(torch.float8_e8m0fnu),
    }
    layout = {name: TensorSpec(DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    with ShardWriter(tmp_path / "x.safetensors", layout) as writer:
        for name, tensor in tensors.items():
            if name == "fp8":
                for part in tensor:
                    writer.put(name, part)
            else:
                writer.put(name, tensor)
    loaded = load_file(tmp_path / "x.safetensors")
    same({name: loaded[name] for name in tensors}, {name: tensor.contiguous() for name, tensor in tensors.items()})
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


# Quantizing.


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale_format", FORMATS)
def test_quantize(tmp_path, scale_format, fused, shards):
    tensors = unquantized(fused=fused)
    src = write(tmp_path / "src", tensors, shards, config={"model_type": "mixtral", "hidden_size": HIDDEN})
    for name in ("tokenizer.json", "generation_config.json", "LICENSE"):
        (src / name).write_text(name)
    (src / "pytorch_model.bin").write_bytes(b"pickle")
    dst = tmp_path / "dst"
    quantize_checkpoint(src, dst, scale_format=scale_format)

    names = {path.name for path in dst.iterdir()}
    assert names == {path.name for path in src.iterdir()} - {"pytorch_model.bin"}
    assert (dst / "tokenizer.json").read_text() == "tokenizer.json"
    same(dict(sorted(read(dst).items())), dict(sorted(expected_fp8(tensors, scale_format).items())))
    config = json.loads((dst / "config.json").read_text())
    assert config["hidden_size"] == HIDDEN
    quantization = config["quantization_config"]
    assert quantization.pop("modules_to_not_convert") == [
        "embed_tokens",
        "layers.0.gate",
        "layers.1.gate",
        "lm_head",
    ]
    expected = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    assert quantization == expected | ({"scale_fmt": "ue8m0"} if scale_format == "ue8m0" else {})
    assert not inspect_checkpoint(dst).problems

    model = Model()
    load_fp8_checkpoint(model, dst)
    up = model.layers[1].experts
    values = dequantize((up.gate_up_proj[1, INTERMEDIATE:], up.gate_up_proj_scale_inv[1, 1:]))
    source = (
        tensors["layers.1.experts.gate_up_proj"][1, INTERMEDIATE:]
        if fused
        else tensors["layers.1.experts.1.up_proj.weight"]
    )
    assert 0 < (values - source.float()).norm() < 0.04 * source.float().norm()


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ((), []),
        (
            ("q_proj", "layers.0.experts*"),
            ["layers.0.experts.gate_up_proj", "layers.0.q_proj.weight", "layers.1.q_proj.weight"],
        ),
        (("*.1.experts",), ["layers.1.experts.down_proj"]),
    ],
)
def test_skip(tmp_path, skip, left):
    write(tmp_path / "src", unquantized(fused=True), config={})
    quantize_checkpoint(tmp_path / "src", tmp_path / "dst", skip=skip)
    tensors = read(tmp_path / "dst")
    assert all(tensors[name].dtype == torch.bfloat16 for name in left)
    assert (tensors["embed_tokens.weight"].dtype == torch.bfloat16) is False
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    modules = config["quantization_config"]["modules_to_not_convert"]
    assert set(modules) == {name.removesuffix(".weight").rpartition("experts")[0] + "experts"
                            if "experts" in name else name.removesuffix(".weight") for name in left}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        *("transformer.wte", "transformer.wpe", "wte", "model.embed_tokens", "shared"),  # embeddings
        *("lm_head", "head", "transformer.output_layer", "score", "classifier"),  # outputs
        *("layers.0.mlp.gate", "layers.0.mlp.gate.wg", "layers.0.mlp.router_gate"),  # routers
        "layers.0.mamba.dt_proj",
    ],
)
def test_modules_that_stay_by_default(tmp_path, name):
    others = ["h.0.attn.wto", "layers.0.mlp.gate_proj", "layers.0.mlp.shared_expert.up_proj", "layers.0.attn.out_proj"]
    write(tmp_path / "src", {f"{module}.weight": torch.ones(8, 16) for module in (name, *others)})
    quantize_checkpoint(tmp_path / "src", tmp_path / "dst")
    dtypes = {key.removesuffix(".weight"): value.dtype for key, value in read(tmp_path / "dst").items()}
    assert dtypes[name] == torch.float32 and all(dtypes[other] == torch.float8_e4m3fn for other in others)


def test_experts_are_skipped_all_or_none(tmp_path):
    src = write(tmp_path / "src", unquantized(), config={})
    quantize_checkpoint(src, tmp_path / "dst", skip=("layers.0.experts",))
    dtypes = {name: value.dtype for name, value in read(tmp_path / "dst").items()}
    assert dtypes["layers.0.experts.1.up_proj.weight"] == torch.bfloat16
    assert dtypes["layers.1.experts.1.up_proj.weight"] == torch.float8_e4m3fn
    for skip in ("down_proj", "layers.0.experts.2.*"):
        with pytest.raises(CheckpointError, match=r"layers\.0\.experts: some of these experts' weights would be FP8"):
            quantize_checkpoint(src, tmp_path / "other", skip=(skip,))
    assert not (tmp_path / "other").exists()


def test_patterns_that_match_nothing_are_refused(tmp_path):
    src = write(tmp_path / "src", unquantized(), config={})
    for skip in ("layers.0.mlp", "layers.0", "q_prj"):
        with pytest.raises(ValueError, match=f"skip: '{skip}' matches no module"):
            quantize_checkpoint(src, tmp_path / "dst", skip=(*DEFAULT_SKIP, skip))
    assert not (tmp_path / "dst").exists()


def test_files_that_are_copied(tmp_path):
    src = write(tmp_path / "src", unquantized(), config={})
    copied = {"tokenizer.json", "vocab.bpe", "chat_template.jinja", "LICENSE", "NOTICE.md", "modeling.py"}
    for name in (*copied, "pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5.index.json"):
        (src / name).write_text(name)
    quantize_checkpoint(src, tmp_path / "dst")
    assert {path.name for path in (tmp_path / "dst").iterdir()} == copied | {"config.json", SINGLE}
    assert all((tmp_path / "dst" / name).read_text() == name for name in copied)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_that_are_not_finite(tmp_path, dtype, scale_format, value):
    """The tensor is named, its shard gets no name, and the finished ones stay."""
    tensors = {name: tensor.to(dtype) for name, tensor in unquantized(fused=True).items() if tensor.ndim}
    name = "layers.1.experts.gate_up_proj"
    tensors[name][2, 100, 7] = tensors[name][2, 5, 143] = value
    tensors["layers.0.norm.weight"][3] = value  # stays as it is, whatever it is
    src = write(tmp_path / "src", tensors, shards=3)
    with pytest.raises(CheckpointError) as error:
        quantize_checkpoint(src, tmp_path / "dst", scale_format=scale_format)
    (problem,) = error.value.problems
    assert problem.startswith(
        f"{name}: 2 values are NaN or infinite, expected finite weights; allow_nonfinite=True (--"
    )
    (file,) = (path.name for path in src.glob("*.safetensors") if name in load_file(path))
    left = {path.name for path in (tmp_path / "dst").iterdir()}
    assert file not in left and INDEX not in left and not any("partial" in other for other in left)

    quantize_checkpoint(src, tmp_path / "dst", scale_format=scale_format, allow_nonfinite=True)
    scale = read(tmp_path / "dst")[f"{name}_scale_inv"].float()
    where = torch.zeros_like(scale, dtype=torch.bool)
    where[2, 0, 1] = where[2, 1, 0] = True  # gate's block with column 143, up's with row 100
    assert torch.equal(~scale.isfinite(), where)


def test_nothing_to_quantize(tmp_path):
    stays = {"lm_head.weight": torch.ones(8, 8), "norm.weight": torch.ones(8), "q_proj.weight": torch.ones(8)}
    with pytest.raises(CheckpointError, match="no weight would become FP8: skip leaves no matrix in BF16, F16 or F32"):
        quantize_checkpoint(write(tmp_path / "src", stays, config={}), tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("rows", [300, 199])
def test_little_fp8_is_said(tmp_path, rows, recwarn):
    """Below half of the parameters in matrices."""
    tensors = {
        "embed_tokens.weight": torch.ones(rows, 64),
        "layers.0.mixer.in": torch.ones(2, 50, 32),
        "layers.1.mixer.in": torch.ones(2, 50, 32),
        "layers.0.q_proj.weight": torch.ones(300, 64),
        "layers.0.norm.weight": torch.ones(100_000),
    }
    quantize_checkpoint(write(tmp_path / "src", tensors, config={}), tmp_path / "dst")
    said = [str(warning.message) for warning in recwarn if str(warning.message).startswith("FP8 weights")]
    warning = "FP8 weights have only 42.9% of the parameters in matrices; what stayed as it is: "
    warning += "embed_tokens.weight 42.9%, layers.*.mixer.in 14.3%"
    assert said == ([warning] if rows == 300 else [])


# Links.


def test_links_that_leave_the_source_are_not_followed(tmp_path):
    src = write(tmp_path / "src", unquantized(), config={})
    (tmp_path / "secret").write_text("secret")
    (src / "real.txt").write_text("real")
    links = {
        "alias.txt": "real.txt",
        "notes.txt": "../secret",
        "absolute.json": str(tmp_path / "secret"),
        "twice.md": "notes.txt",
        "LICENSE": "nowhere",
        "loop.py": "loop.py",
        "self.txt": "../src/real.txt",
    }
    for name, target in links.items():
        (src / name).symlink_to(target)
    with pytest.warns(UserWarning, match="^not copied from") as warned:
        quantize_checkpoint(src, tmp_path / "dst")
    assert str(warned.list[-1].message) == (
        f"not copied from {src}: LICENSE (a link to no file), absolute.json (a link to outside of the checkpoint), "
        "loop.py (a link to no file), notes.txt (a link to outside of the checkpoint), "
        "twice.md (a link to outside of the checkpoint)"
    )
    names = {path.name for path in (tmp_path / "dst").iterdir()}
    assert names == {"real.txt", "alias.txt", "self.txt", "config.json", SINGLE}
    assert not any(path.is_symlink() for path in (tmp_path / "dst").iterdir())


@pytest.mark.parametrize("name", [INDEX, "config.json", "model-00002-of-00002.safetensors"])
def test_a_checkpoint_that_is_a_link_to_elsewhere_is_refused(tmp_path, name):
    src = write(tmp_path / "src", unquantized(), shards=2, config={})
    (src / name).rename(tmp_path / name)
    (src / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError) as error:
        quantize_checkpoint(src, tmp_path / "dst")
    assert error.value.problems == [f"{name}: is a link to outside of the checkpoint; put the file itself there"]
    assert not (tmp_path / "dst").exists()


def test_the_cache_of_the_hub(tmp_path):
    """Its snapshots are links to blobs of the same repository, and only these are followed."""
    repository = tmp_path / "models--Qwen--Qwen3-30B-A3B"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    write(snapshot, unquantized(), shards=2, config={})
    (snapshot / "tokenizer.json").write_text("{}")
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    (repository / "refs").write_text("secret")
    (snapshot / "notes.txt").symlink_to("../../refs")
    with pytest.warns(UserWarning, match=r"^not copied from .*: notes\.txt \(a link to outside of the checkpoint\)$"):
        quantize_checkpoint(snapshot, tmp_path / "dst")
    same(dict(sorted(read(tmp_path / "dst").items())), dict(sorted(expected_fp8(unquantized(), "float32").items())))
    assert (tmp_path / "dst" / "tokenizer.json").read_text() == "{}"
    assert not any(path.is_symlink() or path.name == "notes.txt" for path in (tmp_path / "dst").iterdir())


def test_large_files_are_left_out(tmp_path):
    src = write(tmp_path / "src", unquantized(), config={})
    with (src / "corpus.txt").open("wb") as file:
        file.truncate(2**40)  # a hole: a terabyte if it were read
    with pytest.warns(UserWarning, match=r"corpus\.txt \(more than 100,000,000 bytes\)$"):
        quantize_checkpoint(src, tmp_path / "dst")
    assert not (tmp_path / "dst" / "corpus.txt").exists()


# Sources that are refused.


def test_sources_that_cannot_be_quantized(tmp_path):
    def refused_source(directory):
        with pytest.raises(CheckpointError) as error:
            quantize_checkpoint(directory, tmp_path / "dst")
        assert not (tmp_path / "dst").exists()
        return error.value.problems

    save_fp8_checkpoint(Model(), tmp_path / "fp8")
    problems = refused_source(tmp_path / "fp8")
    assert problems == [
        "the checkpoint is quantized already: FP8 with a scale for each 128x128 values; start from the unquantized one"
    ]
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    problems = refused_source(write(tmp_path / "mxfp4", unquantized(), config=config))
    assert problems == [
        "the checkpoint is quantized already: config.json: quantization_config says mxfp4: MXFP4, with a power of two "
        "for each 32 values; start from the unquantized one"
    ]
    nested = write(tmp_path / "nested", unquantized(), config={"text_config": config})
    assert "config.json: text_config.quantization_config says mxfp4" in refused_source(nested)[0]
    tensors = unquantized(fused=True)
    gate_up = "layers.0.experts.gate_up_proj"
    odd = {name: value for name, value in tensors.items() if name != "layers.0.experts.down_proj"}
    (problem,) = refused_source(write(tmp_path / "odd", odd | {gate_up: tensors[gate_up][:, 1:].contiguous()}))
    assert problem == f"{gate_up}: shape (3, 143, 144), expected as many rows of gate as of up"
    transposed = {name: t.mT.contiguous() if "experts" in name else t for name, t in tensors.items()}
    problems = refused_source(write(tmp_path / "transposed", transposed))
    assert len(problems) == 2 and problems[0].startswith("layers.0.experts.gate_up_proj: shape (3, 144, 144)")
    bias = {"layers.0.experts.gate_up_proj_bias": torch.ones(EXPERTS, 2 * INTERMEDIATE)}
    (problem,) = refused_source(write(tmp_path / "bias", tensors | bias))
    assert problem == f"{gate_up}: experts with a bias, where config.json does not say that they are GPT-OSS's"
    gpt_oss = as_gpt_oss(tensors)
    gpt_oss |= {f"{gate_up}_bias": torch.ones(EXPERTS, 3), "layers.1.experts.down_proj": torch.ones(EXPERTS, 8, 4)}
    assert refused_source(write(tmp_path / "gpt_oss", gpt_oss, config={"model_type": "gpt_oss"})) == [
        f"{gate_up}_bias: shape (3, 3), expected (3, 144)",
        "layers.1.experts.gate_up_proj: shape (3, 144, 144), expected (3, 16, 4) to go with down_proj",
    ]
    (problem,) = refused_source(write(tmp_path / "taken", tensors | {Q + "_scale_inv": torch.ones(1)}))
    assert problem == f"{Q}_scale_inv: this name is needed for the scale of {Q}"
    truncate(write(tmp_path / "short", tensors) / SINGLE)
    assert "is cut short" in refused_source(tmp_path / "short")[0]
    with pytest.raises(ValueError, match=r"^dst_dir: expected another directory"):
        quantize_checkpoint(tmp_path / "bias", tmp_path / "x" / ".." / "bias")
    with pytest.raises(ValueError, match=r"^dst_dir: expected a directory, but .* is a file"):
        quantize_checkpoint(tmp_path / "bias", tmp_path / "bias" / SINGLE)
    with pytest.raises(ValueError, match=r"^scale_format"):
        quantize_checkpoint(tmp_path / "bias", tmp_path / "dst", scale_format="float8")
    with pytest.raises(ValueError, match=r"^experts: expected one of .* got 'nvfp4'"):
        quantize_checkpoint(tmp_path, tmp_path / "four", experts="nvfp4")
    assert not (tmp_path / "four").exists()
    with pytest.raises(TypeError, match=r"^skip"):
        quantize_checkpoint(tmp_path / "bias", tmp_path / "dst", skip="gate")
