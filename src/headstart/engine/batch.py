"""The rows that decode together, and everything the device keeps of them between two steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from ..models import Model
from ..sampling import AcceptResult, BatchContext, Controls, SequenceParams, controls
from ..state import BatchState

LATEST = 16  # pairs that the head is shown when drafts begin again: of those before them it stays ignorant


class UnseenPairs(NamedTuple):
    """Committed pairs (hidden of position t, token t+1) that the head has not seen: in row b, `counts[b]` of them."""

    hidden: mx.array  # [B, T, H]
    tokens: mx.array  # [B, T]
    counts: mx.array  # [B]

    @classmethod
    def none(cls, rows: int, hidden: int, dtype: mx.Dtype) -> "UnseenPairs":
        return cls(mx.zeros((rows, 0, hidden), dtype), mx.zeros((rows, 0), mx.int32), mx.zeros((rows,), mx.int32))

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])

    def extend(self, hidden: mx.array, tokens: mx.array, counts: mx.array) -> "UnseenPairs":
        """Append the first `counts[b]` pairs of row b behind those that wait."""
        if self.width == 0:
            return UnseenPairs(hidden, tokens, counts)
        both = self.pad(self.width + tokens.shape[1])
        at = self.counts[:, None] + mx.arange(tokens.shape[1])  # [B, W]
        return UnseenPairs(
            mx.put_along_axis(both.hidden, at[..., None], hidden, axis=1),
            mx.put_along_axis(both.tokens, at, tokens, axis=1),
            self.counts + counts,
        )

    def latest(self, most: int) -> "UnseenPairs":
        """The last pairs of every row, at most so many."""
        if self.width <= most:
            return self
        at = mx.maximum(self.counts - most, 0)[:, None] + mx.arange(most)  # [B, most]
        return UnseenPairs(
            mx.take_along_axis(self.hidden, at[..., None], axis=1),
            mx.take_along_axis(self.tokens, at, axis=1),
            mx.minimum(self.counts, most),
        )

    def pad(self, width: int) -> "UnseenPairs":
        more = width - self.width
        return UnseenPairs(
            mx.pad(self.hidden, [(0, 0), (0, more), (0, 0)]),
            mx.pad(self.tokens, [(0, 0), (0, more)]),
            self.counts,
        )

    def join(self, other: "UnseenPairs") -> "UnseenPairs":
        width = max(self.width, other.width)
        pairs = zip(self.pad(width), other.pad(width), strict=True)
        return UnseenPairs(*[mx.concatenate([mine, theirs]) for mine, theirs in pairs])


@dataclass
class Batch:
    rows: BatchState  # the trunk's memory
    head: BatchState | None  # the head's; None where no row drafts
    waiting: UnseenPairs
    last: mx.array  # [B], each row's last token, which the trunk has not seen
    ceiling: mx.array  # [B], most drafts a round that the row's request allows
    remaining: mx.array  # [B], tokens the row may still say
    rounds: mx.array  # [B], steps the row has been through
    recent: mx.array  # [B, L], the last tokens, as many as penalties look at, -1 where there is none
    counts: mx.array | None  # [B, V], how often each token was generated, where a row's penalties count them
    asked: list[SequenceParams]
    controls: Controls
    plain: list[tuple[mx.array, mx.array]] = field(default_factory=list)
    """Hidden [B, 1, H] and tokens [B, 1] of the latest rounds without drafts, which the head has not seen either."""

    @classmethod
    def of_one(
        cls, model: Model, tokens: Sequence[int], asked: SequenceParams, ceiling: int, said: int = 0, rounds: int = 0
    ) -> "Batch":
        """A row that has yet to take in all of its tokens but the last one, which opens its next window. Where it is
        begun again, `said` of them are its own, said in so many `rounds`."""
        size = asked.params.context_size
        recent = ([-1] * size + list(tokens[-size:]))[-size:] if size else []
        return cls(
            rows=model.make_state(1),
            head=model.make_head_state(1) if ceiling else None,
            waiting=_nothing_waits(model, 1),
            last=mx.array([tokens[-1]], mx.int32),
            ceiling=mx.array([ceiling], mx.int32),
            remaining=mx.array([asked.limit - said], mx.int32),
            rounds=mx.array([rounds], mx.int32),
            recent=mx.array([recent], mx.int32).reshape(1, size),
            counts=_counts(tokens[len(tokens) - said :], model) if asked.params.counts_generated else None,
            asked=[asked],
            controls=controls([asked], model.vocabulary),
        )

    @property
    def size(self) -> int:
        return int(self.last.shape[0])

    def scene(self) -> BatchContext:
        """The trunk has seen every token but the last one, so the next has that index plus one."""
        return BatchContext(
            self.controls, self.rows.lengths + 1, self.rounds, self.recent, self.remaining, self.counts
        )

    def commit(self, hidden: mx.array, verdict: AcceptResult) -> None:
        """What was accepted is now certain, in every row by its own count. The rest is simply never counted."""
        said = verdict.accepted + 1
        self.rows.accepted = verdict.accepted
        self.rows.commit(said, most=hidden.shape[1])
        self.last = verdict.next
        self.remaining = self.remaining - said
        self.rounds = self.rounds + 1
        if (size := self.recent.shape[1]) > 0:
            text = mx.concatenate([self.recent, verdict.tokens], axis=1)
            self.recent = mx.take_along_axis(text, said[:, None] + mx.arange(size), axis=1)
        if self.counts is not None:
            emitted = mx.arange(verdict.tokens.shape[1]) < said[:, None]  # [B, W]
            row = mx.arange(self.size)[:, None]
            self.counts = self.counts.at[row, verdict.tokens].add(emitted.astype(mx.float32))
        if self.head is None:
            return
        if hidden.shape[1] > 1:
            self.waiting = self.waiting.extend(hidden, verdict.tokens, said)
        else:  # nothing is computed for a head that may not be asked again
            self.plain = [*self.plain, (hidden, verdict.tokens)][-LATEST:]

    def gather(self) -> None:
        """Put the pairs of rounds without drafts behind those that wait. The latest are enough."""
        if self.plain:
            hidden, tokens = (mx.concatenate(list(each), axis=1) for each in zip(*self.plain, strict=True))
            counts = mx.full((self.size,), len(self.plain), mx.int32)
            self.waiting, self.plain = self.waiting.extend(hidden, tokens, counts), []
        self.waiting = self.waiting.latest(LATEST)

    def keep(self, rows: list[int], model: Model) -> None:
        """Only these rows go on."""
        self.gather()
        if self.head is not None:
            self.head.bounds = self.rows.bounds  # a head holds no more pairs than the trunk holds tokens
            self.head.keep(rows)
        self.rows.keep(rows)
        index = mx.array(rows, mx.int32)
        self.waiting = UnseenPairs(*[a[index] for a in self.waiting])
        self.last, self.ceiling, self.remaining = self.last[index], self.ceiling[index], self.remaining[index]
        self.rounds, self.recent = self.rounds[index], self.recent[index]
        self.asked = [self.asked[row] for row in rows]
        if self.counts is not None:
            self.counts = self.counts[index] if any(each.params.counts_generated for each in self.asked) else None
        self.controls = controls(self.asked, model.vocabulary)

    def fork(self, asked: list[SequenceParams], model: Model) -> None:
        """The one row becomes as many as there are `asked`, alike in all else."""
        self.keep([0] * len(asked), model)
        self.asked, self.controls = asked, controls(asked, model.vocabulary)

    def join(self, other: "Batch", model: Model) -> None:
        """Take in rows that have just been prefilled. Either side may be without a head: a blank one does no harm,
        since drafts are only ever proposals and those rows allow none."""
        for batch in (self, other):
            batch.gather()
            if batch.head is None and (self.head is not None or other.head is not None):
                batch.head = model.make_head_state(batch.size)
                batch.waiting = _nothing_waits(model, batch.size)
        self.rows.join(other.rows)
        if self.head is not None and other.head is not None:
            self.head.join(other.head)
        self.waiting = self.waiting.join(other.waiting)
        if self.counts is not None or other.counts is not None:
            both = [b.counts if b.counts is not None else mx.zeros((b.size, model.vocabulary)) for b in (self, other)]
            self.counts = mx.concatenate(both)
        self.last = mx.concatenate([self.last, other.last])
        self.ceiling = mx.concatenate([self.ceiling, other.ceiling])
        self.remaining = mx.concatenate([self.remaining, other.remaining])
        self.rounds = mx.concatenate([self.rounds, other.rounds])
        longest = max(self.recent.shape[1], other.recent.shape[1])
        recents = [
            mx.pad(r, [(0, 0), (longest - r.shape[1], 0)], constant_values=-1) for r in (self.recent, other.recent)
        ]
        self.recent = mx.concatenate(recents)
        self.asked = self.asked + other.asked
        self.controls = controls(self.asked, model.vocabulary)

    def forget_head(self, model: Model) -> None:
        """No row is left that drafts."""
        self.head, self.waiting, self.plain = None, _nothing_waits(model, self.size), []

    def arrays(self) -> list[mx.array]:
        """Everything that must be computed for the step to be over."""
        head = self.head.arrays() if self.head is not None else []
        counters = [self.last, self.ceiling, self.remaining, self.rounds, self.recent]
        counts = [] if self.counts is None else [self.counts]
        return [*self.rows.arrays(), *head, *self.waiting, *counters, *counts]


def _counts(generated: Sequence[int], model: Model) -> mx.array:
    """Return [1, V]: how often each token was generated."""
    counts = mx.zeros((1, model.vocabulary))
    return counts.at[0, mx.array(list(generated), mx.int32)].add(1.0) if generated else counts


def _nothing_waits(model: Model, rows: int) -> UnseenPairs:
    return UnseenPairs.none(rows, int(model.config["hidden_size"]), model.dtype)
