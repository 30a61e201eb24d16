"""Train torchtitan's Qwen3 debug MoE, cut small, without a GPU: in bfloat16, or with experts and linears in FP8.

    python -m examples.titan.debug_moe [options of torchtitan 0.3.0]
    torchrun --nproc-per-node 2 -m examples.titan.debug_moe --parallelism.data_parallel_shard_degree 2

FP8 by ``--override.imports fp8moe_torchtitan.experts fp8moe_torchtitan.linears``, which is all that a run on GPUs needs
too: integrations/torchtitan/README.md. All else here is for the CPU, of which `prepare` makes the accelerator that
torchtitan expects. The model is the debug MoE with 2 layers and 8 experts of 256, top-k 2; the text is that of Python's
standard library.
"""

import atexit
import functools
import json
import os
import shutil
import socket
import sys
import tempfile
import types
from pathlib import Path

import torch

LAYERS, EXPERTS, TOP_K, EXPERT_DIM = 2, 8, 2, 256
SEQUENCE, BATCH, STEPS = 64, 4, 20
SINGLE_DEVICE = ("set_device", "reset_peak_memory_stats", "empty_cache", "memory_stats", "synchronize")


def prepare() -> None:
    """Make torchtitan use the CPU as its accelerator. Call it before torchtitan is imported."""
    device = types.SimpleNamespace(**{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[0] != "_"})
    device.__dict__.update({name: lambda *args, **options: {} for name in SINGLE_DEVICE})
    device.device_count = lambda: int(os.environ["WORLD_SIZE"])
    device.current_device = lambda: 0
    device.get_device_name = lambda *args: "CPU"
    device.get_device_properties = lambda *args: types.SimpleNamespace(total_memory=1 << 30, name="CPU")
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: device
    torch.distributed.set_timeout = lambda timeout, group=None: None  # newer than PyTorch 2.13
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in defaults.items():
        os.environ.setdefault(name, str(value))

    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention._compiled_flex_attn = attention
    # Gloo has no premultiplied sum.
    divide = FSDPModule.set_gradient_divide_factor

    def without_factor(self, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = without_factor


def attention(q, k, v, *, block_mask, scale, enable_gqa, **options):
    """Attention with the mask of a BlockMask: flex_attention has no backward on CPUs."""
    mask = _dense(block_mask)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return out, None


def _dense(block_mask) -> torch.Tensor:
    from torch.nn.attention.flex_attention import create_mask

    batch, heads, queries, keys = block_mask.shape
    return create_mask(block_mask.mask_mod, batch, heads, queries, keys, device="cpu")


@functools.cache
def assets() -> Path:
    """Return a directory with a tokenizer, one token per byte, and a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from examples import python_text

    directory = Path(tempfile.mkdtemp(prefix="debug_moe_"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "text").mkdir(parents=True, exist_ok=True)
    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "bos_token": "<end>"}))
    text = bytes(python_text.load().train[: 1 << 20].tolist()).decode(errors="ignore")
    pieces = [text[start : start + 2000] for start in range(0, len(text), 2000)]
    (directory / "text/data.json").write_text("\n".join(json.dumps({"text": piece}) for piece in pieces))
    return directory


def config():
    """Return torchtitan's configuration of the run."""
    from torchtitan.models import qwen3
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    made = qwen3_moe_debug()
    model = made.model_spec.model
    first = model.layers[0]
    model.layers = qwen3._build_qwen3_moe_layers(
        n_layers=LAYERS,
        dim=model.dim,
        n_heads=16,
        n_kv_heads=8,
        head_dim=128,
        moe_hidden_dim=EXPERT_DIM,
        num_experts=EXPERTS,
        top_k=TOP_K,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=first.attention.rope,
    )
    made.hf_assets_path, made.dump_folder = str(assets()), str(assets() / "outputs")
    made.dataloader.dataset_path = str(assets() / "text")
    made.training.local_batch_size, made.training.seq_len, made.training.steps = BATCH, SEQUENCE, STEPS
    made.training.disable_cuda_graphs = True
    made.debug.seed = 0
    made.parallelism.spmd_backend = "partial_dtensor"
    return made


def main() -> None:
    prepare()
    sys.argv[1:1] = ["--module", "examples.titan.debug_moe", "--config", "config"]
    from torchtitan.train import main as train

    train()


if __name__ == "__main__":
    main()
