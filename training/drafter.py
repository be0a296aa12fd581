"""A DFlash block drafter (arXiv 2602.06036) in PyTorch, under its released names, and its loss.

Its input is a block: a token of the text and mask tokens. Keys and values of the context come from the trunk's hidden
states after a few layers, at the positions before the block. Embedding and output layer are the trunk's, which is not
trained. Every layer is causal and slides: so a block may be cut short, and a text be longer than those trained on.

DFlash2 (`second`) adds short convolutions over the block, and scores for a token given the one before it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .model import MLP, Net, _normed, _rotated
from .shapes import Shape
from .vocabulary import added


@dataclass(frozen=True)
class DrafterShape:
    """Sizes that are not said are the trunk's."""

    trunk: Shape
    layers: int = 2
    intermediate_size: int = 1024
    block_size: int = 16
    window: int = 256
    target_layers: tuple[int, ...] = (1, 3, 5, 7)
    second: bool = False
    taps: int = 2  # of the convolutions
    group: int = 16  # channels that share a kernel
    rank: int = 64  # of the codebooks
    scored: int = 32  # likeliest tokens that are scored

    @property
    def name(self) -> str:
        return f"dflash{'2' if self.second else ''}-{self.layers}"

    @property
    def mask_token(self) -> int:
        """Return a token that texts hardly have."""
        return added(self.trunk.vocab_size).end_of_tool_call

    def config(self) -> dict[str, Any]:
        """Return config.json of the exported folder."""
        trunk = self.trunk
        own: dict[str, Any] = {"mask_token_id": self.mask_token, "target_layer_ids": [*self.target_layers]}
        if self.second:
            own |= {"conv_kernel_size": self.taps, "conv_group_size": self.group}
            own |= {"selector_rank": self.rank, "selector_top_k": self.scored}
        return {
            "architectures": ["DFlash2DraftModel" if self.second else "DFlashDraftModel"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "hidden_size": trunk.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": trunk.num_attention_heads,
            "num_key_value_heads": trunk.num_key_value_heads,
            "head_dim": trunk.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": trunk.rms_norm_eps,
            "rope_theta": trunk.rope_theta,
            "vocab_size": trunk.vocab_size,
            "max_position_embeddings": trunk.context_length,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "layer_types": ["sliding_attention"] * self.layers,
            "sliding_window": self.window,
            "block_size": self.block_size,
            "num_target_layers": trunk.num_hidden_layers,
            "dflash_config": own,
        }


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (_normed(x, self.eps) * self.weight.float()).to(x.dtype)


class CrossAttention(nn.Module):
    """Queries of the block; keys and values of the context and of the block."""

    def __init__(self, shape: Shape):
        super().__init__()
        hidden, dim = shape.hidden_size, shape.head_dim
        self.shape = replace(shape, rotary_dim=dim)
        self.q_proj = nn.Linear(hidden, shape.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, shape.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * dim, hidden, bias=False)
        self.q_norm, self.k_norm = Norm(dim, shape.rms_norm_eps), Norm(dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, at: Tensor, sees: Tensor) -> Tensor:
        """x [B, N, H] at positions `at` [N], context [B, T, H] from position 0 on, `sees` [N, T + N]."""
        q = _rotated(self._heads(self.q_norm, self.q_proj, x), at, self.shape)
        both = torch.cat([context, x], 1)
        where = torch.cat([torch.arange(context.shape[1], device=at.device), at])
        k = _rotated(self._heads(self.k_norm, self.k_proj, both), where, self.shape)
        v = self._heads(nn.Identity(), self.v_proj, both)
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        return self.o_proj(attended.transpose(1, 2).flatten(-2))

    def _heads(self, norm: nn.Module, projection: nn.Module, x: Tensor) -> Tensor:
        return norm(projection(x).unflatten(-1, (-1, self.shape.head_dim))).transpose(1, 2)


class DynamicConv(nn.Module):
    """Kernels of two causal convolutions over the block, one before a part of a layer and one after it."""

    def __init__(self, hidden: int, taps: int, group: int):
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return both, [..., taps, H] each, for x [..., H]."""
        _, taps, hidden = self.base_kernel.shape
        made = self.kernel_projection(x).unflatten(-1, (2, taps, hidden // self.group))
        return (made.repeat_interleave(self.group, -1) + self.base_kernel.to(x.dtype)).unbind(-3)


def _convolve(x: Tensor, kernel: Tensor, width: int) -> Tensor:
    """x [B, n·width, H], blocks one after the other; kernel [B, n·width, taps, H]."""
    blocks, taps = x.unflatten(1, (-1, width)), kernel.unflatten(1, (-1, width)).unbind(3)
    shifted = (F.pad(blocks, (0, 0, t, 0))[:, :, :width] for t in range(len(taps)))
    return sum(tap * each for tap, each in zip(taps, shifted, strict=True)).flatten(1, 2)


class CandidateSelector(nn.Module):
    def __init__(self, hidden: int, vocabulary: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocabulary, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocabulary, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, made: Tensor, before: Tensor) -> Tensor:
        """Return what is added to the logits of outputs [..., H] given the tokens before them [...], [..., V]."""
        weights = self.predecessor_codebook[before] * self.hidden_projection(made)
        return F.linear(weights, self.successor_codebook)


class DrafterLayer(nn.Module):
    def __init__(self, shape: DrafterShape):
        super().__init__()
        hidden, eps = shape.trunk.hidden_size, shape.trunk.rms_norm_eps
        self.self_attn = CrossAttention(shape.trunk)
        self.mlp = MLP(hidden, shape.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        self.width = shape.block_size
        if shape.second:
            self.attention_conv = DynamicConv(hidden, shape.taps, shape.group)
            self.mlp_conv = DynamicConv(hidden, shape.taps, shape.group)

    def forward(self, x: Tensor, context: Tensor, at: Tensor, sees: Tensor) -> Tensor:
        x = x + self._part("attention_conv", self.input_layernorm(x), lambda y: self.self_attn(y, context, at, sees))
        return x + self._part("mlp_conv", self.post_attention_layernorm(x), lambda y: self.mlp(y, []))

    def _part(self, conv: str, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        if not hasattr(self, conv):
            return part(x)
        before, after = getattr(self, conv)(x)
        return _convolve(part(_convolve(x, before, self.width)), after, self.width)


class Drafter(nn.Module):
    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.shape, hidden, eps = shape, shape.trunk.hidden_size, shape.trunk.rms_norm_eps
        self.fc = nn.Linear(len(shape.target_layers) * hidden, hidden, bias=False)
        self.hidden_norm = Norm(hidden, eps)
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(shape.layers))
        self.norm = Norm(hidden, eps)
        if shape.second:
            self.candidate_selector = CandidateSelector(hidden, shape.trunk.vocab_size, shape.rank)
        for name, weight in self.named_parameters():
            if name.endswith("base_kernel"):
                weight.data[:, 0] = 1.0
            elif weight.ndim == 2 and "codebook" not in name:
                nn.init.normal_(weight, std=0.01 if "o_proj" in name or "down_proj" in name else 0.02)

    def forward(self, net: Net, tokens: Tensor, taps: Tensor, starts: Tensor) -> Tensor:
        """Fill the blocks that begin at `starts` [n] of tokens [B, T]. taps [B, T, taps·H] are the trunk's.

        Returns [B, n, block_size - 1, H]: entry j is the output for the token j + 1 after a start.
        """
        width, count = self.shape.block_size, len(starts)
        offsets = torch.arange(width, device=tokens.device)
        block = torch.where(offsets == 0, tokens[:, starts, None], self.shape.mask_token)  # [B, n, W]
        context = self.hidden_norm(self.fc(taps))
        at, first = (starts[:, None] + offsets).flatten(), starts.repeat_interleave(width)
        keys = torch.arange(tokens.shape[1], device=tokens.device)
        before = (keys < first[:, None]) & (at[:, None] - keys < self.shape.window)  # [n·W, T]
        inside = (first[:, None] == first) & (at[:, None] >= at)
        sees = torch.cat([before, inside], 1)
        x = net.embed(block.flatten(1))
        for layer in self.layers:
            x = layer(x, context, at, sees)
        return self.norm(x).unflatten(1, (count, width))[:, :, 1:]


class Reading(NamedTuple):
    """What the trunk makes of a text."""

    taps: Tensor  # [B, T, taps·H], the outputs of the target layers
    hidden: Tensor  # [B, T, H], after the final norm
    logits: Tensor  # [B, T, V]


@torch.no_grad()
def read_text(net: Net, tokens: Tensor, layers: tuple[int, ...]) -> Reading:
    x = net.embed(tokens)
    positions, outputs = torch.arange(tokens.shape[1], device=tokens.device), []
    for layer in net.model.layers:
        x = layer(x, positions, [])
        outputs.append(x)
    hidden = net.model.norm(x)
    return Reading(torch.cat([outputs[i] for i in layers], -1), hidden, net.logits(hidden).float())


def block_loss(
    net: Net, drafter: Drafter, tokens: Tensor, read: Reading, starts: Tensor, decay: float, teacher: float
) -> Tensor:
    """Return the cross-entropy of the drafts, `teacher` of it with the trunk's distribution, the rest with the text.

    A draft counts only if those before it are right, so its weight falls by e for every `decay` positions. A DFlash2
    is to do well with its scores, and a quarter as much without them: they choose among few tokens.
    """
    made = drafter(net, tokens, read.taps, starts)
    logits, ahead = net.logits(made), torch.arange(1, made.shape[2] + 1, device=tokens.device)
    at = starts[:, None] + ahead
    weights = torch.exp(-(ahead - 1) / decay)
    wanted = teacher * read.logits[:, at - 1].softmax(-1)  # [B, n, W - 1, V]
    wanted.scatter_add_(-1, tokens[:, at, None], torch.full_like(wanted[..., :1], 1 - teacher))

    def loss(logits: Tensor) -> Tensor:
        by_position = -(wanted * logits.float().log_softmax(-1)).sum(-1).mean((0, 1))
        return (by_position * weights).sum() / weights.sum()

    if not drafter.shape.second:
        return loss(logits)
    return 0.8 * loss(logits + drafter.candidate_selector(made, tokens[:, at - 1])) + 0.2 * loss(logits)


@torch.no_grad()
def survival(net: Net, drafter: Drafter | None, tokens: Tensor, read: Reading, starts: Tensor, k: int) -> Tensor:
    """Return for every j the share of blocks whose first j drafts are all the text's [k]; without a drafter the
    head's. The text should be the trunk's own, greedy: then these drafts are the accepted ones."""
    at = starts[:, None] + torch.arange(1, k + 1, device=tokens.device)
    if drafter is not None:
        made = drafter(net, tokens, read.taps, starts)[:, :, :k]
    else:  # a pair of the head ends with the token at a start
        pairs = read.hidden[:, : tokens.shape[1] - k]
        first, *others = net.mtp.unroll(net.embed(tokens), pairs, starts - 1, k, [])
        made = torch.stack([first[:, starts - 1], *others], 2)
    logits = net.logits(made).float()
    if drafter is not None and drafter.shape.second:
        best = logits.topk(drafter.shape.scored, -1)
        scores = best.values + drafter.candidate_selector(made, tokens[:, at - 1]).float().gather(-1, best.indices)
        drafts = best.indices.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
    else:
        drafts = logits.argmax(-1)
    right = drafts == tokens[:, at]
    return right.int().cumprod(-1).float().mean((0, 1))


def load_drafter(folder: Path, shape: DrafterShape) -> Drafter:
    """Return a saved drafter, in float32."""
    drafter, saved = Drafter(shape), load_file(folder / "model.safetensors")
    drafter.load_state_dict({name: weight.float() for name, weight in saved.items()})
    return drafter


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """Write the drafter in the released layout, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to(torch.bfloat16).cpu() for name, weight in drafter.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(drafter.shape.config(), indent=2))
