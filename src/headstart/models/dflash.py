"""DFlash block drafters (arXiv 2602.06036): a small separate model that fills a block of drafts in one pass.

The block is the last token and k mask tokens. Its keys and values of the context are not its own: they are made from
the trunk's hidden states after a few layers (`target_layers`), in the pass that computes those. So its KV caches are
as long as the trunk's, belong to the trunk's state, and follow every commit, join and prefix with it. The block's own
entries are written past the committed ones and overwritten by the verification pass. Embedding and output layer are
the trunk's.

DFlash2 adds two things: short convolutions over the block, whose kernels depend on the input, around attention and
MLP of every layer; and a `CandidateSelector`, which scores the likeliest tokens of a position by the draft before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3

from ..kernels import Backend
from ..kernels.layers import Attention, Pass
from ..limits import MAX_K
from ..state import KV, BatchState


@dataclass(frozen=True)
class DFlashSpec:
    """What config.json says beside the sizes of the layers."""

    block_size: int  # the last token and the most drafts
    mask_token: int
    target_layers: tuple[int, ...]  # whose outputs the context is made from
    windows: tuple[int | None, ...]  # by layer: positions that it sees; None: all
    causal: tuple[bool, ...]  # by layer: drafts see no later ones
    kernel: tuple[int, int] | None = None  # DFlash2: taps of its convolutions, channels that share a kernel
    selector: tuple[int, int] | None = None  # DFlash2: rank of the codebooks, tokens that are scored
    input_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: dict[str, Any]) -> "DFlashSpec":
        """Read a config.json that was checked: fields are under `dflash_config`, or flat."""
        fields = {**config, **(config.get("dflash_config") or {})}
        kinds = fields.get("layer_types") or ["full_attention"] * fields["num_hidden_layers"]
        sliding = [kind == "sliding_attention" for kind in kinds]
        causal = fields.get("causal", fields.get("is_causal"))
        return cls(
            fields["block_size"],
            fields["mask_token_id"],
            tuple(fields["target_layer_ids"]),
            tuple(fields["sliding_window"] if each else None for each in sliding),
            tuple(each if causal is None else bool(causal) for each in sliding),
            (fields["conv_kernel_size"], fields["conv_group_size"]) if "conv_kernel_size" in fields else None,
            (fields["selector_rank"], fields["selector_top_k"]) if "selector_rank" in fields else None,
            fields.get("input_embedding_scale", 1.0),
            fields.get("output_multiplier", 1.0),
            fields.get("final_logit_softcapping"),
        )


class DynamicConv(nn.Module):
    """A causal convolution over the block before a part of a layer, and another after it.

    A tap is a weight per channel plus one per group of channels that depends on the part's input."""

    def __init__(self, hidden: int, taps: int, group: int):
        super().__init__()
        self.base_kernel = mx.zeros((2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)

    def kernels(self, backend: Backend, x: mx.array) -> mx.array:
        """Return both kernels for the part's input x [B, W, H], [2, taps, B, W, H]."""
        _, taps, hidden = self.base_kernel.shape
        made = backend.product(x, self.kernel_projection).reshape(*x.shape[:2], 2, taps, -1)  # by group
        wide = mx.repeat(made, hidden // made.shape[-1], axis=-1)
        return (wide + self.base_kernel.astype(x.dtype)).transpose(2, 3, 0, 1, 4)


def convolve(x: mx.array, kernel: mx.array) -> mx.array:
    """Return the sum over taps t of kernel[t] times x [B, W, H] t positions earlier."""
    width = x.shape[1]
    shifted = [mx.pad(x, [(0, 0), (t, 0), (0, 0)])[:, :width] for t in range(kernel.shape[0])]
    return sum((tap * each for tap, each in zip(kernel, shifted, strict=True)), mx.zeros_like(x))


class CandidateSelector(nn.Module):
    """Scores of a token after another, at a position of the block: a product of two codebooks and of its output."""

    def __init__(self, hidden: int, vocabulary: int, rank: int):
        super().__init__()
        self.predecessor_codebook = mx.zeros((vocabulary, rank))
        self.successor_codebook = mx.zeros((vocabulary, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def rescore(self, backend: Backend, logits: mx.array, hidden: mx.array, before: mx.array, count: int) -> mx.array:
        """Return the logits [B, 1, V] of a position given the draft `before` it [B], of its `count` likeliest tokens;
        the others cannot be drawn. `hidden` [B, 1, H] is the drafter's output there."""
        ids = mx.argpartition(logits, -count, axis=-1)[..., -count:]  # [B, 1, C]
        projected = backend.product(hidden, self.hidden_projection)
        weights = self.predecessor_codebook[before][:, None] * projected  # [B, 1, R]
        scores = mx.take_along_axis(logits, ids, axis=-1) + (weights[:, :, None] * self.successor_codebook[ids]).sum(
            -1
        )
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, logits.dtype), ids, scores, axis=-1)


class DFlashWeights(nn.Module):
    """The weights under their released names: mlx-lm's layers of a Qwen3, and what is around them."""

    def __init__(self, config: dict[str, Any], spec: DFlashSpec):
        super().__init__()
        args, hidden = qwen3.ModelArgs.from_dict(config), config["hidden_size"]
        self.fc = nn.Linear(len(spec.target_layers) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, args.rms_norm_eps)
        self.layers = [qwen3.TransformerBlock(args) for _ in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(hidden, args.rms_norm_eps)
        if spec.kernel is not None:
            for layer in self.layers:
                layer.attention_conv, layer.mlp_conv = (DynamicConv(hidden, *spec.kernel) for _ in range(2))
        if spec.selector is not None:
            self.candidate_selector = CandidateSelector(hidden, config["vocab_size"], spec.selector[0])


@dataclass(frozen=True, eq=False)
class DFlash:
    spec: DFlashSpec
    weights: DFlashWeights
    kind = "dflash"

    @property
    def max_k(self) -> int:
        """Return the most drafts of a block."""
        return min(self.spec.block_size - 1, MAX_K)

    @cached_property
    def attentions(self) -> list[Attention]:
        """Return what the attention of the layers is."""
        parts = [layer.self_attn for layer in self.weights.layers]
        kinds = zip(parts, self.spec.windows, self.spec.causal, strict=True)
        return [
            Attention(part, part.n_heads, part.n_kv_heads, window=window, causal=causal)
            for part, window, causal in kinds
        ]

    def make_caches(self, rows: int, dtype: mx.Dtype) -> list[KV]:
        return [each.state(rows, dtype, eight_bits=False) for each in self.attentions]

    def remember(self, backend: Backend, outputs: Sequence[mx.array], memories: Sequence[KV]) -> None:
        """Write the context of a window, given the output [B, W, H] of every layer of the trunk."""
        taps = mx.concatenate([outputs[layer] for layer in self.spec.target_layers], axis=-1)
        context = backend.norm(backend.product(taps, self.weights.fc), self.weights.hidden_norm)
        for layer, memory in zip(self.attentions, memories, strict=True):
            keys, values = backend.products(context, (layer.module.k_proj, layer.module.v_proj))
            backend.write(replace(layer, heads=layer.kv_heads), keys, keys, values, memory)  # there are no queries

    def __call__(
        self, backend: Backend, embed: Callable[[mx.array], mx.array], state: BatchState, last: mx.array, k: int
    ) -> mx.array:
        """Run a block of the token `last` [B] and k mask tokens after what `state` holds, the caches of this drafter.

        Returns the hidden states [B, k, H] that predict the k drafts.
        """
        state.reserve(1 + k)
        at = state.lengths[:, None] + mx.arange(1 + k)  # [B, W]
        block = embed(mx.pad(last[:, None], [(0, 0), (0, k)], constant_values=self.spec.mask_token))  # [B, W, H]
        seen = cache(partial(block_mask, at, state.kv_layers[0].reach))
        layers, scale = self.weights.layers, self.spec.input_scale
        x = block if scale == 1 else block * scale
        normed = backend.norm(x, layers[0].input_layernorm)
        norms = [layer.input_layernorm for layer in layers[1:]] + [self.weights.norm]
        for layer, attention, memory, norm in zip(layers, self.attentions, state.kv_layers, norms, strict=True):
            run = Pass(partial(seen, attention.causal), state.accepted)
            attend, between = partial(_attend, backend, attention, memory, run), layer.post_attention_layernorm
            made = _convolved(backend, layer.get("attention_conv"), normed, attend)
            x, normed = backend.add_and_norm(x, made, between["weight"], between.eps)
            made = _convolved(backend, layer.get("mlp_conv"), normed, partial(backend.mlp_or_mixture, layer.mlp))
            x, normed = backend.add_and_norm(x, made, norm["weight"], norm.eps)
        return normed[:, 1:]

    def scaled(self, logits: mx.array) -> mx.array:
        """Return the output layer's product as logits."""
        logits = logits if self.spec.output_scale == 1 else logits * self.spec.output_scale
        return logits if self.spec.softcap is None else mx.tanh(logits / self.spec.softcap) * self.spec.softcap

    @property
    def selects(self) -> bool:
        """Return whether a draft depends on the one before it."""
        return self.spec.selector is not None

    def rescore(self, backend: Backend, logits: mx.array, hidden: mx.array, before: mx.array) -> mx.array:
        """Return the logits of one position given the draft before it, see `CandidateSelector`."""
        assert self.spec.selector is not None
        return self.weights.candidate_selector.rescore(backend, logits, hidden, before, self.spec.selector[1])


def block_mask(at: mx.array, reach: int, causal: bool, window: int | None) -> mx.array:
    """Return what block positions `at` [B, W] see in a layer, [B, 1, W, reach]."""
    keys, queries = mx.arange(reach), at[:, None, :, None]
    seen = keys <= (queries if causal else queries[:, :, -1:])
    if window is not None:
        seen = seen & (mx.abs(queries - keys) < window)
    return mx.broadcast_to(seen, (at.shape[0], 1, at.shape[1], reach))


def _attend(backend: Backend, layer: Attention, memory: KV, run: Pass, x: mx.array) -> mx.array:
    part = layer.module
    queries, keys, values = backend.products(x, (part.q_proj, part.k_proj, part.v_proj))
    return backend.product(backend.attend(layer, queries, keys, values, memory, run), part.o_proj)


def _convolved(
    backend: Backend, conv: DynamicConv | None, x: mx.array, part: Callable[[mx.array], mx.array]
) -> mx.array:
    """Return part(x), between two convolutions where the layer has them."""
    if conv is None:
        return part(x)
    before, after = conv.kernels(backend, x)
    return convolve(part(convolve(x, before)), after)
