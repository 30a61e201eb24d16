"""README's table of models: GB are what `fp8moe quantize` writes in each format; parameters are as published."""

import warnings
from importlib import metadata

import pytest

transformers = pytest.importorskip("transformers")
from benchmarks.tables import with_tables  # noqa: E402
from fp8moe.weights import DEFAULT_SKIP, quantize_checkpoint  # noqa: E402
from fp8moe.weights.source import open_checkpoint  # noqa: E402
from tests.tiny_moe_models import MODELS as TINY  # noqa: E402
from tools import model_sizes  # noqa: E402
from tools.model_matrix import MARK, PAGE, read_page  # noqa: E402
from tools.model_sizes import BEGIN, END, MODELS, Sizes, Stored  # noqa: E402


def test_the_table_is_as_the_tool_writes_it():
    version, _ = read_page(PAGE.read_text(encoding="utf-8").partition(MARK)[2])
    if version != metadata.version("transformers"):
        pytest.skip(f"docs/models.md is of transformers {version}")
    text = model_sizes.PAGE.read_text(encoding="utf-8")
    assert with_tables(text, model_sizes.readme(), BEGIN, END) == text, "run python -m tools.model_sizes"


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_many_as_published(name):
    assert model_sizes.published(name).parameters / 1e9 == pytest.approx(MODELS[name].billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        *((name, "fp8") for name in ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "MixtralForCausalLM")),
        *(("Qwen3MoeForCausalLM", experts) for experts in ("mxfp4", "int4-32")),
        ("GptOssForCausalLM", "mxfp4"),
    ],
)
def test_bytes_are_those_of_a_quantized_checkpoint(tmp_path, name, experts):
    config = TINY[name].config()
    model = TINY[name].auto_class.from_config(config).bfloat16()
    model.save_pretrained(tmp_path / "model")
    with warnings.catch_warnings(action="ignore"):
        kept = ("*.self_attn.*",) if name == "GptOssForCausalLM" else ()
        quantize_checkpoint(tmp_path / "model", tmp_path / "fp8", experts=experts, skip=(*DEFAULT_SKIP, *kept))
    buffers = {name for name, _ in model.named_buffers()}
    stored = open_checkpoint(tmp_path / "fp8").tensors
    form = None if experts == "fp8" else Stored(experts, "bfloat16" if kept else "fp8")
    found = model_sizes.sizes(model_sizes.on_meta(config), form)
    sizes = {key: info.nbytes for key, info in stored.items() if key not in buffers and not key.endswith("_shape")}
    assert found.experts + found.rest == sum(sizes.values())
    assert found.experts > found.rest / 10
    assert found.parameters == sum(weight.numel() for weight in model.parameters())


def test_gpus_have_room_beside_the_weights():
    assert Sizes(60, 8, 1).gpus(80) == 1
    assert Sizes(61, 8, 1).gpus(80) == 2  # each has everything but experts
    assert Sizes(16 * 60, 8, 1).gpus(80) == 16
    assert Sizes(0, 69, 1).gpus(80) is None
