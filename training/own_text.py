"""Text that a model generates itself, many rows at a time: what a drafter must learn to predict.

Token by token with a state, as headstart decodes. A row begins with real text, the prompt.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .gated_delta import _by_head
from .model import Attention, GatedDeltaNet, Net


@dataclass
class Memory:
    """Of one layer: keys and values [B, heads, T, D], or the last inputs of the convolution and the state."""

    first: Tensor
    second: Tensor


def _memory(part: Attention | GatedDeltaNet, rows: int, length: int) -> Memory:
    if isinstance(part, Attention):
        shape, like = (rows, part.shape.num_attention_heads, length, part.shape.head_dim), part.k_proj.weight
        return Memory(like.new_zeros(shape), like.new_zeros(shape))
    taps = part.conv1d.weight  # [C, 1, 4]
    state = taps.new_zeros(rows, part.values // part.dim, part.dim, part.dim, dtype=torch.float32)
    return Memory(taps.new_zeros(rows, taps.shape[2] - 1, taps.shape[0]), state)


def _attend(part: Attention, x: Tensor, position: int, memory: Memory) -> Tensor:
    at = torch.tensor([position], device=x.device)
    q, gate = part.queries(x, at)
    k, v = part.keys_and_values(x, at)
    memory.first[:, :, position], memory.second[:, :, position] = k[:, :, 0], v[:, :, 0]
    seen = (memory.first[:, :, : position + 1], memory.second[:, :, : position + 1])
    return part.out(F.scaled_dot_product_attention(q, *seen), gate)


def _recur(part: GatedDeltaNet, x: Tensor, memory: Memory) -> Tensor:
    inputs = torch.cat([memory.first, part.in_proj_qkv(x)], 1)  # [B, 4, C]
    memory.first = inputs[:, 1:]
    mixed = F.silu((inputs * part.conv1d.weight[:, 0].T).sum(1, keepdim=True))
    q, k, v = mixed.split([part.keys, part.keys, part.values], -1)
    q, k, v, z = (y.unflatten(-1, (-1, part.dim)) for y in (q, k, v, part.in_proj_z(x)))
    g = -part.A_log.float().exp() * F.softplus(part.in_proj_a(x).float() + part.dt_bias.float())
    beta = part.in_proj_b(x).float().sigmoid()
    q, k, v = _by_head(q, k, v)  # [B, H, 1, D]
    state = memory.second.mul_(g.exp().mT[..., None])  # [B, H, D, D]
    missing = (v - k @ state) * beta.mT[..., None]
    state.add_(k.mT * missing)
    said = (q @ state).transpose(1, 2)
    return part.out_proj(part.norm(said, z).to(x.dtype).flatten(-2))


@torch.no_grad()
def generate(net: Net, rows: Tensor, prompts: Tensor, temperatures: Tensor) -> Tensor:
    """Return rows [B, T] with what the model says after the first `prompts` [B] tokens of each, at `temperatures`."""
    tokens, length = rows.clone(), rows.shape[1]
    layers = net.model.layers
    parts = [getattr(layer, "self_attn", None) or layer.linear_attn for layer in layers]
    memories = [_memory(part, len(rows), length) for part in parts]
    for position in range(length - 1):
        x = net.embed(tokens[:, position : position + 1])
        for layer, part, memory in zip(layers, parts, memories, strict=True):
            normed = layer.input_layernorm(x)
            if isinstance(part, Attention):
                x = x + _attend(part, normed, position, memory)
            else:
                x = x + _recur(part, normed, memory)
            x = layer.feed_forward(x, [])
        logits = net.logits(net.model.norm(x))[:, 0].float()  # [B, V]
        noise = -torch.empty_like(logits).exponential_().log_()
        drawn = (logits + temperatures[:, None] * noise).argmax(-1)
        tokens[:, position + 1] = torch.where(position + 1 < prompts, tokens[:, position + 1], drawn)
    return tokens
