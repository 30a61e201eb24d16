"""transformers' tensor and expert parallelism on two or four GPUs: decoding from CUDA graphs on all."""

import os

import pytest
import torch
import torch.distributed as dist

from fp8moe.decode import GraphDecoder
from tests.processes import GPUS, in_processes

transformers = pytest.importorskip("transformers")
from tests.parallel_models import FORMS, NAMES, WAYS, config_of, load, write_checkpoints  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")]

IDS = torch.arange(24).view(2, 12) * 5 % 128
NEW = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("parallel")
    write_checkpoints(path, ranks=GPUS)
    return path


def decode(model):
    """The decoder, tokens (2, L) and logprobs (2, NEW), the same of two calls: the second has only graphs to replay."""
    decoder = GraphDecoder(model, batch_sizes=(2,), max_length=64)
    assert decoder.captured
    calls = [decoder.generate(IDS, max_new_tokens=NEW, eos_token_id=(), return_logprobs=True) for _ in range(2)]
    assert calls[0][0].equal(calls[1][0]) and calls[0][1].equal(calls[1][1])
    return decoder, *calls[0]


def same_on_all_ranks(values):
    values = values.cuda().contiguous()
    others = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(others, values)
    return all(other.equal(values) for other in others)


def decodes(root, name, form):
    from fp8moe.hf import register

    register()
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(rank)
    directory = root / f"{name}-{form}"
    _, expected, likely = decode(load(directory, dtype=torch.bfloat16, device_map=f"cuda:{rank}"))
    for way in WAYS:
        model = load(directory, dtype=torch.bfloat16, distributed_config=config_of(way, directory, ranks=GPUS))
        decoder, tokens, logprobs = decode(model)
        assert same_on_all_ranks(tokens) and same_on_all_ranks(logprobs)
        apart = (logprobs[:, 0] - likely[:, 0]).abs()
        # Of more sums, one chooses another expert where a router nearly ties.
        assert apart.min() < 0.1 and apart.max() < (0.1 if GPUS == 2 else 0.4)
        if way == "ep":
            assert tokens.equal(expected)
        torch.manual_seed(rank)
        assert same_on_all_ranks(decoder.generate(IDS, max_new_tokens=NEW, eos_token_id=(), do_sample=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_decoder(root, name, form):
    in_processes(decodes, root, name, form, world=GPUS, backend="nccl")
