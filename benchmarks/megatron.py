"""Losses and tokens/s of a mixture of experts trained by Megatron-Core, in bfloat16 and in FP8, on one or more GPUs.

    torchrun --nproc-per-node 2 -m benchmarks.megatron OUT.json [--megatron DIR] [--expert-parallel 2]

Uses Megatron-Core's model, router, dispatcher, DistributedDataParallel with float32 gradients, and distributed
optimizer. `--megatron` is a directory with its unpacked wheel; TransformerEngine and Apex are not needed. Attention is
PyTorch's scaled_dot_product_attention in all variants.

- bf16: `torch.nn.functional.grouped_mm` experts in Megatron's MoELayer, and Megatron's linears. Its dispatcher sorts
  and sums rows by PyTorch's operations; Megatron's fused ones need TransformerEngine.
- experts: `fp8moe_megatron.FP8Experts` and Megatron's linears; on one rank in an `FP8MoELayer`, which dispatches
  nothing. fp8: the linears in FP8, too.
- control, of the losses only: bf16 with experts multiplied in float32, to tell what another rounding alone changes.

`loss` trains a small model from equal weights on equal batches, for each of several seeds; `speed` times steps of
layers of Qwen3-30B-A3B's size, with a vocabulary of 32768, and counts the memory: about 60 GiB on one GPU, of which 44
are 18 bytes for each of 2.6e9 parameters. Each variant begins when the memory of the one before is free.
"""

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean, median, stdev

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.report import ROOT, digest, write_json

SMALL = {
    **{"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 2, "channels": 64, "experts": 16, "top_k": 4},
    **{"inter": 256, "vocabulary": 1024, "sequence": 256, "batch": 16},
}
QWEN = {
    **{"layers": 4, "hidden": 2048, "heads": 32, "kv_heads": 4, "channels": 128, "experts": 128, "top_k": 8},
    **{"inter": 768, "vocabulary": 32768, "sequence": 4096, "batch": 2},
}
VARIANTS = ("bf16", "experts", "fp8")
APART, FASTER = 0.003, 1.3  # bars
WARMUP, STEPS, LOSS_STEPS = 2, 7, 50
SEEDS = 8  # of weights and batches: the losses of one run differ by about the bar however its products are rounded
RATE, RISING = 3e-4, 10  # the losses' learning rate, and the steps in which it is reached
LEFT_GIB = 0.25  # what may be allocated when a variant begins: workspaces of libraries


def find_megatron(directory: str | None) -> None:
    """Make megatron.core and `fp8moe_megatron` importable."""
    sys.path[:0] = [*([] if directory is None else [directory]), str(ROOT), str(ROOT / "integrations/megatron")]


def layer_spec(variant: str, experts: int):
    """Return the spec of a layer: Megatron-Core's own but for attention's core and what the variant is named after."""
    from fp8moe_megatron import FP8Experts, in_fp8
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    class GroupedMM(FP8Experts):
        """The same parameters in bfloat16."""

        def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
            ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
            both = F.grouped_mm(rows, self.gate_up_proj.mT, offs=ends)
            return F.grouped_mm(_weighted_swiglu(both, probs), self.down_proj.mT, offs=ends), None

    class InFloat32(FP8Experts):
        """The same parameters in bfloat16, multiplied in float32."""

        def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
            sizes = tokens_per_expert.tolist()
            out = []
            for part, of_part, up, down in zip(
                *(rows.split(sizes), probs.split(sizes), self.gate_up_proj, self.down_proj), strict=True
            ):
                both = part.float() @ up.float().T
                out.append(_swiglu(both, of_part) @ down.float().T)
            return torch.cat(out).to(rows.dtype), None

    class Attention(nn.Module):
        """Causal attention by PyTorch's own kernels. Arguments: those of Megatron's core attention."""

        def __init__(self, **_: object):
            super().__init__()

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
            q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))  # (S, B, heads, D)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.permute(2, 0, 1, 3).flatten(2)

    spec = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=True)
    spec.submodules.self_attention.submodules.core_attention = Attention
    if variant in ("experts", "fp8"):
        return in_fp8(spec, linears=variant == "fp8")
    spec.submodules.mlp.keywords["submodules"].experts = GroupedMM if variant == "bf16" else InFloat32
    return spec


@torch.compile
def _swiglu_on_gpu(both: Tensor, probs: Tensor) -> Tensor:
    return _swiglu(both, probs)


def _swiglu(both: Tensor, probs: Tensor) -> Tensor:
    gate, up = both.float().chunk(2, -1)
    return (F.silu(gate) * up * probs[:, None]).to(both.dtype)


def _weighted_swiglu(both: Tensor, probs: Tensor) -> Tensor:
    return (_swiglu_on_gpu if both.is_cuda else _swiglu)(both, probs)


class Trainer:
    """A model of a variant with Megatron-Core's DistributedDataParallel and optimizer; equal seeds, equal weights."""

    def __init__(
        self,
        variant: str,
        sizes: dict[str, int],
        cpu: bool = False,
        distributed_optimizer: bool = True,
        seed: int = 0,
        **config: object,
    ):
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.sizes = sizes
        self.config = TransformerConfig(
            **{"num_layers": sizes["layers"], "hidden_size": sizes["hidden"], "kv_channels": sizes["channels"]},
            **{"num_attention_heads": sizes["heads"], "num_query_groups": sizes["kv_heads"]},
            **{"num_moe_experts": sizes["experts"], "moe_router_topk": sizes["top_k"]},
            **{"moe_ffn_hidden_size": sizes["inter"], "ffn_hidden_size": sizes["inter"]},
            **{"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False},
            **{"normalization": "RMSNorm", "qk_layernorm": True, "attention_dropout": 0.0, "hidden_dropout": 0.0},
            **{"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
            **{"moe_token_dispatcher_type": "alltoall"},
            **{"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-3},
            expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
            expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
            **{"gradient_accumulation_fusion": False, "bias_dropout_fusion": False, "use_cpu_initialization": cpu},
            **config,
        )
        torch.manual_seed(seed)
        if not cpu:
            model_parallel_cuda_manual_seed(seed)
        length = sizes["sequence"]
        self.device = torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
        model = GPTModel(
            *(self.config, layer_spec(variant, sizes["experts"]), sizes["vocabulary"], length),
            **{"position_embedding_type": "rope", "share_embeddings_and_output_weights": False},
        ).to(self.device)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=not cpu
        )
        self.model = DistributedDataParallel(self.config, ddp, Float16Module(self.config, model))
        options = {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0, "bf16": True}
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                **options, params_dtype=torch.bfloat16, use_distributed_optimizer=distributed_optimizer, clip_grad=1.0
            ),
            [self.model],
        )

    def gradients(self, batches: list[Tensor]) -> Tensor:
        """Run forward and backward of a step's micro-batches (B, S + 1), sum the gradients; return the mean loss."""
        from megatron.core.distributed import finalize_model_grads

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.model.set_is_first_microbatch()
        losses = [self._micro_batch(batch, len(batches), batch is batches[-1]) for batch in batches]
        finalize_model_grads([self.model])
        return torch.stack(losses).mean()

    def step(self, batches: list[Tensor]) -> Tensor:
        loss = self.gradients(batches)
        self.optimizer.step()
        return loss

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def close(self) -> None:
        """Let the memory go: Megatron-Core's objects hold each other by hooks and graphs that gc cannot look into."""
        self.model.grad_accs.clear()
        for module in self.model.modules():
            if hasattr(module, "token_dispatcher"):
                module.token_dispatcher = None  # it keeps the last probabilities
        del self.model, self.optimizer
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _micro_batch(self, batch: Tensor, count: int, last: bool) -> Tensor:
        batch = batch.to(self.device, non_blocking=True)
        tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        if last:
            loss = self.model(tokens, positions, None, labels=labels).float().mean()
            (loss / count).backward()
        else:
            with self.model.no_sync():
                loss = self.model(tokens, positions, None, labels=labels).float().mean()
                (loss / count).backward()
        return loss.detach()


def batches_of(sizes: dict[str, int], seed: int) -> Iterator[Tensor]:
    """Yield batches (B, S + 1) of sequences in which each token has four successors, in this order of frequency."""
    generator = torch.Generator().manual_seed(7)
    vocabulary, batch, length = sizes["vocabulary"], sizes["batch"], sizes["sequence"] + 1
    following = torch.randint(vocabulary, (vocabulary, 4), generator=generator)
    generator.manual_seed(seed)
    frequencies = torch.tensor([8.0, 4.0, 2.0, 1.0])
    while True:
        tokens = torch.randint(vocabulary, (batch, 1), generator=generator)
        choices = torch.multinomial(frequencies.expand(batch, -1), length, replacement=True, generator=generator)
        for column in choices.unbind(1)[1:]:
            tokens = torch.cat([tokens, following[tokens[:, -1], column][:, None]], 1)
        yield tokens


def mean_over_ranks(value: Tensor) -> float:
    value = value.clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def losses(
    variant: str, sizes: dict[str, int], steps: int, cpu: bool, rate: float = RATE, seed: int = 0
) -> list[float]:
    """Return the losses of the steps. The learning rate rises for the first ten, and stays at `rate`."""
    from megatron.core import parallel_state

    trainer = Trainer(variant, sizes, cpu, seed=seed)
    found = []
    ranks = parallel_state.get_data_parallel_world_size()
    batches = batches_of(sizes, 1 + ranks * seed + parallel_state.get_data_parallel_rank())
    for number, batch in enumerate(islice(batches, steps), 1):
        trainer.set_rate(rate * min(1.0, number / RISING))
        found.append(mean_over_ranks(trainer.step([batch])))
    trainer.close()
    print(f"seed {seed}, {variant}: {fmean(found[-10:]):.4f}", file=sys.stderr, flush=True)
    return found


def compare_losses(sizes: dict[str, int], steps: int, cpu: bool, rate: float = RATE, seeds: int = SEEDS) -> dict:
    """Compare losses with those of bf16: the mean of the last ten steps, and that of all seeds with its standard error.

    The control's distance and error, no part of the bar, must be well below it.
    """
    found = [
        {variant: losses(variant, sizes, steps, cpu, rate, seed) for variant in ("bf16", "control", *VARIANTS[1:])}
        for seed in range(seeds)
    ]
    apart = {}
    for variant in ("control", *VARIANTS[1:]):
        last = [sum(of_seed[variant][-10:]) / sum(of_seed["bf16"][-10:]) - 1 for of_seed in found]
        apart[variant] = {
            **{"of_seeds": last, "last_ten": fmean(last)},
            **{"error": stdev(last) / math.sqrt(seeds) if seeds > 1 else math.inf},
        }
    learned = all(of_seed["bf16"][-1] < of_seed["bf16"][0] for of_seed in found)
    passed = all(abs(apart[variant]["last_ten"]) <= APART for variant in VARIANTS[1:]) and learned
    fair = abs(apart["control"]["last_ten"]) + apart["control"]["error"] <= APART
    return {
        **{"sizes": sizes, "learning_rate": rate, "seeds": seeds, "losses": found[0], "apart": apart, "bar": APART},
        **{"fair": fair, "passed": passed},
    }


def speed(variant: str, sizes: dict[str, int], micro_batches: int, cpu: bool) -> dict:
    from megatron.core import parallel_state

    before = 0.0 if cpu else torch.cuda.memory_allocated() / 2**30
    trainer = Trainer(variant, sizes, cpu)
    data = parallel_state.get_data_parallel_rank()
    batches = [*islice(batches_of(sizes, 1 + data), micro_batches)]
    batches = [batch.to(trainer.device) for batch in batches]
    if not cpu:
        torch.cuda.reset_peak_memory_stats()
    times = {
        name: _seconds(work, batches, cpu) for name, work in (("gradients", trainer.gradients), ("step", trainer.step))
    }
    seconds = {name: median(found) for name, found in times.items()}  # numbers of rows may compile a kernel once
    tokens = sizes["sequence"] * sizes["batch"] * micro_batches * parallel_state.get_data_parallel_world_size()
    row = {"variant": variant, "seconds": seconds, "times": times, "tokens_per_second": tokens / seconds["step"]}
    row["tokens_per_second_of_gradients"] = tokens / seconds["gradients"]
    print(f"{variant}: {times}", file=sys.stderr, flush=True)
    if not cpu:
        row |= {"gib_before": before, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    trainer.close()
    return row


def _seconds(work: Callable[[list[Tensor]], Tensor], batches: list[Tensor], cpu: bool) -> list[float]:
    """Return the seconds of each of STEPS calls. Ranks begin each together."""
    warmup, steps = (1, 1) if cpu else (WARMUP, STEPS)
    for _ in range(warmup):
        work(batches)
    found = []
    for _ in range(steps):
        _wait(cpu)
        start = time.perf_counter()
        work(batches)
        _wait(cpu)
        found.append(time.perf_counter() - start)
    return found


def _wait(cpu: bool) -> None:
    if not cpu:
        torch.cuda.synchronize()
    dist.barrier()


def compare_speed(sizes: dict[str, int], micro_batches: int, cpu: bool) -> dict:
    rows = [speed(variant, sizes, micro_batches, cpu) for variant in VARIANTS]
    faster = {row["variant"]: row["tokens_per_second"] / rows[0]["tokens_per_second"] for row in rows[1:]}
    settings = {"sizes": sizes, "micro_batches": micro_batches}
    freed = all(row.get("gib_before", 0) <= LEFT_GIB for row in rows)  # otherwise peaks count what others left
    passed = faster["fp8"] >= FASTER and freed
    return {**settings, "rows": rows, "over_bf16": faster, "bar": FASTER, "freed": freed, "passed": passed}


def start(megatron: str | None, expert_parallel: int | None, expert_tensor_parallel: int, cpu: bool) -> None:
    """Join torchrun's processes, or be the only one, and make Megatron-Core's groups."""
    find_megatron(megatron)
    from megatron.core import parallel_state

    if not dist.is_initialized():
        alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "1"}
        for name, value in alone.items():
            os.environ.setdefault(name, value)
        if not cpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("gloo" if cpu else "nccl")
    world = dist.get_world_size()
    expert_parallel = world // expert_tensor_parallel if expert_parallel is None else expert_parallel
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=expert_parallel, expert_tensor_parallel_size=expert_tensor_parallel
    )


def add_run(out: Path, result: dict) -> None:
    """Write a run into a file beside those of other numbers of GPUs, of the same kernels.

    A part that was left out (`--only`) stays as the file has it, from the same device and versions.
    """
    kernels = digest(ROOT)
    stored = json.loads(out.read_text()) if out.exists() else {}
    kept = stored["runs"] if stored.get("digest") == kernels else []
    layout, where = ("world", "expert_parallel", "expert_tensor_parallel"), ("device", "versions")
    before = [run for run in kept if all(run[name] == result[name] for name in layout)]
    kept = [run for run in kept if run not in before]
    for run in (run for run in before if all(run[name] == result[name] for name in where)):
        result = run | result
    write_json(out, {"digest": kernels, "runs": sorted([*kept, result], key=lambda run: run["world"])})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.megatron", description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--megatron", metavar="DIR", help="directory with Megatron-Core's unpacked wheel")
    parser.add_argument("--only", choices=("loss", "speed"))
    parser.add_argument("--expert-parallel", type=int, help="default: all ranks")
    parser.add_argument("--expert-tensor-parallel", type=int, default=1)
    parser.add_argument("--layers", type=int, default=QWEN["layers"], help="of the model that is timed")
    parser.add_argument("--micro-batches", type=int, default=8, help="of 8192 tokens, for each step that is timed")
    parser.add_argument("--steps", type=int, default=LOSS_STEPS, help="of the small model")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the small model")
    args = parser.parse_args()
    start(args.megatron, args.expert_parallel, args.expert_tensor_parallel, cpu=False)
    import megatron.core

    result: dict = {
        "versions": {"megatron-core": megatron.core.__version__, "torch": torch.__version__},
        "device": torch.cuda.get_device_name(),
        "world": dist.get_world_size(),
        "expert_tensor_parallel": args.expert_tensor_parallel,
        "expert_parallel": args.expert_parallel or dist.get_world_size() // args.expert_tensor_parallel,
    }
    if args.only != "speed":
        result["loss"] = compare_losses(SMALL, args.steps, cpu=False, seeds=args.seeds)
    if args.only != "loss":
        result["speed"] = compare_speed(QWEN | {"layers": args.layers}, args.micro_batches, cpu=False)
    if dist.get_rank() == 0:
        add_run(args.out, result)
        print(args.out.read_text())
    dist.destroy_process_group()
    return int(not all(part["passed"] for part in (result.get("loss"), result.get("speed")) if part))


if __name__ == "__main__":
    sys.exit(main())
