"""A small language model with the mixture of experts of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).

Pre-norm transformer; the first layer's MLP is dense, in the others a token goes to K of E experts and to one shared
expert. Parameters and residual stream are float32; linears, attention and experts compute in bfloat16.

Shapes: B sequences of S tokens, T = B * S; H hidden, D a head; E experts of intermediate size I, K a token.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes
ROTARY_BASE = 10_000.0
INIT_STD = 0.02
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Config:
    """Sizes of the model. `sequence` is the largest S, `dense_intermediate` of the first layer's MLP."""

    hidden: int
    layers: int
    heads: int
    dense_intermediate: int
    experts: int
    top_k: int
    intermediate: int
    sequence: int


class RMSNorm(nn.Module):
    """RMSNorm in float32 over the last dimension: x (..., H) -> bfloat16."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight).to(DTYPE)


class Attention(nn.Module):
    """Causal attention with rotary positions (arXiv:2104.09864), queries and keys normalized as in Qwen3
    (arXiv:2505.09388, section 2): x (B, S, H) -> (B, S, H).
    """

    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        size = config.hidden // config.heads
        self.q_norm, self.k_norm = RMSNorm(size), RMSNorm(size)
        angles = torch.arange(config.sequence)[:, None] * ROTARY_BASE ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("cos", angles.cos(), persistent=False)  # (S, D / 2)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, S, D) each
        q, k = self.rotate(self.q_norm(q)), self.rotate(self.k_norm(k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor) -> Tensor:
        """The halves of x (..., S, D) are the coordinates of D/2 points, turned by an angle that grows with S."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class SwiGLU(nn.Module):
    """The dense MLP, and the shared expert: x (..., H) -> (..., H)."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Router(nn.Module):
    """Sigmoid scores in float32, the K best experts of each token, and their weights, which sum to one.

    Balanced without a loss (DeepSeek-V3, section 2.1.2; arXiv:2408.15664): `bias` counts in the choice only, and after
    each step `balance` moves it up for experts with less than the mean load and down for those with more.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.register_buffer("bias", torch.zeros(config.experts))
        self.load = torch.zeros(config.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, H) -> index (T, K) int64, weights (T, K) float32."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight).sigmoid()
        index = (scores + self.bias).topk(self.top_k).indices
        if self.training:
            self.load = F.one_hot(index, len(self.bias)).sum((0, 1))
        weights = scores.gather(-1, index)
        return index, weights / weights.sum(-1, keepdim=True)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        load = self.load.float()
        if dist.is_initialized():
            dist.all_reduce(load)
        self.bias += rate * (load.mean() - load).sign()


class Experts(nn.Module):
    """The experts in bfloat16, with the parameters and the signature of `fp8moe.GroupedExperts`."""

    def __init__(self, config: Config):
        super().__init__()
        experts, hidden, intermediate = config.experts, config.hidden, config.intermediate
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """x (T, H), index and weights (T, K) -> (T, H)."""
        tokens, top_k = index.shape
        by_expert, order = index.flatten().sort(stable=True)
        experts = torch.arange(len(self.down_proj), device=x.device)
        ends = torch.searchsorted(by_expert, experts, right=True).int()
        gate, up = grouped(x[order // top_k], self.gate_up_proj, ends).chunk(2, dim=-1)
        y = grouped(self.act_fn(gate) * up, self.down_proj, ends)
        return (y[order.argsort()].unflatten(0, (tokens, top_k)) * weights[..., None]).sum(1).to(x.dtype)


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x (R, H) sorted by expert, weight (E, N, H), ends (E,) int32: the row after each expert's last -> (R, N)."""
    return F.grouped_mm(x, weight.to(x.dtype).transpose(-1, -2), offs=ends)


class MoE(nn.Module):
    """Routed experts and the shared one: x (B, S, H) -> (B, S, H)."""

    def __init__(self, config: Config):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = SwiGLU(config.hidden, config.intermediate)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        return self.experts(tokens, *self.router(tokens)).view_as(x) + self.shared(x)


class Block(nn.Module):
    def __init__(self, config: Config, dense: bool):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden)
        self.mlp = SwiGLU(config.hidden, config.dense_intermediate) if dense else MoE(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.hidden)
        self.blocks = nn.Sequential(*(Block(config, dense=layer == 0) for layer in range(config.layers)))
        self.norm = RMSNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, VOCABULARY, bias=False)
        # Layers that add to the residual stream start smaller in deeper models (GPT-2).
        residual = INIT_STD / math.sqrt(2 * config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=residual if ".out." in name or "down" in name else INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy in nats of every token of (B, S + 1) but the first, given those before it."""
        with torch.autocast(tokens.device.type, DTYPE):
            x = self.norm(self.blocks(self.embedding(tokens[:, :-1])))
            logits = self.lm_head(x)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def balance(self, rate: float) -> None:
        """Moves every router's bias by `rate` towards equal loads."""
        for module in self.modules():
            if isinstance(module, Router):
                module.balance(rate)
