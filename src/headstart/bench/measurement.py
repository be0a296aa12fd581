"""From trials to measurements: one record for each depth under each condition."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median

from .plan import BenchPlan, Condition, Trials

MIN_TRIES = 10  # drafts at a position before the share of accepted ones is shown: fewer say nothing


@dataclass(frozen=True)
class Trial:
    """A batch decoded at one depth, once or as the sum of several times."""

    tokens: int  # generated in `seconds`
    seconds: float
    tokens_per_round: float = 1.0
    proposed: Sequence[int] = ()  # drafts by position
    accepted: Sequence[int] = ()
    sequences: list[list[int]] = field(default_factory=list, repr=False)  # token ids
    exact: bool = True  # the engine promises the tokens of plain decoding
    cpu_seconds: float = 0.0  # of this process in `seconds`, all threads

    @property
    def rate(self) -> float:
        """Return the tokens per second of all sequences together."""
        return self.tokens / self.seconds

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step, of a trial that decodes one sequence at a time."""
        return self.tokens_per_round / self.rate

    @property
    def acceptance_by_position(self) -> list[float]:
        return accepted_shares(self.accepted, self.proposed)


@dataclass(frozen=True)
class Estimate:
    """The median of all repeats, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Measurement:
    variant: str  # a depth, such as "k=2"
    condition: Condition
    repeats: int
    tokens_per_second: Estimate  # of all sequences together
    # Ratios to the first variant in the same repeat: tokens_per_second. Of k=auto also best_fixed: its speed over
    # that of the fixed depth which was fastest in the other repeats.
    relative: dict[str, Estimate] = field(default_factory=dict)
    tokens_per_round: float = 1.0
    step_ms: float = 0.0
    acceptance_rate: float | None = None  # of all drafts
    acceptance_by_position: list[float] = field(default_factory=list)  # cumulative; positions tried often enough
    identical: bool | None = None  # the tokens of all repeats are the baseline's; None where those are not known


def accepted_shares(accepted: Sequence[int], proposed: Sequence[int]) -> list[float]:
    """Return the share of drafts accepted by position, for the positions that were tried often enough."""
    return [a / p for a, p in zip(accepted, proposed, strict=True) if p >= MIN_TRIES]


def add_up(trials: Sequence[Trial]) -> Trial:
    """Return several trials of one depth as one."""
    tokens = sum(trial.tokens for trial in trials)
    return Trial(
        tokens=tokens,
        seconds=sum(trial.seconds for trial in trials),
        tokens_per_round=tokens / sum(trial.tokens / trial.tokens_per_round for trial in trials),
        proposed=_add_by_position([trial.proposed for trial in trials]),
        accepted=_add_by_position([trial.accepted for trial in trials]),
        sequences=[sequence for trial in trials for sequence in trial.sequences],
        exact=all(trial.exact for trial in trials),
    )


def _add_by_position(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def summarise(plan: BenchPlan, trials: Trials[Trial]) -> list[Measurement]:
    """Return measurements in the order of the plan. Where the baseline is missing there are no ratios."""
    return [
        _measurement(variant, condition, trials[condition], plan.variants[0], plan.same_text)
        for condition in plan.conditions
        for variant in plan.variants
        if variant in trials.get(condition, {})
    ]


def _measurement(
    variant: str, condition: Condition, by_variant: Mapping[str, Mapping[int, Trial]], baseline: str, same_text: bool
) -> Measurement:
    trials = list(by_variant[variant].values())
    plain = by_variant.get(baseline, {})
    speed = Estimate.of([trial.rate for trial in trials])
    total = add_up(trials)
    expected = next((trial.sequences for trial in plain.values()), None)
    relative = {}
    ratios = [trial.rate / plain[i].rate for i, trial in by_variant[variant].items() if i in plain]
    if variant != baseline and ratios:
        relative["tokens_per_second"] = Estimate.of(ratios)
    if variant == "k=auto" and (ratios := _to_best_fixed(by_variant)):
        relative["best_fixed"] = Estimate.of(ratios)
    return Measurement(
        variant=variant,
        condition=condition,
        repeats=len(trials),
        tokens_per_second=speed,
        relative=relative,
        tokens_per_round=total.tokens_per_round,
        step_ms=1e3 * condition.value * total.tokens_per_round / speed.median,
        acceptance_rate=sum(total.accepted) / sum(total.proposed) if sum(total.proposed) else None,
        acceptance_by_position=total.acceptance_by_position,
        identical=all(_same(trial.sequences, expected) for trial in trials) if expected and same_text else None,
    )


def _to_best_fixed(by_variant: Mapping[str, Mapping[int, Trial]]) -> list[float]:
    """Return the speed of k=auto over the best fixed depth's, by repeat.

    The best depth is chosen on the other repeats: chosen on the one that is compared, it would be the luckiest.
    """
    rates = {k: {repeat: trial.rate for repeat, trial in trials.items()} for k, trials in by_variant.items()}
    auto, plain = rates.pop("k=auto"), rates.get("k=0", {})
    whole = [repeat for repeat in auto if all(repeat in each for each in rates.values())]
    ratios = []
    for repeat in whole if len(whole) > 1 and plain else []:
        others = [other for other in whole if other != repeat]
        best = max(rates, key=lambda k: median(rates[k][other] / plain[other] for other in others))
        ratios.append(auto[repeat] / rates[best][repeat])
    return ratios


def _same(sequences: list[list[int]], expected: list[list[int]]) -> bool:
    """Compare as far as both go: a run ends with its fastest sequence, so the others may be shorter."""
    return all(a[: len(b)] == b[: len(a)] for a, b in zip(sequences, expected, strict=True))
