"""Times of vLLM's engine with the whole model of `benchmarks.peers`, in a process of its own.

    python -m benchmarks.vllm_engine FILE [--quantization fp8moe]

Measures greedy decode steps and a prefill of a model of Qwen3-30B-A3B's sizes with FP8 block scales. The model's random
weights have the spread of real ones. vLLM chooses its kernels; with `--quantization fp8moe` it runs the kernels of
integrations/vllm. It captures CUDA graphs for the measured batches and has no prefix cache. Its scheduler runs in this
process, so that each step can be timed. Rows include the number of kernels that fp8moe compiled during the measurement.
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
from benchmarks.report import write_json
from benchmarks.whole_models import CONFIGS
from fp8moe.runtime import jit

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
STD, FP8_STD, SCALE = 0.02, 100.0, 2.0**-12  # standard deviation of weights, and of E4M3 values; block scale
TIMED, SKIPPED = 48, 6  # decode steps that are timed, and decode steps before them
REPEATS = 3
AT_ONCE = 16384  # prompt tokens that vLLM takes into one step


def write_config(directory: Path) -> None:
    """Write the config.json of a checkpoint with FP8 block scales; router, norms and output layer are bfloat16."""
    model_type, options = CONFIGS["qwen3-30b-a3b"]
    plain = ("input_layernorm", "post_attention_layernorm", "mlp.gate")
    skip = [f"model.layers.{i}.{name}" for i in range(options["num_hidden_layers"]) for name in plain]
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    quantization |= {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", *skip]}
    more = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "decoder_sparse_step": 1}
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": model_type, **options, **more}
    write_json(directory / "config.json", config | {"quantization_config": quantization})


@torch.no_grad()
def fill(model: Any) -> None:
    """Replace vLLM's dummy weights by random ones: its FP8 dummy weights are mostly zero, and equal in all layers."""
    for name, parameter in model.named_parameters():
        value = parameter.data
        if value.dtype == torch.float32 and "scale" in name.rsplit(".", 1)[-1] and value.dim() >= 2:
            value.fill_(SCALE)
        elif value.dim() == 1 and "norm" in name:
            value.fill_(1.0)
        elif value.dim() >= 2 and value.is_floating_point():
            std = FP8_STD if value.dtype == torch.float8_e4m3fn else STD
            for part in (value if value.dim() == 3 else value[None]).split(32):
                drawn = torch.randn(part.shape, device=part.device, dtype=torch.bfloat16)
                part.copy_(drawn.mul_(std).clamp_(-448, 448))


class Engine:
    """vLLM's engine with the model loaded, and random prompts for it."""

    def __init__(self, directory: str, quantization: str | None):
        from vllm import LLM

        write_config(Path(directory))
        graphs = {"cudagraph_capture_sizes": [batch for batch, _ in STEPS]}
        sizes = {"max_model_len": 9216, "max_num_batched_tokens": AT_ONCE, "max_num_seqs": 128}
        how = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "generation_config": "vllm"}
        how |= {"enable_prefix_caching": False, "disable_log_stats": True, "attention_backend": "FLASH_ATTN", **sizes}
        self.llm = LLM(
            directory, quantization=quantization, gpu_memory_utilization=0.8, compilation_config=graphs, **how
        )
        self.llm.apply_model(fill)
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


def measure(quantization: str | None) -> list[dict]:
    """Measure rows like those of `benchmarks.decode`, with the number of kernels compiled during each measurement."""
    rows: list[dict] = []
    compilations = Compilations()
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(directory, quantization)
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
    parser.add_argument("--quantization", choices=["fp8moe"], help="fp8moe's kernels, by integrations/vllm")
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["FP8MOE_STRICT"] = "1"  # raise an error instead of falling back to other kernels
    rows = measure(args.quantization)
    args.file.write_text(json.dumps(rows))
    sys.stdout.flush()
    os._exit(0)  # skip the engine's shutdown, which takes long


if __name__ == "__main__":
    main()
