"""A model: our forward pass over the modules of a family.

A family is mlx-lm's modules (weights map by eye) and a description of their layers; a backend computes them. mlx-lm's
own forward hides the hidden states and commits the recurrent state at once. Nothing of mlx-lm is patched or copied.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError, RequestError
from ..kernels import Backend, choose_backend
from ..kernels.adapters import Adapter, ChosenAdapters
from ..kernels.layers import Layer, Pass
from ..kernels.memories import memories_by_layer, state_of
from ..kernels.share import Alone, Share
from ..limits import DEFAULT_K, MAX_HEAD_K
from ..state import GROUP, BatchState
from .assistant import Assistant, Drafts
from .dflash import DFlash
from .draft_vocabulary import DraftVocabulary
from .family import Family
from .grams import GramTable, read_tables
from .head import Weights
from .heads import HeadPasses
from .passes import finish
from .reading import reader_of
from .vision import VisionTower


class Scores(NamedTuple):
    """What a pass over a window [B, W] gives."""

    hidden: mx.array  # [B, W, H], the head's input
    logits: mx.array  # [B, W, V], for the token after each position


@dataclass(frozen=True, eq=False)
class Model(HeadPasses):
    """Run a model: `trunk` and `logits`, in one pass `score`; its head: `head` and `draft_logits`; and make the
    states that they read and write."""

    family: Family
    config: dict[str, Any]  # config.json's text part
    lm: nn.Module  # mlx-lm's own model over the same arrays
    weights: Weights
    dtype: mx.Dtype = mx.float32  # of activations: embeddings, KV caches, states, the head; chosen once, at load
    backend: Backend = field(default_factory=choose_backend)
    head_unavailable: str | None = None  # why there is no head
    default_k: int = DEFAULT_K  # drafts a round to begin with
    max_k: int = MAX_HEAD_K  # most drafts of the head a round
    copies: bool = True  # drafts may be copied from the context
    draft_vocabulary: DraftVocabulary | None = None  # the tokens that drafts may be limited to
    drafter: DFlash | Assistant | None = None
    share: Share = field(default_factory=Alone)  # what of the trunk is on this machine
    tower: VisionTower[Any] | None = None
    tower_unavailable: str | None = None  # why there is no tower
    eight_bit_kv: bool = False  # sequences keep keys and values in eight bits
    tables: tuple[GramTable, ...] = ()  # of n-grams, on disk
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    default_adapter: str | None = None  # of requests that name none

    @property
    def drafts_from_pairs(self) -> bool:
        """Return whether a source of drafts is given the trunk's hidden states and the tokens after them."""
        return self.has_head or isinstance(self.drafter, Assistant)

    @property
    def most_drafts(self) -> int:
        """Return the most drafts per step of the head or the drafter, 0 without either."""
        block = self.drafter.max_k if self.drafter is not None else 0
        return max(block, self.max_k if self.has_head else 0)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Return what the trunk's layers are."""
        return self.family.describe(self.weights.layers, self.weights.norm)

    @cached_property
    def reading(self) -> "Model":
        """Return the model as it reads prompts."""
        return reader_of(self)

    # The trunk

    def trunk(
        self,
        tokens: mx.array,
        state: BatchState,
        certain: int,
        embeddings: mx.array | None = None,
        keep: int | None = None,
        grams: Sequence[mx.array] | None = None,  # what `read_grams` gives, if it is known
    ) -> mx.array:
        """Run the trunk over [B, W] tokens after what `state` holds → [B, W, H], the head's input: after the final
        norm if the head is fed so, else before it. `embeddings` [B, W, H] take the place of the tokens' own.
        After `keep` tokens recurrent layers keep their state too.

        Recurrent states advance now, by the first `state.accepted` of the pending drafts (`Batch.commit` sets them)
        and the first `certain` tokens, so no window may run twice; the rest become the new pending drafts. KV entries
        count after `state.commit` only.
        """
        adapters = self._adapters(state)
        return finish(self._run_layers(state, tokens, certain, embeddings, adapters, keep, grams, whole=True))

    def by_layers(
        self,
        tokens: mx.array,
        state: BatchState,
        certain: int,
        embeddings: mx.array | None = None,
        keep: int | None = None,
    ) -> Generator[mx.array, None, mx.array]:
        """Do what `trunk` does, and stop after each layer to yield the residual stream: it may be computed so far."""
        return self._run_layers(state, tokens, certain, embeddings, self._adapters(state), keep)

    def read_grams(self, tokens: mx.array, state: BatchState) -> list[mx.array]:
        """Return what each table has of the tokens [B, W] after what `state` holds, [B, W, E]; waits for drafts."""
        return read_tables(self.tables, self.layers, tokens, state) if self.tables else []

    def _adapters(self, state: BatchState) -> ChosenAdapters | None:
        if state.adapters is None:
            return None
        return ChosenAdapters(state.adapters, mixed=-1 in state.adapter_indices or not state.adapter_indices)

    def _run_layers(
        self,
        state: BatchState,
        tokens: mx.array,
        certain: int,
        embeddings: mx.array | None,
        adapters: ChosenAdapters | None,
        keep: int | None = None,
        grams: Sequence[mx.array] | None = None,
        *,
        whole: bool = False,
    ) -> Generator[mx.array, None, mx.array]:
        """Run the layers one by one, and yield the residual stream after each. With `whole` nobody looks at it: all
        layers are one operation of the backend then, unless a block drafter needs the output of each."""
        backend, share = self.backend, self.share
        mask = state.reserve(tokens.shape[1])
        grams = tuple(self.read_grams(tokens, state) if grams is None else grams)
        x, normed = self._begin(tokens, embeddings)
        own = self.family.own_inputs(backend, self.weights, tokens, x)
        run = Pass(
            mask, state.accepted, certain, keep,
            adapters=adapters, share=share, own_inputs=own, tokens=tokens, grams=grams,
        )  # fmt: skip
        block = self.drafter if isinstance(self.drafter, DFlash) else None
        outputs = []  # of every layer, for the drafter
        if whole and block is None:
            x, normed = backend.decoder_layers(self.layers, x, normed, state.layers, run)
        each_layer = memories_by_layer(() if whole and block is None else self.layers, state.layers)
        for layer, held in each_layer:
            x, normed = backend.decoder_layer(layer, x, normed, held, run)
            if block is not None:
                outputs.append(x)
            yield x
        if block is not None:
            block.remember(backend, outputs, state.kv_layers[-len(block.weights.layers) :])
        if share.ends and self.family.head.fed_after_norm:
            x = backend.norm(x, self.weights.norm) if normed is None else normed
        return share.give(x)

    def _begin(self, tokens: mx.array, embeddings: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """Return the input of the first layer here, and its norm where that is known."""
        if (streams := self.family.streams(self.lm)) > 1:
            return mx.tile(self.embed(tokens) if embeddings is None else embeddings, (1, 1, streams)), None
        if embeddings is None and self.share.ranks == 1 and self._embedding_scale == 1:
            first = self.layers[0].parts[0].norm
            return self.backend.embed_and_norm(tokens, self.weights.embed_tokens, first, self.dtype)
        return self.share.take(self.embed(tokens) if embeddings is None else embeddings), None

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings [B, W, H] of tokens [B, W]."""
        made, scale = self._embed_unscaled(tokens), self._embedding_scale
        return made if scale == 1 else made * scale

    def _embed_unscaled(self, tokens: mx.array) -> mx.array:
        return self.backend.embed(tokens, self.weights.embed_tokens, self.dtype)

    @cached_property
    def _embedding_scale(self) -> float:
        return self.family.embedding_scale(self.config)

    def adapted_layers(self) -> set[int]:
        """Return the ids of the `LayerAdapters` that a pass adds, without computing it."""
        state, adapters = self.make_state(1), ChosenAdapters(mx.array([0], mx.int32), mixed=False)
        finish(self._run_layers(state, mx.zeros((1, 1), mx.int32), 1, None, adapters))
        return adapters.applied

    @cached_property
    def _score(self) -> Any:
        def score(state: BatchState, tokens: mx.array, *grams: mx.array) -> list[mx.array]:
            hidden = self.trunk(tokens, state, certain=1, grams=grams)
            return [hidden, self.logits(hidden)]

        # Messages to other machines are no operations that can be remembered.
        return self.backend.remember(score) if self.share.ranks == 1 else Backend().remember(score)

    def score(self, tokens: mx.array, state: BatchState) -> Scores:
        """Run the trunk over a window [B, W] whose first token is certain."""
        return Scores(*self._score(state, tokens.shape[1], tokens, *self.read_grams(tokens, state)))

    def proof(self, tokens: mx.array) -> mx.array:
        """Return what the weights and kernels make of the tokens [1, W] of a prompt."""
        return self.reading.trunk(tokens, self.make_state(1), certain=tokens.shape[1])

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits […, V] of hidden states […, H] from `trunk`."""
        if not self.family.head.fed_after_norm:
            hidden = self.backend.norm(hidden, self.weights.norm)
        logits, cap = self.backend.logits(hidden, self._lm_head), self.family.logit_cap(self.config)
        return logits if cap is None else mx.tanh(logits / cap) * cap

    # The block drafter

    @cached_property
    def _block(self) -> Any:
        assert isinstance(self.drafter, DFlash)
        return self.backend.remember(partial(self.drafter, self.backend, self._embed_unscaled))

    def block_logits(self, last: mx.array, k: int, state: BatchState) -> tuple[mx.array, mx.array]:
        """Return the block drafter's logits [B, k, V] and hidden states [B, k, H] for the k tokens after `last` [B],
        the first that the trunk's `state` does not hold."""
        assert isinstance(self.drafter, DFlash)
        state.reserve(1 + k)
        first = -len(self.drafter.weights.layers)
        own = BatchState(state.layers[first:], state.lengths, state.accepted, state.bounds)
        hidden = self._block(own, 1 + k, last, k)
        state.layers[first:] = own.layers
        return self.drafter.scaled(self.backend.logits(hidden, self._lm_head)), hidden

    def assistant_drafts(self, state: BatchState) -> Drafts:
        """Return what makes the assistant's drafts after what the trunk's `state` holds."""
        assert isinstance(self.drafter, Assistant)
        return self.drafter.begin(self.layers, state)

    # States, and models like this one

    def make_state(self, rows: int) -> BatchState:
        state = state_of(self.layers, rows, self.dtype, self.eight_bit_kv)
        if isinstance(self.drafter, DFlash):
            state.layers += self.drafter.make_caches(rows, self.dtype)
        return state

    def make_head_state(self, rows: int) -> BatchState:
        layers = self.head_layers if self.has_head else ()  # an assistant has no state
        return state_of(layers, rows, self.dtype, self.eight_bit_kv)

    def with_draft_vocabulary(self, ids: list[int], origin: str) -> "Model":
        """Return the model with a copy of the rows of these tokens, for drafts."""
        return replace(self, draft_vocabulary=DraftVocabulary.of(self.draft_lm_head(), ids, origin))

    def with_kv_bits(self, bits: int) -> "Model":
        """Return the model with the KV caches of its sequences in 8 bits: about half the memory, and not exact."""
        if bits != 8:
            raise RequestError(f"kv_bits is {bits}; KV caches are kept as they are, or in 8 bits")
        caches = state_of(self.layers, 1, self.dtype, eight_bit_kv=False).kv_layers
        sizes = [array.shape[-1] for cache in caches for array in (cache.keys, cache.values)]
        if odd := next((size for size in sizes if size % GROUP), None):
            raise CheckpointError(
                f"heads of {odd} numbers cannot be kept in 8 bits: they must be a multiple of {GROUP}"
            )
        return replace(self, eight_bit_kv=True)

    def with_one_layer_of_each_kind(self) -> "Model":
        """Return the model with the first of all layers that have the same shapes, to try kernels on."""
        kinds: dict[Any, Layer] = {}
        for layer in self.layers:
            kinds.setdefault(layer.kind, layer)
        short = replace(self, drafter=None)
        short.__dict__["layers"] = tuple(kinds.values())  # in place of what the cached property would find
        return short
