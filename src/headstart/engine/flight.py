"""A round between its launch and its landing."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..models import Model
from ..sampling import Guide, Logprobs
from .batch import Batch
from .row import Row, Said
from .step import step


@dataclass(frozen=True)
class Flight:
    """A round that the device is working on, and the rows that are in it."""

    rows: list[Row]
    k: int
    begun: float
    steady: bool  # nothing but this step is between the landing before and this one
    report: mx.array  # [B, k+4]: tokens, accepted, proposed, finite
    logits: mx.array | None  # [B, k+1, V], if a row wants them
    logprobs: Logprobs | None

    def said(self, index: int, numbers: list[int]) -> Said:
        """What the round says to the row at `index`, whose line of the report is `numbers`."""
        *tokens, accepted, proposed, _ = numbers
        logits = None if self.logits is None else self.logits[index]
        logprobs = None if self.logprobs is None else Logprobs(*[a[index] for a in self.logprobs])
        return Said(tokens[: accepted + 1], accepted, proposed, logits, logprobs)


def launches_ahead() -> bool:
    """Whether a step may be launched while the device works on the one before. The CPU takes nothing on until it is
    nearly done with what it has: the host would learn of a step when the next one is over."""
    return mx.default_device() != mx.cpu


def launch(model: Model, batch: Batch, rows: Sequence[Row], k: int, *, steady: bool = False) -> Flight:
    """Start a round of k drafts for the rows of a batch, and wait for nothing."""
    begun = time.perf_counter()
    matchers = [row.matcher for row in rows]
    guide = Guide(matchers, model.vocabulary) if any(matchers) else None
    round = step(model, batch, k, guide)
    columns = [round.accepted, round.proposed, round.finite.astype(mx.int32)]
    report = mx.concatenate([round.tokens, mx.stack(columns, axis=1)], axis=1)
    wanted = any(row.handle.request.keep_logits for row in rows)
    also = [*(round.logprobs or ()), *([round.logits] if wanted else [])]
    mx.async_eval(report, *also, *batch.arrays())
    return Flight(list(rows), k, begun, steady, report, round.logits if wanted else None, round.logprobs)
