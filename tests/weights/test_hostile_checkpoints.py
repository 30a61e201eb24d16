"""Damaged and hostile checkpoints: refused in words, in bounded time and memory, and nothing is half loaded."""

import importlib.util
import itertools
import json
import math
import os
import shutil
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from fp8moe import GroupedExperts, refit
from fp8moe.cli import main
from fp8moe.weights import (
    CheckpointError,
    convert_checkpoint,
    inspect_checkpoint,
    load_fp8_checkpoint,
    quantize_checkpoint,
    save_fp8_checkpoint,
)
from fp8moe.weights.source import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    SINGLE,
    config_problems,
    count_problems,
    open_checkpoint,
    parse_object,
    printable,
)
from tools.mutate_checkpoints import Cases, Model, attempt
from tools.mutations import DEEP, MUTATIONS, read_parts, write_parts

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLE = 140  # of the cases of tools.mutate_checkpoints
SCALE = "layers.0.q_proj.weight_scale_inv"
CONFIGURATION = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


@pytest.fixture
def checkpoint(tmp_path):
    """A sound FP8 checkpoint in three shards or more."""
    save_fp8_checkpoint(Model(), tmp_path / "checkpoint", max_shard_size=60_000)
    (tmp_path / "checkpoint" / CONFIG).write_text(json.dumps(CONFIGURATION))
    return tmp_path / "checkpoint"


@pytest.fixture
def single(tmp_path):
    """A sound FP8 checkpoint in one file."""
    save_fp8_checkpoint(Model(), tmp_path / "single")
    return tmp_path / "single"


def refused(directory, model=None):
    """The problems for which the checkpoint is refused, having made sure that the model stays as it is."""
    model = model or Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        load_fp8_checkpoint(model, directory)
    for name, value in model.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)), name
    return error.value.problems


def change(directory, name, function):
    """Store another tensor under this name."""
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            save_file(tensors | {name: function(tensors[name].clone())}, path, {"format": "pt"})


# Mutations.


def test_sample_of_mutations(tmp_path):
    cases = Cases(tmp_path, with_models=importlib.util.find_spec("transformers") is not None)
    drawn = [cases.case(number) for number in range(SAMPLE)]
    assert {case.mutation for case in drawn} == set(MUTATIONS)
    outcomes = [cases.run(case) for case in drawn]
    assert [(outcome.case, failure) for outcome in outcomes for failure in outcome.failures] == []
    refused_cases = sum(outcome.refused > 0 for outcome in outcomes)
    assert 0.5 * SAMPLE < refused_cases < 0.95 * SAMPLE  # else the mutations miss, or nothing is read at all


def test_attempt_tells_refusals_from_accidents(tmp_path):
    def refuse(_):
        raise CheckpointError("cannot read it", ["x: is damaged"])

    def from_the_system(path):
        (path / "none").read_bytes()

    def half_load(_):
        raise AssertionError("half loaded")

    assert attempt(lambda _: None, tmp_path) == ""
    assert attempt(refuse, tmp_path) is None and attempt(from_the_system, tmp_path) is None
    for accident in (
        lambda _: {}["x"],
        lambda _: int("x"),
        half_load,
        lambda _: [][1],
        lambda _: json.loads("[" * DEEP),
    ):
        assert "Traceback" in attempt(accident, tmp_path)


# Scales.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "kind"),
    [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite"), (0, "zero"), (-1, "negative")],
)
def test_values_that_no_scale_has(checkpoint, dtype, value, kind):
    def spoil(scale):
        scale.view(-1)[1:3] = value
        return scale.to(dtype)

    change(checkpoint, SCALE, spoil)
    problem = f"{SCALE}: has 2 {kind} of 4 values, expected scales that are finite and positive"
    assert inspect_checkpoint(checkpoint).problems == [problem]
    assert refused(checkpoint) == [problem]


def test_every_kind_of_bad_value_is_counted(checkpoint):
    change(checkpoint, SCALE, lambda _: torch.tensor([[math.nan, -math.inf], [-0.0, -1e-40]]))
    expected = "has 1 NaN, 1 infinite, 1 zero, 1 negative of 4 values"
    assert refused(checkpoint) == [f"{SCALE}: {expected}, expected scales that are finite and positive"]


@pytest.mark.parametrize("experts", ["separate", "fused"])
def test_codes_of_e8m0_that_are_nan(tmp_path, experts):
    model = Model()
    for name, value in model.named_parameters():
        if name.endswith("_scale_inv"):
            value.data = value.log2().ceil().exp2()
    save_fp8_checkpoint(model, tmp_path, scale_format="ue8m0", experts=experts)
    (name,) = [name for name in load_file(tmp_path / SINGLE) if name.startswith("layers.1.experts.down_proj_s")] or [
        SCALE
    ]

    def spoil(codes, code):
        codes.view(torch.uint8).view(-1)[0] = code
        return codes

    change(tmp_path, name, lambda scale: spoil(scale, 0))  # 2^-127: the smallest there is
    assert inspect_checkpoint(tmp_path).problems == []
    change(tmp_path, name, lambda scale: spoil(scale, 255))
    (problem,) = refused(tmp_path)
    assert problem.startswith(f"{name}: has 1 NaN of ") and inspect_checkpoint(tmp_path).problems == [problem]


def test_scales_with_their_sizes_of_one_elsewhere(tmp_path):
    experts = GroupedExperts(num_experts=1, hidden_size=256, intermediate_size=256)
    save_fp8_checkpoint(experts, tmp_path, experts="fused")
    change(tmp_path, "gate_up_proj_scale_inv", lambda scale: scale.view(4, 1, 2))
    other = GroupedExperts(num_experts=1, hidden_size=256, intermediate_size=256)
    load_fp8_checkpoint(other, tmp_path)
    assert torch.equal(other.gate_up_proj_scale_inv, experts.gate_up_proj_scale_inv)


# Headers.


def test_fused_experts_with_a_flat_down_proj(tmp_path):
    tensors = {"experts.gate_up_proj": torch.ones(2, 256, 128), "experts.down_proj": torch.ones(2 * 128 * 128)}
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(CheckpointError) as error:
        quantize_checkpoint(tmp_path, tmp_path / "quantized")
    assert "experts.down_proj: shape (32768,), expected three dimensions to go with experts.gate_up_proj" in (
        error.value.problems
    )
    assert not (tmp_path / "quantized").exists()


def test_a_scale_of_nothing(single):
    save_file(load_file(single / SINGLE) | {"_scale_inv": torch.ones(1)}, single / SINGLE)
    assert inspect_checkpoint(single).problems == ["_scale_inv: a scale without a weight"]
    assert refused(single) == ["_scale_inv: extra, the model has no such tensor"]


_NAMES = (
    *(("a.weight", "a.weight_scale"), ("a.weight", "a.weight_scale_inv"), ("a.weight_packed", "a.weight_scale")),
    *(("a.qweight", "a.scales"), ("experts.down_proj", "experts.down_proj_weight_scale")),
    ("experts.gate_up_proj", "experts.gate_up_proj_scale_inv"),
    ("experts.gate_up_proj_blocks", "experts.gate_up_proj_scales"),
    ("experts.0.gate_proj.weight", "experts.gate_up_proj_scale_inv"),
    ("experts.0.up_proj.weight", "experts.0.up_proj.weight_scale"),
)
_SHAPES = (
    *((), (0,), (33,), (0, 32), (4, 0), (1, 1), (3, 5), (64, 32), (32, 0, 32), (2, 0, 64), (3, 7, 32), (2, 4, 16)),
    *((2, 2, 2, 16), (2, 2, 0, 16), (2, 2, 2, 2, 32)),
)
_METHODS = ("fp8", "mxfp8", "mxfp4", "fbgemm_fp8")


def scale_shapes(shape):
    """Shapes that the scale of codes of this shape has in some format."""
    *lead, rows, columns = (1, 1, *shape)[-max(len(shape), 2) :]
    sizes = [(), (1,), shape[:1], shape[:-1], (*shape[:-1], 1), (*shape[:1], 1, 1)]
    sizes += [(*shape[:-1], 2 * columns // 32), (*shape[:-1], -(-columns // 32)), (*shape[:-1], -(-2 * columns // 128))]
    return [*sizes, (*lead, -(-rows // 128), -(-columns // 128))]


def test_codes_and_scales_that_fit_each_other(tmp_path):
    """Of any rank and emptiness: what one mutation does not reach."""
    pairs = [(shape, scale) for shape in _SHAPES for scale in scale_shapes(shape)]
    dtypes = (("F8_E4M3", "U8", "I8", "I32"), ("F32", "BF16", "F8_E8M0", "U8", "F8_E4M3", "I8"))
    cases = list(itertools.product(_NAMES, pairs, *dtypes, _METHODS))
    problems = {}
    for names, shapes, *kinds, method in Random(0).sample(cases, 500):
        header, end = {}, 0
        for name, shape, dtype in zip(names, shapes, kinds, strict=True):
            begin, end = end, end + math.prod(shape) * {"F32": 4, "I32": 4, "BF16": 2}.get(dtype, 1)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        (tmp_path / "x").mkdir()
        write_parts(tmp_path / "x" / SINGLE, json.dumps(header).encode(), b"<" * end)
        config = {"quantization_config": {"quant_method": method, "scale_fmt": "ue8m0"}}
        (tmp_path / "x" / CONFIG).write_text(json.dumps(config))
        for read in (
            inspect_checkpoint,
            lambda directory: load_fp8_checkpoint(nn.Module(), directory),
            lambda directory: convert_checkpoint(directory, tmp_path / "converted", requantize=True),
        ):
            problem = attempt(read, tmp_path / "x")
            problems |= {problem: header} if problem else {}
        for directory in tmp_path.iterdir():
            shutil.rmtree(directory)
    assert problems == {}


@pytest.mark.parametrize("dtype", ["F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"])
def test_unknown_dtypes(single, tmp_path, dtype):
    """They may be in a checkpoint that is loaded, but cannot be written again."""
    header, data = read_parts(single / SINGLE)
    size = 1 if dtype.startswith("F8") else 8
    header["other"] = {"dtype": dtype, "shape": [1], "data_offsets": [len(data), len(data) + size]}
    write_parts(single / SINGLE, json.dumps(header).encode(), data + bytes(size))
    load_fp8_checkpoint(Model(), single, ignore=["other"])
    with pytest.raises(CheckpointError) as error:
        convert_checkpoint(single, tmp_path / "converted")
    assert error.value.problems == [f"other: unknown dtype {dtype}"]
    assert not (tmp_path / "converted").exists()


def edit_header(path, function):
    header, data = read_parts(path)
    write_parts(path, function(header), data)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda header: json.dumps(header | {"__metadata__": {"epoch": 1}}).encode(), "expected a string"),
        (lambda header: json.dumps(header)[:-1].encode() + b',"a\\ud800":{}}', "has {}, expected dtype, shape and"),
        (lambda header: json.dumps(header)[:-1].encode() + b',"__metadata__":{},"__metadata__":{}}', "more than once"),
        (lambda header: b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}", "nested more than 64 deep"),
        (lambda header: json.dumps(header).encode("utf-16"), "'utf-8' codec can't decode"),
        (lambda header: b"[" + json.dumps(header).encode() + b"]", "expected a JSON object, got [{"),
    ],
)
def test_second_shard_with_a_malformed_header(checkpoint, function, message):
    shard = sorted(checkpoint.glob("*.safetensors"))[1]
    edit_header(shard, function)
    (problem,) = refused(checkpoint)
    assert problem.startswith(f"{shard.name}: ") and message in problem
    assert inspect_checkpoint(checkpoint).problems == [problem]


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([2**62, 2**62, 0], [0, 0]),  # what it takes in 64 bits overflows
        ([1] * 65, [0, 2]),  # PyTorch cannot copy so many dimensions
        ([-1, -1], [0, 2]),
        ([True], [0, 2]),
        ([1.0], [0, 2]),
        ([1], [0, 2, 2]),
        ([1], [2, 0]),
        ("1", [0, 2]),
        ([1], None),
    ],
)
def test_shapes_and_offsets(single, shape, offsets):
    entry = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    edit_header(single / SINGLE, lambda header: json.dumps({"x": entry}).encode())
    (problem,) = refused(single)
    assert "x has {" in problem and "expected dtype, shape and data_offsets of a tensor" in problem


def test_experts_with_huge_numbers(single):
    name, huge = (f"layers.0.experts.{number}.gate_proj.weight" for number in (0, 3 * 10**14))
    edit_header(single / SINGLE, lambda header: json.dumps(header).replace(name, huge).encode())
    report = inspect_checkpoint(single)
    assert sorted(report.problems) == [
        "layers.0.experts.0: has no gate_proj",
        "layers.0.experts.3-299999999999999: has no gate_proj",
        "layers.0.experts.3-300000000000000: has no down_proj",
        "layers.0.experts.3-300000000000000: has no up_proj",
    ]
    assert (1, 3 * 10**14 + 1, "separate") in report.experts
    assert f"{name}: missing" in refused(single)


@pytest.mark.parametrize("number", ["9" * 19, "9" * 5000, "00", "٣"])
def test_numbers_that_no_expert_has(single, number):
    name = "layers.0.experts.2.gate_proj.weight"
    edit_header(single / SINGLE, lambda header: json.dumps(header).replace(name, name.replace("2", number)).encode())
    assert inspect_checkpoint(single).problems == ["layers.0.experts.2: has no gate_proj"]
    assert f"{name}: missing" in refused(single)


# Files, config.json and the index.


def in_place_of(path, kind):
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(path.name if kind == "loop" else "nowhere")


@pytest.mark.parametrize("file", [CONFIG, INDEX, "shard"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("directory", "is not a regular file"),
        ("pipe", "is not a regular file"),  # which would wait for ever
        ("device", "is not a regular file"),
        ("nowhere", "there is no such file"),
        ("loop", "cannot be read ("),
    ],
)
def test_no_regular_file(checkpoint, file, kind, message):
    path = min(checkpoint.glob("*.safetensors")) if file == "shard" else checkpoint / file
    in_place_of(path, kind)
    (problem,) = refused(checkpoint)
    assert problem.startswith(f"{path.name}: {message}")


@pytest.mark.parametrize("file", ["", "..", "/etc/passwd", "../x.safetensors", "x" * 300, "a\0b", "\ud800"])
def test_files_that_the_index_cannot_mean(checkpoint, file, capsys):
    index = json.loads((checkpoint / INDEX).read_text())
    index["weight_map"][SCALE] = file
    (checkpoint / INDEX).write_text(json.dumps(index))
    assert len(refused(checkpoint)) == 2  # the file, and that the tensor is in another one
    assert main(["inspect", str(checkpoint)]) == 1
    assert capsys.readouterr().out.isascii()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"quantization_config": ["fp8"]}', "config.json: quantization_config is ['fp8'], expected an object"),
        ('{"quantization_config": "fp8"}', "config.json: quantization_config is 'fp8', expected an object"),
        (
            '{"quantization_config": {"weight_block_size": 128}}',
            "config.json: quantization_config: weight_block_size is 128, expected [128, 128]",
        ),
        (
            '{"quantization_config": {"modules_to_not_convert": {"lm_head": 1}}}',
            "config.json: quantization_config: modules_to_not_convert is {'lm_head': 1}, expected a list of strings",
        ),
        ('{"a":' * DEEP + "1" + "}" * DEEP, "config.json: is not valid JSON (nested more than 64 deep)"),
        ('{"a": ' + "9" * 5000 + "}", "config.json: is not valid JSON (an integer has 5000 digits)"),
        ('{"a": 1, "a": 2}', "config.json: is not valid JSON (the name 'a' is there more than once)"),
        ("[]", "config.json: is not valid JSON (expected a JSON object, got [])"),
    ],
)
def test_configurations(single, text, message, capsys):
    (single / CONFIG).write_text(text)
    assert refused(single) == [message]
    assert message in inspect_checkpoint(single).problems
    assert main(["inspect", str(single)]) == 1
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("value", ["1e5", "100000", "1" + "0" * 40, "Infinity"])
@pytest.mark.parametrize("name", ["num_hidden_layers", "num_experts", "n_routed_experts", "depth", "num_labels"])
def test_counts_that_the_tensors_cannot_have(single, name, value):
    (single / CONFIG).write_text(f'{{"{name}": 1, "text_config": {{"{name}": {value}}}, "max_window_layers": {value}}}')
    (problem,) = count_problems(open_checkpoint(single))
    assert problem.startswith(f"config.json: {name} is 1") or problem.startswith(f"config.json: {name} is inf")
    assert problem.endswith("expected at most 200 for these tensors")


def test_counts_that_no_model_has():
    """Whatever the tensors are: warmup has none."""
    config = {"num_hidden_layers": 1025, "depths": [2, 10**8], "num_labels": 1 << 21, "num_experts": 2048}
    assert config_problems(config | {"vision_config": {"num_layers": 1024}}) == [
        "config.json: num_hidden_layers is 1025, expected at most 1024",
        "config.json: depths is [2, 100000000], expected at most 1024",
        "config.json: num_labels is 2097152, expected at most 1048576",
    ]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            CONFIG,
            '{"model_type": "qwen3_moe", "num_hidden_layers": 100000}',
            "config.json: num_hidden_layers is 100000",
        ),
        (
            CONFIG,
            '{"model_type": "qwen3_moe", "architectures": [1]}',
            "config.json: transformers cannot ",
        ),
        (CONFIG, '{"model_type": "qwen3_moe", "hidden_size": []}', "config.json: transformers cannot read it"),
        (CONFIG, '{"model_type": {}}', "config.json: transformers cannot read it"),
        (GENERATION_CONFIG, "[" * DEEP, "generation_config.json: is not valid JSON (nested more than 64 deep)"),
        (GENERATION_CONFIG, '{"cache_implementation": "x"}', "generation_config.json: transformers cannot read it"),
    ],
)
def test_what_transformers_trips_over(single, file, text, message):
    pytest.importorskip("transformers")
    from fp8moe.hf import load_model

    (single / CONFIG).write_text('{"model_type": "qwen3_moe"}')
    (single / file).write_text(text)
    with pytest.raises(CheckpointError) as error:
        load_model(single)
    assert error.value.problems[-1].startswith(message)


def test_a_json_file_that_is_too_large(single):
    with (single / CONFIG).open("wb") as file:
        file.truncate(2**40)  # a hole: a terabyte if it were read
    assert refused(single) == ["config.json: is larger than 100,000,000 bytes"]


def test_the_command_says_one_line(tmp_path, capsys):
    (tmp_path / INDEX).write_text("[" * DEEP)
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", str(tmp_path)])
    assert str(stopped.value).endswith(f"{INDEX}: is not valid JSON (nested more than 64 deep)")
    assert "\n" not in stopped.value.code and capsys.readouterr() == ("", "")


def test_declarations_that_must_be_objects(single):
    (single / CONFIG).write_text(
        '{"quantization_config": [], "text_config": {"quantization_config": {"a": 1}}, "x": []}'
    )
    checkpoint = open_checkpoint(single)
    assert checkpoint.declarations == {"config.json: text_config.quantization_config": {"a": 1}}
    assert checkpoint.problems == ["config.json: quantization_config is [], expected an object"]


# Text.


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.floats(allow_nan=False) | st.text()))
def test_objects_are_parsed_as_json_does(content):
    assert parse_object(json.dumps(content).encode()) == content


@given(st.text(st.characters() | st.sampled_from("\ud800\udfff\x1b\n\r\u2028")))
def test_messages_are_printable(text):
    assert printable(text).isprintable()
    assert not text.isprintable() or printable(text) == text


def test_long_messages_lose_their_middle():
    line = printable("first" + "x" * DEEP + "last")
    assert len(line) < 2100 and line.startswith("first") and line.endswith("last")


def test_errors_show_printable_names_only(single):
    save_file({"a\n\x1b[31m": torch.ones(1)}, single / SINGLE)
    assert "a\\n\\x1b[31m: extra, the model has no such tensor" in refused(single)
    assert "\x1b" not in str(inspect_checkpoint(single))


# Leftovers: what is to blame is named once, by every reader.


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4976698672\n"


def refused_by_all(directory):
    """The problems that each reader has with a checkpoint."""
    readers = [
        lambda: load_fp8_checkpoint(Model(), directory),
        lambda: refit(Model(), directory),
        lambda: convert_checkpoint(directory, directory / "converted"),
    ]
    if importlib.util.find_spec("transformers") is not None:
        from fp8moe.hf import load_model

        readers.append(lambda: load_model(directory))
    found = []
    for read in readers:
        with pytest.raises(CheckpointError) as error:
            read()
        found.append(error.value.problems)
    return found


def test_pointers_and_missing_shards_alone_are_to_blame(single, tmp_path):
    """Also for scales that lie in another shard than their weights."""
    (single / CONFIG).write_text(json.dumps(CONFIGURATION | {"num_hidden_layers": 2}))
    tensors, weight_map = load_file(single / SINGLE), {}
    (single / SINGLE).unlink()
    for file, scales in (("codes.safetensors", False), ("scales.safetensors", True)):
        part = {name: value for name, value in tensors.items() if name.endswith("_scale_inv") == scales}
        save_file(part, single / file)
        weight_map |= dict.fromkeys(part, file)
    (single / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    shard = single / "codes.safetensors"
    for spoil, words in ((lambda: shard.write_text(POINTER), "Git LFS"), (shard.unlink, "there is no such file")):
        spoil()
        problems = inspect_checkpoint(single).problems
        assert len(problems) == 1 and problems[0].startswith(f"{shard.name}: ") and words in problems[0]
        assert all(found == problems for found in refused_by_all(single))
    for file in (INDEX, CONFIG):
        (single / file).write_text(POINTER)
    with pytest.raises(CheckpointError) as error:
        load_fp8_checkpoint(Model(), single)
    assert [problem.partition(":")[0] for problem in error.value.problems] == [CONFIG, INDEX]
    assert all(
        "Git LFS, not the file itself; fetch the file with git lfs pull" in line for line in error.value.problems
    )
    unquantized = tmp_path / "unquantized"
    unquantized.mkdir()
    (unquantized / SINGLE).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"cannot quantize .*: {SINGLE}: is a pointer of Git LFS, [^\n]*$"):
        quantize_checkpoint(unquantized, tmp_path / "quantized")


def test_two_checkpoints_in_a_directory(checkpoint, single):
    """transformers reads the single file, vLLM the shards of the index."""
    shutil.copy(single / SINGLE, checkpoint)
    (problem,) = inspect_checkpoint(checkpoint).problems
    assert problem.startswith(f"{SINGLE}: lies beside {INDEX} of other files, and some libraries read the one")
    assert all(problem in found for found in refused_by_all(checkpoint))
    assert open_checkpoint(checkpoint).files == [SINGLE]
    index = {"weight_map": dict.fromkeys(load_file(single / SINGLE), SINGLE)}
    (checkpoint / INDEX).write_text(json.dumps(index))
    load_fp8_checkpoint(Model(), checkpoint)
