"""Chains of drafts of a head, each from the draft before it."""

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

from ..sampling import BatchContext, Proposal
from ..state import BatchState, UnseenPairs
from .sampling import SamplingSteps
from .types import at_last

Draw = Callable[[mx.array, int], mx.array]  # a module's output [B, 1, H], and which module → the drafts so far [B, j]


class DraftHead(Protocol):
    """A multi-token-prediction head, as a chain of drafts runs it."""

    modules: int
    chained: bool  # module j > 0 is given module j-1's hidden of the same position, or the trunk's
    hidden_size: int
    vocabulary: int

    def run(
        self,
        state: BatchState,
        hidden: mx.array,
        tokens: mx.array,
        module: int,
        last: mx.array | None,
        embeddings: mx.array | None = None,
    ) -> mx.array:
        """Run a module over pairs [B, W, H] and [B, W] → [B, W, H], or only at index `last` [B], [B, 1, H]."""
        ...

    def scores(self, hidden: mx.array, module: int) -> tuple[mx.array, mx.array | None]:
        """Return the logits [B, W, V] of a module's output, or those of some tokens [B, W, R] and their ids [R]."""
        ...

    def logits(self, hidden: mx.array, module: int) -> mx.array:
        """Return the logits [B, W, V] of a module's output; what cannot be drafted has -inf."""
        ...


def chain_drafts(
    head: DraftHead,
    state: BatchState,
    pairs: UnseenPairs,
    last: mx.array,
    starts: mx.array,
    chained: int,
    draw: Draw | None,
    embeddings: mx.array | None = None,
) -> None:
    """Run the head over the committed pairs it has not seen, and then `chained` times over its own drafts, which
    begin at `starts` [chained or more, B]. `draw` is given what follows the last pair (at index `last` [B]), and
    draws.

    Every module has a KV cache of its own and sees every pair: module j the token that is j further on, and the
    hidden state that module j - 1 made of the same position, or the trunk's. Tokens after the last committed one are
    drafts, so the last pairs of all modules but the first are not final: they are to be run again with the next ones.
    `embeddings` [B, T, H] take the place of the pairs' tokens.
    """
    drafts, fed = mx.zeros((last.shape[0], 0), mx.int32), pairs.hidden
    hidden = mx.zeros((last.shape[0], 1, head.hidden_size), fed.dtype)  # without pairs any draft will do
    final = head.modules - 1
    for module in range(head.modules):
        if pairs.width:
            chains = head.chained and module < final
            tokens, at = pairs.following(drafts, module), None if chains else last
            given = None if embeddings is None else mx.pad(embeddings[:, module:], [(0, 0), (0, module), (0, 0)])
            hidden = head.run(state, fed, tokens, module, at, given)
            fed, hidden = (hidden, at_last(hidden, last)) if chains else (fed, hidden)
        if draw is not None:
            drafts = draw(hidden, module)
    for ahead in range(chained):
        assert draw is not None
        # This pair is written past the committed ones: later drafts see it, the next step overwrites it.
        hidden = head.run(state.ahead(ahead, starts[ahead]), hidden, drafts[:, -1:], final, None)
        drafts = draw(hidden, final)


class Drafting(SamplingSteps):
    """Let a head draft."""

    def draft(
        self,
        head: DraftHead,
        state: BatchState,
        pairs: UnseenPairs,
        k: int,
        context: BatchContext,
        given: mx.array | None = None,
    ) -> Proposal:
        """Return k drafts after the pairs that the head has not seen, and let it see those.

        Of several modules each makes the draft after the one before it. Once all have made theirs, the last goes on
        alone, from the pair of its own output for a draft, and that draft. A sequence without pairs gets the output
        of padding: a bad draft costs time, not correctness.
        """
        proposal = Proposal.none(state.lengths.shape[0])

        def draw(hidden: mx.array, module: int) -> mx.array:
            nonlocal proposal
            if (j := proposal.tokens.shape[1]) < k:
                here = given[:, j : j + 1] if given is not None else None
                proposal = self.propose(head.logits(hidden, module), proposal, context, here)
            return proposal.tokens

        self._chain(head, state, pairs, max(k - head.modules, 0), draw)
        return proposal

    def see(self, head: DraftHead, state: BatchState, pairs: UnseenPairs, embeddings: mx.array | None = None) -> None:
        """Let the head see pairs, without drafts."""
        self._chain(head, state, pairs, 0, None, embeddings)

    def _chain(
        self,
        head: DraftHead,
        state: BatchState,
        pairs: UnseenPairs,
        chained: int,
        draw: Draw | None,
        embeddings: mx.array | None = None,
    ) -> None:
        last, starts = self.draft_starts(state.lengths, pairs.counts, max(chained, 1))
        chain_drafts(head, state, pairs, last, starts, chained, draw, embeddings)
        state.commit(pairs.counts, most=0, lengths=starts[0])

    def draft_starts(self, lengths: mx.array, counts: mx.array, n: int) -> tuple[mx.array, mx.array]:
        """Return for sequences of `lengths` [B] that are given `counts` [B] pairs: the index of the last of these, 0
        without any, [B]; and where n chained passes begin, [n, B]."""
        return mx.maximum(counts - 1, 0), lengths + counts + mx.arange(n)[:, None]
