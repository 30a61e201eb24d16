"""`python -m tools.vllm_reads`: whether vLLM reads the checkpoints that fp8moe writes.

A small Qwen3-MoE with random weights is written by `quantize_checkpoint` and by `save_fp8_checkpoint`, with experts in
each format that the function writes. `load_model` and vLLM, in a process of its own, read each checkpoint and give log
probabilities of the same prompts. Needs a GPU, and vLLM in this environment or in that of `--python`.

`rounding`: differences of fp8moe's log probabilities from those of the model in bfloat16. `difference`: of vLLM's from
fp8moe's, which must not be larger in the median. vLLM multiplies experts in four bits by bfloat16, fp8moe by FP8.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.report import ROOT
from tools.environments import store
from tools.vllm_serving import compare, log_probabilities

FILE = ROOT / "benchmarks" / "results" / "vllm_reads.json"
SIZES = {"vocab_size": 2048, "hidden_size": 1024, "moe_intermediate_size": 512, "intermediate_size": 1024}
SIZES |= {"num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 4, "norm_topk_prob": True}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "initializer_range": 0.05}
PROMPTS, TOKENS = 4, 128
ERROR_LINES = 6


def quantize(source: Path, target: Path, experts: str) -> None:
    """Write by `quantize_checkpoint`."""
    from fp8moe.weights import quantize_checkpoint

    quantize_checkpoint(source, target, experts=experts)


def save(source: Path, target: Path, experts: str) -> None:
    """Write by `save_fp8_checkpoint` a model that is quantized in memory."""
    from transformers import AutoModelForCausalLM

    from fp8moe import GroupedExperts, replace_linears
    from fp8moe.weights import DEFAULT_SKIP, save_fp8_checkpoint

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    for path, module in list(model.named_modules()):
        if isinstance(getattr(module, "down_proj", None), nn.Parameter):
            model.set_submodule(path, GroupedExperts.from_experts(module, weight_format=experts))
    replace_linears(model, skip=DEFAULT_SKIP)
    save_fp8_checkpoint(model, target)


WRITERS: dict[Callable[[Path, Path, str], None], tuple[str, ...]] = {
    quantize: ("fp8", "mxfp4", "int4", "int4-32"),
    save: ("fp8", "mxfp4", "nvfp4", "int4", "int4-32"),
}
"""Maps each function that writes checkpoints to the formats of experts that it writes."""


def make_source(directory: Path, device: str) -> nn.Module:
    """Make a model in bfloat16 and write it to the directory."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    with torch.device(device):
        config = Qwen3MoeConfig(**SIZES, tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(directory)
    return model


def measure(work: Path, python: str, device: str = "cuda") -> list[dict]:
    """Write and read all checkpoints; return a row for each."""
    from fp8moe.hf import load_model

    model = make_source(work / "bfloat16", device)
    prompts = torch.randint(SIZES["vocab_size"], (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    exact = log_probabilities(model, prompts)
    del model
    rows = []
    for write, formats in WRITERS.items():
        for experts in formats:
            target = work / f"{write.__name__}-{experts}"
            write(work / "bfloat16", target, experts)
            ours = log_probabilities(load_model(target, device=device), prompts)
            row = {"written_by": write.__name__, "experts": experts, "rounding": compare(ours, exact)}
            try:
                answer = ask_vllm(target, prompts, python)
                row |= {"difference": compare(answer["log_probabilities"], ours), "methods": answer["methods"]}
                row["read"] = row["difference"]["median"] <= row["rounding"]["median"]
            except RuntimeError as error:
                row |= {"read": False, "error": str(error)}
            rows.append(row)
            print(row, flush=True)
    return rows


def ask_vllm(directory: Path, prompts: list[list[int]], python: str) -> dict:
    """Return what `answer` finds in another process. RuntimeError with vLLM's errors if it fails."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # for the other process
    question, found = directory / "prompts.json", directory / "answer.json"
    question.write_text(json.dumps(prompts))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [python, "-c", f"from tools.vllm_reads import answer; answer({str(directory)!r})"],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode or not found.exists():
        lines = done.stdout.splitlines()
        errors = [line for line in lines if "Error" in line] or lines
        raise RuntimeError(f"exit code {done.returncode}: " + "\n".join(errors[-ERROR_LINES:]))
    return json.loads(found.read_text())


def answer(directory: str) -> None:
    """Let vLLM read a checkpoint; write log probabilities of the prompts beside it, and the kinds of its layers."""
    from benchmarks.vllm_engine import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    prompts = json.loads(Path(directory, "prompts.json").read_text())
    how = {"skip_tokenizer_init": True, "dtype": "bfloat16", "generation_config": "vllm", "enforce_eager": True}
    how |= {"max_model_len": 512, "gpu_memory_utilization": 0.5, "enable_prefix_caching": False}
    how |= {"attention_backend": "FLASH_ATTN"}
    engine = LLM(directory, **how)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    results = engine.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
    found = [
        [places[token].logprob for token, places in zip(prompt[1:], one.prompt_logprobs[1:], strict=True)]
        for prompt, one in zip(prompts, results, strict=True)
    ]
    content = {"log_probabilities": found, "methods": engine.apply_model(methods)[0]}
    Path(directory, "answer.json").write_text(json.dumps(content))


def methods(model: nn.Module) -> list[str]:
    """Return the names of the classes by which a model of vLLM computes its quantized layers."""
    layers = (module for module in model.modules() if getattr(module, "quant_method", None) is not None)
    return sorted({type(getattr(layer, "scheme", None) or layer.quant_method).__name__ for layer in layers})


def main() -> None:
    """Measure and write the file; exit with the checkpoints that vLLM does not read, if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tools.vllm_reads", description=__doc__.partition(": ")[2])
    parser.add_argument("--python", default=sys.executable, help="the interpreter of an environment that has vLLM")
    parser.add_argument("--out", type=Path, default=FILE, metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("vLLM's kernels need a GPU and PyTorch sees none; run it on a machine that has one")
    with tempfile.TemporaryDirectory() as work:
        rows = measure(Path(work), args.python)
    store(args.out, {"gpu": torch.cuda.get_device_name(), "rows": rows})
    unread = [f"{row['written_by']} {row['experts']}" for row in rows if not row["read"]]
    sys.exit(f"vLLM does not read: {', '.join(unread)}" if unread else 0)


if __name__ == "__main__":
    main()
