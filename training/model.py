"""The models in PyTorch, with upstream's names for upstream's weights, and their head.

Dense or with experts is the shape's matter. To export is to change a prefix, and how the head's experts are laid out.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gated_delta import chunked
from .shapes import Shape

Routing = list[tuple[Tensor, Tensor]]  # of every pass of a router: mean probability and share of the choices [E]


class RMSNorm(nn.Module):
    """The weight is stored less one, so that it is near zero."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (_normed(x, self.eps) * (1.0 + self.weight.float())).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """Inside the gated delta net; its weight is stored as it is."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.weight.float() * _normed(x, self.eps) * F.silu(gate.float())


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """All experts' weights in one tensor, gate before up."""

    def __init__(self, count: int, hidden: int, inner: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.zeros(count, hidden, inner))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Every expert for every token, weighted: for so small experts cheaper than sending tokens around."""
        count, double, hidden = self.gate_up_proj.shape
        made = F.linear(x, self.gate_up_proj.reshape(count * double, hidden)).unflatten(-1, (count, double))
        gate, up = made.chunk(2, dim=-1)
        made = (F.silu(gate) * up * weights[..., None].to(x.dtype)).flatten(-2)
        return F.linear(made, self.down_proj.permute(1, 0, 2).reshape(hidden, count * double // 2))


class SparseMLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.chosen = shape.num_experts_per_tok
        self.gate = nn.Linear(shape.hidden_size, shape.num_experts, bias=False)
        self.experts = Experts(shape.num_experts, shape.hidden_size, shape.moe_intermediate_size)
        self.shared_expert = MLP(shape.hidden_size, shape.moe_intermediate_size)
        self.shared_expert_gate = nn.Linear(shape.hidden_size, 1, bias=False)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x, routing)
        return self.experts(x, self.route(x, routing)) + shared

    def route(self, x: Tensor, routing: Routing) -> Tensor:
        """Softmax over all experts, the largest few, renormalised → [..., E], zero where not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.linear(x.float(), self.gate.weight.float()).softmax(-1)
        best = probabilities.detach().topk(self.chosen, dim=-1).indices
        is_chosen = torch.zeros_like(probabilities).scatter(-1, best, 1.0)
        routing.append((probabilities.flatten(0, -2).mean(0), is_chosen.flatten(0, -2).mean(0) / self.chosen))
        weights = probabilities * is_chosen
        return weights / weights.sum(-1, keepdim=True)


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        hidden, dim = shape.hidden_size, shape.head_dim
        self.shape = shape
        self.q_proj = nn.Linear(hidden, shape.num_attention_heads * dim * 2, bias=False)  # and the gate
        self.k_proj = nn.Linear(hidden, shape.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * dim, hidden, bias=False)
        self.q_norm = RMSNorm(dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(dim, shape.rms_norm_eps)

    def queries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, hidden] → queries [B, heads, T, D], output gate [B, T, heads·D]."""
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.shape.head_dim)).chunk(2, dim=-1)
        return _rotated(self.q_norm(q).transpose(1, 2), positions, self.shape), gate.flatten(-2)

    def keys_and_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, hidden] → two of [B, heads, T, D], each repeated for the queries that share it."""
        repeats = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        return _rotated(k, positions, self.shape).repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)

    def out(self, attended: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(attended.transpose(1, 2).flatten(-2) * torch.sigmoid(gate))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, gate = self.queries(x, positions)
        k, v = self.keys_and_values(x, positions)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True), gate)


class GatedDeltaNet(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        dim, hidden = shape.linear_head_dim, shape.hidden_size
        self.dim = dim
        self.keys, self.values = shape.linear_num_key_heads * dim, shape.linear_num_value_heads * dim
        mixed = 2 * self.keys + self.values
        self.in_proj_qkv = nn.Linear(hidden, mixed, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.values, bias=False)
        self.in_proj_b = nn.Linear(hidden, shape.linear_num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, shape.linear_num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(mixed, mixed, shape.conv_kernel, groups=mixed, bias=False)
        self.A_log = nn.Parameter(torch.zeros(shape.linear_num_value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(shape.linear_num_value_heads))
        self.norm = GatedRMSNorm(dim, shape.rms_norm_eps)
        self.out_proj = nn.Linear(self.values, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed, length = self.in_proj_qkv(x), x.shape[1]
        taps = self.conv1d.weight[:, 0].to(mixed.dtype)  # [C, 4]
        padded = F.pad(mixed, (0, 0, taps.shape[1] - 1, 0))
        mixed = F.silu(sum(padded[:, i : i + length] * taps[:, i] for i in range(taps.shape[1])))
        q, k, v = mixed.split([self.keys, self.keys, self.values], -1)
        q, k, v, z = (y.unflatten(-1, (-1, self.dim)) for y in (q, k, v, self.in_proj_z(x)))
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        beta = self.in_proj_b(x).float().sigmoid()
        with torch.autocast(x.device.type, enabled=False):
            said = chunked(q, k, v, g, beta)
        return self.out_proj(self.norm(said, z).to(x.dtype).flatten(-2))


class DecoderLayer(nn.Module):
    def __init__(self, shape: Shape, kind: str):
        super().__init__()
        if kind == "full_attention":
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)
        self.mlp = SparseMLP(shape) if shape.num_experts else MLP(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, routing: Routing) -> Tensor:
        normed = self.input_layernorm(x)
        is_attention = hasattr(self, "self_attn")
        x = x + (self.self_attn(normed, positions) if is_attention else self.linear_attn(normed))
        return self.feed_forward(x, routing)

    def feed_forward(self, x: Tensor, routing: Routing) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x), routing)


class Trunk(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape, kind) for kind in shape.layer_types)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, embedded: Tensor, routing: Routing) -> Tensor:
        """[B, T, H] embedded tokens → [B, T, H] after the final norm."""
        positions, x = torch.arange(embedded.shape[1], device=embedded.device), embedded
        for layer in self.layers:
            x = layer(x, positions, routing)
        return self.norm(x)


class Head(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList([DecoderLayer(shape, "full_attention")])
        self.norm = RMSNorm(hidden, eps)

    def unroll(self, embedded: Tensor, hidden: Tensor, starts: Tensor, steps: int, routing: Routing) -> list[Tensor]:
        """Chains of drafts, as the engine would run them where every draft were the true token.

        embedded [B, T + steps, H]: of tokens 0 .. T+steps-1. hidden [B, T, H]: the trunk's, after its final norm.
        The pair (hidden of t, token t+1) sits at position t and predicts token t+2: the first step, at every t.
        Steps 2 .. run for the chains that start at `starts` [n]: step j takes what step j-1 made and token t+j,
        sits at t+j-1, and sees the first step's pairs 0 .. t and its own chain. → [B, T, H], then [B, n, H] each.
        """
        layer, length = self.layers[0], hidden.shape[1]
        every = torch.arange(length, device=hidden.device)
        x = self._pair(embedded[:, 1 : length + 1], hidden)
        normed = layer.input_layernorm(x)
        keys, values = layer.self_attn.keys_and_values(normed, every)
        q, gate = layer.self_attn.queries(normed, every)
        attended = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        made = [self.norm(layer.feed_forward(x + layer.self_attn.out(attended, gate), routing))]

        previous = made[0][:, starts]
        sees = every <= starts[:, None]  # [n, T]
        own = torch.eye(len(starts), dtype=torch.bool, device=hidden.device)
        for j in range(2, steps + 1):
            x = self._pair(embedded[:, starts + j], previous)
            normed = layer.input_layernorm(x)
            k, v = layer.self_attn.keys_and_values(normed, starts + j - 1)
            keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            sees = torch.cat([sees, own], 1)
            q, gate = layer.self_attn.queries(normed, starts + j - 1)
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=sees)
            previous = self.norm(layer.feed_forward(x + layer.self_attn.out(attended, gate), routing))
            made.append(previous)
        return made

    def _pair(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))


class Net(nn.Module):
    """A trunk and its head; the embedding is what turns hiddens into logits."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.mtp = Head(shape)
        self._initialise()

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed_tokens(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    @torch.no_grad()
    def _initialise(self) -> None:
        """Matrices small, those that write to the stream smaller with depth; decays spread as in Mamba2."""
        depth = 1 / math.sqrt(2 * self.shape.num_hidden_layers)
        for name, weight in self.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(1, 16).log_()
            elif name.endswith("dt_bias"):
                step = torch.exp(torch.rand_like(weight) * math.log(100) + math.log(0.001))
                weight.copy_(step + torch.log(-torch.expm1(-step)))
            elif "conv1d" in name:
                weight.uniform_(-0.5, 0.5)
            elif weight.ndim >= 2:
                weight.normal_(0, 0.02)
                if name.removesuffix(".weight").endswith(("o_proj", "out_proj", "down_proj")):
                    weight.mul_(depth)


def _normed(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _rotated(x: Tensor, positions: Tensor, shape: Shape) -> Tensor:
    """x [B, heads, T, D], of which the first rotary_dim turn with the position."""
    d = shape.rotary_dim
    turns = torch.arange(0, d, 2, dtype=torch.float32, device=x.device) / d
    angle = positions[:, None].float() * shape.rope_theta**-turns  # [T, d/2]
    angle = torch.cat([angle, angle], -1)
    turning, rest = x[..., :d].float(), x[..., d:]
    a, b = turning.chunk(2, dim=-1)
    turned = turning * angle.cos() + torch.cat([-b, a], -1) * angle.sin()
    return torch.cat([turned.to(x.dtype), rest], -1)
