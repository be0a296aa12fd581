"""DFlash block drafters (arXiv 2602.06036): a small separate model that fills a block of drafts in one pass.

The block is the last token and k mask tokens. Its keys and values of the context are not its own: they are made from
the trunk's hidden states after a few layers (`target_layers`), in the pass that computes those. So its KV caches are
as long as the trunk's, belong to the trunk's state, and follow every commit, join and prefix with it. The block's own
entries are written past the committed ones and overwritten by the verification pass. Embedding and output layer are
the trunk's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3

from ..kernels.products import product, products
from ..limits import MAX_K
from ..state import KV, BatchState
from .feed_forward import feed_forward
from .residual import Residual
from .share import Alone


@dataclass(frozen=True)
class DFlashSpec:
    """What config.json says beside the sizes of the layers."""

    block_size: int  # the last token and the most drafts
    mask_token: int
    target_layers: tuple[int, ...]  # whose outputs the context is made from
    windows: tuple[int | None, ...]  # by layer: positions that it sees; None: all
    causal: tuple[bool, ...]  # by layer: drafts see no later ones

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
        )


class DFlashWeights(nn.Module):
    """The weights under their released names: mlx-lm's layers of a Qwen3, and what is around them."""

    def __init__(self, config: dict[str, Any], targets: int):
        super().__init__()
        args, hidden = qwen3.ModelArgs.from_dict(config), config["hidden_size"]
        self.fc = nn.Linear(targets * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, args.rms_norm_eps)
        self.layers = [qwen3.TransformerBlock(args) for _ in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(hidden, args.rms_norm_eps)


@dataclass(frozen=True, eq=False)
class DFlash:
    spec: DFlashSpec
    weights: DFlashWeights

    @property
    def max_k(self) -> int:
        """Return the most drafts of a block."""
        return min(self.spec.block_size - 1, MAX_K)

    def make_caches(self, rows: int, dtype: mx.Dtype) -> list[KV]:
        parts = [layer.self_attn for layer in self.weights.layers]
        return [KV.empty(rows, part.n_kv_heads, part.q_norm.weight.shape[0], dtype) for part in parts]

    def remember(self, outputs: Sequence[mx.array], caches: Sequence[Any]) -> None:
        """Write the context of a window, given the output [B, W, H] of every layer of the trunk."""
        taps = mx.concatenate([outputs[layer] for layer in self.spec.target_layers], axis=-1)
        context = self.weights.hidden_norm(product(taps, self.weights.fc))
        for layer, cache in zip(self.weights.layers, caches, strict=True):
            part = layer.self_attn
            keys, values = products(context, part.k_proj, part.v_proj)
            cache.update_and_fetch(_keys(part, keys, cache), _heads(values, part.n_kv_heads))

    def __call__(self, block: mx.array, state: BatchState) -> mx.array:
        """Run a block of embeddings [B, W, H] after what `state` holds, whose last layers are this drafter's.

        Returns [B, W, H]; position j > 0 predicts draft j - 1.
        """
        width = block.shape[1]
        state.reserve(width)
        caches: list[Any] = state.layers[-len(self.weights.layers) :]
        at = state.lengths[:, None] + mx.arange(width)  # [B, W]
        x, alone = block, Alone()
        layers = self.weights.layers
        normed = layers[0].input_layernorm(x)
        for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            part = layer.self_attn
            queries, keys, values = products(normed, part.q_proj, part.k_proj, part.v_proj)
            queries = part.rope(part.q_norm(_heads(queries, part.n_heads)), offset=cache.offset)
            keys, values = cache.update_and_fetch(_keys(part, keys, cache), _heads(values, part.n_kv_heads))
            seen = self._mask(index, at, keys.shape[2])
            out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=part.scale, mask=seen)
            out = out.transpose(0, 2, 1, 3).reshape(*block.shape[:2], -1)
            residual = Residual(x, layer.post_attention_layernorm, alone)
            x, normed = residual.add(product(out, part.o_proj))
            following = layers[index + 1].input_layernorm if index + 1 < len(layers) else self.weights.norm
            x, normed = feed_forward(layer.mlp, normed, Residual(x, following, alone))
        return normed

    def _mask(self, index: int, at: mx.array, reach: int) -> mx.array:
        """Return what block positions `at` [B, W] see in a layer, [B, 1, W, reach]."""
        keys, queries = mx.arange(reach), at[:, None, :, None]
        seen = keys <= (queries if self.spec.causal[index] else queries[:, :, -1:])
        window = self.spec.windows[index]
        if window is not None:
            seen = seen & (mx.abs(queries - keys) < window)
        return mx.broadcast_to(seen, (at.shape[0], 1, at.shape[1], reach))


def _heads(x: mx.array, count: int) -> mx.array:
    return x.reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3)


def _keys(part: nn.Module, keys: mx.array, cache: KV) -> mx.array:
    """Return keys [B, W, H·D] as [B, H, W, D], normed and rotated to where `cache` writes them."""
    return part.rope(part.k_norm(_heads(keys, part.n_kv_heads)), offset=cache.offset)
