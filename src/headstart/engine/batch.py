"""The sequences that decode together: everything the device keeps of them between two steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from ..models import Model
from ..sampling import BatchContext, Controls, SequenceParams, Verdict, controls
from ..sampling.noise import Keys, Purpose
from ..state import BLOCK, BatchState, UnseenPairs

RESUME_PAIRS = 16  # most pairs that the head replays when drafting resumes
COUNTERS = ("last", "max_k", "remaining", "rounds")  # fields of Batch with one number per sequence


class StepNoise(NamedTuple):
    """Hold the keys of the noise for the next positions, which drafts and their verification share."""

    rounds: mx.array  # of the step
    width: int
    keys: dict[Purpose, Keys]


@dataclass
class Batch:
    trunk_state: BatchState  # KV cache and recurrent states of the trunk
    head_state: (
        BatchState | None
    )  # of the head; None without a head, or if neither a draft nor the prefix cache needs it
    unseen: UnseenPairs  # what the head has not seen
    history: mx.array  # [B, S], the sequence's tokens up to `last`, then undefined
    last: mx.array  # [B], each sequence's last token, which the trunk has not seen
    max_k: mx.array  # [B], most drafts per step that the sequence's request allows
    remaining: mx.array  # [B], tokens the sequence may still generate
    rounds: mx.array  # [B], steps the sequence has been through
    recent: mx.array  # [B, L], the last tokens, as many as penalties look at, -1 before the first
    counts: mx.array | None  # [B, V], how often each token was generated, if a penalty counts them
    params: list[SequenceParams]
    controls: Controls  # `params` as arrays
    last_noise: StepNoise | None = None
    paused_pairs: list[tuple[mx.array, mx.array]] = field(default_factory=list)
    """Hidden [B, 1, H] and tokens [B, 1] of the last steps at k = 0: also unseen, collected when drafting resumes."""

    @classmethod
    def of_one(
        cls,
        model: Model,
        tokens: Sequence[int],
        params: SequenceParams,
        max_k: int,
        generated: int = 0,
        rounds: int = 0,
    ) -> "Batch":
        """Return a batch of one sequence, of whose tokens all but the last are still to be prefilled.

        If it is recomputed, the last `generated` of them are its own, generated in so many `rounds`.
        """
        size = params.params.context_size
        recent = ([-1] * size + list(tokens[-size:]))[-size:] if size else []
        counts = None
        if params.params.counts_generated:
            counts = mx.zeros((1, model.vocabulary))
            if generated:
                counts = counts.at[0, mx.array(list(tokens[-generated:]), mx.int32)].add(1.0)
        return cls(
            trunk_state=model.make_state(1),
            head_state=model.make_head_state(1) if max_k and model.drafts_from_pairs else None,
            unseen=_no_pairs(model, 1),
            history=mx.array([tokens], mx.int32),
            last=mx.array([tokens[-1]], mx.int32),
            max_k=mx.array([max_k], mx.int32),
            remaining=mx.array([params.limit - generated], mx.int32),
            rounds=mx.array([rounds], mx.int32),
            recent=mx.array([recent], mx.int32).reshape(1, size),
            counts=counts,
            params=[params],
            controls=controls([params], model.vocabulary),
        )

    @property
    def size(self) -> int:
        return int(self.last.shape[0])

    def context(self, width: int) -> BatchContext:
        """Return what sampling needs to know of the next `width` positions."""
        where = self.trunk_state.lengths, self.rounds, self.recent, self.remaining, self.counts
        return BatchContext(self.controls, *where, partial(self._noise, width))

    def _noise(self, width: int) -> dict[Purpose, Keys]:
        """Return the keys of noise for the next `width` positions, computed once a step."""
        if (last := self.last_noise) is None or last.rounds is not self.rounds or last.width < width:
            positions = self.trunk_state.lengths[:, None] + mx.arange(1, width + 1)
            self.last_noise = last = StepNoise(self.rounds, width, self.controls.noise_keys(self.rounds, positions))
        return last.keys

    def commit(self, hidden: mx.array, verdict: Verdict) -> None:
        """Advance every sequence by its accepted drafts and the token after them. `hidden` [B, W, H] is the window's.

        Rejected drafts need no undo. Their KV entries lie past the length and are overwritten. In recurrent layers
        all drafts are still pending, and the next pass folds in the first `accepted` of them.
        """
        tokens, generated, width = verdict.tokens, verdict.generated, hidden.shape[1]
        self._append(tokens, verdict.places)
        self.trunk_state.accepted = verdict.accepted
        self.trunk_state.commit(generated, width, verdict.lengths)
        self.last, self.remaining, self.rounds = verdict.last, verdict.remaining, verdict.rounds
        if (size := self.recent.shape[1]) > 0:
            text = mx.concatenate([self.recent, tokens], axis=1)
            self.recent = mx.take_along_axis(text, generated[:, None] + mx.arange(size), axis=1)
        if self.counts is not None:
            counted = mx.arange(width) < generated[:, None]  # [B, W]
            row = mx.arange(self.size)[:, None]
            self.counts = self.counts.at[row, tokens].add(counted.astype(mx.float32))
        if self.head_state is None:
            return
        if width > 1:
            self.collect_unseen()
            self.unseen = self.unseen.extend(hidden, tokens, generated).latest(RESUME_PAIRS)
        else:  # only noted: the head may not be needed again
            self.paused_pairs = [*self.paused_pairs, (hidden, tokens)][-RESUME_PAIRS:]

    def tokens_at(self, positions: mx.array) -> mx.array:
        """Return the tokens [B, T] at these positions [B, T] of each sequence."""
        return mx.take_along_axis(self.history, positions, axis=1)

    def _append(self, tokens: mx.array, places: mx.array) -> None:
        """Write tokens [B, W] at these places; those that were not generated are overwritten later."""
        missing = max(self.trunk_state.bounds) + 1 + tokens.shape[1] - self.history.shape[1]
        if missing > 0:
            self.history = mx.pad(self.history, [(0, 0), (0, -(-missing // BLOCK) * BLOCK)])
        self.history = mx.put_along_axis(self.history, places, tokens, axis=1)

    def collect_unseen(self) -> None:
        """Append the pairs of steps without drafts to `unseen`, and keep the last RESUME_PAIRS."""
        if self.paused_pairs:
            hidden, tokens = (mx.concatenate(list(each), axis=1) for each in zip(*self.paused_pairs, strict=True))
            counts = mx.full((self.size,), len(self.paused_pairs), mx.int32)
            self.unseen = self.unseen.extend(hidden, tokens, counts)
            self.paused_pairs = []
        self.unseen = self.unseen.latest(RESUME_PAIRS)

    def keep(self, indices: list[int], model: Model) -> None:
        """Reduce the batch to the sequences at `indices`."""
        self.collect_unseen()
        if self.head_state is not None:
            self.head_state.bounds = self.trunk_state.bounds  # at most as many pairs as the trunk holds tokens
            self.head_state.keep(indices)
        self.trunk_state.keep(indices)
        index = mx.array(indices, mx.int32)
        self.unseen = UnseenPairs(*[a[index] for a in self.unseen])
        for name in (*COUNTERS, "recent", "history"):
            setattr(self, name, getattr(self, name)[index])
        self._set_params([self.params[i] for i in indices], model)
        if self.counts is not None:
            counts_needed = any(each.params.counts_generated for each in self.params)
            self.counts = self.counts[index] if counts_needed else None

    def fork(self, params: list[SequenceParams], model: Model) -> None:
        """Copy the only sequence, once for each of `params`."""
        self.keep([0] * len(params), model)
        self._set_params(params, model)

    def join(self, other: "Batch", model: Model) -> None:
        """Append sequences that have just been prefilled. If only one side has a head, the other gets an empty one:
        its sequences allow no drafts, so what that head proposes is never accepted."""
        for batch in (self, other):
            batch.collect_unseen()
            if batch.head_state is None and (self.head_state is not None or other.head_state is not None):
                batch.head_state = model.make_head_state(batch.size)
                batch.unseen = _no_pairs(model, batch.size)
        self.trunk_state.join(other.trunk_state)
        if self.head_state is not None and other.head_state is not None:
            self.head_state.join(other.head_state)
        self.unseen = self.unseen.join(other.unseen)
        if self.counts is not None or other.counts is not None:
            both = [b.counts if b.counts is not None else mx.zeros((b.size, model.vocabulary)) for b in (self, other)]
            self.counts = mx.concatenate(both)
        width = max(self.history.shape[1], other.history.shape[1])
        padded = [mx.pad(b.history, [(0, 0), (0, width - b.history.shape[1])]) for b in (self, other)]
        self.history = mx.concatenate(padded)
        length = max(self.recent.shape[1], other.recent.shape[1])
        self.recent = mx.concatenate([_pad_left(self.recent, length), _pad_left(other.recent, length)])
        for name in COUNTERS:
            setattr(self, name, mx.concatenate([getattr(self, name), getattr(other, name)]))
        self._set_params(self.params + other.params, model)

    def arrays(self) -> list[mx.array]:
        """Return everything that must be evaluated for a step to be complete."""
        head = self.head_state.arrays() if self.head_state is not None else []
        counters = [self.last, self.max_k, self.remaining, self.rounds, self.recent, self.history]
        counts = [] if self.counts is None else [self.counts]
        return [*self.trunk_state.arrays(), *head, *self.unseen, *counters, *counts]

    def _set_params(self, params: list[SequenceParams], model: Model) -> None:
        self.params = params
        self.controls = controls(params, model.vocabulary)


def _pad_left(recent: mx.array, length: int) -> mx.array:
    return mx.pad(recent, [(0, 0), (length - recent.shape[1], 0)], constant_values=-1)


def _no_pairs(model: Model, rows: int) -> UnseenPairs:
    return UnseenPairs.empty(rows, model.hidden_size, model.dtype)
