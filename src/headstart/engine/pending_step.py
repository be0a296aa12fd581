"""A decode step, from when it is built until the host reads its tokens."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..kernels.report import Report
from ..models import Model
from ..models.draft_vocabulary import DraftVocabulary
from ..sampling import GrammarMasks, Logprobs
from .batch import Batch
from .depth import Plan
from .draft import Source
from .sequence import SequenceState
from .step import step


@dataclass
class PendingStep:
    sequences: list[SequenceState]
    plan: Plan
    steady: bool  # nothing but this step runs on the device after the step before it, so its time can be measured
    report: Report  # [B, k+5]: tokens, accepted, proposed, copied, finite (1, or 0)
    logits: mx.array | None  # [B, k+1, V], if a sequence wants them
    logprobs: Logprobs | None
    arrays: list[mx.array]  # to be evaluated
    started: float = 0.0

    @property
    def k(self) -> int:
        return self.plan.k

    def start(self) -> None:
        """Launch it on the device. On a CPU this takes almost as long as the step: MLX queues little there."""
        self.started = time.perf_counter()
        mx.async_eval(*self.arrays)
        self.arrays = []  # without these references the next step can update buffers in place

    def read(self) -> list[list[int]]:
        """Wait for the step, and return its report."""
        return self.report.read()  # the one synchronisation

    def outcome(self, line: list[int], listed: DraftVocabulary | None) -> tuple[int, int]:
        """Return from a line of the report how many drafts were accepted, and how many the source proposed.

        A token that the reduced head does not know says nothing of how often the full head is right.
        """
        *tokens, accepted, proposed, copied, _ = line
        if copied:
            return accepted, 0
        unknown = self.plan.source == Source.REDUCED and listed is not None and tokens[accepted] not in listed.tokens
        return accepted, accepted if unknown else proposed

    def emit(self, index: int, tokens: list[int], proposed: int, copied: int) -> None:
        """Hand the sequence at `index` its tokens, and what it wants of logits and log-probabilities."""
        logits = None if self.logits is None else self.logits[index]
        logprobs = None if self.logprobs is None else Logprobs(*[a[index] for a in self.logprobs])
        block = self.plan.source in (Source.BLOCK, Source.ASSISTANT)
        self.sequences[index].emit(tokens, proposed, copied, logits, logprobs, block=block)


def build_step(
    model: Model, batch: Batch, sequences: Sequence[SequenceState], plan: Plan, *, steady: bool = False
) -> PendingStep:
    """Return a step for the sequences of a batch, ready to start."""
    matchers = [sequence.matcher for sequence in sequences]
    grammar = GrammarMasks(matchers, model.vocabulary) if any(matchers) else None
    result = step(model, batch, plan.k, grammar, source=plan.source, distances=plan.distances)
    verdict = result.verdict
    columns = [verdict.accepted, verdict.proposed, result.copied, verdict.finite]
    report = model.backend.report([verdict.tokens, *[each[:, None] for each in columns]])
    logits = result.logits if any(sequence.handle.request.keep_logits for sequence in sequences) else None
    arrays = [*report.arrays, *(result.logprobs or ()), *([] if logits is None else [logits]), *batch.arrays()]
    return PendingStep(list(sequences), plan, steady, report, logits, result.logprobs, arrays)
