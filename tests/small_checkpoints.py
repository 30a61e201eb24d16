"""Small checkpoints, the model that they are of, and what tests do with them."""

import json

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fp8moe import FP8Linear, GroupedExperts, quantize_128x128
from fp8moe.weights import write as checkpoint_write
from fp8moe.weights.source import INDEX, SINGLE

HIDDEN, INTERMEDIATE, EXPERTS = 144, 72, 3  # neither a multiple of 128: gate and up have scales of their own
Q, E = "layers.0.q_proj.weight", "layers.1.experts.2.up_proj.weight"
FORMATS = ("float32", "ue8m0")


def bits(tensor):
    return tensor.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same(first, second):
    """Equal names, dtypes, shapes and bits."""
    assert list(first) == list(second)
    for name in first:
        assert (first[name].dtype, first[name].shape) == (second[name].dtype, second[name].shape), name
        assert torch.equal(bits(first[name]), bits(second[name])), name


class Layer(nn.Module):
    def __init__(self, gated, weight_scales, gpt_oss, weight_format):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, dtype=torch.bfloat16)
        if gpt_oss or weight_format != "fp8":
            self.q_proj = nn.Linear(HIDDEN, 200, dtype=torch.bfloat16)
        else:
            self.q_proj = FP8Linear(HIDDEN, 200, weight_scales=weight_scales)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.bfloat16)
        self.experts = GroupedExperts(
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            gated=gated,
            weight_scales=weight_scales,
            weight_format=weight_format,
            bias=gpt_oss,
        )


class Model(nn.Module):
    """The names of a small mixture-of-experts model; lm_head is tied to the embedding if asked for.

    gpt_oss: experts with biases. weight_format: of experts. All else is unquantized with biases or with four bits.
    """

    def __init__(self, layers=2, *, tied=False, gated=True, weight_scales="block", gpt_oss=False, weight_format="fp8"):
        super().__init__()
        self.embed_tokens = nn.Embedding(50, HIDDEN, dtype=torch.bfloat16)
        self.layers = nn.ModuleList([Layer(gated, weight_scales, gpt_oss, weight_format) for _ in range(layers)])
        self.lm_head = nn.Linear(HIDDEN, 50, bias=False, dtype=torch.bfloat16)
        self.register_buffer("steps", torch.tensor(7))
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def round_scales(self):
        for name, value in self.named_parameters():
            if name.endswith("_scale_inv"):
                value.data = value.data.log2().ceil().exp2()
        return self


def unquantized(seed=0, *, fused=False, layers=2):
    """A bfloat16 checkpoint with the names of `Model`."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return (torch.randn(shape, generator=generator) * 0.1).bfloat16()

    tensors = {
        "embed_tokens.weight": random(50, HIDDEN),
        "lm_head.weight": random(50, HIDDEN),
        "steps": torch.tensor(7),
    }
    for i in range(layers):
        layer = f"layers.{i}"
        tensors[f"{layer}.norm.weight"] = random(HIDDEN)
        tensors[f"{layer}.gate.weight"] = random(EXPERTS, HIDDEN)
        tensors[f"{layer}.q_proj.weight"] = random(200, HIDDEN)
        tensors[f"{layer}.q_proj.bias"] = random(200)
        if fused:
            tensors[f"{layer}.experts.gate_up_proj"] = random(EXPERTS, 2 * INTERMEDIATE, HIDDEN)
            tensors[f"{layer}.experts.down_proj"] = random(EXPERTS, HIDDEN, INTERMEDIATE)
            continue
        for e in range(EXPERTS):
            tensors[f"{layer}.experts.{e}.gate_proj.weight"] = random(INTERMEDIATE, HIDDEN)
            tensors[f"{layer}.experts.{e}.up_proj.weight"] = random(INTERMEDIATE, HIDDEN)
            tensors[f"{layer}.experts.{e}.down_proj.weight"] = random(HIDDEN, INTERMEDIATE)
    return tensors


def write(directory, tensors, shards=1, config=None):
    """A checkpoint of these tensors, in turns to the shards."""
    directory.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, directory / SINGLE, {"format": "pt"})
        return directory
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensor for j, (name, tensor) in enumerate(sorted(tensors.items())) if j % shards == i}
        save_file(part, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def read(directory):
    """All tensors of a checkpoint, read by the safetensors library."""
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def expected_fp8(tensors, scale_format):
    """What the checkpoint becomes, tensor by tensor."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            parts = [tensor]
        elif name.endswith("gate_up_proj"):
            parts = tensor.chunk(2, dim=1)
        elif name.endswith("down_proj"):
            parts = [tensor]
        else:
            result[name] = tensor
            continue
        quantized = [quantize_128x128(part, scale_format=scale_format) for part in parts]
        result[name] = torch.cat([part.data.view(torch.uint8) for part in quantized], -2).view(torch.float8_e4m3fn)
        scale = torch.cat([part.scale for part in quantized], -2)
        result[name + "_scale_inv"] = scale.to(torch.float8_e8m0fnu) if scale_format == "ue8m0" else scale
    return result


def truncate(path, by=3):
    path.write_bytes(path.read_bytes()[:-by])


class Interrupted(Exception):
    pass


def interrupt(monkeypatch, puts):
    """Let ShardWriter.put fail after so many calls."""
    count, put = [0], checkpoint_write.ShardWriter.put

    def failing(*arguments, **options):
        count[0] += 1
        if count[0] > puts:
            raise Interrupted
        put(*arguments, **options)

    monkeypatch.setattr(checkpoint_write.ShardWriter, "put", failing)
