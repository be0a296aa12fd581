"""Do drafts change the output? Decode the same prompts at every depth and compare with plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine import Engine, Request, Stats
from ..engine.depth import DepthController
from ..engine.request import TokenLogprobs
from ..models import Model
from ..sampling import SamplingParams
from .local import K

TOP_LOGPROBS = 8  # kept per position: the token that another run chose is nearly always among them


@dataclass(frozen=True)
class GreedyAnswer:
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    stats: Stats

    def gap(self, position: int, other: int) -> float | None:
        """Return by how many logits the token at `position` was preferred to `other`, or None where `other` is not
        among the likeliest. A difference of log-probabilities is one of logits."""
        here = self.logprobs[position]
        found = dict(here.top).get(other)
        return None if found is None else here.logprob - found


@dataclass(frozen=True)
class GreedyRun:
    """All prompts decoded together at one depth."""

    k: K
    answers: list[GreedyAnswer]

    @property
    def stats(self) -> Stats:
        return Stats.of([answer.stats for answer in self.answers])


@dataclass(frozen=True)
class Divergence:
    """The first position at which an answer is not that of plain decoding."""

    k: K
    prompt: int  # its number
    position: int  # in the answer
    plain: int | None  # token ids; None where one answer had ended
    drafted: int | None
    plain_gap: float | None  # by how many logits each run preferred its own token, where that is known
    drafted_gap: float | None

    @property
    def shift(self) -> float:
        """How far the two runs' logits must be apart. No rounding makes an answer longer, or a token the likeliest
        that was not even among the likeliest."""
        if self.plain_gap is None or self.drafted_gap is None:
            return float("inf")
        return self.plain_gap + self.drafted_gap


def decode_prompts(
    model: Model, tokenizer: TokenizerWrapper | None, prompts: Sequence[Sequence[int]], k: K, tokens: int
) -> GreedyRun:
    """Decode up to `tokens` tokens per prompt. "auto" starts without any knowledge, and so tries several depths."""
    engine = Engine(model, tokenizer, max_sequences=len(prompts), depth=DepthController())
    params = SamplingParams(k=k, max_tokens=tokens, logprobs=True, top_logprobs=TOP_LOGPROBS)
    answers = []
    for handle in [engine.submit(Request(prompt, params)) for prompt in prompts]:
        events = list(handle)
        if (error := events[-1].error) is not None:
            raise error
        stats = events[-1].stats
        assert stats is not None
        ids = [token for event in events for token in event.tokens]
        answers.append(GreedyAnswer(ids, [each for event in events for each in event.logprobs or ()], stats))
    return GreedyRun(k, answers)


def divergences(plain: GreedyRun, run: GreedyRun) -> list[Divergence]:
    """Return where answers first differ, for those that do."""
    found = []
    for index, (one, other) in enumerate(zip(plain.answers, run.answers, strict=True)):
        pairs = enumerate(zip_longest(one.tokens, other.tokens))
        first = next(((at, a, b) for at, (a, b) in pairs if a != b), None)
        if first is not None:
            position, a, b = first
            gaps = (None, None) if a is None or b is None else (one.gap(position, b), other.gap(position, a))
            found.append(Divergence(run.k, index, position, a, b, *gaps))
    return found
