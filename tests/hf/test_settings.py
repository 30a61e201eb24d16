"""Every entry gives the same whatever the process has set: default dtype and device, inference mode, grad mode."""

from itertools import product

import pytest
import torch
from safetensors.torch import load_file

import fp8moe
from fp8moe.decode import GraphDecoder
from fp8moe.hf import load_model
from fp8moe.layers import replace_linears
from fp8moe.weights import (
    convert_checkpoint,
    inspect_checkpoint,
    load_fp8_checkpoint,
    quantize_checkpoint,
    save_fp8_checkpoint,
)
from tests.checkpoint_formats import LAYOUTS
from tests.global_settings import SETTINGS
from tests.small_checkpoints import bits

transformers = pytest.importorskip("transformers")
from tools.format_matrix import source_of, wanted  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread", "registered", "fp8_without_gpu"),
    pytest.mark.filterwarnings("ignore:.*static scales"),
]

IDS = torch.arange(3, 27).view(2, 12)


@torch.no_grad()
def of_model(model):
    return dict(model.state_dict()) | {"logits": model(IDS).logits}


def files(directory):
    return load_file(directory / "model.safetensors") | {
        path.name: path.read_text() for path in directory.glob("*.json") if path.name != "generation_config.json"
    }


def loaded_by_names(checkpoints, out):
    model = load_model(checkpoints / "fp8")
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    load_fp8_checkpoint(model, checkpoints / "fp8")
    return of_model(model)


def quantized(checkpoints, out):
    quantize_checkpoint(checkpoints / "bf16", out)
    return files(out)


def converted(checkpoints, out):
    convert_checkpoint(checkpoints / "tensor", out)
    return files(out)


def saved(checkpoints, out):
    save_fp8_checkpoint(load_model(checkpoints / "fp8"), out)
    return files(out)


def inspected(checkpoints, out):
    report = inspect_checkpoint(checkpoints / "fp8")
    return {"problems": str(report.problems)}


def from_pretrained(checkpoints, out):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints / "fp8", dtype=torch.bfloat16, device_map="cpu", experts_implementation="fp8moe"
    )
    return of_model(model.eval())


def refitted(checkpoints, out):
    model = load_model(checkpoints / "fp8")
    report = fp8moe.refit(
        model, {name: value * 1.25 for name, value in load_file(checkpoints / "bf16" / "model.safetensors").items()}
    )
    return of_model(model) | {"left": str(report.left)}


def refitted_from_a_directory(checkpoints, out):
    model = load_model(checkpoints / "fp8")
    fp8moe.refit(model, checkpoints / "other")
    return of_model(model)


def decoded(checkpoints, out):
    decoder = GraphDecoder(load_model(checkpoints / "fp8"), batch_sizes=(2,), max_length=32)
    return {"tokens": decoder.generate(IDS, max_new_tokens=6)}


def layers(checkpoints, out):
    model = load_model(checkpoints / "bf16", dtype=torch.float32)
    replace_linears(model)
    return of_model(model)


ENTRIES = {
    **{
        f"load_model, {name}": lambda checkpoints, out, name=name: of_model(load_model(checkpoints / name))
        for name in ("fp8", "channel", "bf16")
    },
    "load_fp8_checkpoint": loaded_by_names,
    "from_pretrained": from_pretrained,
    "quantize": quantized,
    "convert": converted,
    "save": saved,
    "inspect": inspected,
    "refit": refitted,
    "refit from a directory": refitted_from_a_directory,
    "decode": decoded,
    "layers": layers,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One model unquantized, in FP8 with scales of blocks, channels or tensors, and one with other values."""
    directory = tmp_path_factory.mktemp("settings")
    source = source_of("block", directory / "bf16")
    for name, layout in {"fp8": "block", "channel": "compressed-tensors channel", "tensor": "ModelOpt FP8"}.items():
        source.write(LAYOUTS[layout], directory / name, wanted(layout))
    source.tensors = {name: value * 1.25 for name, value in source.tensors.items()}
    source.write(LAYOUTS["block"], directory / "other", wanted("block"))
    return directory


@pytest.fixture(scope="module")
def expected(checkpoints, tmp_path_factory):
    found = {}

    def of(entry):
        if entry not in found:
            found[entry] = ENTRIES[entry](checkpoints, tmp_path_factory.mktemp("expected") / "out")
        return found[entry]

    return of


def means_the_device(entry, setting):
    """from_pretrained is transformers' own: there a default device is where the model is to be, and meta is refused."""
    return entry == "from_pretrained" and "device" in setting


@pytest.mark.parametrize("entry,setting", [each for each in product(ENTRIES, SETTINGS) if not means_the_device(*each)])
def test_settings_change_nothing(checkpoints, expected, tmp_path, entry, setting):
    right = expected(entry)
    with SETTINGS[setting]():
        found = ENTRIES[entry](checkpoints, tmp_path / "out")
    assert list(found) == list(right)
    for name, value in right.items():
        if isinstance(value, torch.Tensor):
            assert (found[name].dtype, found[name].device) == (value.dtype, value.device), name
            assert torch.equal(bits(found[name]), bits(value)), name
        else:
            assert found[name] == value, name


def test_a_model_made_in_inference_mode_is_refused_by_name(checkpoints):
    with torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints / "bf16")
    for write in (fp8moe.refit, load_fp8_checkpoint):
        with pytest.raises(ValueError, match=r"^model: \S+ was made under torch.inference_mode"):
            write(model, checkpoints / "bf16")
    with torch.no_grad():
        model(IDS)
