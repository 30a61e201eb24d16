"""`python -m tools.sglang_serving`: integrations/sglang end to end on the CPU; the result is validation/sglang.json.

Creates an environment and installs into it PyTorch, SGLang (pinned by its hash, without the CUDA packages that it
requires), the packages that its server imports, and fp8moe as described in the README of integrations/sglang. There the
tests of the plug-in run. The README's command then serves a tiny Qwen3-MoE with random weights, quantized by `fp8moe
quantize`, once with each of the options in `SERVED`. Prompts are sent all at once, and the log probabilities of their
tokens and of those generated are compared with those that `load_model` gives in this environment. fp8moe's reference
backend computes the FP8 layers. Takes about ten minutes and 3 GB.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path

from benchmarks.report import ROOT
from tools.environments import commands_of, make, parser_of, pip, store, versions
from tools.vllm_serving import compare, expected_of, free_port, log_probabilities, make_checkpoints, running

MAX_MEDIAN_DIFFERENCE = 2e-2
FILE = ROOT / "validation" / "sglang.json"
README = ROOT / "integrations/sglang/README.md"
VERSIONS = ("0.5.23",)
SGLANG = f"sglang=={VERSIONS[0]} --hash=sha256:00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937"
IMPORTED = (
    *("transformers==5.19.0", "orjson", "gguf", "psutil", "pybase64", "triton", "pillow", "starlette", "msgspec"),
    *("pyzmq", "aiohttp", "dill", "apache-tvm-ffi", "sentencepiece", "compressed-tensors", "einops", "openai"),
    *("partial-json-parser", "requests", "uvicorn", "fastapi", "uvloop", "setproctitle", "python-multipart"),
    *("jsonschema", "prometheus-client", "xxhash", "distro", "pytest", "hypothesis"),
)
IMPORTED_ALONE = ("xgrammar==0.2.7",)  # whose requirements would replace PyTorch
PACKAGES = ("fp8moe", "fp8moe-sglang", "sglang", "torch", "transformers")
SERVED = ("", "--tp-size 2")
NEW_TOKENS = 4
ENVIRONMENT = {"FP8MOE_BACKEND": "reference", "HF_HUB_OFFLINE": "1"}
REQUEST_S = 300


class Anything(type):
    """Classes with any attribute, each such a class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__init__": lambda self, *args, **options: None})


class Missing:
    """Finds modules that SGLang imports and this model does not use; any name in them is `Anything`."""

    names = "IPython", "datasets", "soundfile", "torchvision", "vllm"

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__version__ = "0"
        module.__getattr__ = lambda name: getattr(Anything(spec.name, (), {}), name)
        return module

    def exec_module(self, module):
        pass


def main() -> None:
    """Run the tests, serve a checkpoint with each of the options in SERVED, and write the file."""
    args = parser_of("sglang_serving", FILE).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        environment = (args.environment or work / "environment").absolute()
        if not environment.exists():
            install(environment, args.torch, work)
        tests = run_tests(environment)
        prompts = make_checkpoints(work)
        _, without_experts = expected_of(work / "blocks", prompts)
        rows = [serve(environment, work, options, prompts) for options in SERVED]
        installed = versions(environment, PACKAGES)
    found = {"bar": {"median": MAX_MEDIAN_DIFFERENCE}, "model_without_experts": without_experts, "served": rows}
    store(args.out, {"versions": installed, "tests": {VERSIONS[0]: tests}, **found})
    failed = [row for row in rows if row["median"] > MAX_MEDIAN_DIFFERENCE]
    sys.exit(f"above {MAX_MEDIAN_DIFFERENCE}: {failed}" if failed else 0)


def install(environment: Path, torch_requirement: str, work: Path) -> None:
    """Create an environment; install into it SGLang, and fp8moe as the README of integrations/sglang says."""
    make(environment, torch_requirement)
    (work / "sglang.txt").write_text(SGLANG)
    pip(environment, "install", *IMPORTED)
    pip(environment, "install", "--no-deps", *IMPORTED_ALONE)
    pip(environment, "install", "--no-deps", "--require-hashes", "-r", f"{work}/sglang.txt")
    pip(environment, *commands_of(README)[0][1:])
    packages = next(environment.glob("lib/python*/site-packages"))
    imports = "import sys\nimport types\nfrom importlib.machinery import ModuleSpec\n\n"
    code = f"{inspect.getsource(Anything)}\n\n{inspect.getsource(Missing)}\n\nsys.meta_path.append(Missing())\n"
    (packages / "missing_modules.py").write_text(imports + code)
    (packages / "missing_modules.pth").write_text("import missing_modules\n")  # imported by every process


def run_tests(environment: Path) -> dict[str, int]:
    """Run the tests; return how many passed. Raises RuntimeError with their output if any failed or was skipped."""
    tests = "tests/guests/test_sglang.py"
    command = [environment / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    found = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    print(json.dumps(found), flush=True)
    if done.returncode or set(found) != {"passed"}:
        raise RuntimeError(f"{found}: {done.stdout[-4000:]}{done.stderr[-1000:]}")
    return found


def serve(environment: Path, work: Path, options: str, prompts: list[list[int]]) -> dict:
    """Serve the checkpoint by the README's command with more options.

    Return a row with the differences between the server's log probabilities and those of `load_model`.
    """
    from fp8moe.hf import load_model

    begin = time.perf_counter()
    port = free_port()
    readme = [str(work / "blocks") if word == "MODEL" else word for word in commands_of(README)[1]]
    more = ["--device", "cpu", "--port", str(port), "--max-total-tokens", "4096", *options.split()]
    command = [str(environment / "bin" / readme[0]), *readme[1:], *more]
    print(*command, flush=True)
    environ = os.environ | ENVIRONMENT
    if options:
        environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    environ.pop("PYTHONPATH", None)
    url = f"http://127.0.0.1:{port}"
    with running(command, work, environ, f"{url}/health"), ThreadPoolExecutor() as pool:
        tokens, found = zip(*pool.map(lambda prompt: ask(url, prompt), prompts), strict=True)
    said = sorted(set(re.findall(r"fp8moe: .*", (work / "log").read_text())))
    differences = compare(found, log_probabilities(load_model(work / "blocks"), tokens))
    row = {"options": options, "tokens": sum(map(len, found)), **differences}
    row |= {"seconds": round(time.perf_counter() - begin), "log": said}
    print(row, flush=True)
    return row


def ask(url: str, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Let the server continue a prompt; return all tokens, and the log probability of each except the first."""
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
        said = json.load(answer)
    scores = said["meta_info"]["input_token_logprobs"][1:] + said["meta_info"]["output_token_logprobs"]
    return [*prompt, *said["output_ids"]], [score for score, *_ in scores]


if __name__ == "__main__":
    main()
