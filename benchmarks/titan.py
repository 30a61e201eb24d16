"""Tokens/s and memory of four layers of Qwen3-30B-A3B's size on one GPU: torchtitan's modules in bfloat16 and in FP8.

    python -m benchmarks.titan OUT.json [--titan DIR] [--variants bf16 fp8moe torchao]

Uses the modules of torchtitan 0.2.2 without its trainer. `--titan` is a directory with its unpacked wheel; packages
that it imports only for trainers need not be installed. As when torchtitan trains on one GPU, master weights are
float32 under bfloat16 autocast, blocks and loss are compiled and AdamW is fused. Each variant runs in its own process.

- bf16: `torch._grouped_mm` and nn.Linear. fp8moe: experts and linear layers by the converter of
  `fp8moe_torchtitan.v0_2`.
- torchao: its rowwise FP8, `Float8TrainingOpConfig`, for experts and linear layers; groups of tokens are padded to 16
  rows.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import time
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from benchmarks.report import digest, write_json

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ("bf16", "fp8moe", "torchao")
SIZES = {"layers": 4, "dim": 2048, "heads": 32, "kv_heads": 4, "experts": 128, "top_k": 8, "inter": 768}
TRAINERS_ONLY = ("tyro", "torchdata", "datasets", "tensorboard", "tokenizers", "wandb", "einops", "PIL")
WARMUP, STEPS = 5, 10


def find_titan(directory: str | None) -> None:
    """Make torchtitan and `fp8moe_torchtitan` importable.

    Stubs replace missing packages that only torchtitan's trainers need.
    """
    sys.path[:0] = [*([] if directory is None else [directory]), str(ROOT), str(ROOT / "integrations/torchtitan")]
    missing = [name for name in TRAINERS_ONLY if importlib.util.find_spec(name) is None]
    if "tensorboard" in missing:
        missing.append("torch.utils.tensorboard")
    sys.meta_path.insert(0, _EmptyModules(missing))


class _Empty(type(Stateful)):
    """Metaclass of stand-in classes: any attribute is the class itself; as a decorator it changes nothing."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args, **options):
        return args[0] if args and callable(args[0]) else cls


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that makes modules of the given names and their submodules; any name in them is an `_Empty` class."""

    def __init__(self, names: list[str]):
        self.names = names

    def find_spec(self, name: str, path=None, target=None):
        if name in self.names or name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = lambda name: _Empty.__getattr__(_Empty("Empty", (), {}), name)


def model_of(sizes: dict, sequence: int, device: str) -> nn.Module:
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
    from torchtitan.models.qwen3.model.model import Qwen3Model

    moe = MoEArgs(
        num_experts=sizes["experts"],
        num_shared_experts=0,
        top_k=sizes["top_k"],
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        use_grouped_mm=device == "cuda",
    )
    arguments = Qwen3ModelArgs(
        dim=sizes["dim"],
        n_layers=sizes["layers"],
        n_heads=sizes["heads"],
        n_kv_heads=sizes["kv_heads"],
        head_dim=128,
        hidden_dim=4 * sizes["dim"],
        vocab_size=sizes["vocabulary"],
        max_seq_len=sequence,
        moe_enabled=True,
        moe_inter_dim=sizes["inter"],
        moe_args=moe,
    )
    with torch.device("meta"):
        return Qwen3Model(arguments)


def convert(model: nn.Module, variant: str) -> None:
    if variant == "fp8moe":
        from fp8moe_torchtitan.v0_2 import Converter

        Converter(None, types.SimpleNamespace(tp=1)).convert(model)
    elif variant == "torchao":
        from torchao.prototype.moe_training.config import Float8TrainingOpConfig
        from torchao.quantization import quantize_
        from torchtitan.models.moe.utils import set_token_group_alignment_size_m

        def chosen(module: nn.Module, name: str) -> bool:
            linear = isinstance(module, nn.Linear) and not name.endswith(("output", "router.gate"))
            return linear or name.endswith("moe.experts")

        # Settings that torchtitan uses too, for rowwise scales and for groups of FP8 rows.
        torch._inductor.config.emulate_precision_casts = True
        set_token_group_alignment_size_m(16)
        quantize_(model, Float8TrainingOpConfig(), filter_fn=chosen)


def compile_blocks(model: nn.Module) -> None:
    """Compile what torchtitan compiles: the blocks except token dispatch, and the function that computes experts."""
    from torchtitan.models.moe import moe

    torch._dynamo.config.capture_scalar_outputs = True
    for block in model.layers.values():
        for name, module in block.named_children():
            parts = (block, name, module), *((module, part, inner) for part, inner in module.named_children())
            for parent, part, inner in parts[1:] if name == "moe" else parts[:1]:
                if part != "experts":
                    setattr(parent, part, torch.compile(inner, fullgraph=True))
    moe._run_experts_grouped_mm = torch.compile(moe._run_experts_grouped_mm, fullgraph=True)


def measure(variant: str, arguments: argparse.Namespace) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":  # only for trying out this benchmark: on a CPU, torch.histc does not accept integers
        counts = torch.histc
        torch.histc = lambda values, **options: counts(values.float(), **options).to(values.dtype)
    sizes = SIZES | {"vocabulary": arguments.vocabulary} | dict(arguments.size)
    torch.manual_seed(0)
    model = model_of(sizes, arguments.sequence, device)
    convert(model, variant)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(torch.device(device))
    loss_of = cross_entropy
    if not arguments.eager:
        compile_blocks(model)
        loss_of = torch.compile(cross_entropy)  # as torchtitan compiles it beside the model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator(device).manual_seed(1)
    shape = (arguments.batch, arguments.sequence + 1)
    # Few different tokens, so that the model has something to learn.
    data = torch.randint(0, 64, shape, device=device, generator=generator)
    losses, begin = [], 0.0
    for step in range(WARMUP + arguments.steps):
        if step == WARMUP:
            wait(device)
            begin = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            logits = model(data[:, :-1])
        loss = loss_of(logits, data[:, 1:])
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    wait(device)
    seconds = (time.perf_counter() - begin) / arguments.steps
    row = {"variant": variant, "ms": 1e3 * seconds, "tokens_s": data[:, 1:].numel() / seconds}
    if device == "cuda":
        row |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "gpu": torch.cuda.get_device_name()}
    parameters = sum(value.numel() for value in model.parameters())
    losses = [round(value, 4) for value in torch.stack(losses).tolist()]
    return row | {"parameters": parameters, "losses": losses, "compiled": not arguments.eager}


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of torchtitan's `cross_entropy_loss`."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--titan", help="directory of torchtitan 0.2.2's unpacked wheel; otherwise the installed one")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument(
        "--size", nargs="*", default=[], type=lambda text: (text.split("=")[0], int(text.split("=")[1])), metavar="N=V"
    )
    parser.add_argument("--only", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        find_titan(arguments.titan)
        arguments.out.write_text(json.dumps(measure(arguments.only, arguments)))
        return 0
    rows = []
    for variant in arguments.variants:
        part = arguments.out.with_suffix(f".{variant}.json")
        command = [sys.executable, "-m", "benchmarks.titan", part.absolute(), *sys.argv[2:], "--only", variant]
        done = subprocess.run(command, cwd=ROOT)
        rows.append(json.loads(part.read_text()) if not done.returncode else {"variant": variant, "failed": True})
        write_json(arguments.out, {"digest": digest(ROOT), "rows": rows})
        print(rows[-1], flush=True)
    return any("failed" in row for row in rows)


if __name__ == "__main__":
    sys.exit(main())
