"""Small checkpoints, damaged in thousands of ways, and what reads them: `python -m tools.mutate_checkpoints`.

Every case is one mutation of a copy of a valid checkpoint. The mutation depends only on the case's number: `--first 123
--count 1` repeats it. The case is read by inspect_checkpoint, the command `fp8moe inspect`, and one of
load_fp8_checkpoint, quantize_checkpoint and, for a transformers model, load_model. A checkpoint that is not refused
must work. A refusal must be a readable error of ours or of the operating system, and must leave the model bitwise
unchanged.
"""

import argparse
import contextlib
import io
import json
import linecache
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8moe
from fp8moe import FP8Linear, GroupedExperts
from fp8moe.cli import main as command_line
from fp8moe.weights import (
    CheckpointError,
    convert_checkpoint,
    inspect_checkpoint,
    load_fp8_checkpoint,
    quantize_checkpoint,
    save_fp8_checkpoint,
)
from tests.checkpoint_formats import LAYOUTS, Layout, as_gpt_oss, write_layout
from tools.mutations import CONFIG, MUTATIONS

SECONDS = 60  # time limit of a case in seconds; a case that takes longer counts as hanging
MEMORY = 4 << 30  # bytes that the process may allocate; a case that needs more fails
HIDDEN = 160  # hidden size: a multiple of 32, not of 128
FORMATS = (
    *("ModelOpt FP8", "ModelOpt FP8_PB_WO", "Mistral static", "AutoFP8 dynamic", "compressed-tensors block"),
    *("block, E8M0 in bytes", "MXFP8", "compressed-tensors MXFP4", "FP8 with FP4 experts"),
    *("compressed-tensors channel", "GPT-OSS"),
)
"""Layouts in `tests.checkpoint_formats.LAYOUTS`; every second case starts from a checkpoint in one of them."""
MODELS_EVERY = 8  # one of this many cases uses a transformers model, which is slow to build
CONFIGURATION = {"model_type": "unknown", "sizes": {"hidden": [HIDDEN]}}
QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class Layer(nn.Module):
    def __init__(self, gpt_oss: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, dtype=torch.bfloat16)
        self.q_proj = nn.Linear(HIDDEN, 200, dtype=torch.bfloat16) if gpt_oss else FP8Linear(HIDDEN, 200)
        self.experts = GroupedExperts(num_experts=3, hidden_size=HIDDEN, intermediate_size=96, bias=gpt_oss)


class Model(nn.Module):
    """A module with the parameter names of a mixture-of-experts model.

    gpt_oss: only experts are FP8, and they have biases.
    """

    def __init__(self, gpt_oss: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, HIDDEN, dtype=torch.bfloat16)
        self.layers = nn.ModuleList([Layer(gpt_oss) for _ in range(2)])


class Hang(BaseException):
    """Raised when a case takes more than `SECONDS`."""


@dataclass(frozen=True)
class Case:
    """A case. number: seed of the mutation. base: name of the checkpoint to mutate. mutation: a key of `MUTATIONS`."""

    number: int
    base: str
    mutation: str


@dataclass(frozen=True)
class Outcome:
    """The result of a case.

    refused: how many readers refused the checkpoint. failures: what went wrong in other readers.
    """

    case: Case
    refused: int
    failures: list[str]


class Cases:
    """Valid checkpoints in ``directory``, and cases made from them. with_models: include transformers models."""

    def __init__(self, directory: Path, *, with_models: bool):
        self._directory = directory
        torch.manual_seed(0)
        model = Model()
        self._make("separate", model, max_shard_size=60_000)
        self._make("fused", model, experts="fused")
        self._make("bfloat16 scales", model, max_shard_size=60_000)
        self._convert("bfloat16 scales", lambda name: name.endswith("_scale_inv"))
        for name, value in model.named_parameters():
            if name.endswith("_scale_inv"):
                value.data = value.log2().ceil().exp2()
        self._make("ue8m0", model, max_shard_size=60_000, scale_format="ue8m0")
        self._make("source", model, max_shard_size=60_000)
        self._make("fused source", model, experts="fused")
        for name in ("source", "fused source"):
            self._convert(name, lambda _: True, keep=lambda key: not key.endswith("_scale_inv"))
            (directory / name / CONFIG).write_text(json.dumps(CONFIGURATION))
        for name in FORMATS:
            _write_format(directory / name, LAYOUTS[name], directory)
        self._bases = ["separate", "fused", "bfloat16 scales", "ue8m0", "source", "fused source"]
        self._models = ["model", "converted model", "model source", "converted model source"]
        self._with_models = with_models
        if with_models:
            _make_transformers_models(directory)
        self._model, self._gpt_oss = Model(), Model(gpt_oss=True)

    def case(self, number: int) -> Case:
        rng = Random(number)
        with_model = self._with_models and rng.randrange(MODELS_EVERY) == 0
        bases = self._models if with_model else self._bases if rng.randrange(2) else FORMATS
        return Case(number, rng.choice(bases), rng.choice(list(MUTATIONS)))

    def run(self, case: Case) -> Outcome:
        """Damage a copy of the case's valid checkpoint, and try all readers on it."""
        work = self._directory / "work"
        shutil.copytree(self._directory / case.base, work / "checkpoint")
        try:
            MUTATIONS[case.mutation](work / "checkpoint", Random(f"{case.number}"))
            last = partial(_load, self._gpt_oss if case.base == "GPT-OSS" else self._model)
            if case.base in self._models:
                last = _load_model
            if case.base.endswith("source"):
                last = _quantize
            readers = [_inspect, _inspect_by_command, last, *([_convert] if case.base in FORMATS else [])]
            results = [attempt(reader, work / "checkpoint") for reader in readers]
        finally:
            shutil.rmtree(work)
        refused = sum(result is None for result in results)
        return Outcome(case, refused, [result for result in results if result])

    def _make(self, name: str, model: nn.Module, **options: object) -> None:
        save_fp8_checkpoint(model, self._directory / name, **options)
        config = CONFIGURATION | {"quantization_config": QUANTIZATION}
        (self._directory / name / CONFIG).write_text(json.dumps(config))

    def _convert(self, name: str, wanted: Callable[[str], bool], keep: Callable[[str], bool] = lambda _: True) -> None:
        """Rewrite the shards of a valid checkpoint: tensors that ``wanted`` selects become bfloat16.

        Only tensors that ``keep`` selects remain.
        """
        for path in (self._directory / name).glob("*.safetensors"):
            tensors = {key: value for key, value in load_file(path).items() if keep(key)}
            save_file({key: value.bfloat16() if wanted(key) else value for key, value in tensors.items()}, path)
        for path in (self._directory / name).glob("*.index.json"):
            content = json.loads(path.read_text())
            content["weight_map"] = {key: file for key, file in content["weight_map"].items() if keep(key)}
            path.write_text(json.dumps(content))


def _write_format(directory: Path, layout: Layout, sources: Path) -> None:
    source = sources / ("source" if layout.experts == "separate" else "fused source")
    tensors = {name: value for path in source.glob("*.safetensors") for name, value in load_file(path).items()}
    wanted = [name for name in tensors if name.endswith("_proj.weight")]
    if layout.experts == "gpt-oss":
        tensors = as_gpt_oss(tensors)
        wanted = [name for name, value in tensors.items() if value.dim() == 3]
    tensors = {name: value.float() if name in wanted else value for name, value in tensors.items()}
    write_layout(layout, directory, tensors, wanted.__contains__, CONFIGURATION)


def _make_transformers_models(directory: Path) -> None:
    """Write two transformers models, unquantized and in FP8; transformers converts the tensor names of one model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 64}
    experts = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0}
    for name, model_type, shard_size in (("model", "qwen3_moe", "100KB"), ("converted model", "granitemoe", "1GB")):
        config = AutoConfig.for_model(model_type, **sizes, **heads, **experts, max_position_embeddings=64)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(directory / f"{name} source", max_shard_size=shard_size)
        quantize_checkpoint(directory / f"{name} source", directory / name)


def _inspect(checkpoint: Path) -> None:
    str(inspect_checkpoint(checkpoint)).encode()


def _inspect_by_command(checkpoint: Path) -> None:
    """Run `fp8moe inspect`; raise ValueError if the command exits with an error message."""
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")):
        try:
            command_line(["inspect", str(checkpoint)])
        except SystemExit as stopped:
            raise ValueError(stopped.code) from None


def _load(model: nn.Module, checkpoint: Path) -> None:
    # No checkpoint has these values: a tensor that still has them after a load has not been loaded.
    before = {name: _filled(value) for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    try:
        load_fp8_checkpoint(model, checkpoint)
    except Exception:
        changed = [name for name, value in model.state_dict().items() if not _same(value, before[name])]
        assert not changed, f"half loaded: {changed}"
        raise
    for name, value in model.state_dict().items():
        assert not _same(value, before[name]), f"{name} has not been loaded"
        assert not name.endswith("_scale_inv") or (value.isfinite() & (value > 0)).all(), f"{name} has bad scales"


def _quantize(checkpoint: Path) -> None:
    target = checkpoint.with_name("quantized")
    quantize_checkpoint(checkpoint, target)
    problems = set(inspect_checkpoint(target).problems) - set(inspect_checkpoint(checkpoint).problems)
    assert not problems, f"what it wrote has problems: {sorted(problems)}"


def _convert(checkpoint: Path) -> None:
    target = checkpoint.with_name("converted")
    convert_checkpoint(checkpoint, target, requantize=True)
    report = inspect_checkpoint(target)
    assert report.format.loads and not report.problems, f"what it wrote has problems: {report.problems}"


def _load_model(checkpoint: Path) -> None:
    from fp8moe.hf import load_model

    model = load_model(checkpoint)
    for name, value in model.state_dict().items():
        assert not value.is_meta, f"{name} has not been loaded"
        assert not name.endswith("_scale_inv") or (value.isfinite() & (value > 0)).all(), f"{name} has bad scales"


def _filled(value: Tensor) -> Tensor:
    return torch.full(value.shape, 0x55, dtype=torch.uint8).to(value.dtype)


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.flatten().view(torch.uint8), second.flatten().view(torch.uint8))


def attempt(reader: Callable[[Path], None], checkpoint: Path) -> str | None:
    """Run a reader: return "" if it succeeds, None if it refuses the checkpoint properly, else what went wrong."""
    try:
        with _time_limit(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reader(checkpoint)
            for warning in caught:
                own = Path(warning.filename).is_relative_to(Path(__file__).parent)
                assert not own or str(warning.message).isprintable(), f"warns of {warning.message}"
    except Exception as error:
        return None if is_refusal(error) else "".join(traceback.format_exception(error))
    except Hang as error:
        return "".join(traceback.format_exception(error))
    return ""


def is_refusal(error: Exception) -> bool:
    """Return whether an error is a deliberate, readable refusal, rather than an unforeseen exception."""
    if not str(error) or not all(line.isprintable() for line in str(error).split("\n")):
        return False
    if isinstance(error, CheckpointError):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, OSError):
        return error.strerror is not None
    own = (Path(fp8moe.__file__).parent, Path(__file__).parent)
    raised = linecache.getline(last.filename, last.lineno).strip().startswith("raise ")
    return isinstance(error, ValueError) and raised and any(Path(last.filename).is_relative_to(path) for path in own)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--count", type=int, default=4000, help="how many cases; default: %(default)s")
    parser.add_argument("--first", type=int, default=0, help="number of the first; default: %(default)s")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = {name: Counter() for name in MUTATIONS}
    with tempfile.TemporaryDirectory() as directory:
        cases = Cases(Path(directory), with_models=True)
        for number in range(options.first, options.first + options.count):
            outcome = cases.run(cases.case(number))
            state = "failed" if outcome.failures else "refused" if outcome.refused else "accepted"
            counts[outcome.case.mutation][state] += 1
            for failure in outcome.failures:
                print(f"{outcome.case}\n{failure}", flush=True)
    for name, states in counts.items():
        print(f"{name:<22} " + "".join(f"{states[state]:>6} {state}" for state in ("accepted", "refused", "failed")))
    total = sum(counts.values(), Counter())
    print(f"{total.total()} cases: {total['accepted']} accepted, {total['refused']} refused, {total['failed']} failed")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
