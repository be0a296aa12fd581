"""From answers to figures: what clients of each server saw, and one server against another."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ..interval import Estimate, estimate
from .answer import Answer, Counted
from .measure import Cell, Run


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Figure:
    """One server in one cell, over all repeats. Seconds, and tokens a second."""

    target: str
    cell: Cell
    requests: int
    errors: dict[str, int]  # how often each
    prompt_tokens: float | None  # mean
    cached_tokens: float | None
    tokens: float  # mean, of an answer
    counted: dict[Counted, int]  # answers by who counted their tokens
    first_token: Percentiles
    between_tokens: Percentiles | None  # None where every answer came in one piece
    end_to_end: Percentiles
    tokens_per_second: Percentiles  # of one request, waiting included
    throughput: Estimate  # of all together
    requests_per_second: float
    acceptance: float | None  # of the drafts, where the server tells
    tokens_per_round: float | None


@dataclass(frozen=True)
class Ratio:
    """A server's figures over another's in the same repeat."""

    target: str
    to: str
    cell: Cell
    throughput: Estimate
    first_token: Estimate
    between_tokens: Estimate | None  # of the means
    end_to_end: Estimate


def figures(runs: Sequence[Run], targets: Sequence[str]) -> list[Figure]:
    """Cells in the order in which they were measured, the servers beside each other."""
    cells = dict.fromkeys(run.cell for run in runs)
    there = [_of(runs, cell, target) for cell in cells for target in targets]
    return [_figure(done) for done in there if done]


def ratios(runs: Sequence[Run], targets: Sequence[str]) -> list[Ratio]:
    """The first server against each of the others."""
    target, *others = targets
    compared = []
    for cell in dict.fromkeys(run.cell for run in runs):
        mine = {run.repeat: run for run in _of(runs, cell, target)}
        for other in others:
            pairs = [(mine[run.repeat], run) for run in _of(runs, cell, other) if run.repeat in mine]
            if pairs:
                compared.append(_ratio(target, other, cell, pairs))
    return compared


def percentiles(values: Iterable[float]) -> Percentiles:
    ordered = sorted(values)
    return Percentiles(*(_percentile(ordered, share) for share in (0.5, 0.95, 0.99)))


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Between neighbours in proportion, as numpy does by default."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _of(runs: Sequence[Run], cell: Cell, target: str) -> list[Run]:
    return [run for run in runs if run.cell == cell and run.target == target]


def _figure(runs: Sequence[Run]) -> Figure:
    answers = [answer for run in runs for answer in run.good]
    drafts = [(answer, answer.drafts) for answer in answers if answer.drafts is not None]
    proposed = sum(told.proposed for _, told in drafts)
    rounds = sum(told.rounds or 0 for _, told in drafts)
    return Figure(
        target=runs[0].target,
        cell=runs[0].cell,
        requests=sum(len(run.answers) for run in runs),
        errors=dict(Counter(answer.error for run in runs for answer in run.answers if answer.error is not None)),
        prompt_tokens=_mean(answer.prompt_tokens for answer in answers),
        cached_tokens=_mean(answer.cached_tokens for answer in answers),
        tokens=fmean(answer.tokens for answer in answers),
        counted=dict(Counter(answer.counted for answer in answers)),
        first_token=percentiles(answer.first for answer in answers),
        between_tokens=percentiles(gaps) if (gaps := _gaps(answers)) else None,
        end_to_end=percentiles(answer.seconds for answer in answers),
        tokens_per_second=percentiles(answer.rate for answer in answers),
        throughput=estimate([run.rate for run in runs]),
        requests_per_second=median(len(run.good) / run.seconds for run in runs),
        acceptance=sum(told.accepted for _, told in drafts) / proposed if proposed else None,
        tokens_per_round=sum(answer.tokens for answer, told in drafts if told.rounds) / rounds if rounds else None,
    )


def _ratio(target: str, to: str, cell: Cell, pairs: Sequence[tuple[Run, Run]]) -> Ratio:
    in_pieces = all(_gaps(run.good) for pair in pairs for run in pair)

    def of(what: Callable[[Run], float]) -> Estimate:
        return estimate([what(mine) / what(theirs) for mine, theirs in pairs])

    return Ratio(
        target=target,
        to=to,
        cell=cell,
        throughput=of(lambda run: run.rate),
        first_token=of(lambda run: median(answer.first for answer in run.good)),
        between_tokens=of(lambda run: fmean(_gaps(run.good))) if in_pieces else None,
        end_to_end=of(lambda run: median(answer.seconds for answer in run.good)),
    )


def _gaps(answers: Iterable[Answer]) -> list[float]:
    return [gap for answer in answers for gap in answer.gaps()]


def _mean(values: Iterable[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
