"""Times of vLLM's engine with a whole model of `benchmarks.peers`, in a process of its own.

    python -m benchmarks.vllm_engine FILE [--model M] [--quantization fp8moe]

Measures greedy decode steps and a prefill of a model with random weights in the formats of the published checkpoint:
Qwen3-30B-A3B with FP8 block scales, GPT-OSS with experts in MXFP4. vLLM chooses its kernels; with
`--quantization fp8moe` it runs the kernels of this checkout's integrations/vllm, installed or not. It captures CUDA
graphs for the measured batches and has no prefix cache. Its scheduler runs in this process, so that each step can be
timed. Rows include the number of kernels that fp8moe compiled during the measurement.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import PREFILL, STEPS
from benchmarks.report import ROOT, write_json
from benchmarks.shapes import QWEN
from benchmarks.whole_models import CONFIGS, STD
from fp8moe import quantize_mxfp4
from fp8moe.runtime import jit

PLUGIN = ROOT / "integrations" / "vllm"
ARCHITECTURES = {QWEN: "Qwen3MoeForCausalLM"} | dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), "GptOssForCausalLM")
"""The models that can be measured, and the names of their classes."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",  # instead, kernels are compiled at first use, before a case is timed
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "HF_HUB_OFFLINE": "1",
}
FP8_STD, SCALE = 100.0, 2.0**-12  # standard deviation of E4M3 values; block scale
TIMED, SKIPPED = 48, 6  # decode steps that are timed, and decode steps before them
REPEATS = 3
AT_ONCE = 16384  # prompt tokens that vLLM takes into one step


def write_config(directory: Path, model: str) -> None:
    """Write the config.json of a checkpoint: with FP8 block scales or, of GPT-OSS, with experts in MXFP4.

    Router, norms and output layer are bfloat16; of GPT-OSS, attention too.
    """
    model_type, options = CONFIGS[model]
    config = {"architectures": [ARCHITECTURES[model]], "model_type": model_type, **options, "torch_dtype": "bfloat16"}
    if model_type == "gpt_oss":
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    else:
        plain = ("input_layernorm", "post_attention_layernorm", "mlp.gate")
        skip = [f"model.layers.{i}.{name}" for i in range(options["num_hidden_layers"]) for name in plain]
        quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        quantization |= {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", *skip]}
        config |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "decoder_sparse_step": 1}
    write_json(directory / "config.json", config | {"quantization_config": quantization})


@torch.no_grad()
def fill(model: Any) -> None:
    """Give a model of vLLM random weights, as they are loaded: before vLLM arranges them for its kernels."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        value = parameter.data
        if value.dtype == torch.uint8:
            if not name.endswith("_scale"):  # scales are written with their codes
                for codes, scale in zip(value, parameters[f"{name}_scale"].data, strict=True):
                    drawn = torch.randn(codes.shape[0], 2 * codes.shape[1], device=value.device, dtype=torch.bfloat16)
                    packed = quantize_mxfp4(drawn.mul_(STD))
                    codes.copy_(packed.data)
                    scale.copy_(packed.scale)
        elif value.dtype == torch.float32 and "scale" in name.rsplit(".", 1)[-1] and value.dim() >= 2:
            value.fill_(SCALE)
        elif value.dim() == 1:  # norms, biases, sinks
            value.fill_(1.0 if "norm" in name else 0.0)
        elif value.dim() >= 2 and value.is_floating_point():
            std = FP8_STD if value.dtype == torch.float8_e4m3fn else STD
            for part in (value if value.dim() == 3 else value[None]).split(32):
                drawn = torch.randn(part.shape, device=part.device, dtype=torch.bfloat16)
                part.copy_(drawn.mul_(std).clamp_(-448, 448))


def random_loader() -> str:
    """Add a load format to vLLM that fills models with random weights; return its name.

    The dummy weights of vLLM's own format are mostly zero in FP8, and always in MXFP4.
    """
    from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader

    @register_model_loader("random")
    class RandomLoader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            fill(model)

    return "random"


def register_plugin() -> None:
    """Add the quantization method "fp8moe" of this checkout to vLLM. RuntimeError if this vLLM does not take it."""
    sys.path.insert(0, str(PLUGIN))
    import fp8moe_vllm
    from vllm.model_executor.layers.quantization import get_quantization_config

    fp8moe_vllm.register()
    try:
        get_quantization_config("fp8moe")
    except ValueError as error:
        raise RuntimeError(
            "--quantization fp8moe: this vLLM does not take the plug-in; its warning says why"
        ) from error


def plugin_layers(model: Any) -> int:
    """Return how many layers of vLLM's model run on the plug-in."""
    methods = (type(getattr(module, "quant_method", None)) for module in model.modules())
    return sum(method.__module__.startswith("fp8moe_vllm.") for method in methods)


class Engine:
    """vLLM's engine with the model loaded, and random prompts for it."""

    def __init__(self, directory: str, model: str, quantization: str | None):
        """Load a model of ARCHITECTURES. RuntimeError if the plug-in was asked for and runs no layer."""
        from vllm import LLM

        if quantization:
            register_plugin()
        write_config(Path(directory), model)
        graphs = {"cudagraph_capture_sizes": [batch for batch, _ in STEPS]}
        sizes = {"max_model_len": 9216, "max_num_batched_tokens": AT_ONCE, "max_num_seqs": 128}
        how = {"load_format": random_loader(), "skip_tokenizer_init": True, "dtype": "bfloat16"}
        how |= {"enable_prefix_caching": False, "disable_log_stats": True, "attention_backend": "FLASH_ATTN", **sizes}
        how |= {"generation_config": "vllm", "gpu_memory_utilization": 0.9, "compilation_config": graphs}
        self.llm = LLM(directory, quantization=quantization, **how)
        if quantization and not sum(self.llm.apply_model(plugin_layers)):
            raise RuntimeError("--quantization fp8moe: no layer of the model runs on the plug-in")
        self._draw, self._requests = random.Random(1), 0

    def prompts(self, batch: int, length: int) -> list[dict]:
        """Draw `batch` random prompts of `length` tokens."""
        return [{"prompt_token_ids": [self._draw.randrange(1000, 150000) for _ in range(length)]} for _ in range(batch)]

    def sampling(self, tokens: int, **more: Any) -> Any:
        """Make vLLM's sampling parameters for a greedy answer of exactly `tokens` tokens."""
        from vllm import SamplingParams

        more |= {"max_tokens": tokens, "min_tokens": tokens}
        return SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **more)

    def step_seconds(self, batch: int, prompt: int) -> float:
        """Return the median seconds of TIMED steps in which all sequences decode, after SKIPPED untimed ones.

        The untimed steps compile kernels.
        """
        self._steps(batch, prompt, 4)
        return self._steps(batch, prompt, TIMED)

    def _steps(self, batch: int, prompt: int, timed: int) -> float:
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        tokens = timed + SKIPPED + -(-batch * prompt // AT_ONCE) + 6
        for one in self.prompts(batch, prompt):
            self._requests += 1
            how = self.sampling(tokens, output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(f"request-{self._requests}", one, how)
        ends: list[float] = []
        while engine.has_unfinished_requests():
            engine.step()
            running = scheduler.running
            if len(running) == batch and all(one.num_computed_tokens >= prompt for one in running):
                ends.append(time.perf_counter())
        steps = [end - begin for begin, end in zip(ends[SKIPPED:], ends[SKIPPED + 1 :], strict=False)][:timed]
        if len(steps) < timed // 2:
            raise RuntimeError(f"batch {batch}: all sequences decoded in {len(steps)} steps only")
        return statistics.median(steps)

    def prefill_seconds(self, batch: int, prompt: int) -> float:
        """Return the median over REPEATS runs of the seconds until the first token."""

        def run() -> float:
            prompts = self.prompts(batch, prompt)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.llm.generate(prompts, self.sampling(1), use_tqdm=False)
            return time.perf_counter() - begin

        run()
        return statistics.median(run() for _ in range(REPEATS))


class Compilations:
    """Counts the kernels that fp8moe compiles in this process."""

    def __init__(self) -> None:
        self.count, compile_spec = 0, jit.compile_spec

        def counted(spec: jit.KernelSpec) -> jit.Compiled:
            self.count += 1
            return compile_spec(spec)

        jit.compile_spec = counted


def measure(model: str, quantization: str | None) -> list[dict]:
    """Measure rows like those of `benchmarks.decode`, with the number of kernels compiled during each measurement."""
    rows: list[dict] = []
    compilations = Compilations()
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(directory, model, quantization)
        cases = [("decode", engine.step_seconds, *step, 1) for step in STEPS]
        cases.append(("prefill", engine.prefill_seconds, *PREFILL, PREFILL[1]))
        for what, seconds_of, batch, prompt, tokens in cases:
            before = compilations.count
            seconds = seconds_of(batch, prompt)
            row = {"what": what, "batch": batch, "prompt": prompt, "ms": 1e3 * seconds}
            rows.append(row | {"tokens_s": batch * tokens / seconds, "compiled": compilations.count - before})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_engine", description="vLLM's engine, whole model")
    parser.add_argument("file", type=Path, help="for the rows, as JSON")
    parser.add_argument("--model", choices=ARCHITECTURES, default=QWEN)
    parser.add_argument("--quantization", choices=["fp8moe"], help="fp8moe's kernels, by integrations/vllm")
    args = parser.parse_args()
    if args.quantization and args.model != QWEN:
        parser.error(f"--quantization {args.quantization} needs experts in FP8 blocks, {args.model} has them in MXFP4")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["FP8MOE_STRICT"] = "1"  # raise an error instead of falling back to other kernels
    rows = measure(args.model, args.quantization)
    args.file.write_text(json.dumps(rows))
    sys.stdout.flush()
    os._exit(0)  # skip the engine's shutdown, which takes long


if __name__ == "__main__":
    main()
