"""From runs to figures: what each depth earned, and whether the one that is chosen online is as good as the best."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from .interval import Estimate, estimate
from .run import K, Run
from .sweep import Cell, Runs

AS_GOOD_AS_BEST, AS_GOOD_AS_PLAIN = 0.95, 0.97  # a cell that lies wholly below is pointed out


@dataclass(frozen=True)
class Figure:
    """One cell at one depth."""

    kind: str
    rows: int
    k: K
    tokens_per_second: float  # median, of the whole batch
    to_plain: Estimate  # ratio to k = 0 of the same repeat
    tokens_per_round: float
    drafts_per_round: float
    cumulative: list[float]  # of the rounds with a draft at each position, how many accepted it
    conditional: list[float]  # the same of the rounds that accepted all before it
    identical: bool  # all runs said what the first one at k = 0 said


@dataclass(frozen=True)
class Judged:
    """Auto in one cell. The best fixed depth is chosen on one half of the repeats and compared on the other."""

    kind: str
    rows: int
    best: list[int]  # as each half chose
    to_best: Estimate
    to_plain: Estimate


@dataclass(frozen=True)
class Verdict:
    cells: list[Judged]

    @property
    def to_best(self) -> float:
        """Geometric mean over all cells of auto's speed against the best fixed depth's."""
        return geometric_mean([cell.to_best.median for cell in self.cells])

    @property
    def below_best(self) -> list[Judged]:
        return [cell for cell in self.cells if cell.to_best.high < AS_GOOD_AS_BEST]

    @property
    def below_plain(self) -> list[Judged]:
        return [cell for cell in self.cells if cell.to_plain.high < AS_GOOD_AS_PLAIN]


def figures(runs: Runs) -> list[Figure]:
    return [_figure(cell, k, done, runs[cell][0]) for cell in runs for k, done in runs[cell].items()]


def judge_auto(runs: Runs) -> Verdict | None:
    """None where auto did not run."""
    judged = [_judge(cell, by_k) for cell, by_k in runs.items() if "auto" in by_k]
    return Verdict(judged) if judged else None


def past_end(runs: Runs, ends: Collection[int]) -> dict[str, float]:
    """By kind, the share of tokens at k = 0 that came after the model would have ended its answer."""
    shares: dict[str, list[float]] = {}
    for cell, by_k in runs.items():
        for text in by_k[0][0].texts:
            end = next((i + 1 for i, token in enumerate(text) if token in ends), len(text))
            shares.setdefault(cell.kind, []).append(1 - end / len(text))
    return {kind: sum(each) / len(each) for kind, each in shares.items()}


def _figure(cell: Cell, k: K, done: Sequence[Run], plain: Sequence[Run]) -> Figure:
    rounds = [outcome for run in done for outcome in run.rounds]
    deepest = max(proposed for _, proposed in rounds)
    return Figure(
        kind=cell.kind,
        rows=cell.rows,
        k=k,
        tokens_per_second=median(run.rate for run in done),
        to_plain=_ratio(done, plain),
        tokens_per_round=sum(run.tokens for run in done) / len(rounds),
        drafts_per_round=sum(proposed for _, proposed in rounds) / len(rounds),
        cumulative=[_share(rounds, j, after=0) for j in range(deepest)],
        conditional=[_share(rounds, j, after=j) for j in range(deepest)],
        identical=all(_same(run.texts, plain[0].texts) for run in done),
    )


def _judge(cell: Cell, by_k: dict[K, list[Run]]) -> Judged:
    auto, fixed = by_k["auto"], {k: done for k, done in by_k.items() if k != "auto"}
    best: list[int] = []
    ratios: list[float] = []
    to_plain = {k: [a.rate / b.rate for a, b in zip(done, fixed[0], strict=True)] for k, done in fixed.items()}
    for half in (0, 1):
        # Within a repeat, here too: what the machine was doing in one is the same for every depth.
        best.append(max(fixed, key=lambda k: median(to_plain[k][1 - half :: 2])))
        pairs = zip(auto[half::2], fixed[best[-1]][half::2], strict=True)
        ratios += [a.rate / b.rate for a, b in pairs]
    return Judged(cell.kind, cell.rows, best, estimate(ratios), _ratio(auto, by_k[0]))


def _ratio(done: Sequence[Run], to: Sequence[Run]) -> Estimate:
    return estimate([a.rate / b.rate for a, b in zip(done, to, strict=True)])


def _share(rounds: Sequence[tuple[int, int]], j: int, after: int) -> float:
    """Of the rounds with a draft at position j that accepted at least `after`, those that accepted the one at j."""
    tried = [accepted for accepted, proposed in rounds if proposed > j and accepted >= after]
    return sum(accepted > j for accepted in tried) / len(tried) if tried else 0.0


def _same(texts: list[list[int]], plain: list[list[int]]) -> bool:
    """A run ends with its fastest row, so the others may have said less."""
    return all(text == expected[: len(text)] for text, expected in zip(texts, plain, strict=True))
