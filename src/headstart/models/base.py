"""A model: our forward pass over the modules of a family.

A family is mlx-lm's modules (weights map by eye) and our forward over them: mlx-lm's own hides the hidden states
and commits the recurrent state at once. Nothing of mlx-lm is patched or copied.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError
from ..kernels.adapters import Adapter, choose_adapters
from ..kernels.attention import at_last
from ..kernels.cuda.greedy import BestTokens, best_fits, launch_best
from ..kernels.cuda.sampling import DraftRows
from ..kernels.embedding import draft_input, embed_and_norm, join_pairs
from ..kernels.greedy import best_tokens, draft_starts, in_device_memory
from ..kernels.products import product
from ..limits import DEFAULT_K, MAX_HEAD_K
from ..state import GROUP, KV, BatchState
from .attention import attention
from .decoder_layer import decoder_layer
from .dflash import DFlash
from .draft_chain import draft_chain
from .draft_vocabulary import DraftVocabulary
from .family import Family, empty_state
from .feed_forward import feed_forward, mlp_or_mixture
from .graph import Graph, compiles
from .head import Head, find_part, share_missing_parts
from .part import PartKind
from .residual import Residual
from .share import Alone, Share
from .vision import VisionTower


class Scores(NamedTuple):
    """What a pass over a window [B, W] gives."""

    hidden: mx.array  # [B, W, H], the head's input
    logits: mx.array  # [B, W, V], for the token after each position
    best: BestTokens | None


class Weights(nn.Module):
    """Every weight under its canonical name, whatever the checkpoint and mlx-lm call it."""

    def __init__(self, text: nn.Module, lm_head: nn.Module | None, mtp: Head | None):
        super().__init__()
        self.embed_tokens = text.embed_tokens
        self.layers = text.layers
        self.norm = text.norm
        if lm_head is not None:
            self.lm_head = lm_head
        if mtp is not None:
            self.mtp = mtp


@dataclass(frozen=True, eq=False)
class Model:
    """Run a model and its head: `trunk` and `logits`, in one pass `score`; `head` and `draft_logits`, in one
    pass `chain_drafts`; and their states."""

    family: Family
    config: dict[str, Any]  # config.json's text part
    lm: nn.Module  # mlx-lm's own model over the same arrays
    weights: Weights
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

    @property
    def dtype(self) -> mx.Dtype:
        """Return the type of activations: that of the embedding's output, known without computing it."""
        return self.weights.embed_tokens(mx.zeros((1,), mx.int32)).dtype

    @cached_property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("mlx.core.")

    def trunk(
        self, tokens: mx.array, state: BatchState, certain: int, embeddings: mx.array | None = None
    ) -> mx.array:
        """Run the trunk over [B, W] tokens after what `state` holds → [B, W, H], the head's input. `embeddings`
        [B, W, H] take the place of the tokens' own.

        Recurrent states advance now, by the accepted of the pending drafts and the first `certain` tokens, so no
        window may run twice; the rest become the new pending drafts. KV entries count after `state.commit` only.
        """
        with choose_adapters(state.adapters, mixed=-1 in state.adapter_indices or not state.adapter_indices):
            return self._run_layers(state, tokens, certain, embeddings)

    def _run_layers(self, state: BatchState, tokens: mx.array, certain: int, embeddings: mx.array | None) -> mx.array:
        mask, share, layers = state.reserve(tokens.shape[1]), self.share, self.weights.layers
        parts, memories = [self.family.parts(layer) for layer in layers], iter(state.layers)
        accepted = state.accepted
        if embeddings is None and share.ranks == 1:
            x, normed = embed_and_norm(tokens, self.weights.embed_tokens, parts[0][0].norm)
        else:
            x, normed = share.take(self.weights.embed_tokens(tokens) if embeddings is None else embeddings), None
        fits = share.ranks == 1 and self.family.attention is attention  # may be a layer in one launch
        # Every part of a layer is added to x; with it comes the norm that the next part is given.
        outputs = []  # of every layer but the last, for the drafter
        for index, layer in enumerate(layers):
            if self.drafter is not None and index:
                outputs.append(x)
            after = parts[index + 1][0].norm if index + 1 < len(layers) else self.weights.norm
            held = [next(memories) for part in parts[index] if part.kind is not PartKind.MLP]
            whole = decoder_layer(layer, parts[index][0].norm, x, held[0], accepted, certain) if fits else None
            if whole is not None:
                x, normed = whole, None
                continue
            normed = parts[index][0].norm(x) if normed is None else normed
            norms = [part.norm for part in parts[index][1:]] + [after]
            late = None
            for (kind, _, module, beside), norm in zip(parts[index], norms, strict=True):
                residual = Residual(x, norm, share)
                late = late if beside is None else mlp_or_mixture(beside, normed)
                if kind is PartKind.MLP:
                    x, normed = feed_forward(module, normed, residual)
                elif kind is PartKind.ATTENTION:
                    memory = cast(KV, held.pop(0))
                    x, normed = self.family.attention(module, normed, partial(mask, memory.window), memory, residual)
                else:
                    x, normed = self.family.recurrent(module, normed, held.pop(0), accepted, certain, residual)
            if late is not None:
                x, normed = Residual(x, after, share).add(late)
        if self.drafter is not None:
            self.drafter.remember([*outputs, x], list(memories))
        if share.ends and self.family.head.fed_after_norm:
            x = self.weights.norm(x) if normed is None else normed
        return share.give(x)

    _score_graph = cached_property(lambda self: Graph(self._score))
    _head_graph = cached_property(lambda self: Graph(self._head))
    _draft_graph = cached_property(
        lambda self: Graph(partial(draft_chain, self._head, self._best_draft, self.draft_logits))
    )
    _block_graph = cached_property(lambda self: Graph(self._block))

    def score(self, tokens: mx.array, state: BatchState, greedy: bool = False) -> Scores:
        """Run the trunk over a window [B, W] whose first token is certain. `greedy`: also find the best tokens, where
        there is a kernel for it."""
        run: Callable[..., list[mx.array]] = self._score
        if self.share.ranks == 1 and compiles(tokens.shape[1]):
            state.reserve(tokens.shape[1])
            run = self._score_graph
        hidden, logits, *best = run(state, tokens, greedy)
        return Scores(hidden, logits, BestTokens(*best) if best else None)

    def _score(self, state: BatchState, tokens: mx.array, greedy: bool) -> list[mx.array]:
        hidden = self.trunk(tokens, state, certain=1)
        logits = self.logits(hidden)
        return [hidden, logits, *(launch_best(logits) if greedy and best_fits(logits) else ())]

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits […, V] of hidden states […, H] from `trunk`."""
        if not self.family.head.fed_after_norm:
            hidden = self.weights.norm(hidden)
        return product(hidden, self._lm_head)

    def head(
        self,
        hidden: mx.array,
        tokens: mx.array,
        state: BatchState,
        ahead: int = 0,
        module: int = 0,
        last: mx.array | None = None,
        embeddings: mx.array | None = None,
    ) -> mx.array:
        """Run the head over pairs (hidden of position t, token t+1), [B, W, H] and [B, W] → [B, W, H].

        The output predicts token t+2 and, with that token, is the next pair of the chain. The pairs are written
        `ahead` positions past what `state` holds. With `last` [B] only the output at that index is returned, [B, 1,
        H]. `embeddings` [B, W, H] take the place of the tokens' own.
        """
        if compiles(tokens.shape[1]) and embeddings is None:
            state.reserve(tokens.shape[1], ahead)
            return cast(mx.array, self._head_graph(state, hidden, tokens, ahead, module, last))
        return self._head(state, hidden, tokens, ahead, module, last, embeddings)

    def _head(
        self,
        state: BatchState,
        hidden: mx.array,
        tokens: mx.array,
        ahead: int | None,  # None for 0 where a kernel of ours has made the lengths
        module: int,
        last: mx.array | None,
        embeddings: mx.array | None = None,
    ) -> mx.array:
        spec, part = self.family.head, partial(self._part, module)
        embed = part(spec.names.embedding) or self.weights.embed_tokens
        norms = part(spec.names.embedding_norm), part(spec.names.hidden_norm)
        if embeddings is None and not spec.first_embedding_is_zero:
            pairs = draft_input(tokens, hidden, embed, *norms, spec.embedding_first)
        else:
            embedding = embed(tokens) if embeddings is None else embeddings
            if spec.first_embedding_is_zero:
                positions = state.lengths[:, None] + (ahead or 0) + mx.arange(tokens.shape[1])  # [B, W]
                embedding = embedding * (positions > 0)[..., None].astype(embedding.dtype)
            pairs = join_pairs(norms[0](embedding), norms[1](hidden), spec.embedding_first)
        x = product(pairs, part(spec.names.fc))
        layer, memory = self.weights.mtp.layers[module], state.layers[module]
        assert isinstance(memory, KV)
        mask = partial(state.reserve(tokens.shape[1], ahead or 0), memory.window)
        if ahead is not None:
            memory.offset = in_device_memory(memory.offset)
        (first, second), following = self.family.parts(layer), self._head_norm(module)
        fits = self.family.attention is attention
        whole = decoder_layer(layer, first.norm, x, memory, state.accepted, 1) if fits else None
        if whole is not None:
            x = whole if last is None else at_last(whole, last)
            return following(x) if spec.chains_after_norm else x
        alone = Alone()  # every machine has the whole head
        residual = Residual(x if last is None else at_last(x, last), second.norm, alone)
        x, normed = self.family.attention(first.module, first.norm(x), mask, memory, residual, last)
        x, normed = feed_forward(second.module, normed, Residual(x, following, alone))
        return normed if spec.chains_after_norm else x

    def chain_drafts(
        self, pairs: Sequence[mx.array], state: BatchState, k: int, reduced: bool, ratio: bool, *sampler: Any
    ) -> tuple[mx.array, DraftRows] | None:
        """Return k drafts [B, k] after pairs (hidden, tokens and how many are committed here, see `head`): each the
        argmax, or drawn by a `Sampler`; and from what, for the `ratio` rule. All in one graph; None where it is not
        remembered, or the head has several modules."""
        hidden, tokens, counts = pairs
        if self.head_modules > 1 or not compiles(tokens.shape[1]):
            return None
        state.reserve(max(tokens.shape[1], k))
        # A sequence without pairs gets the output of padding: a bad draft costs time, not correctness.
        last, starts = draft_starts(state.lengths, counts, k)
        drafts, *rows = self._draft_graph(state, hidden, tokens, last, starts, reduced, ratio, *sampler)
        state.commit(counts, most=0, lengths=starts[:1].reshape(-1))
        return drafts, DraftRows(rows[1:], rows[:1])

    def _best_draft(self, hidden: mx.array, reduced: bool) -> mx.array:
        logits, some = self._score_drafts(hidden, reduced, 0)
        return best_tokens(logits) if some is None else some.ids[best_tokens(logits)]

    def draft_logits(self, hidden: mx.array, reduced: bool = False, *, module: int = 0) -> mx.array:
        """Return the logits [B, W, V] of hidden states [B, W, H] from a module of `head`. `reduced`: only the draft
        vocabulary can be drawn, where the module's output layer is the first's."""
        logits, some = self._score_drafts(hidden, reduced, module)
        return logits if some is None else some.full(logits, self.vocabulary)

    def _score_drafts(self, hidden: mx.array, reduced: bool, module: int) -> tuple[mx.array, DraftVocabulary | None]:
        """Return logits, and the draft vocabulary if they are only its tokens'."""
        spec, some = self.family.head, self.draft_vocabulary
        if not spec.chains_after_norm:
            hidden = self._head_norm(module)(hidden)
        if reduced and some is not None and (module == 0 or not spec.own_lm_head):
            return product(hidden, some.lm_head), some
        return product(hidden, self._draft_lm_head(module)), None

    def block_logits(self, last: mx.array, k: int, state: BatchState) -> tuple[mx.array, mx.array]:
        """Return the block drafter's logits [B, k, V] and hidden states [B, k, H] for the k tokens after `last` [B],
        the first that the trunk's `state` does not hold."""
        assert self.drafter is not None
        state.reserve(1 + k)
        first = -len(self.drafter.weights.layers)
        own = BatchState(state.layers[first:], state.lengths, state.accepted, state.bounds)
        hidden = (self._block_graph if compiles(1 + k) else self._block)(own, last, k)
        state.layers[first:] = own.layers
        return self.drafter.scaled(product(hidden, self._lm_head)), hidden

    def _block(self, own: BatchState, last: mx.array, k: int) -> mx.array:
        assert self.drafter is not None
        return self.drafter(self.weights.embed_tokens, own, last, k)

    def with_draft_vocabulary(self, ids: list[int], origin: str) -> "Model":
        """Return the model with a copy of the rows of these tokens, for drafts."""
        return replace(self, draft_vocabulary=DraftVocabulary.of(self._draft_lm_head(), ids, origin))

    def with_eight_bit_kv(self) -> "Model":
        """Return the model with the KV caches of its sequences in 8 bits: about half the memory, and not exact."""
        attends = [layer.self_attn for layer in self.weights.layers if "linear_attn" not in layer]
        if odd := next((dim for each in attends for dim in self.family.kv_sizes(each)[1:] if dim % GROUP), None):
            raise CheckpointError(
                f"heads of {odd} numbers cannot be kept in 8 bits: they must be a multiple of {GROUP}"
            )
        return replace(self, eight_bit_kv=True)

    def _part(self, module: int, path: str) -> Any:
        """Return a part of a head's module by its name, None if the trunk's is used."""
        mtp = self.weights.mtp
        return find_part(mtp.layers[module] if self.family.head.in_layer else mtp, path)

    def _head_norm(self, module: int) -> Any:
        spec = self.family.head
        return self._part(module, spec.names.norm) if spec.own_norm else self.weights.norm

    def share_missing(self, stored: Container[str]) -> None:
        """Use the trunk's embedding and output layer where a head's `stored` parameters lack its own copies."""
        share_missing_parts(self.weights.mtp, self.family.head, stored)

    def make_state(self, rows: int) -> BatchState:
        state = empty_state(self.family, self.weights.layers, rows, self.dtype, self.eight_bit_kv)
        if self.drafter is not None:
            state.layers += self.drafter.make_caches(rows, self.dtype)
        return state

    def make_head_state(self, rows: int) -> BatchState:
        return empty_state(self.family, self.weights.mtp.layers, rows, self.dtype, self.eight_bit_kv)

    @property
    def _lm_head(self) -> nn.Module:
        return self.weights.lm_head if "lm_head" in self.weights else self.weights.embed_tokens

    def _draft_lm_head(self, module: int = 0) -> nn.Module:
        own = self._part(module, self.family.head.names.lm_head)
        return own if own is not None else self._lm_head
