"""`python -m tools.model_matrix`: what fp8moe does with every mixture-of-experts model of transformers: docs/models.md.

Each model of `tests.tiny_moe_models`, with random weights, is tried in every way that the table has a column for, on
the CPU, in its own process. With names of classes it prints their rows and writes nothing.

A cell is "yes", with a restriction if there is one; or "refused: " and the reason that fp8moe gives; or "wrong: " and
what happened: an error other than a ValueError or TypeError raised by fp8moe itself, logits or gradients that are not
close, or other tokens.
"""

import argparse
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn

import fp8moe
from fp8moe import GroupedExperts, replace_linears
from fp8moe.decode import GraphDecoder
from fp8moe.hf import load_model, register, report
from fp8moe.hf.fused import find_fused
from fp8moe.hf.reporting import experts_modules
from fp8moe.layers.replaced import matches
from fp8moe.weights import DEFAULT_SKIP, CheckpointError, quantize_checkpoint
from tests.checkpoint_formats import LAYOUTS, Layout, Source
from tests.tiny_moe_models import LEFT_OUT, MODELS, moe_classes
from tools import matrices
from tools.matrices import Wrong
from tools.mutations import read_parts, shards

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
COLUMNS = (
    *("quantize", "from_pretrained", "load_model", "GraphDecoder", "train"),
    *("published_load_model", "published_from_pretrained"),
)
PUBLISHED = {
    "DeepseekV4ForCausalLM": ("FP8 with FP4 experts", "block, E8M0", "block, .scale"),
    "Glm4MoeForCausalLM": ("compressed-tensors channel",),
    "GptOssForCausalLM": ("GPT-OSS",),
    "Inkling2ForCausalLM": ("MXFP8",),
    "Inkling2ForConditionalGeneration": ("MXFP8",),
    "LagunaForCausalLM": ("compressed-tensors block",),
    "Llama4ForCausalLM": ("ModelOpt FP8",),
    "MiniMaxM3SparseForConditionalGeneration": ("MXFP8",),
    "MiniMaxM3VLForCausalLM": ("MXFP8",),
    "Mistral4ForCausalLM": ("Mistral static",),
    "MistralLarge4ForConditionalGeneration": ("Mistral static",),
    "MixtralForCausalLM": ("AutoFP8 static", "compressed-tensors tensor"),
    "NemotronHForCausalLM": ("ModelOpt FP8",),
    "Qwen3_5MoeForCausalLM": ("block, bfloat16 scales",),
    "Qwen3_5MoeForConditionalGeneration": ("block, bfloat16 scales",),
}
"""Maps classes to the layouts of `tests.checkpoint_formats` in which their checkpoints are published.

Classes that are missing have ("block",).
"""
LEAST_COSINE = {"logits": 0.95, "gradients": 0.8}  # least cosine to the logits and gradients of the unquantized model
COSINE_WITHOUT_EXPERTS = 0.8
LARGEST_DIFFERENCE = 1e-5  # largest difference between logits of the models from load_model and from_pretrained
TIMEOUT_S = 300

MARK = "<!-- python -m tools.model_matrix writes what follows -->"
WORDS = {
    "its experts stay unquantized|its experts are not in FP8": "experts stay in bfloat16",
    "transposed or interleaved": "experts are stored transposed, or gate and up take turns: not to train",
    "its forward does not go through|experts of .* scale their input": (
        "experts have code of their own, which fp8moe does not replace"
    ),
    "cannot tell its activation|expected no norm": "experts compute more than a gated activation",
    "expected fused experts|but of JetMoe": "experts are modules of a kind of their own",
    "there is no FP8 checkpoint": "it cannot be quantized, so there is nothing to load",
    "cannot load this model with FP8 weights": "transformers itself cannot load it in FP8",
    "transformers cannot load it": "transformers itself cannot load it in this format",
    "transformers' own model fails": "the code of transformers fails",
    "would compute without|would not run": "transformers would leave out scales or weights; load_model reads them",
    "by Concatenate|by Ernie|ties it to": "transformers puts FP8 and other weights together",
    "shape .* expected|expected shape": "experts are stored in another layout",
    "routes a token by others": "the routing of a token depends on other tokens of the batch",
    "cache|keeps a|decode step": "its cache is of a kind that GraphDecoder does not have",
    "of the unquantized checkpoint": "transformers' FP8 experts have no biases; load_model's do",
}
"""Maps patterns found in reasons to what they mean. A reason that matches no pattern names published layouts."""
_PACKAGE = str(Path(fp8moe.__file__).parent)


class Trial:
    """One model; for each column of the table a method tries it. Later methods use results of earlier methods."""

    def __init__(self, name: str, directory: Path):
        self.tiny = tiny = MODELS[name]
        self.unquantized, self.fp8 = directory / "unquantized", directory / "fp8"
        self.tokens = torch.randint(3, 128, (2, 32), generator=torch.Generator().manual_seed(0))
        model = tiny.build()
        _make_experts_matter(model, self.tokens)
        # Save in float32: for FP8 models, transformers keeps some weights in the checkpoint's dtype, whatever dtype is
        # asked for.
        model.save_pretrained(self.unquantized)
        self.logits = logits_of(self._from_pretrained(self.unquantized), self.tokens)
        self.models: list[nn.Module] = []  # loaded models; the first is run by GraphDecoder
        self.loads = True  # whether from_pretrained loads the FP8 checkpoint
        self.quantized_logits: Tensor | None = None
        self.layouts = PUBLISHED.get(name, ("block",))

    def quantize(self) -> str | None:
        quantize_checkpoint(self.unquantized, self.fp8)
        return None if _has_fp8_experts(self.fp8) else "its experts stay unquantized"

    def from_pretrained(self) -> str | None:
        restriction, directory = None, self.fp8 if self.fp8.exists() else self.unquantized
        try:
            model = self._from_pretrained(directory, experts_implementation="fp8moe")
        except ValueError as error:
            if not str(error).endswith("fp8moe.hf.load_model loads it"):
                raise
            reason = str(error).rpartition(", where ")[2]
            restriction, self.loads = f"of the unquantized checkpoint: {reason}", False
            model = self._from_pretrained(self.unquantized, experts_implementation="fp8moe")
        logits = logits_of(model, self.tokens)
        check_close(logits, self.logits)
        self.models.append(model)
        _check_experts(model)
        if self.loads:
            self.quantized_logits = logits
        return restriction

    def load_model(self) -> None:
        if not self.fp8.exists():
            raise Refusal("there is no FP8 checkpoint of it")
        model = load_model(self.fp8, dtype=torch.float32)
        expected = self.quantized_logits
        if not self.loads:
            replaced = self._from_pretrained(self.unquantized)
            for name, module in list(experts_modules(replaced)):
                replaced.set_submodule(name, GroupedExperts.from_experts(module))
            replace_linears(replaced, skip=DEFAULT_SKIP)
            expected = logits_of(replaced, self.tokens)
        elif expected is None:  # fp8moe does not run the model's experts, because they are not FP8
            model.set_experts_implementation("eager")
            expected = logits_of(self._from_pretrained(self.fp8), self.tokens)
        else:  # fp8moe also runs experts that are not FP8 in the checkpoint
            model.set_experts_implementation("fp8moe")
        self.models.append(model)
        logits = logits_of(model, self.tokens)
        check_close(logits, self.logits)
        difference = (logits - expected).abs().max().item()
        if not difference <= LARGEST_DIFFERENCE:
            raise Wrong(f"logits differ by {difference:.1e} from those of from_pretrained")

    def GraphDecoder(self) -> None:  # noqa: N802
        model = self.models[0] if self.models else self._from_pretrained(self.unquantized)
        check_decoder(model, self.tokens[:, :8])

    def train(self) -> None:
        model = self._from_pretrained(self.unquantized).train()
        expected = self._step(model)
        for name, module in list(experts_modules(model)):
            model.set_submodule(name, GroupedExperts.from_experts(module, master_dtype=torch.float32))
        gradients = self._step(model)
        for name in expected:
            if not (cosine := _cosine(gradients[name], expected[name])) >= LEAST_COSINE["gradients"]:
                raise Wrong(f"the gradient of {name}: a cosine of {cosine:.4f} to the unquantized model's")
        replaced = replace_linears(model, skip=DEFAULT_SKIP, master_dtype=torch.float32)
        self._step(model)
        for name in replaced:
            gradient = model.get_submodule(name).weight.grad
            if gradient is not None and not gradient.isfinite().all():
                raise Wrong(f"the gradient of {name} is not finite")

    def published_load_model(self) -> str | None:
        for directory, expected in self._published():
            model = load_model(directory, dtype=torch.float32)
            check_close(logits_of(model, self.tokens), expected)
        return self._how_published()

    def published_from_pretrained(self) -> str | None:
        for directory, expected in self._published():
            try:
                model = self._from_pretrained(directory, experts_implementation="fp8moe")
            except Exception as error:
                if isinstance(error, Wrong | ImportError) or _is_refusal(error):
                    raise
                raise Refusal(f"transformers cannot load it ({type(error).__name__}: {_first_line(error)})") from error
            check_close(logits_of(model, self.tokens), expected)
            _check_experts(model)
        return self._how_published()

    def _published(self) -> Iterator[tuple[Path, Tensor]]:
        """Yield a checkpoint in each published layout, and the logits that its exact values give."""
        source = Source(self.unquantized, type(self._from_pretrained(self.unquantized)))
        for name in self.layouts:
            layout, directory = LAYOUTS[name], self.unquantized.with_name(name)
            wanted = {key for key, value in source.tensors.items() if _is_published_in_fp8(key, value, layout)}
            yield directory, logits_of(source.write(layout, directory, wanted.__contains__), self.tokens)

    def _how_published(self) -> str | None:
        """Return the note beside "yes", or None for no note.

        The note names layouts other than "block", or says that the experts are not in FP8.
        """
        if self.layouts != ("block",):
            return " and ".join(self.layouts)
        return None if _has_fp8_experts(self.unquantized.with_name("block")) else "its experts are not in FP8 there"

    def _from_pretrained(self, directory: Path, experts_implementation: str = "eager") -> nn.Module:
        model, info = self.tiny.auto_class.from_pretrained(
            directory, dtype=torch.float32, experts_implementation=experts_implementation, output_loading_info=True
        )
        if left := {kind: sorted(map(str, names))[:3] for kind, names in info.items() if names}:
            raise Wrong(f"transformers reports {left}")
        return model

    def _step(self, model: nn.Module) -> dict[str, Tensor]:
        """Run one forward and backward; return the gradients of the experts' weights."""
        torch.manual_seed(0)  # for dropout, which draws random numbers
        model.zero_grad()
        logits = model(input_ids=self.tokens).logits
        targets = self.tokens[:, : logits.shape[1]]
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        gradients = {
            f"{name}.{weight}": value.grad.clone()
            for name, module in experts_modules(model)
            for weight, value in module.named_parameters()
            if value.grad is not None
        }
        if not gradients:
            raise Wrong("its experts get no gradients")
        return gradients


class Refusal(ValueError):
    """Raised for a model that is not supported although no function has raised an error."""


def _is_published_in_fp8(name: str, value: Tensor, layout: Layout) -> bool:
    """Return whether checkpoints published in ``layout`` have this weight in FP8.

    In FP8 are linears and experts in layers; in GPT-OSS, only experts.
    """
    fused = value.dim() == 3 and re.search(r"(\.experts|moe)\b", name) is not None
    if layout.experts == "gpt-oss":
        return fused
    linear = name.endswith(".weight") and value.dim() == 2
    in_layers = ".layers." in f".{name}" and not re.search("vis|audio|compressor|indexer", name)
    module = name.removesuffix(".weight") if linear else name.rpartition(".")[0]
    return (linear or fused) and in_layers and not matches(module, DEFAULT_SKIP)


def row_of(name: str) -> dict[str, str]:
    """Return the cells of one model's row, by column."""
    prepare()
    with tempfile.TemporaryDirectory() as directory:
        try:
            trial = Trial(name, Path(directory))
        except Exception as error:
            return dict.fromkeys(COLUMNS, f"refused: transformers' own model fails: {_first_line(error)}")
        cells = {column: cell(getattr(trial, column)) for column in COLUMNS}
    return {column: text.replace(f"{directory}/", "").replace("`", "") for column, text in cells.items()}


def prepare() -> None:
    """Let transformers keep FP8 weights on a CPU; without a GPU it would dequantize them to bfloat16."""
    import transformers
    from transformers.quantizers import quantizer_finegrained_fp8

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    quantizer = quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer
    quantizer.validate_environment = lambda self, *arguments, **options: None
    register()


def cell(attempt: Callable[[], str | None]) -> str:
    try:
        restriction = attempt()
    except Wrong as error:
        return f"wrong: {error}"
    except ImportError as error:
        return f"refused: transformers asks for a package: {_first_line(error)}"
    except Exception as error:
        if _is_refusal(error):
            return f"refused: {_first_line(error)}"
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        return f"wrong: {type(error).__name__}: {_first_line(error)} ({where.rpartition('site-packages/')[2]})"
    return f"yes: {restriction}" if restriction else "yes"


def _is_refusal(error: Exception) -> bool:
    """Return whether fp8moe raised this error deliberately, to refuse a model."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = _PACKAGE in frame.filename and (frame.line or "").startswith("raise ")
    return isinstance(error, Refusal) or (isinstance(error, ValueError | TypeError) and ours)


def _first_line(error: Exception) -> str:
    text = error.problems[0] if isinstance(error, CheckpointError) and error.problems else str(error)
    return text.partition("\n")[0]


def _check_experts(model: nn.Module) -> None:
    """Raise Refusal if some experts do not run on fp8moe."""
    names = {name for name, _ in experts_modules(model)}
    others = {(row.module_class, row.why) for row in report(model) if row.name in names and row.runs_on != "fp8moe"}
    if others:
        raise Refusal("; ".join(f"{name}: {why}" for name, why in sorted(others)))


def _has_fp8_experts(directory: Path) -> bool:
    headers = [read_parts(path)[0] for path in shards(directory)]
    tensors = {name: info for header in headers for name, info in header.items() if info.get("dtype") == "F8_E4M3"}
    return any(".experts." in name or len(info["shape"]) == 3 for name, info in tensors.items())


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    torch.manual_seed(0)  # for block diffusion, which begins with random tokens
    return model(input_ids=tokens).logits


@torch.no_grad()
def _make_experts_matter(model: nn.Module, tokens: Tensor) -> None:
    """Scale up the experts' weights until the logits depend on them, so that wrong experts are noticed."""
    weights = [weight for _, module in experts_modules(model) for weight in module.parameters()]
    kept = [weight.clone() for weight in weights]
    for weight in weights:
        weight.zero_()
    without = logits_of(model, tokens)
    for weight, value in zip(weights, kept, strict=True):
        weight.copy_(value)
    for _ in range(20):
        if _cosine(logits_of(model, tokens), without) < COSINE_WITHOUT_EXPERTS:
            return
        for weight in weights:
            weight.mul_(1.3)
    raise RuntimeError("its logits hardly depend on its experts")


def check_close(logits: Tensor, expected: Tensor, least: float = LEAST_COSINE["logits"]) -> None:
    """Raise Wrong unless the median token's logits are close to the expected ones.

    The median is used because a token whose routing is nearly a tie may go to another expert.
    """
    cosines = nn.functional.cosine_similarity(logits.double(), expected.double(), dim=-1)
    if not (cosine := cosines.median().item()) >= least:  # written so that NaN raises
        raise Wrong(f"the logits of the median token have a cosine of {cosine:.4f} to the unquantized model's")


def check_decoder(model: nn.Module, prompts: Tensor) -> None:
    """Raise Wrong if GraphDecoder generates other tokens than the model's own generate."""
    how = {"max_new_tokens": 8, "do_sample": False}
    for fuse in (False, True):
        tokens = GraphDecoder(model, batch_sizes=(2,), max_length=32, fuse=fuse).generate(prompts, **how)
        with find_fused(model).in_force() if fuse else nullcontext():
            expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), **how)
        if not torch.equal(tokens, expected):
            raise Wrong(f"{tokens.tolist()} instead of {expected.tolist()}, fuse={fuse}")


def _cosine(a: Tensor, b: Tensor) -> float:
    return nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0).item()


def rows(names: Iterable[str]) -> Iterable[tuple[str, dict[str, str]]]:
    """Yield (class name, cells) for each model as soon as it is done, each tried in a process of its own.

    A process that dies or hangs affects only its own row.
    """
    context = multiprocessing.get_context("fork")  # a forked process need not repeat the imports
    for name in names:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send_row, args=(sender, name))
        process.start()
        sender.close()
        try:
            row = receiver.recv() if receiver.poll(TIMEOUT_S) else dict.fromkeys(COLUMNS, "wrong: does not end")
        except EOFError:
            row = dict.fromkeys(COLUMNS, "wrong: the process died")
        process.kill()
        process.join()
        yield name, row


def _send_row(sender: Connection, name: str) -> None:
    with open(os.devnull, "w") as nothing:
        sys.stdout = sys.stderr = nothing
        sender.send(row_of(name))


def page(table: matrices.Rows, version: str) -> str:
    """Return the part of the page below the mark: the table, reasons as notes, and models left out."""
    counts = ", ".join(f"{sum(row[column].startswith('yes') for row in table.values())} {column}" for column in COLUMNS)
    ordered = dict(sorted(table.items(), key=lambda item: item[0].lower()))
    found = [f"transformers {version}, {len(table)} model classes; yes: {counts}.", ""]
    found += matrices.lines(ordered, COLUMNS, "model class", lambda reason: f"{in_words(reason)}: ")
    found += ["", "Left out:", "", *(f"- {name}: {LEFT_OUT[name]}" for name in sorted(moe_classes() - set(table)))]
    return "\n".join(found) + "\n"


def in_words(reason: str) -> str:
    """Return the meaning of a reason, in words for readers who do not know the code."""
    return next((words for pattern, words in WORDS.items() if re.search(pattern, reason)), "published layout")


def read_page(text: str) -> tuple[str, matrices.Rows]:
    """Parse a page: return the version of transformers, and the table."""
    version = re.search(r"^transformers (\S+),", text, re.MULTILINE).group(1)
    return version, matrices.read(text, COLUMNS)


def main() -> None:
    """Print the rows of the named models, or write the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.model_matrix", description=__doc__.partition("\n")[0])
    parser.add_argument("classes", nargs="*", help="print the rows of these classes; without any, all go to the page")
    names = parser.parse_args().classes
    if unknown := sorted(moe_classes() - set(MODELS) - set(LEFT_OUT)):
        raise SystemExit(f"transformers has {', '.join(unknown)}: add them to tests/tiny_moe_models.py")
    table = matrices.collect(rows(names or MODELS))
    if not names:
        matrices.write(PAGE, MARK, page(table, metadata.version("transformers")))


if __name__ == "__main__":
    main()
