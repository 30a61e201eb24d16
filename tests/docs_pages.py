"""The pages with code, each with the models that it needs and a check of what its blocks leave behind."""

import functools
import io
import os
import shutil
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import torch

from fp8moe import dequantize
from fp8moe.weights import quantize_checkpoint
from tests.docs_blocks import PAGES, blocks, run_blocks
from tests.tiny_tokenizer import write_tiny_tokenizer

MODEL = "Qwen3-30B-A3B"
FP8_MODEL = "Qwen3-30B-A3B-FP8"
# Pages that make their models themselves; the others find them in their directory.
MODELS = {"README.md": (f"Qwen/{MODEL}",), "checkpoints.md": (MODEL,)}
WITH_CODE = [page for page in PAGES if any(block.language in ("python", "sh") for block in blocks(page))]


@functools.cache
def models():
    """A folder, there until the process ends, of a tiny model, unquantized and in FP8, under names of large ones."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    temporary = tempfile.TemporaryDirectory(prefix="fp8moe-docs-")
    folder = Path(temporary.name)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 128},
        **{"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "initializer_range": 0.1},
        **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1},
    )
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder / MODEL)
    write_tiny_tokenizer(folder / MODEL)
    quantize_checkpoint(folder / MODEL, folder / FP8_MODEL)
    return temporary


def run_page(page, directory, has_gpu):
    """Run a page in the working directory ``directory``, with the models that it needs, and check what it leaves."""
    for name in MODELS.get(page.name, (MODEL, FP8_MODEL)):
        shutil.copytree(Path(models().name, Path(name).name), directory / name)
    names = run_blocks(blocks(page), directory, has_gpu)
    if page.name in CHECKS:
        CHECKS[page.name](names)


def run_alone(rank, block, directory):
    """What a process runs in which modules were imported, and nothing else was done."""
    os.chdir(directory)
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    with redirect_stdout(io.StringIO()):
        run_blocks([block], directory, has_gpu=False)


def check_operations(names):
    assert names["y"].shape == (10, 576)
    exact, grouped = names["exact"], names["grouped"][70:].float()
    assert torch.linalg.norm(grouped - exact) / torch.linalg.norm(exact) < 2e-3


def check_readme(names):
    assert names["model"].config._experts_implementation == "fp8moe"
    prompts, tokens = names["prompts"]["input_ids"], names["tokens"]
    assert torch.equal(tokens[:, : prompts.shape[1]], prompts)
    assert 1 <= tokens.shape[1] - prompts.shape[1] <= 32


def check_mqa(names):
    seen = [(names[result] != -torch.inf).sum(-1).tolist() for result in ("logits", "step")]
    assert seen == [[*range(1, 101), *range(1, 201)], [59, 60, 63, 64]]
    assert names["kept"].data.shape == (124, 128)
    assert (names["chosen"] >= 0).sum(-1).tolist() == [min(count, 32) for count in seen[0]]


def check_deep_gemm(names):
    weights, rows = dequantize(names["weights"]), names["x"].float()
    expected = torch.cat([rows[:70] @ weights[0].T, rows[70:] @ weights[2].T])
    assert names["group_offsets"].tolist() == [0, 70, 70, 200]
    assert close(names["y"], expected)
    padded, tokens, dy = (names[name].float() for name in ("padded", "tokens", "dy"))
    assert close(names["z"][2], padded[256:] @ weights[2].T)
    assert close(names["dw"][0], 2 * dy[:128].T @ tokens[:128])
    assert close(names["dw"][2], 2 * dy[128:].T @ tokens[128:])
    assert not names["dw"][1].any()


def close(result, expected):
    """As close as operands in E4M3 allow."""
    return (result.float() - expected).norm() <= 0.05 * expected.norm()


def check_training(names):
    assert names["losses"][-1] < names["losses"][0]


def check_finetuning(names):
    from transformers import AutoModelForCausalLM

    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert names["loss"] < 0.5 * names["losses"][0]
    assert names["lora_losses"][-1] < 0.8 * names["lora_losses"][0]
    assert all(error.weight < 3e-2 for error in names["errors"].values()) and "lora_" not in str(names["merged"])
    assert all("experts" in name for name, weight in names["model"].named_parameters() if weight.requires_grad)
    before, after = (AutoModelForCausalLM.from_pretrained(directory).state_dict() for directory in (MODEL, "trained"))
    experts = [name for name in before if "experts" in name]
    assert before.keys() == after.keys() and len(experts) == 4
    assert not any(torch.equal(before[name], after[name]) for name in experts)


def check_distributed(names):
    from transformers import AutoModelForCausalLM

    assert names["results"].any() and torch.equal(names["results"], names["again"])
    trained = AutoModelForCausalLM.from_pretrained("trained").state_dict()
    before = AutoModelForCausalLM.from_pretrained(MODEL).state_dict()
    assert before.keys() == trained.keys()
    assert not any(torch.equal(before[name], trained[name]) for name in before if "proj" in name)


def check_troubleshooting(names):
    assert torch.equal(names["after"], 2 * names["before"])
    assert names["before"].any()


def check_rl(names):
    assert len(names["rewards"]) == 3 and not names["report"].left
    assert not names["model"]._forward_pre_hooks


CHECKS = {
    "deep_gemm.md": check_deep_gemm,
    "README.md": check_readme,
    "rl.md": check_rl,
    "operations.md": check_operations,
    "distributed.md": check_distributed,
    "finetuning.md": check_finetuning,
    "mqa.md": check_mqa,
    "training.md": check_training,
    "troubleshooting.md": check_troubleshooting,
}
