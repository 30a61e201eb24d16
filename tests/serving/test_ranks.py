"""`torchrun -m fp8moe serve`: processes hold a model together, the first answers, others make the same forwards."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from fp8moe.decode import GraphDecoder
from tests.processes import GPUS, WITHOUT_MULTICAST
from tests.tiny_tokenizer import tiny_tokenizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("fastapi", reason="serving needs fp8moe[serve]")
openai = pytest.importorskip("openai", reason="serving needs fp8moe[serve]")
if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from fp8moe.commands.serve import load  # noqa: E402
from tests.tiny_moe_models import MODELS  # noqa: E402

SIZES = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 97, "eos_token_id": None}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
PROMPTS = ["paged attention", "a", "experts of a mixture", "four"]
NEW = 9


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path, tiny = tmp_path_factory.mktemp("ranks"), MODELS["MixtralForCausalLM"]
    tiny._replace(options=tiny.options | SIZES | HEADS).build().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@contextmanager
def served(directory, device, *arguments):
    """torchrun's process, which serves with two processes on a CPU, or one on each GPU."""
    ranks = {"cpu": 2, "cuda": GPUS}[device]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, "-m", "fp8moe", "serve", str(directory), "--port", "0", "--device", device, "--json"]
    environment = os.environ | WITHOUT_MULTICAST | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    killer = threading.Timer(120, process.kill)
    killer.start()
    try:
        yield process
    finally:
        killer.cancel()
        process.kill()
        process.communicate()


def test_answers_are_those_of_one_process(directory, device):
    model, tokenizer = load(str(directory), device)
    decoder = GraphDecoder(model, batch_sizes=(1,), max_length=64)

    def expected(prompt):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)
        tokens = decoder.generate(ids, max_new_tokens=NEW)[0, ids.shape[1] :]
        return tokenizer.decode(tokens, skip_special_tokens=True)

    with served(directory, device, "--slots", "3", "--max-length", "64") as process:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        facts = json.loads(line)
        assert (facts["runs"], facts["slots"], facts["max_length"]) == ("GraphDecoder", 3, 64)
        client = openai.OpenAI(base_url=facts["url"], api_key="none", max_retries=0, timeout=60)

        def ask(prompt, **options):
            made = client.completions.create(
                model=str(directory), prompt=prompt, max_tokens=NEW, temperature=0, **options
            )
            return made.choices[0].text

        def leave_early(prompt):
            with client.completions.create(model=str(directory), prompt=prompt, max_tokens=40, stream=True) as pieces:
                next(iter(pieces))

        def sample(seed):
            options = {"max_tokens": NEW, "temperature": 1.0, "seed": seed}
            return client.completions.create(model=str(directory), prompt="a", **options).choices[0].text

        with ThreadPoolExecutor(8) as pool:  # more than there are rows
            gone = [pool.submit(leave_early, prompt) for prompt in PROMPTS[:2]]
            sampled = [pool.submit(sample, seed) for seed in (3, None, 3)]
            answers = [*pool.map(ask, PROMPTS)]
            assert all(one.result() is None for one in gone)
            first, _, again = (one.result() for one in sampled)
        assert answers == [*map(expected, PROMPTS)] and first == again
        stop = expected(PROMPTS[0])[2:4]
        assert ask(PROMPTS[0], stop=stop) == expected(PROMPTS[0]).partition(stop)[0]
        with pytest.raises(openai.BadRequestError, match="max_tokens: 1 tokens of prompt"):  # told to nobody else
            client.completions.create(model=str(directory), prompt="a", max_tokens=9999)
        assert ask("a") == expected("a")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert "closed by peer" not in errors and "fp8moe serve:" not in errors


def test_what_several_processes_cannot_serve(directory, device, tmp_path):
    """All of them end."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "min_new_tokens": 5}')
    for model, most, message in (
        (directory, "9999", "--max-length 9999: the model has 64 positions"),
        (tmp_path, "64", "generation_config.min_new_tokens: GraphDecoder does not apply 5, so a request that sets"),
    ):
        with served(model, device, "--max-length", most) as process:
            _, errors = process.communicate(timeout=60)
        assert process.returncode and f"fp8moe serve: {message}" in errors
