"""Times, rates, ratios, errors and sizes in README and docs: in parts that tools write from stored results, or stated.

Tests hold the parts that tools write against the files: tests/package/test_docs.py, test_model_sizes.py.
"""

import json
import os
import re
from statistics import fmean

import pytest
import torch

from benchmarks import roofline
from benchmarks.tables import with_tables
from fp8moe import dequantize, quantize_128x128
from fp8moe.decode import sampling
from fp8moe.distributed import local, transport
from fp8moe.layers import mqa_indexer
from fp8moe.quant.arranged import arrange
from fp8moe.quant.packed import blocks_of_nvfp4, quantize_nvfp4
from fp8moe.runtime import cubin_cache
from fp8moe.serving.server import SECONDS_TO_FINISH
from fp8moe.weights import formats, source
from tests.docs_blocks import PAGES, ROOT
from tools import commands, format_matrix, model_matrix, model_sizes

WRITTEN = re.compile(r"<!-- [\w.]+ writes what follows -->\n.*?^<!-- .* -->\n", re.MULTILINE | re.DOTALL)
UNITS = (
    *("us", "µs", "ms", "s", "seconds?", "minutes?", "hours?", "[KMGT]iB", "[GT]B/s", "Gb/s", "[MGT]B"),
    *("TFLOPS", "tokens/s", "times"),
)
FIGURE = re.compile(
    rf"(?<![\w.-])\d[\d.,]*(?:%|[x×](?!\w)|[\s-](?:{'|'.join(UNITS)})(?!\w)|e-\d\b)"  # with a unit, or an error
    r"|(?<![\w.-])(?!2\.1\d|3\.1\d|5\.\d\d)\d\.\d\d+(?![\w.]|-)"  # a ratio
)
VERSION = r"(?:vLLM|torchao|SGLang|lm_eval|TRL) [\d.]+(?: (?:to|and) [\d.]+)*"
"""Besides those of PyTorch, Python and transformers, which FIGURE leaves out."""


def figures(text):
    """Those in prose and in comments of code, but for what tools write and for what is quoted."""
    text = WRITTEN.sub("", text)
    text = re.sub(r"^```.*?^```$", lambda code: "".join(re.findall(r"#.*", code[0])), text, flags=re.M | re.S)
    text = re.sub(r"`[^`\n]+`|\]\([^)]*\)|" + VERSION, "", text)
    return [" ".join(found.replace("\n", " ").split()) for found in FIGURE.findall(text)]


def rounding():
    """What E4M3 costs of a normally distributed tensor, in norm."""
    x = torch.randn(1024, 1024)
    return ((dequantize(quantize_128x128(x)) - x).norm() / x.norm()).item()


def rounding_of_nvfp4():
    """What the kernels round of normally distributed weights in NVFP4, in norm."""
    stored = quantize_nvfp4(torch.randn(1024, 1024))
    exact = dequantize(stored, dtype=torch.float32)
    return (
        (dequantize(blocks_of_nvfp4(*arrange(stored)[:2]), dtype=torch.float32) - exact).norm() / exact.norm()
    ).item()


def rises():
    """Of the demo's perplexity."""
    demo = json.loads((ROOT / "validation/demo.json").read_text())
    plain, *others = [*demo["perplexity"].values(), *demo["experts_in_four_bits"].values()]
    return (f"{other / plain - 1:.1%}" for other in others)


def rise_by_fp8_output():
    """Of the perplexity of the demo's dense model."""
    demo = json.loads((ROOT / "validation/demo.json").read_text())
    return f"{demo['output_layer_in_fp8']['bf16'] / demo['perplexity']['bf16'] - 1:.2%}"


def rewards():
    """Of the example of reinforcement learning, whose test has the lines of the table."""
    for run in json.loads((ROOT / "validation/rl.json").read_text()).values():
        for steps in run["seeds"].values():
            yield from (f"{fmean(steps['reward'][part]):.3f}" for part in (slice(10), slice(-10, None)))
            yield from (f"{fmean(steps['apart']):.4f}", f"{max(steps['most_apart']):.2f}")


def stated():
    """By page: limits and defaults of the code, constants of predictions, and what follows from sizes."""
    hidden, intermediate, top_k = 7168, 2048, 8  # of DeepSeek-V3; 8 ranks of 4096 tokens
    tokens = 8 * 4096 * (hidden + 4 * hidden // 128 + 4 * top_k)
    rows, sums = 4096 * top_k * 2 * hidden, 8 * 4096 * 4 * hidden
    layer = top_k * (3 * hidden + intermediate + 4 * (hidden + intermediate) / 128 + 8)
    kept = top_k * (4 * intermediate + 8)
    error = rounding()
    return {
        "README.md": [f"{model_sizes.FULL:.0%}", *rises()],
        "checkpoints.md": [f"{source.MAX_BYTES / 1e6:.0f} MB"],
        "decode.md": [f"{sampling.NEAR_ZERO:.0e}".replace("e-0", "e-"), rise_by_fp8_output()],
        "distributed.md": [
            *(f"{transport._MICROSECONDS_A_CALL / 1e3} ms", f"{local._SLACK} times", f"{local._SLACK}"),
            *(f"{tokens / 1e9:.2f} GB", f"{rows / 1e9:.2f} GB", f"{sums / 1e9:.2f}"),
            *(f"{roofline.NETWORK_GBPS:.0f} GB/s", "400 Gb/s", f"{8 * roofline.NETWORK_GBPS / 400:.0%}"),
            f"{roofline.NETWORK_US:.0f} us",
        ],
        "experts.md": [
            *(f"{layer / 1024:.0f} KiB", f"{roofline.TFLOPS:.0f} TFLOPS", f"{rounding_of_nvfp4():.0%}"),
            *(f"{4 + 16 / 128:.3f}", f"{4 + 8 / 32:.2f}"),  # bits of a weight: scales in bfloat16, and of a byte
        ],
        "finetuning.md": [f"{error:.1%}"],
        "formats.md": [f"{format_matrix.LARGEST_ERROR}".replace("e-0", "e-"), formats.NVFP4_ERROR],
        "fused.md": [f"{128 * (128 + 128) * 512 * 2 / 1e6:.0f} MB"],  # of 128 heads, from 512 latents, in bfloat16
        "models.md": [
            *(f"{model_matrix.LEAST_COSINE['logits']}", f"{model_matrix.LARGEST_DIFFERENCE:.0e}".replace("e-0", "e-"))
        ],
        "rl.md": [*rewards()],
        "serving.md": [f"{SECONDS_TO_FINISH} s"],
        "training.md": [f"{kept / 1024:.0f} KiB", f"{error:.1%}", f"{error * 2**0.5:.0%}"],
        "transformers.md": [f"{4 * mqa_indexer.LOGITS_AT_A_TIME >> 30} GiB"],
        "troubleshooting.md": [f"{error:.1%}"],
        "warmup.md": [f"{cubin_cache._MAX_BYTES >> 20} MB"],
    }


@pytest.fixture(scope="module")
def expected():
    return stated()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_is_written_by_hand(page, expected):
    assert set(figures(page.read_text(encoding="utf-8"))) == set(expected.get(page.name, ()))


FIGURES = "12 ms|0.3 us|8\nminutes|3.5%|1.04 of cuBLAS|(1.5 times|within 1e-3|2 GB|1490 TFLOPS|2.5x faster"


@pytest.mark.parametrize("text", FIGURES.split("|"))
def test_figures_are_found(text):
    others = "`3 ms`, with PyTorch 2.11 and vLLM 0.26, in GLM-4.55 of arXiv:2412.19437, 4 x 4096 of 128x128"
    assert len(figures(f"It takes {text} here, {others}.")) == 1


def test_what_tools_write_is_left_out():
    text = "a\n<!-- tools.x writes what follows -->\n3 ms\n\n4 s\n<!-- to here -->\n"
    assert figures(text) == [] and figures(text + "5 s\n") == ["5 s"]


def test_readme_says_what_the_two_commands_took():
    text = commands.README.read_text(encoding="utf-8")
    assert with_tables(text, commands.sentences(), commands.BEGIN, commands.END) == text, "run python -m tools.commands"


def test_what_the_two_commands_took_in_words(monkeypatch, tmp_path):
    assert commands.memory_of_session(os.getsid(0)) > 1e7
    (tmp_path / "a").write_bytes(bytes(20_000_000))
    assert commands.disk_gb(tmp_path) == 0.02
    rows = dict(zip(commands.TARGETS, ({"seconds": 60 * n, "peak_gb": n} for n in (1, 2, 10)), strict=True))
    disk = {"installed": 1.4, "venv": 1.9, "cache": 1.1, "bare": 0.25}
    recorded = {"versions": {"torch": "2.13.0+cpu"}, "cpus": 2, "commands": rows, "disk_gb": disk}
    monkeypatch.setattr(commands, "FILE", tmp_path / "commands.json")
    assert commands.sentences() == ""
    commands.FILE.write_text(json.dumps(recorded))
    text = commands.sentences()
    assert "`make demo` took 2.0 minutes and 2.0 GB of memory, `make test` 10.0 minutes" in text
    assert "PyTorch's build for CPUs `.venv` takes 1.9 GB" in text and "`pip install .` takes 0.25 GB" in text


def test_what_a_bare_install_brings():
    found = commands.dependencies("fp8moe", without="torch")
    assert {"safetensors", "cuda-bindings", "nvidia-cuda-nvrtc"} <= found and "torch" not in found
    assert 0.05 < commands.bare_gb() < 1  # PyTorch for CUDA brings NVRTC itself
