"""A model: our forward pass over the modules of a family.

A family is mlx-lm's modules (weights map by eye) and a description of their layers; a backend computes them. mlx-lm's
own forward hides the hidden states and commits the recurrent state at once. Nothing of mlx-lm is patched or copied.
"""

from collections.abc import Container, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError, RequestError
from ..kernels import Backend, choose_backend
from ..kernels.adapters import Adapter, ChosenAdapters
from ..kernels.backend import state_of
from ..kernels.layers import Layer, Pass
from ..kernels.share import Alone, Share
from ..limits import DEFAULT_K, MAX_HEAD_K
from ..state import GROUP, KV, BatchState
from .dflash import DFlash
from .draft_head import ModelHead
from .draft_vocabulary import DraftVocabulary
from .family import Family
from .head import Weights, find_part, share_missing_parts
from .passes import finish
from .reading import reader_of
from .vision import VisionTower


class Scores(NamedTuple):
    """What a pass over a window [B, W] gives."""

    hidden: mx.array  # [B, W, H], the head's input
    logits: mx.array  # [B, W, V], for the token after each position


@dataclass(frozen=True, eq=False)
class Model:
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
    drafter: DFlash | None = None
    share: Share = field(default_factory=Alone)  # what of the trunk is on this machine
    tower: VisionTower | None = None
    tower_unavailable: str | None = None  # why there is no tower
    eight_bit_kv: bool = False  # sequences keep keys and values in eight bits
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    default_adapter: str | None = None  # of requests that name none

    @property
    def has_head(self) -> bool:
        return "mtp" in self.weights

    @property
    def head_modules(self) -> int:
        return len(self.weights.mtp.layers)

    @property
    def most_drafts(self) -> int:
        """Return the most drafts per step of the head or the drafter, 0 without either."""
        block = self.drafter.max_k if self.drafter is not None else 0
        return max(block, self.max_k if self.has_head else 0)

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def context_length(self) -> int:
        return int(self.config["max_position_embeddings"])

    @cached_property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("mlx.core.")

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Return what the trunk's layers are."""
        return self.family.describe(self.weights.layers, self.weights.norm)

    @cached_property
    def head_layers(self) -> tuple[Layer, ...]:
        """Return what the layers of the head's modules are, a stack each."""
        modules = enumerate(self.weights.mtp.layers)
        return tuple(self.family.describe([each], self._head_norm(number))[0] for number, each in modules)

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
    ) -> mx.array:
        """Run the trunk over [B, W] tokens after what `state` holds → [B, W, H], the head's input. `embeddings`
        [B, W, H] take the place of the tokens' own. After `keep` tokens recurrent layers keep their state too.

        Recurrent states advance now, by the accepted of the pending drafts and the first `certain` tokens, so no
        window may run twice; the rest become the new pending drafts. KV entries count after `state.commit` only.
        """
        return finish(self._run_layers(state, tokens, certain, embeddings, self._adapters(state), keep, whole=True))

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
        *,
        whole: bool = False,
    ) -> Generator[mx.array, None, mx.array]:
        """`whole`: without a stop, where nothing but the end is asked for."""
        backend, share, memories = self.backend, self.share, iter(state.layers)
        mask = state.reserve(tokens.shape[1])
        run = Pass(mask, state.accepted, certain, keep, adapters=adapters, share=share)
        x, normed = self._begin(tokens, embeddings)
        outputs = []  # of every layer, for the drafter
        if whole and self.drafter is None:
            x, normed = backend.decoder_layers(self.layers, x, normed, state.layers, run)
        for layer in () if whole and self.drafter is None else self.layers:
            held = [next(memories) for _ in layer.mixers]
            x, normed = backend.decoder_layer(layer, x, normed, held, run)
            if self.drafter is not None:
                outputs.append(x)
            yield x
        if self.drafter is not None:
            self.drafter.remember(backend, outputs, [each for each in memories if isinstance(each, KV)])
        if share.ends and self.family.head.fed_after_norm:
            x = backend.norm(x, self.weights.norm) if normed is None else normed
        return share.give(x)

    def _begin(self, tokens: mx.array, embeddings: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """Return the input of the first layer here, and its norm where that is known."""
        if embeddings is None and self.share.ranks == 1:
            first = self.layers[0].parts[0].norm
            return self.backend.embed_and_norm(tokens, self.weights.embed_tokens, first, self.dtype)
        return self.share.take(self.embed(tokens) if embeddings is None else embeddings), None

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings [B, W, H] of tokens [B, W]."""
        return self.backend.embed(tokens, self.weights.embed_tokens, self.dtype)

    def adapted_layers(self) -> set[int]:
        """Return the ids of the `LayerAdapters` that a pass adds, without computing it."""
        state, adapters = self.make_state(1), ChosenAdapters(mx.array([0], mx.int32), mixed=False)
        finish(self._run_layers(state, mx.zeros((1, 1), mx.int32), 1, None, adapters))
        return adapters.applied

    @cached_property
    def _score(self) -> Any:
        def score(state: BatchState, tokens: mx.array) -> list[mx.array]:
            hidden = self.trunk(tokens, state, certain=1)
            return [hidden, self.logits(hidden)]

        # Messages to other machines are no operations that can be remembered.
        return self.backend.remember(score) if self.share.ranks == 1 else Backend().remember(score)

    def score(self, tokens: mx.array, state: BatchState) -> Scores:
        """Run the trunk over a window [B, W] whose first token is certain."""
        return Scores(*self._score(state, tokens.shape[1], tokens))

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits […, V] of hidden states […, H] from `trunk`."""
        if not self.family.head.fed_after_norm:
            hidden = self.backend.norm(hidden, self.weights.norm)
        return self.backend.logits(hidden, self._lm_head)

    # The head

    def head(
        self,
        hidden: mx.array,
        tokens: mx.array,
        state: BatchState,
        module: int = 0,
        last: mx.array | None = None,
        embeddings: mx.array | None = None,
    ) -> mx.array:
        """Run the head over pairs (hidden of position t, token t+1), [B, W, H] and [B, W] → [B, W, H].

        The output predicts token t+2 and, with that token, is the next pair of the chain. With `last` [B] only the
        output at that index is returned, [B, 1, H]. `embeddings` [B, W, H] take the place of the tokens' own.
        """
        spec, part, backend = self.family.head, partial(self._part, module), self.backend
        matrix = part(spec.names.embedding) or self.weights.embed_tokens
        norms = part(spec.names.embedding_norm), part(spec.names.hidden_norm)
        if embeddings is None and not spec.first_embedding_is_zero:
            pairs = backend.pair(tokens, hidden, matrix, norms, spec.embedding_first)
        else:
            embedding = backend.embed(tokens, matrix, self.dtype) if embeddings is None else embeddings
            if spec.first_embedding_is_zero:
                positions = state.lengths[:, None] + mx.arange(tokens.shape[1])  # [B, W]
                embedding = embedding * (positions > 0)[..., None].astype(embedding.dtype)
            pairs = backend.join_pair(embedding, hidden, norms, spec.embedding_first)
        x = backend.product(pairs, part(spec.names.fc))
        layer = self.head_layers[module]
        run = Pass(state.reserve(tokens.shape[1]), state.accepted, last=last)
        x, normed = backend.decoder_layer(layer, x, None, [state.layers[module]], run)
        if not spec.chains_after_norm:
            return x
        return backend.norm(x, layer.following) if normed is None else normed

    @cached_property
    def draft_head(self) -> ModelHead:
        """Return the head as chains of drafts run it."""
        return ModelHead(self, reduced=False)

    @cached_property
    def reduced_head(self) -> ModelHead:
        """Return the head that drafts from the draft vocabulary only."""
        return ModelHead(self, reduced=True)

    def draft_logits(self, hidden: mx.array, reduced: bool = False, *, module: int = 0) -> mx.array:
        """Return the logits [B, W, V] of hidden states [B, W, H] from a module of `head`."""
        return (self.reduced_head if reduced else self.draft_head).logits(hidden, module)

    def _part(self, module: int, path: str) -> Any:
        """Return a part of a head's module by its name, None if the trunk's is used."""
        mtp = self.weights.mtp
        return find_part(mtp.layers[module] if self.family.head.in_layer else mtp, path)

    def _head_norm(self, module: int) -> nn.Module:
        spec = self.family.head
        norm: nn.Module = self._part(module, spec.names.norm) if spec.own_norm else self.weights.norm
        return norm

    def draft_lm_head(self, module: int = 0) -> nn.Module:
        """Return the output layer of a head's module."""
        own: nn.Module | None = self._part(module, self.family.head.names.lm_head)
        return own if own is not None else self._lm_head

    def share_missing(self, stored: Container[str]) -> None:
        """Use the trunk's embedding and output layer where a head's `stored` parameters lack its own copies."""
        share_missing_parts(self.weights.mtp, self.family.head, stored)

    # The block drafter

    @cached_property
    def _block(self) -> Any:
        assert self.drafter is not None
        return self.backend.remember(partial(self.drafter, self.backend, self.embed))

    def block_logits(self, last: mx.array, k: int, state: BatchState) -> tuple[mx.array, mx.array]:
        """Return the block drafter's logits [B, k, V] and hidden states [B, k, H] for the k tokens after `last` [B],
        the first that the trunk's `state` does not hold."""
        assert self.drafter is not None
        state.reserve(1 + k)
        first = -len(self.drafter.weights.layers)
        own = BatchState(state.layers[first:], state.lengths, state.accepted, state.bounds)
        hidden = self._block(own, 1 + k, last, k)
        state.layers[first:] = own.layers
        return self.drafter.scaled(self.backend.logits(hidden, self._lm_head)), hidden

    # mlx-lm's way to run a model

    def make_cache(self, *args: object, **named: object) -> NoReturn:
        """Refuse to be run by mlx-lm's functions."""
        raise RequestError(
            "mlx_lm cannot run this model: use headstart.generate, stream_generate, batch_generate and "
            "make_prompt_cache, which take the same arguments"
        )

    __call__ = make_cache

    # States, and models like this one

    def make_state(self, rows: int) -> BatchState:
        state = state_of(self.layers, rows, self.dtype, self.eight_bit_kv)
        if self.drafter is not None:
            state.layers += self.drafter.make_caches(rows, self.dtype)
        return state

    def make_head_state(self, rows: int) -> BatchState:
        return state_of(self.head_layers, rows, self.dtype, self.eight_bit_kv)

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

    @property
    def _lm_head(self) -> nn.Module:
        head: nn.Module = self.weights.lm_head if "lm_head" in self.weights else self.weights.embed_tokens
        return head
