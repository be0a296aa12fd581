"""What drawing and accepting a window of drafts is given, and what it gives back."""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from .controls import Controls
from .noise import Keys, Purpose

Source = tuple[mx.array, ...]  # what drafts were drawn from, as the backend has it


class Sampler(NamedTuple):
    """How every sequence samples, what keys its noise, and where it is: all that kernels need, as the inputs of a
    remembered pass."""

    params: mx.array  # [B, 5] float32: temperature, top_k, top_p, log(min_p), min_keep
    words: mx.array  # [B, 6] uint32: two words of its keys, 1 under the ratio rule, words of three purposes
    lengths: mx.array  # [B], index of its last token
    rounds: mx.array  # [B]
    truncates: bool  # a sequence uses top_k, top_p, min_p or XTC
    # XTC, None where no sequence uses it: probability and threshold [B, 1, 1], tokens that it keeps [B, 1, 1, S].
    xtc_probability: mx.array | None = None
    xtc_threshold: mx.array | None = None
    xtc_special: mx.array | None = None
    # What changes logits, as `Changes` has it, and the text that it looks at.
    penalties: mx.array | None = None
    bias_ids: mx.array | None = None
    bias: mx.array | None = None
    stop_ids: mx.array | None = None
    free_at: mx.array | None = None
    recent: mx.array | None = None  # as in `BatchContext`, like the next two
    remaining: mx.array | None = None
    counts: mx.array | None = None

    @property
    def adjusts(self) -> bool:
        """Return whether a sequence changes its logits before sampling."""
        return self.remaining is not None

    @property
    def of_changed(self) -> "Sampler":
        """Return how to sample from logits that are changed already."""
        xtc = self.xtc_probability, self.xtc_threshold, self.xtc_special
        return Sampler(self.params, self.words, self.lengths, self.rounds, self.truncates, *xtc)


class BatchContext(NamedTuple):
    """Where the sequences of a batch are, as far as sampling depends on it."""

    controls: Controls
    lengths: mx.array  # [B], index of the last token in its sequence
    rounds: mx.array  # [B], steps that the sequence has been through
    recent: mx.array  # [B, L], the last tokens, -1 where there is none; L = 0 without penalties
    remaining: mx.array  # [B], tokens that may still be generated
    counts: mx.array | None = None  # [B, V], how often each token was generated, if a penalty needs it
    noise: Callable[[], dict[Purpose, Keys]] | None = None  # returns keys [B, W] of the next positions, made once

    @property
    def sampler(self) -> Sampler:
        controls = self.controls
        made = Sampler(*controls.packed, self.lengths, self.rounds, controls.truncates, *(controls.xtc or ()))
        if not controls.adjusts:
            return made
        made = made._replace(recent=self.recent, remaining=self.remaining, counts=self.counts)
        return made._replace(**controls.changes._asdict())

    def keys(self, purpose: Purpose, first: int, count: int) -> Keys:
        """Return keys [B, count] for the positions `first` after the next token's."""
        if self.noise is None:
            positions = self.lengths[:, None] + mx.arange(first + 1, first + 1 + count)
            return self.controls.noise_keys(self.rounds, positions)[purpose]
        one, other = self.noise()[purpose]
        return one[:, first : first + count], other[:, first : first + count]


class Proposal(NamedTuple):
    """Drafts of every sequence."""

    tokens: mx.array  # [B, k]
    sources: tuple[Source, ...] = ()  # of the drafts from the left, if a sequence uses the ratio rule
    valid: mx.array | None = None  # [B], drafts from the left that may be accepted; None: all

    @classmethod
    def none(cls, rows: int) -> "Proposal":
        return cls(mx.zeros((rows, 0), mx.int32))


class Choice(NamedTuple):
    """What a step would generate at every position of the window, whatever of the drafts is accepted: a draft is,
    while it and all before it are the chosen tokens."""

    tokens: mx.array  # [B, W] int32
    finite: mx.array  # [B, W] int32, 0 where the largest logit is NaN or infinite
    most: mx.array | None = None  # [B] int32, most drafts to accept, where a rule has decided that


class Verdict(NamedTuple):
    """What a step makes of its drafts, and where its sequences are after it."""

    tokens: mx.array  # [B, W] int32: the accepted drafts, the token after them, then undefined
    accepted: mx.array  # [B] int32, as all below
    proposed: mx.array  # drafts that could have been accepted: fewer than k by the request's limits
    finite: mx.array  # 0 where the largest logit at a generated position is NaN or infinite
    generated: mx.array  # tokens: the accepted drafts and one
    last: mx.array  # the newest token
    lengths: mx.array  # index of the newest token
    remaining: mx.array  # tokens that may still be generated
    rounds: mx.array
    places: mx.array  # [B, W], where the window's tokens are in the history


def allowed_drafts(max_k: mx.array, remaining: mx.array, k: int) -> mx.array:
    """Return how many of k drafts may be accepted [B].

    A step always adds a token of its own, so at most remaining - 1 drafts fit. `remaining` is 0 or less in the
    surplus step of a sequence whose end the host has not read yet.
    """
    return mx.clip(mx.minimum(max_k, remaining - 1), 0, k)
