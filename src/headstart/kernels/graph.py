"""Passes over a decoding window as compiled graphs, from arrays to arrays.

A step of a large model is a thousand operations. Where the host needs longer to describe them one by one than the
device to run them, `mx.compile` remembers the description, one for every (rows, width, pending drafts, capacity). To
remember takes twice as long as to describe once, so a shape is remembered when it is seen again.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from ..limits import MAX_K
from ..sampling import BatchContext, Proposal
from ..state import BLOCK, KV, BatchState, Recurrent, UnseenPairs
from .backend import Backend, Remembered
from .drafts import DraftHead, chain_drafts
from .report import join_columns

OFTEN = 1  # times that a shape is described before it is remembered
MOST = 512  # shapes; then all are forgotten, since a long text has a new capacity again and again
WIDEST = MAX_K + 1  # windows; a prompt's chunks have too many widths


class Graph:
    """`run(rows, *inputs)`, which may change what `rows` holds but not its lengths, and returns arrays."""

    def __init__(self, run: Callable[..., Any], backend: "Remembering"):
        self.run = run
        self.backend = backend
        self.kinds: list[Callable[[list[mx.array]], KV | Recurrent]] = []
        self.seen: Counter[Any] = Counter()
        self.traced = mx.compile(self._from_arrays)

    def __call__(self, rows: BatchState, width: int, *inputs: Any) -> Any:
        """Run the graph on a window of `width`."""
        if width > WIDEST:
            return self.run(rows, *inputs)
        rows.reserve(width)  # a graph cannot grow what it is given
        shapes = [each.shape if isinstance(each, mx.array) else each for each in inputs]
        shape = (
            rows.capacity,
            rows.shift is None,
            rows.adapters is None,
            *shapes,
            *(array.shape for array in rows.layers[0].arrays()),
        )
        if len(self.seen) >= MOST and shape not in self.seen:
            self.seen.clear()
            self.traced = mx.compile(self._from_arrays)
        self.seen[shape] += 1
        if self.seen[shape] <= OFTEN:
            return self.run(rows, *inputs)
        self.kinds = [
            partial(type(each).of, every=each.every) if isinstance(each, KV) else type(each).of
            for each in rows.layers
        ]
        held = [memory.arrays() for memory in rows.layers]
        form, carried = self.backend.form(), self.backend.carried()
        given = [carried, rows.lengths, rows.accepted, rows.shift, rows.adapters, held, form, *inputs]
        try:
            output, held, carried = self.traced(*given)
        finally:
            self.backend.carry(carried)
        rows.layers[:] = [make(arrays) for make, arrays in zip(self.kinds, held, strict=True)]
        for memory in rows.kv_layers:
            memory.written_in_place = self.backend.in_place
        return output

    def _from_arrays(
        self,
        carried: list[mx.array],
        lengths: mx.array,
        accepted: mx.array,
        shift: mx.array | None,
        adapters: mx.array | None,
        held: list[list[mx.array]],
        form: int,
        *inputs: Any,
    ) -> tuple[Any, list[list[mx.array]], list[mx.array]]:
        layers = [make(arrays) for make, arrays in zip(self.kinds, held, strict=True)]
        rows = BatchState(layers, lengths, accepted, shift=shift, adapters=adapters)
        # Where the rows end changes from step to step; that all of the capacity is in reach does not.
        rows.bounds = [rows.capacity - BLOCK // 8] * lengths.shape[0]
        self.backend.carry(carried)
        output = self.run(rows, *inputs)
        return output, [memory.arrays() for memory in rows.layers], self.backend.carried()


class RememberedHead:
    """A head whose passes are remembered one by one."""

    def __init__(self, head: DraftHead, backend: "Remembering"):
        self.modules, self.chained, self.hidden_size = head.modules, head.chained, head.hidden_size
        self.vocabulary, self.scores, self.logits = head.vocabulary, head.scores, head.logits
        self.head, self.graph = head, Graph(head.run, backend)

    def run(
        self,
        state: BatchState,
        hidden: mx.array,
        tokens: mx.array,
        module: int,
        last: mx.array | None,
        embeddings: mx.array | None = None,
    ) -> mx.array:
        if embeddings is not None:
            return self.head.run(state, hidden, tokens, module, last, embeddings)
        made: mx.array = self.graph(state, tokens.shape[1], hidden, tokens, module, last)
        return made


class Remembering(Backend):
    """A backend that remembers passes.

    Attributes:
        in_place: Kernels may write into caches in place, in an order that MLX does not know.
    """

    in_place = False

    def __init__(self, description: str | None = None):
        super().__init__(description)
        self._heads: WeakKeyDictionary[DraftHead, tuple[RememberedHead, Graph]] = WeakKeyDictionary()

    def form(self) -> int:
        """Return what a description depends on beside shapes."""
        return 0

    def carried(self) -> list[mx.array]:
        """Return arrays that every pass takes from the one before it and leaves to the next."""
        return []

    def carry(self, arrays: list[mx.array]) -> None:
        """Take what a pass has left."""

    def remember(self, run: Callable[..., Any]) -> Remembered:
        return Graph(run, self)

    def draft(
        self,
        head: DraftHead,
        state: BatchState,
        pairs: UnseenPairs,
        k: int,
        context: BatchContext,
        given: mx.array | None = None,
    ) -> Proposal:
        """Draft as the reference does, all in one graph where arrays alone decide every draft."""
        if head not in self._heads:
            self._heads[head] = RememberedHead(head, self), Graph(partial(self._chain_graph, head), self)
        passes, chain = self._heads[head]
        sampler = self.packed_sampler(context, head.vocabulary) if given is None else None
        if head.modules > 1 or sampler is None or not 0 < pairs.width <= WIDEST:
            return super().draft(passes, state, pairs, k, context, given)
        state.reserve(max(pairs.width, k))
        last, starts = self.draft_starts(state.lengths, pairs.counts, k)
        ratio = bool(sampler) and "ratio" in context.controls.rules
        drafts, *source = chain(state, pairs.width, *pairs, last, starts, ratio, *sampler)
        state.commit(pairs.counts, most=0, lengths=starts[:1].reshape(-1))
        return Proposal(drafts, (tuple(source),) if ratio else ())

    def packed_sampler(self, context: BatchContext, vocabulary: int) -> tuple[Any, ...] | None:
        """Return the arrays that decide a draft, none where it is the argmax; None where arrays do not suffice."""
        return () if context.controls.argmax_only else None

    def draw_packed(self, logits: mx.array, sampler: tuple[Any, ...], drafts: list[mx.array]) -> list[mx.array]:
        """Return a draft [B, 1] after others that is drawn from logits [B, 1, V], and to be part of its source: how,
        and the logits as they were changed."""
        raise NotImplementedError("drafts are the argmax only")

    def join_draws(self, draws: list[mx.array]) -> mx.array:
        """Return how all drafts were drawn."""
        return mx.concatenate(draws, axis=1)

    def _chain_graph(
        self,
        head: DraftHead,
        state: BatchState,
        hidden: mx.array,
        tokens: mx.array,
        counts: mx.array,
        last: mx.array,
        starts: mx.array,
        ratio: bool,
        *sampler: Any,
    ) -> list[mx.array]:
        """Return the drafts [B, k], and for the `ratio` rule their source."""
        drafts: list[mx.array] = []
        rows: list[mx.array] = []
        draws: list[mx.array] = []

        def draw(hidden: mx.array, module: int) -> mx.array:
            if sampler:
                token, how, logits = self.draw_packed(head.logits(hidden, module), sampler, drafts)
                rows.append(logits)
                draws.append(how)
            else:
                logits, ids = head.scores(hidden, module)
                token = self.best_tokens(logits) if ids is None else ids[self.best_tokens(logits)]
            drafts.append(token)
            return token

        chain_drafts(head, state, UnseenPairs(hidden, tokens, counts), last, starts, starts.shape[0] - 1, draw)
        return [self.columns(drafts), *((*rows, self.join_draws(draws)) if ratio else ())]

    def columns(self, arrays: list[mx.array]) -> mx.array:
        """Return integers [B, ...] side by side."""
        return join_columns(arrays)
