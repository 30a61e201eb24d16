"""Sparse upcycling: a dense language model becomes a mixture of experts that computes the same function.

Every MLP is copied into the experts of a mixture-of-experts layer with a random router (Komatsuzaki et al., "Sparse
Upcycling", arXiv:2212.05055, section 3). Identical experts, whose routing weights sum to 1, add up to the one MLP.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe.layers.experts import PACKED_WEIGHTS, GroupedExperts
from fp8moe.layers.linear import replace_linears
from fp8moe.layers.replaced import as_patterns, matches
from fp8moe.quant.formats import MX_BLOCK
from fp8moe.runtime.progress import progress

# LlamaConfig's fields that mean the same in MixtralConfig.
_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters"),
    *("max_position_embeddings", "tie_word_embeddings", "initializer_range", "attention_dropout"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def upcycle(model: Any, *, num_experts: int = 8, top_k: int = 2, seed: int = 0) -> Any:
    """A Mixtral model that computes what ``model`` does, with ``top_k`` of ``num_experts`` equal experts per token.

    model: a transformers LlamaForCausalLM without biases, on the CPU, of any dtype.
    seed: of the routers' weights (num_experts, hidden), normal with variance 1 / hidden.
    Returns a MixtralForCausalLM in eval mode and the same dtype. It has no weights of its own but the routers': the
    rest is shared with ``model``, and the experts of a layer are views of one MLP, so it is for reading only.

    Raises ValueError for a model with biases, or of another kind than Llama.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    source = model.config
    if source.model_type != "llama" or source.attention_bias or source.mlp_bias:
        raise ValueError(f"model: expected a Llama without biases, got {type(model).__name__}")
    config = MixtralConfig(
        **{name: getattr(source, name) for name in _SHARED},
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
    )
    with torch.device("meta"):
        moe = MixtralForCausalLM(config)
    moe.model.rotary_emb = type(moe.model.rotary_emb)(config)  # its frequencies are in no state dict

    generator = torch.Generator().manual_seed(seed)
    weights = {name: value for name, value in model.state_dict().items() if ".mlp." not in name}
    for index, layer in enumerate(model.model.layers):
        gate_up = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]).detach()
        router = torch.randn(num_experts, source.hidden_size, generator=generator) * source.hidden_size**-0.5
        for name, value in {
            "gate.weight": router.to(gate_up.dtype),
            "experts.gate_up_proj": gate_up.expand(num_experts, -1, -1),
            "experts.down_proj": layer.mlp.down_proj.weight.detach().expand(num_experts, -1, -1),
        }.items():
            weights[f"model.layers.{index}.mlp.{name}"] = value
    moe.load_state_dict(weights, assign=True)
    moe.tie_weights()
    moe.generation_config = model.generation_config
    return moe.eval()


def quantize(moe: Any, keep: Iterable[str] = (), weight_format: str = "fp8") -> None:
    """Put FP8 linears, and experts in FP8 or four bits, into a Mixtral model in place.

    keep: patterns of modules that stay as they are, as `replace_linears` takes them. weight_format: of the experts, as
        in `GroupedExperts`.
    """
    keep = as_patterns("keep", keep)
    replace_linears(moe, skip=("lm_head", *keep))
    layers = moe.model.layers
    for index, layer in enumerate(progress(layers, total=len(layers), label="quantizing experts", unit=" layers")):
        if matches(f"model.layers.{index}.mlp.experts", keep):
            continue
        if weight_format == "fp8":
            layer.mlp.experts = GroupedExperts.from_experts(layer.mlp.experts)
        else:
            layer.mlp.experts = PaddedExperts(layer.mlp.experts, weight_format, moe.config.hidden_act)


class PaddedExperts(nn.Module):
    """Experts in four bits whose sizes may be any: zeros fill them up to multiples that the format has.

    experts: of Mixtral, unquantized. activation: as in `GroupedExperts`.
    """

    def __init__(self, experts: nn.Module, weight_format: str, activation: str):
        super().__init__()
        multiple = max(MX_BLOCK, PACKED_WEIGHTS[weight_format][1])
        down = experts.down_proj.detach()
        count, hidden_size, intermediate_size = down.shape
        columns, rows = -hidden_size % multiple, -intermediate_size % multiple
        gate_up = experts.gate_up_proj.detach().unflatten(1, (2, -1))
        masters = GroupedExperts(
            num_experts=count,
            hidden_size=hidden_size + columns,
            intermediate_size=intermediate_size + rows,
            activation=activation,
            master_dtype=down.dtype,
            device="meta",
        )
        masters.gate_up_proj = nn.Parameter(F.pad(gate_up, (0, columns, 0, rows)).flatten(1, 2))
        masters.down_proj = nn.Parameter(F.pad(down, (0, rows, 0, columns)))
        self.experts = GroupedExperts.from_experts(masters, weight_format=weight_format)

    def forward(self, hidden_states: Tensor, *routing: Tensor) -> Tensor:
        size = hidden_states.shape[-1]
        return self.experts(F.pad(hidden_states, (0, self.experts.hidden_size - size)), *routing)[..., :size]
