"""Do drafts change what the model says? The same prompts at every depth, held against plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine import Engine, Request, Stats
from ..engine.depth import Depth
from ..engine.request import TokenLogprobs
from ..models import Model
from ..sampling import SamplingParams

BEST = 8  # log-probabilities kept of each position: the token that another run chose is nearly always among them


@dataclass(frozen=True)
class Answer:
    """What was said to one prompt, and what the model thought of each token."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    stats: Stats

    def gap(self, position: int, other: int) -> float | None:
        """By how much the token at `position` was preferred to `other`; None where that is not among the best, and so
        was no choice. A difference of log-probabilities is one of logits."""
        told = self.logprobs[position]
        found = dict(told.top).get(other)
        return None if found is None else told.logprob - found


@dataclass(frozen=True)
class Run:
    """All prompts, decoded together."""

    k: int | Literal["auto"]
    answers: list[Answer]

    @property
    def tokens_per_round(self) -> float:
        stats = [answer.stats for answer in self.answers]
        return sum(each.generation_tokens for each in stats) / sum(each.rounds for each in stats)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Cumulative: of the rounds that drafted at least j tokens, the share that accepted at least j."""
        proposed = _sums([answer.stats.proposed_by_position for answer in self.answers])
        accepted = _sums([answer.stats.accepted_by_position for answer in self.answers])
        return [a / p for a, p in zip(accepted, proposed, strict=True)]


@dataclass(frozen=True)
class Divergence:
    """The first position at which a run did not say what plain decoding says."""

    k: int | Literal["auto"]
    prompt: int  # which
    position: int  # in the answer
    plain: int | None  # token ids; None where one answer had ended
    drafted: int | None
    plain_gap: float | None  # by how much either run preferred its own token, in logits, if it is known
    drafted_gap: float | None

    @property
    def shift(self) -> float:
        """How far the two runs' logits must be apart for this. No rounding makes an answer longer than its tokens, or
        a token the likeliest that was not among the best."""
        if self.plain_gap is None or self.drafted_gap is None:
            return float("inf")
        return self.plain_gap + self.drafted_gap


def decode(
    model: Model,
    tokenizer: TokenizerWrapper | None,
    prompts: Sequence[Sequence[int]],
    k: int | Literal["auto"],
    tokens: int,
) -> Run:
    """Greedy answers of up to so many tokens. `auto` starts without knowing anything, and so tries several depths."""
    engine = Engine(model, tokenizer, max_rows=len(prompts), depth=Depth())
    params = SamplingParams(k=k, max_tokens=tokens, logprobs=True, top_logprobs=BEST)
    answers = []
    for handle in [engine.submit(Request(prompt, params)) for prompt in prompts]:
        events = list(handle)
        if (error := events[-1].error) is not None:
            raise error
        stats = events[-1].stats
        assert stats is not None
        said = [token for event in events for token in event.tokens]
        answers.append(Answer(said, [told for event in events for told in event.logprobs or ()], stats))
    return Run(k, answers)


def divergences(plain: Run, run: Run) -> list[Divergence]:
    """Where each prompt's answer first differs, for those that do."""
    found = []
    for index, (one, other) in enumerate(zip(plain.answers, run.answers, strict=True)):
        pairs = enumerate(zip_longest(one.tokens, other.tokens))
        first = next(((at, a, b) for at, (a, b) in pairs if a != b), None)
        if first is not None:
            position, a, b = first
            gaps = (None, None) if a is None or b is None else (one.gap(position, b), other.gap(position, a))
            found.append(Divergence(run.k, index, position, a, b, *gaps))
    return found


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
