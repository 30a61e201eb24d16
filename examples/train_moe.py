"""Trains a small mixture-of-experts language model twice, in bfloat16 and in FP8: `python examples/train_moe.py`.

Both runs start from the same float32 weights and see the same batches in the same order; see examples/README.md. In the
directory --out they leave bf16/ and fp8/, to resume from, and once both are done losses.json and losses.png.
"""

import argparse
import math
import os
import platform
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# cuBLAS gives the same bits in every run only with this variable, which must be set before its first call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import loss_report
import python_text
import run_state
import torch
from loss_report import Result
from moe_model import Config, LanguageModel, MoE
from processes import Processes, exit_with, start
from torch import Tensor, nn
from tqdm import tqdm

from fp8moe import GroupedExperts, replace_linears

LABELS = ("bf16", "fp8")
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
WARMUP = 0.05  # share of the steps
CLIP = 1.0
BALANCE_RATE = 1e-3  # of the routers' biases, as in DeepSeek-V3; it decays with the learning rate
SAVE_EVERY, SHOW_EVERY = 500, 10  # steps
UNTIMED_STEPS = 5  # the first steps of a process compile kernels
VALIDATION_BATCHES = 16


@dataclass(frozen=True)
class Preset:
    model: Config
    batch: int
    learning_rate: float


PRESETS = {
    "small": Preset(
        Config(
            hidden=512,
            layers=4,
            heads=8,
            dense_intermediate=1408,
            experts=8,
            top_k=2,
            intermediate=512,
            sequence=512,
        ),
        batch=28,
        learning_rate=6e-4,
    ),
    "tiny": Preset(
        Config(
            hidden=128,
            layers=2,
            heads=2,
            dense_intermediate=256,
            experts=4,
            top_k=2,
            intermediate=128,
            sequence=64,
        ),
        batch=4,
        learning_rate=2e-3,
    ),
}


class Interrupted(Exception):
    """The user ended the program; the run is saved."""


def to_fp8(model: nn.Module) -> None:
    """Make all experts, and all linears but the output layer, FP8 with float32 master weights, in place."""
    for module in model.modules():
        if isinstance(module, MoE):
            module.experts = GroupedExperts.from_experts(module.experts, master_dtype=torch.float32)
    replace_linears(model, skip=("lm_head",), master_dtype=torch.float32)


def make_model(label: str, preset: Preset, seed: int, device: torch.device) -> LanguageModel:
    """Return the model of a run; both runs begin with the same weights."""
    torch.manual_seed(seed)
    model = LanguageModel(preset.model).to(device)
    if label == "fp8":
        to_fp8(model)
    return model


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW; weights of norms do not decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)


def schedule(step: int, steps: int) -> float:
    """Return the factor of the rates of a step: a linear warm-up to one, then a cosine down to zero."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def draw_starts(text: Tensor, steps: int, preset: Preset, seed: int) -> Tensor:
    """Return the beginnings of the sequences of every step, (steps, B): equal in both runs, also if resumed.

    No sequence comes again before all of them have come.
    """
    generator = torch.Generator().manual_seed(seed)
    length, count = preset.model.sequence, steps * preset.batch
    sequences = (len(text) - 1) // length
    passes = [torch.randperm(sequences, generator=generator) for _ in range(-(-count // sequences))]
    return (length * torch.cat(passes)[:count]).view(steps, preset.batch).to(text.device)


class Stopwatch:
    """Measures the seconds of steps, without the time between `pause` and `resume`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds, self.steps = 0.0, 0
        self._start: tuple[float, int] | None = None

    def resume(self, step: int) -> None:
        self._start = self._now(), step

    def pause(self, step: int) -> bool:
        """Pause, and return whether the clock was running."""
        if self._start is None:
            return False
        self.seconds += self._now() - self._start[0]
        self.steps += step - self._start[1]
        self._start = None
        return True

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Yield a list that collects interrupts and requests to terminate, so that the current step can end."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Raise SystemExit if the checkpoint is of a run with other settings."""
    found = run_state.read(path, {"settings": dict.fromkeys(settings)})["settings"]
    different = [key for key, value in settings.items() if found[key] != value]
    if different:
        raise SystemExit(f"{path} is of a run with another {', '.join(different)}: start anew without --resume")


def train(
    label: str,
    preset: Preset,
    settings: dict[str, Any],
    text: python_text.Text,
    directory: Path,
    processes: Processes,
    *,
    resume: bool,
) -> Result:
    """Run the remaining steps; save to `directory` every SAVE_EVERY steps, on an interrupt, and at the end.

    Each process takes its part of every batch. Raises Interrupted after the step in which an interrupt or a request to
    terminate came to one of them.
    """
    steps, device = settings["steps"], text.train.device
    model = make_model(label, preset, settings["seed"], device)
    processes.shard(model, model.blocks)
    optimizer = make_optimizer(model, preset.learning_rate)
    starts = draw_starts(text.train, steps, preset, settings["seed"])
    losses = torch.zeros(steps, device=device)  # on the device: reading a loss on the host would wait for its step
    watch = Stopwatch(device)
    first = 0
    path = run_state.latest(directory) if resume else None
    if path is not None:
        check_settings(path, settings)
        progress = run_state.read(path, {"step": 0, "timed_steps": 0, "seconds": 0.0, "losses": losses})
        first, watch.steps, watch.seconds = progress["step"], progress["timed_steps"], progress["seconds"]
        run_state.load(path, model, optimizer)
    model.train()
    quiet = True if processes.rank else None
    with stop_requests() as stop, tqdm(total=steps, initial=first, desc=label, unit="step", disable=quiet) as bar:
        for step in range(first, steps):
            if step == first + UNTIMED_STEPS:
                watch.resume(step)
            factor = schedule(step, steps)
            for group in optimizer.param_groups:
                group["lr"] = factor * preset.learning_rate
            loss = model(python_text.windows(text.train, processes.part(starts[step]), preset.model.sequence + 1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            model.balance(factor * BALANCE_RATE)
            losses[step] = processes.mean(loss.detach())
            done = step + 1
            bar.update()
            if done % SHOW_EVERY == 0 and not bar.disable:
                bar.set_postfix(loss=f"{losses[done - SHOW_EVERY : done].mean().item():.3f}")
            stopping = processes.any(bool(stop))
            if stopping or done % SAVE_EVERY == 0 or done == steps:
                timed = watch.pause(done)
                progress = {"settings": settings, "step": done, "timed_steps": watch.steps, "seconds": watch.seconds}
                run_state.save(directory, done, progress | {"losses": losses}, model, optimizer)
                if timed:
                    watch.resume(done)
            if stopping and done < steps:
                raise Interrupted(f"{label} stopped after {done} of {steps} steps; --resume continues")
    tokens = watch.steps * preset.batch * preset.model.sequence
    speed = tokens / watch.seconds if watch.steps else None
    return Result(losses.tolist(), validate(model, text.validation, preset, processes), speed)


@torch.no_grad()
def validate(model: nn.Module, text: Tensor, preset: Preset, processes: Processes) -> float:
    """Return the mean loss of evenly spaced sequences of the text."""
    model.eval()
    length = preset.model.sequence + 1
    starts = torch.linspace(0, len(text) - length, VALIDATION_BATCHES * preset.batch, device=text.device).long()
    parts = map(processes.part, starts.split(preset.batch))
    losses = [model(python_text.windows(text, part, length)) for part in parts]
    return processes.mean(torch.stack(losses).mean()).item()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="train a small mixture of experts in bfloat16 and in FP8")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="of each run; default: %(default)s")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument("--preset", choices=PRESETS, help="default: small on a GPU, tiny on a CPU")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("train_moe"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--ep", type=int, default=1, metavar="N", help="processes, started by torchrun, to share the experts"
    )
    parser.add_argument("--resume", action="store_true", help="continue the runs that --out holds")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}; it must be at least 1")
    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        raise SystemExit("--device cuda, but PyTorch finds no usable GPU here: use --device cpu")
    kind = "cuda" if has_gpu and args.device != "cpu" else "cpu"
    name = args.preset or ("small" if kind == "cuda" else "tiny")
    preset = PRESETS[name]
    if args.ep < 1 or preset.batch % args.ep or preset.model.experts % args.ep:
        parser.error(
            f"--ep is {args.ep}; it must divide the batch of {preset.batch} and the {preset.model.experts} experts"
        )
    processes, device = start(args.ep, kind)
    # A resumed run has the bits of an uninterrupted one.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    text = python_text.load()
    settings = {"preset": name, "steps": args.steps, "seed": args.seed, "device": device.type, "text": text.digest}
    text = text._replace(train=text.train.to(device), validation=text.validation.to(device))
    args.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for label in LABELS:
        directory = args.out / label
        try:
            results[label] = train(label, preset, settings, text, directory, processes, resume=args.resume)
        except Interrupted as interrupted:
            if processes.rank == 0:
                print(interrupted)
            processes.finish()
            return 1
    processes.finish()
    if processes.rank:
        return 0
    about = {
        "config": asdict(preset),
        "processes": processes.world,
        "text": {"files": text.files, "train_bytes": len(text.train), "validation_bytes": len(text.validation)},
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    content = {**settings, **about, **loss_report.summarize(results)}
    loss_report.write_json(content, args.out / "losses.json")
    loss_report.draw(results, args.out / "losses.png")
    print(loss_report.table(content))
    return 0


if __name__ == "__main__":
    exit_with(main())
