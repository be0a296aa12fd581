"""A round between its launch and its landing."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..models import Model
from ..sampling import GrammarMasks, Logprobs
from .batch import Batch
from .sequence import SequenceState, StepOutput
from .step import step


@dataclass
class PendingStep:
    """A round that the device is working on, or soon will be, and the rows that are in it."""

    rows: list[SequenceState]
    k: int
    steady: bool  # nothing but this step is between the landing before and this one
    report: mx.array  # [B, k+4]: tokens, accepted, proposed, finite
    logits: mx.array | None  # [B, k+1, V], if a row wants them
    logprobs: Logprobs | None
    waiting: list[mx.array]  # what the device is to work out
    begun: float = 0.0

    def start(self) -> "PendingStep":
        """Hand it to the device. A CPU takes nothing on until it is nearly done with what it has, so there this
        takes almost as long as the round itself."""
        self.begun = time.perf_counter()
        mx.async_eval(*self.waiting)
        self.waiting = []  # whoever goes on from these arrays may overwrite them
        return self

    def said(self, index: int, numbers: list[int]) -> StepOutput:
        """What the round says to the row at `index`, whose line of the report is `numbers`."""
        *tokens, accepted, proposed, _ = numbers
        logits = None if self.logits is None else self.logits[index]
        logprobs = None if self.logprobs is None else Logprobs(*[a[index] for a in self.logprobs])
        return StepOutput(tokens[: accepted + 1], accepted, proposed, logits, logprobs)


def launches_ahead() -> bool:
    """Whether a step is handed to the device while it works on the one before. On a CPU the host would learn of a
    step when the next one is over."""
    return mx.default_device() != mx.cpu


def describe(
    model: Model, batch: Batch, rows: Sequence[SequenceState], k: int, *, steady: bool = False
) -> PendingStep:
    """A round of k drafts for the rows of a batch, ready to start."""
    matchers = [row.matcher for row in rows]
    guide = GrammarMasks(matchers, model.vocabulary) if any(matchers) else None
    round = step(model, batch, k, guide)
    columns = [round.accepted, round.proposed, round.finite.astype(mx.int32)]
    report = mx.concatenate([round.tokens, mx.stack(columns, axis=1)], axis=1)
    logits = round.logits if any(row.handle.request.keep_logits for row in rows) else None
    waiting = [report, *(round.logprobs or ()), *([] if logits is None else [logits]), *batch.arrays()]
    return PendingStep(list(rows), k, steady, report, logits, round.logprobs, waiting)
