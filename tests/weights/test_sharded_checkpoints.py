"""FP8 checkpoints of models that are shared out among processes: the files of one process, and errors on all."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from fp8moe import GroupedExperts, refit, refitting
from fp8moe.decode import GraphDecoder
from fp8moe.distributed import ExpertParallel
from fp8moe.weights import CheckpointError, load_fp8_checkpoint, save, save_fp8_checkpoint
from fp8moe.weights.source import INDEX, Reader
from tests import small_checkpoints
from tests.errors import relative_error
from tests.processes import in_processes
from tests.sharded_models import SHARD_SIZE, files_of, save_whole, shard_all, shard_both, shard_experts
from tests.small_checkpoints import HIDDEN, INTERMEDIATE, Model, bits, interrupt, unquantized, write
from tests.transformers_models import BASE, random_model

MIXTRAL = {"num_local_experts": 4, "hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 2}

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def ways_to_shard():
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    yield "experts", partial(shard_experts, mesh=mesh)
    yield "all", partial(shard_all, mesh=mesh)
    if world == 4:
        yield "both", partial(shard_both, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")))


def equal(model, expected):
    """Whether this process has its part of these tensors."""
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        part = expected[name]
        if isinstance(value, DTensor):
            part = distribute_tensor(part, value.device_mesh, value.placements, src_data_rank=None).to_local()
            value = value.to_local()
        assert value.dtype == part.dtype and value.shape == part.shape and torch.equal(bits(value), bits(part)), name


def sentence_of(kind, function, *arguments, **options):
    """What the call raises, which must be the same on all ranks."""
    with pytest.raises(kind) as error:
        function(*arguments, **options)
    sentences = [None] * dist.get_world_size()
    dist.all_gather_object(sentences, str(error.value))
    assert len(set(sentences)) == 1, sentences
    return sentences[0]


def one_checkpoint(directory):
    """Loads what one process has saved, and saves the same files."""
    whole = load_file(directory / "whole.safetensors")
    for name, shard in ways_to_shard():
        torch.manual_seed(1)
        model = shard(Model())
        load_fp8_checkpoint(model, directory / "whole")
        equal(model, whole)
        save_fp8_checkpoint(model, directory / name, max_shard_size=SHARD_SIZE)
        save_fp8_checkpoint(model, directory / f"{name}-fused", experts="fused")
        dist.barrier()
        assert files_of(directory / name) == files_of(directory / "whole")
        assert files_of(directory / f"{name}-fused") == files_of(directory / "whole-fused")
        with torch.device("meta"):
            model = Model()
            model.register_buffer("steps", torch.tensor(0))
        model = shard(model)
        load_fp8_checkpoint(model, directory / f"{name}-fused")
        equal(model, whole)
        refits(model)


def refits(model):
    """Each rank takes its part of new weights, one by one or fused, whose bits are those of one process."""
    for fused in (False, True):
        tensors, expected = unquantized(3, fused=fused), Model().to(model.steps.device)
        refit(expected, tensors)
        refit(model, tensors.items())
        equal(model, expected.state_dict())
        refit(model, expected.state_dict())
        equal(model, expected.state_dict())


def one_rank_cannot_refit(directory):
    model, tensors = shard_all(Model(), init_device_mesh("cpu", (dist.get_world_size(),))), unquantized(3)
    wrong = dict(tensors) if dist.get_rank() else {name: tensors[name] for name in list(tensors)[1:]}
    assert "rank 0: the refit failed" in sentence_of(ValueError, refit, model, wrong.items())
    assert "embed_tokens.weight: missing" in sentence_of(ValueError, refit, model, list(tensors.items())[1:])
    tensors["layers.0.q_proj.weight"][199, 0] = torch.nan  # which the last rank has
    assert "layers.0.q_proj.weight: holds a NaN" in sentence_of(ValueError, refit, model, tensors)
    with pytest.raises(ValueError, match="rank 1: not readable"), refitting(model):
        if dist.get_rank() == 1:
            fails()
    refits(model)


def experts_in_four_bits(directory):
    """As files, refitted, and as states of whole experts; parts of experts have other exponents."""
    world = dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HIDDEN", "INTERMEDIATE"):
            patch.setattr(small_checkpoints, name, 256)
        for form in ("mxfp4", "int4", "nvfp4"):
            torch.manual_seed(0)
            whole = Model(1, weight_format=form)
            if dist.get_rank() == 0:
                save_fp8_checkpoint(whole, directory / form)
            dist.barrier()
            for name, shard in ways_to_shard():
                with torch.device("meta"):
                    model = Model(1, weight_format=form)
                    model.register_buffer("steps", torch.tensor(0))
                model = shard(model)
                load_fp8_checkpoint(model, directory / form)
                equal(model, whole.state_dict())
                save_fp8_checkpoint(model, directory / f"{form}-{name}")
                dist.barrier()
                assert files_of(directory / f"{form}-{name}") == files_of(directory / form)
                expected, tensors = copy.deepcopy(whole), unquantized(3, layers=1)
                refit(expected, tensors)
                refit(model, tensors)
                equal(model, expected.state_dict())
                refit(model, directory / form)
                equal(model, whole.state_dict())
        if world == 2:
            parts = shard_all(Model(1, weight_format="mxfp4"), init_device_mesh("cpu", (world,)), dim=1)
            assert sentence_of(ValueError, parts.state_dict) == (
                "layers.0.experts.gate_up_proj: expected whole experts on each rank, got a DTensor with (Shard(dim=1),)"
            )


def checkpoints(directory):
    one_checkpoint(directory)
    experts_in_four_bits(directory)


def reads_only_its_part(directory):
    model = shard_experts(Model(), init_device_mesh("cpu", (dist.get_world_size(),)))
    sizes, whole = [], Reader.read

    def counting(*arguments):
        value = whole(*arguments)
        sizes.append(value.nbytes)
        return value

    Reader.read = counting
    try:
        load_fp8_checkpoint(model, directory / "whole")
    finally:
        Reader.read = whole
    held = sum(getattr(value, "_local_tensor", value).nbytes for value in model.state_dict().values())
    assert sum(sizes) == held < 0.8 * sum(value.nbytes for value in model.state_dict().values())


def sends_an_expert_at_a_time(directory):
    model = shard_experts(Model(), init_device_mesh("cpu", (dist.get_world_size(),)))
    sizes, send = [], dist.send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "send", lambda value, *to: (sizes.append(value.nbytes), send(value, *to)))
        save_fp8_checkpoint(model, directory / "fused", experts="fused")
    assert max(sizes, default=0) == (0 if dist.get_rank() == 0 else 2 * INTERMEDIATE * HIDDEN)


def is_the_model_of_transformers(directory):
    """fully_shard changes the class of a model, by which transformers tells how its experts are called."""
    model = random_model("mixtral", BASE | MIXTRAL, dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.experts = GroupedExperts.from_experts(layer.mlp.experts)
    if dist.get_rank() == 0:
        save_fp8_checkpoint(model, directory / "mixtral")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})
    fully_shard(model, mesh=mesh, ignored_params={value for value in model.parameters() if isinstance(value, DTensor)})
    save_fp8_checkpoint(model, directory / "mixtral-sharded")
    dist.barrier()
    assert {"config.json", "generation_config.json"} < files_of(directory / "mixtral").keys()
    assert files_of(directory / "mixtral-sharded") == files_of(directory / "mixtral")
    assert b"block_sparse_moe.experts.3.w2.weight_scale_inv" in files_of(directory / "mixtral")["model.safetensors"]


def decodes_and_runs_after_a_refit(device="cpu"):
    """Experts spread by ExpertParallel, all else by FSDP2, weights of a trainer in FSDP2: the bits of one process.

    On GPUs those of the weights: sums of two ranks are rounded in another order.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    whole, spread = (random_model("mixtral", BASE | MIXTRAL, dtype=torch.bfloat16).to(device) for _ in range(2))
    for model in (whole, spread):
        for layer in model.model.layers:
            layer.mlp.experts = GroupedExperts.from_experts(layer.mlp.experts)
    parallelize_module(spread, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})
    ids = torch.arange(3, 15, device=device).view(2, 6)
    decoders = [GraphDecoder(model, batch_sizes=(2,), max_length=16) for model in (whole, spread)]

    def trainer(seed):
        model, generator = random_model("mixtral", BASE | MIXTRAL), torch.Generator().manual_seed(seed)
        for value in model.parameters():
            value.data = torch.randn(value.shape, generator=generator) * 0.2
        return model.to(device)

    def alike(first, second):
        return torch.equal(first, second) or (device != "cpu" and relative_error(first, second) < 0.2)

    fully_shard(source := trainer(1), mesh=mesh)
    refit(whole, trainer(1))
    refit(spread, source)
    results = [decoder.generate(ids, max_new_tokens=4, return_logprobs=True) for decoder in decoders]
    equal(spread, whole.state_dict())
    assert device != "cpu" or all(torch.equal(*pair) for pair in zip(*results, strict=True))

    experts = {value for value in spread.parameters() if isinstance(value, DTensor)}
    fully_shard(spread, mesh=mesh, ignored_params=experts)
    fully_shard(source := trainer(2), mesh=mesh)
    with torch.no_grad():
        before, _ = spread(ids).logits, source(ids)  # both have gathered weights now
        refit(whole, trainer(2))
        refit(spread, source.state_dict().items())
        assert alike(spread(ids).logits, whole(ids).logits) and not alike(spread(ids).logits, before)
    equal(spread, whole.state_dict())


def one_rank_cannot_load(directory):
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    model = shard_experts(Model(), mesh)
    before = {name: getattr(value, "_local_tensor", value).clone() for name, value in model.state_dict().items()}
    load_here = partial(sentence_of, CheckpointError, load_fp8_checkpoint, model)
    assert "no such directory" in load_here(directory / ("whole" if rank == 0 else "none"))

    damaged = load_file(directory / "whole.safetensors")
    for expert in range(3):  # of which each rank sees its own
        damaged["layers.0.experts.down_proj_scale_inv"][expert, 0, 0] = torch.nan
    damaged["layers.1.norm.weight"] = damaged["layers.1.norm.weight"][:5]
    if rank == 0:
        write(directory / "damaged", damaged)
    dist.barrier()
    assert load_here(directory / "damaged").endswith("layers.1.norm.weight: shape (5,), expected (144,)")
    assert "ignore: expected" in sentence_of(
        ValueError, load_fp8_checkpoint, model, directory / "whole", ignore="*" if rank == 0 else ()
    )
    for name, value in model.state_dict().items():
        assert torch.equal(bits(getattr(value, "_local_tensor", value)), bits(before[name]))


def each_rank_sees_the_scales_of_its_experts(directory):
    model = shard_experts(Model(), init_device_mesh("cpu", (dist.get_world_size(),)))
    names = [f"layers.0.experts.{expert}.down_proj.weight_scale_inv" for expert in (0, 2)]
    if dist.get_rank() == 0:
        tensors = {
            name: value
            for path in (directory / "whole").glob("*.safetensors")
            for name, value in load_file(path).items()
        }
        for name in names:
            tensors[name][0, 0] = torch.inf
        write(directory / "infinite", tensors)
    dist.barrier()
    with pytest.raises(CheckpointError) as error:
        load_fp8_checkpoint(model, directory / "infinite")
    assert [problem.partition(":")[0] for problem in error.value.problems] == names


def one_rank_cannot_save(directory):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard_experts(Model(), mesh)
    save_here = partial(sentence_of, ValueError, save_fp8_checkpoint)
    assert "already holds a checkpoint" in save_here(model, directory / "whole")
    assert (
        save_here(model, directory / "new", experts="separate" if rank == 0 else "none")
        == "rank 1: experts: expected 'separate' or 'fused', got 'none'"
    )
    assert "same tensors and options" in save_here(model, directory / "new", max_shard_size=SHARD_SIZE * (rank + 1))
    other = shard_experts(Model(2 + rank), mesh)
    assert "same tensors and options on all ranks, got" in save_here(other, directory / "new")
    with torch.no_grad():
        held_here = model.layers[0].experts.down_proj_scale_inv.to_local()
        held_here.copy_(held_here.log2().ceil().exp2())
    assert "powers of two" in save_here(model, directory / "new", scale_format="ue8m0")
    assert not (directory / "new").exists()

    with pytest.MonkeyPatch.context() as patch:  # the disk is full
        if rank == 0:
            interrupt(patch, 25)
        assert save_here(model, directory / "new", max_shard_size=SHARD_SIZE) == "rank 0: Interrupted()"
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(save, "inside", fails)
        assert save_here(model, directory / "new", max_shard_size=SHARD_SIZE) == "rank 1: not readable"
    assert not (directory / "new" / INDEX).exists()
    save_fp8_checkpoint(model, directory / "new", max_shard_size=SHARD_SIZE)
    dist.barrier()
    load_fp8_checkpoint(model, directory / "new")


def fails(*arguments):
    raise OSError("not readable")


def one_failure_is_that_of_all(directory):
    reads_only_its_part(directory)
    sends_an_expert_at_a_time(directory)
    one_rank_cannot_load(directory)
    each_rank_sees_the_scales_of_its_experts(directory)
    one_rank_cannot_save(directory)
    is_the_model_of_transformers(directory)
    one_rank_cannot_refit(directory)
    decodes_and_runs_after_a_refit()


@pytest.mark.parametrize("world", [2, 4])
def test_a_sharded_model_has_the_checkpoint_of_one_process(world, tmp_path):
    save_whole(tmp_path)
    in_processes(checkpoints, tmp_path, world=world)


def test_what_one_process_cannot_do_fails_on_all(tmp_path):
    save_whole(tmp_path)
    in_processes(one_failure_is_that_of_all, tmp_path)
