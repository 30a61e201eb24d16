"""`fp8moe warmup` finds every kernel that a decoder and its prompts launch, and compiles what is missing."""

import json
import os
import random
from argparse import Namespace

import pytest
import torch

import fp8moe
from fp8moe import FP8Linear, GroupedExperts
from fp8moe.cli import main
from fp8moe.commands import warmup
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import permute
from fp8moe.kernels.gemm import warmup as gemm_warmup
from fp8moe.kernels.gemm.epilogue import PlainStore, SwigluQuantize
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.kernels.gemm.tiles import GroupedProblem, choose_dense, choose_grouped
from fp8moe.kernels.gemm.warmup import Family
from fp8moe.layers import warmup as warm_module
from fp8moe.quant import quantize
from fp8moe.runtime import compilers, config, jit
from fp8moe.runtime.record import in_own_process
from tests.checkpoint_formats import LAYOUTS
from tests.errors import refused
from tests.processes import forkserver
from tests.transformers_models import BASE, MLA, random_model, write_checkpoints
from tests.warmup_processes import SMS, end, in_processes, launched, launched_by_modules, needed, needed_for

TOKENS = 700
BATCH_SIZES = (1, 3)
LENGTHS = (*range(1, 20), 31, 32, 33, 64, 65, 100, 128, 129, 255, 256, 257, 300, 513, 650, TOKENS)
SHAPE = {"hidden_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2}
MODELS = {
    "qwen3_moe": {"head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 8},
    "mixtral": {"intermediate_size": 144, "num_local_experts": 4},
    "deepseek_v3": MLA,
    "gpt_oss": {"intermediate_size": 160, "num_local_experts": 4, "head_dim": 32},
}


@pytest.fixture(autouse=True)
def preloaded(monkeypatch):
    """The command's processes have PyTorch imported already."""
    monkeypatch.setattr(warmup, "get_context", lambda _: forkserver)


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("model_type", "dtypes"),
    [
        *((model_type, ()) for model_type in (*MODELS, "gpt_oss in MXFP4")),
        *(("qwen3_moe", dtypes) for dtypes in ((FP8, None), (None, FP8), (FP8, FP8))),
    ],
)
def test_what_a_decoder_launches_is_found(tmp_path, model_type, dtypes):
    pytest.importorskip("transformers")
    if model_type in MODELS:
        _, directory = write_checkpoints(random_model(model_type, BASE | SHAPE | MODELS[model_type]), tmp_path)
    else:
        directory = written("GPT-OSS", tmp_path)
    source = json.loads((directory / "config.json").read_text())
    recorded, (kernels, families) = in_processes(
        (launched, directory, BATCH_SIZES, LENGTHS, *dtypes), (needed, source, BATCH_SIZES, TOKENS, *dtypes)
    )
    of_gemms = set().union(*(warmup._variants(*item, TOKENS, 3 * TOKENS, SMS) for item in families.items()))
    assert recorded <= kernels | of_gemms
    assert sorted(spec.name for spec in kernels - of_gemms - recorded) == []


def kept(model):
    """The tensors of fp8moe's modules in a model, without values."""
    modules = ((name, part) for name, part in model.named_modules() if isinstance(part, FP8Linear | GroupedExperts))
    return {
        (name, key): (value.shape, value.dtype)
        for name, part in modules
        for key, value in part.named_parameters(recurse=False)
    }


def written(layout, directory):
    """A checkpoint in a layout, or quantized by the command."""
    from tools.format_matrix import source_of, wanted

    source = source_of(layout if layout in LAYOUTS else "block", directory / "source")
    if layout in LAYOUTS:
        source.write(LAYOUTS[layout], directory / "checkpoint", wanted(layout))
    else:
        command = ["quantize", directory / "source", directory / "checkpoint", "--experts", layout]
        assert main(list(map(str, command))) == 0
    return directory / "checkpoint"


@pytest.mark.usefixtures("one_thread", "registered")
@pytest.mark.parametrize(
    "layout",
    [
        *("int4-32", "mxfp4", "GPTQ experts", "FP8 with FP4 experts", "GPT-OSS", "compressed-tensors channel"),
        *("ModelOpt NVFP4", "ModelOpt NVFP4 experts, hf_quant_config.json", "compressed-tensors NVFP4 experts"),
    ],
)
def test_modules_are_those_that_load_model_makes(tmp_path, layout):
    """By the JSON files alone: which modules are quantized, and how each of their weights is kept."""
    transformers = pytest.importorskip("transformers")
    from fp8moe.hf import load_model
    from fp8moe.hf.skeleton import skeletons

    directory = written(layout, tmp_path)
    source = warmup._read_source(Namespace(source=directory, model_type=None, set=[]))
    config = transformers.CONFIG_MAPPING[source["model_type"]].from_dict(source)
    for experts in ("stored", "fp8"):
        if experts == "fp8" and layout in ("int4-32", "GPTQ experts"):
            refused(ValueError, "INT4, .*, which load_model refuses with experts='fp8'", skeletons, config, experts)
        else:
            assert kept(load_model(directory, experts=experts)) in list(map(kept, skeletons(config, experts)))


@pytest.mark.parametrize("top_k", [1, 6])
def test_no_length_launches_a_kernel_that_was_not_found(tmp_path, top_k):
    pytest.importorskip("transformers")
    sizes = BASE | SHAPE | MODELS["qwen3_moe"] | {"num_experts_per_tok": top_k, "max_position_embeddings": 1 << 17}
    source = {"model_type": "qwen3_moe", **sizes}
    draw = random.Random(0)
    within = [*range(1, 140, 7), *(draw.randint(140, warmup._FEW_ENOUGH) for _ in range(15))]
    beyond = [warmup._FEW_ENOUGH + 1, 16384, 40001, 65536]
    (kernels, _), others = in_processes(
        (needed, source, [1], warmup._FEW_ENOUGH), (needed_for, source, [*within, *beyond])
    )
    assert {spec.name for spec in others} > {"sort_by_expert", "rotary", "router_logits", "rms_norm", "combine"}
    assert sorted(map(warmup._described, others - kernels)) == []


QWEN3_30B = {(5120, 2048, 0): None, (2048, 4096, 0): None, (1536, 2048, 128): Activation(), (2048, 768, 128): None}
DEEPSEEK_V3 = {
    (2112, 7168, 0): None,
    (24576, 1536, 0): None,
    (32768, 512, 0): None,
    (7168, 16384, 0): None,
    (4096, 7168, 1): Activation(),
    (4096, 7168, 256): Activation(),
    (7168, 2048, 256): None,
}


@pytest.mark.parametrize("model", [QWEN3_30B, DEEPSEEK_V3], ids=["Qwen3-30B-A3B", "DeepSeek-V3"])
def test_no_length_chooses_another_gemm(model):
    top_k, draw = 8, random.Random(0)
    for (n, k, groups), activation in model.items():
        most = 1024 if groups else 8192
        lengths = [*range(1, 200), *(draw.randint(200, most) for _ in range(100)), most]
        epilogue = PlainStore(torch.bfloat16) if activation is None else SwigluQuantize(activation)
        family, each = Family(n, k, groups, epilogue), top_k if groups > 1 else 1
        variants = family.all_variants(each, each * most, SMS)
        for rows in (each * length for length in lengths):
            if groups:
                problem = GroupedProblem(rows, groups, rows / groups, n, k, SMS, swiglu=epilogue.gated)
                chosen = choose_grouped(problem)
            else:
                chosen = choose_dense(rows, n, k, SMS)
            assert kernel_spec(chosen, n, k, epilogue) in variants, rows


@pytest.mark.parametrize("n, k", [(2112, 7168), (4096, 7168), (48, 128)])
def test_dense_variants_are_those_of_every_number_of_rows(n, k):
    epilogue = PlainStore(torch.bfloat16)
    each = {kernel_spec(choose_dense(m, n, k, SMS), n, k, epilogue) for m in range(1, 1400)}
    assert Family(n, k, 0, epilogue).all_variants(1, 1399, SMS) == each


def test_rows_of_a_token_are_known_without_a_call_of_one(monkeypatch):
    monkeypatch.setattr(gemm_warmup, "families", {})
    family = Family(256, 128, 16, PlainStore(torch.bfloat16))
    for tokens in (8, 5, 3):
        gemm_warmup.note(family, 6 * tokens)
    assert gemm_warmup.families == {family: 6}


SHAPES = [(272, 160), (8, 96, 160, 2)]
OPTIONS = warm_module._Options(
    Activation(), bias=False, weight_scales="block", weight_format="fp8", dtype=torch.bfloat16
)


@pytest.fixture
def forked(monkeypatch):
    """What warm records in a process of its own has PyTorch imported already."""
    monkeypatch.setattr(warm_module, "in_own_process", lambda *call: in_processes(call)[0])


def check_warm(monkeypatch, options, batch_invariant):
    """That what calls of other numbers of tokens launch is compiled."""
    compiled, tokens = [], 300
    monkeypatch.setattr(jit, "compile_all", compiled.extend)
    with fp8moe.batch_invariant(batch_invariant):
        fp8moe.warm(SHAPES, [3, tokens], **options._asdict())
    counts = [*range(1, 70, 3), 100, 128, 129, 255, tokens - 1]
    (launched,) = in_processes((launched_by_modules, SHAPES, counts, options, batch_invariant))
    names = {spec.name for spec in launched}
    assert {"gemm", "quantize_1x128", "sort_by_expert", "permute_quantize", "combine"} <= names
    assert ("permute_fp8" in names) == (not options.bias)
    assert sorted(map(warmup._described, launched - set(compiled))) == []


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        OPTIONS._replace(weight_scales="channel", dtype=torch.float16),
        OPTIONS._replace(weight_format="mxfp4"),
        OPTIONS._replace(weight_format="nvfp4"),
    ],
)
def test_no_number_of_tokens_needs_a_kernel_that_warm_did_not_compile(monkeypatch, forked, options):
    check_warm(monkeypatch, options, False)


def test_warm_of_biases_in_the_batch_invariant_mode(monkeypatch):
    check_warm(monkeypatch, OPTIONS._replace(activation=Activation(7.0, 1.702), bias=True), True)


def test_what_warm_compiles_is_kept(tmp_path, monkeypatch, forked):
    specs, cubin = [], jit.cubin
    monkeypatch.setenv("FP8MOE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(jit, "cubin", lambda spec: specs.append(spec) or cubin(spec))
    config.reload()
    fp8moe.warm([(64, 128)], [1])
    assert {spec.name for spec in specs} == {"gemm", "quantize_1x128"} and all(map(jit.is_cached, specs))
    monkeypatch.undo()
    config.reload()


@pytest.mark.parametrize(
    ("shapes", "counts", "error", "message"),
    [
        ([], [1], ValueError, "^shapes: expected at least one"),
        ([(64, 128, 2)], [1], ValueError, r"^shapes: expected \(N, K\) or \(E, I, H, top_k\), got \(64, 128, 2\)"),
        ([(64, 0)], [1], ValueError, "^shapes: expected .*, got 0"),
        ([(64, 1.5)], [1], TypeError, "^shapes: expected an int, got float"),
        ([(64, 128)], [], ValueError, "^token_counts: expected at least one"),
        ([(64, 128)], [0], ValueError, "^token_counts: expected .*, got 0"),
        ([(2000, 16, 16, 1)], [1], ValueError, "^num_experts: expected at most 1024, got 2000"),
    ],
)
def test_shapes_that_warm_refuses(shapes, counts, error, message, forked):
    refused(error, message, fp8moe.warm, shapes, counts)


def test_a_process_that_ends_without_an_answer():
    refused(RuntimeError, "a process ended before its work did", in_own_process, os._exit, 1)


SPECS = [permute.kernel_spec(128, torch.bfloat16), quantize.kernel_spec("quantize_1x128", torch.bfloat16, False, True)]


@pytest.fixture
def two_kernels(monkeypatch):
    monkeypatch.setattr(warmup, "_kernels", lambda *_: list(SPECS))
    yield
    monkeypatch.undo()
    config.reload()


def run(capsys, *arguments):
    status = main(["warmup", "--model-type", "qwen3_moe", "--jobs", "1", *map(str, arguments)])
    return status, capsys.readouterr().out.splitlines()


def test_compiles_what_is_missing_into_a_directory_to_ship(tmp_path, monkeypatch, capsys, two_kernels):
    directory = tmp_path / "kernels"
    status, lines = run(capsys, "--output", directory, "--check")
    assert status == 1 and len(lines) == 3 and lines[0].startswith("permute_quantize INPUT=BFloat16")
    assert lines[-1] == f"2 of 2 kernels are missing in {directory}"
    status, lines = run(capsys, "--output", directory)
    assert status == 0 and lines[0].startswith(f"2 kernels in {directory}, 2 of them compiled now")

    def never(*_):
        raise AssertionError("compiled again")

    shipped = tmp_path / "copy"
    directory.rename(shipped)
    monkeypatch.setenv("FP8MOE_CACHE_DIR", str(shipped))
    config.reload()
    monkeypatch.setattr(compilers, "compile_source", never)
    assert all(map(jit.is_cached, SPECS)) and all(jit.cubin(spec)[:4] == b"\x7fELF" for spec in SPECS)
    assert run(capsys, "--check") == (0, [f"0 of 2 kernels are missing in {shipped}"])


@pytest.mark.filterwarnings("ignore:compiled kernels are not kept")
def test_a_directory_that_keeps_nothing(tmp_path, capsys, two_kernels):
    tmp_path.chmod(0o777)
    refused(SystemExit, "keeps 0 of 2 kernels; expected a directory of your own", run, capsys, "--output", tmp_path)


def test_a_kernel_that_cannot_be_compiled_is_named(tmp_path, monkeypatch, two_kernels):
    broken = jit.KernelSpec("sample.cu", "no_such_kernel", SPECS[0].defines)
    monkeypatch.setattr(warmup, "_kernels", lambda *_: [broken])
    with pytest.raises(SystemExit, match="warmup: no_such_kernel INPUT=BFloat16 .*: .*no_such_kernel.cu"):
        main(["warmup", "--model-type", "qwen3_moe", "--jobs", "1", "--output", str(tmp_path / "kernels")])


def test_a_process_that_is_killed(tmp_path, monkeypatch, two_kernels):
    monkeypatch.setattr(jit, "cubin", end)
    with pytest.raises(SystemExit, match="a process ended before its work did, perhaps for want of memory; try --jobs"):
        main(["warmup", "--model-type", "qwen3_moe", "--jobs", "1", "--output", str(tmp_path / "kernels")])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "expected either SRC or --model-type"),
        (["here", "--model-type", "mixtral"], "expected either SRC or --model-type"),
        (["nowhere"], "SRC is 'nowhere'; it must be a directory with a config.json, or such a file"),
        (["--model-type", "mixtral", "--set", "num_hidden_layers=99999999"], "num_hidden_layers is 99999999, expected"),
    ],
)
def test_no_model(arguments, message):
    refused(SystemExit, message, main, ["warmup", *arguments])


def test_without_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(warmup.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="^fp8moe warmup: transformers, .* is not installed: pip install"):
        main(["warmup", "--model-type", "mixtral", "--output", str(tmp_path)])


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("--tokens", "0", "an integer >= 1, got '0'"),
        ("--batch-sizes", "x", "an integer >= 1, got 'x'"),
        ("--batch-sizes", "65536", "at most 65535, got 65536"),
        ("--tokens", "9999999", "at most 1048576, got 9999999"),
        ("--set", "hidden_size", "NAME=VALUE, got 'hidden_size'"),
    ],
)
def test_wrong_numbers(option, value, expected, capsys):
    with pytest.raises(SystemExit):
        main(["warmup", "--model-type", "mixtral", option, value])
    assert f"argument {option}: expected {expected}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "source, message",
    [
        ({}, "model_type is None; it must be one that transformers knows"),
        ({"model_type": "no_such"}, "model_type is 'no_such'; it must be one"),
        ({"model_type": ["mixtral"]}, r"model_type is \['mixtral'\]; it must be one"),
        ({"model_type": "mixtral", "hidden_size": "wide"}, "config.json: transformers cannot"),
        (
            {"model_type": "mixtral", "quantization_config": {"quant_method": "gptq"}},
            "quantization_config: gptq with bits None, which fp8moe does not run",
        ),
        (
            {"model_type": "mixtral", "quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"config.json: quantization_config: weight_block_size is \[64, 64\], expected \[128, 128\]",
        ),
        (
            {"model_type": "qwen3_moe", "hidden_size": "wide"},
            r"config.json: transformers cannot read it \(.*hidden_size.*wide",
        ),
    ],
)
def test_a_configuration_that_cannot_be_read(source, message):
    pytest.importorskip("transformers")
    refused(ValueError, message, warmup._record, source, [1], 8, SMS)


def test_a_size_that_the_model_does_not_have():
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="--set hiden_size: the configuration of mixtral has no such value"):
        warmup._record({"model_type": "mixtral", "hiden_size": 3}, [1], 8, SMS, given=["hiden_size"])


def test_sizes_by_hand_and_of_a_file(tmp_path, monkeypatch, two_kernels, capsys):
    seen = []
    monkeypatch.setattr(warmup, "_kernels", lambda pool, source, options: seen.append(source) or [])
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "hidden_size": 64}')
    sizes = ["--set", "hidden_size=96", "--set", 'layer_types=["full_attention"]', "--set", "hidden_act=silu"]
    by_hand = {"hidden_size": 96, "layer_types": ["full_attention"], "hidden_act": "silu"}
    for arguments, expected in (
        (["--model-type", "qwen3_moe", *sizes], {"model_type": "qwen3_moe", **by_hand}),
        ([str(tmp_path)], {"model_type": "mixtral", "hidden_size": 64}),
        ([str(tmp_path / "config.json"), *sizes], {"model_type": "mixtral", **by_hand}),
    ):
        assert main(["warmup", *arguments, "--check", "--jobs", "1", "--output", str(tmp_path)]) == 0
        assert seen.pop() == expected
