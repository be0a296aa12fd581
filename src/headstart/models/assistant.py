"""Gemma 4's assistants: four layers that draft for a model, and read its keys and values.

A pass makes one draft from the token before it and a hidden state: the trunk's of the position before `last`, then
the assistant's own. Its queries attend to what the trunk's last sliding and last full layer have written, and stand
at one position for all drafts of a step, that of `last`. So there is no cache, and nothing to catch up on or undo.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from ..kernels import Backend
from ..kernels.layers import Attention, Layer, Pass
from ..kernels.memories import memories_by_layer
from ..limits import MAX_HEAD_K
from ..state import KV, BatchState, Recurrent
from .gemma4 import FAMILY, SLIDING


@dataclass(frozen=True)
class AssistantSpec:
    """What config.json says beside the sizes of the layers."""

    target_hidden: int  # numbers of the target's hidden states
    clusters: tuple[int, int] | None = None  # of the vocabulary, and how many of them are scored; None: all tokens

    @classmethod
    def of(cls, config: dict[str, Any]) -> "AssistantSpec":
        clusters = config.get("num_centroids", 2048), config.get("centroid_intermediate_top_k", 32)
        return cls(config["backbone_hidden_size"], clusters if config.get("use_ordered_embeddings") else None)


class Clusters(nn.Module):
    def __init__(self, hidden: int, vocabulary: int, count: int):
        super().__init__()
        self.centroids = nn.Linear(hidden, count, bias=False)
        self.token_ordering = mx.zeros((vocabulary,), mx.int32)  # tokens by cluster


class AssistantWeights(nn.Module):
    """The weights under their released names: mlx-lm's layers of a Gemma 4, and what is around them."""

    def __init__(self, text: dict[str, Any], spec: AssistantSpec):
        super().__init__()
        layers = text["num_hidden_layers"]
        args = gemma4_text.ModelArgs.from_dict({**text, "num_kv_shared_layers": layers, "enable_moe_block": False})
        args.hidden_size_per_layer_input, hidden = 0, args.hidden_size
        self.embed_tokens = nn.Embedding(args.vocab_size, hidden)
        self.pre_projection = nn.Linear(2 * spec.target_hidden, hidden, bias=False)
        self.layers = [gemma4_text.DecoderLayer(args, layer) for layer in range(layers)]
        self.norm = nn.RMSNorm(hidden, args.rms_norm_eps)
        self.post_projection = nn.Linear(hidden, spec.target_hidden, bias=False)
        if spec.clusters is not None:
            self.masked_embedding = Clusters(hidden, args.vocab_size, spec.clusters[0])
        for number, layer in enumerate(self.layers):
            # As transformers has it: so many positions before that of the queries, which is not there yet.
            layer.window = args.sliding_window + 1 if layer.layer_type == SLIDING else None
            layer.number = number


@dataclass(frozen=True, eq=False)
class Assistant:
    spec: AssistantSpec
    weights: AssistantWeights
    kind = "gemma4_assistant"
    max_k = MAX_HEAD_K

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return FAMILY.describe(self.weights.layers, self.weights.norm)

    def begin(self, trunk: tuple[Layer, ...], state: BatchState) -> "Drafts":
        """Return what makes drafts after what the trunk's `state` holds."""
        state.reserve(1)
        last = mx.maximum(state.lengths - 1, 0)  # [B], the newest position that is seen
        start = state.lengths if state.shift is None else state.lengths + state.shift
        written: dict[str | None, KV | Recurrent] = {}
        for layer, (memory, *_) in memories_by_layer(trunk, state.layers):
            (mixer,) = layer.mixers
            assert isinstance(mixer, Attention)
            written[mixer.shares] = memory
        caches = {
            name: replace(memory, offset=last, start=start, positions=None, ends=None)
            for name, memory in written.items()
            if isinstance(memory, KV)
        }
        reach = state.kv_layers[0].reach

        @cache
        def mask(window: int | None = None) -> mx.array:
            positions = last[:, None, None, None]
            seen = mx.arange(reach) <= positions
            return seen if window is None else seen & (mx.arange(reach) > positions - window)

        return Drafts(self, caches, Pass(mask, state.accepted))

    def logits(self, backend: Backend, hidden: mx.array) -> mx.array:
        """Return the logits [B, 1, V] of hidden states [B, 1, H]; tokens of other clusters cannot be drafted."""
        weights = self.weights
        if self.spec.clusters is None:
            return backend.logits(hidden, weights.embed_tokens)
        clusters, chosen = self.spec.clusters
        scores = backend.product(hidden, weights.masked_embedding.centroids)
        best = mx.argpartition(scores, -chosen, axis=-1)[..., -chosen:]  # [B, 1, C]
        tokens = weights.masked_embedding.token_ordering.astype(mx.int32).reshape(clusters, -1)[best]
        tokens = tokens.reshape(hidden.shape[0], -1)  # [B, N]
        rows = backend.embed(tokens, weights.embed_tokens, hidden.dtype)  # [B, N, H]
        made = hidden @ rows.swapaxes(-1, -2)  # [B, 1, N]
        nothing = mx.full((*made.shape[:2], weights.masked_embedding.token_ordering.size), -mx.inf, made.dtype)
        return mx.put_along_axis(nothing, tokens[:, None], made, axis=-1)


@dataclass(frozen=True)
class Drafts:
    """The drafts of one step, one after the other."""

    assistant: Assistant
    caches: Mapping[str | None, KV]
    run: Pass

    def __call__(
        self, backend: Backend, embed: Callable[[mx.array], mx.array], hidden: mx.array, token: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return the logits [B, 1, V] of the token after `token` [B], which `hidden` [B, 1, H] was before, and the
        hidden state for the next."""
        weights = self.assistant.weights
        pair = mx.concatenate([embed(token[:, None]), hidden], axis=-1)
        x, normed = backend.product(pair, weights.pre_projection), None
        for layer in self.assistant.layers:
            (mixer,) = layer.mixers
            assert isinstance(mixer, Attention)
            x, normed = backend.decoder_layer(layer, x, normed, [self.caches[mixer.shares]], self.run)
        assert normed is not None
        return self.assistant.logits(backend, normed), backend.product(normed, weights.post_projection)
