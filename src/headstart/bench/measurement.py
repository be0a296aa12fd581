"""From trials to measurements: one record for each variant under each condition."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean, median, quantiles

from .plan import BenchPlan, Condition, Trial, Trials

MIN_TRIES = 10  # drafts at a position before the share of accepted ones is shown: fewer say nothing


@dataclass(frozen=True)
class Estimate:
    """The median of all repeats, the lowest and the highest."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Latency:
    """What the clients of a server saw, over all repeats. Seconds."""

    requests: int
    errors: dict[str, int]  # how often each
    requests_per_second: float
    ttft: Percentiles  # time to first token
    itl: Percentiles | None  # inter-token latency; None where every response came in one chunk
    e2e: Percentiles  # whole response
    completion_tokens: float  # mean per request
    counted: dict[str, int]  # responses by who counted their tokens


@dataclass(frozen=True)
class Measurement:
    variant: str  # a depth ("k=2"), or a server
    condition: Condition
    repeats: int
    tokens_per_second: Estimate  # of all sequences together
    # Ratios to the first variant in the same repeat: tokens_per_second, and of servers ttft, itl and e2e (means). Of
    # k=auto also best_fixed: its speed over that of the fixed depth which was fastest in the other repeats.
    relative: dict[str, Estimate] = field(default_factory=dict)
    tokens_per_round: float | None = None
    step_ms: float | None = None
    acceptance_rate: float | None = None  # of all drafts
    acceptance_by_position: list[float] = field(default_factory=list)  # cumulative; positions tried often enough
    identical: bool | None = None  # the tokens of all repeats are the baseline's; None where they are not known
    latency: Latency | None = None


def estimate(values: Sequence[float]) -> Estimate:
    return Estimate(median(values), min(values), max(values))


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return percentiles with linear interpolation between neighbours, as numpy does by default."""
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [*values] * 99
    return Percentiles(cuts[49], cuts[94], cuts[98])


def accepted_shares(accepted: Sequence[int], proposed: Sequence[int]) -> list[float]:
    """Return the share of drafts accepted by position, for the positions that were tried often enough."""
    return [a / p for a, p in zip(accepted, proposed, strict=True) if p >= MIN_TRIES]


def summarise(plan: BenchPlan, trials: Trials) -> list[Measurement]:
    """Return measurements in the order of the plan. Where the baseline is missing there are no ratios."""
    return [
        _measurement(variant, condition, trials[condition], plan.variants[0])
        for condition in plan.conditions
        for variant in plan.variants
        if variant in trials.get(condition, {})
    ]


def _measurement(
    variant: str, condition: Condition, by_variant: Mapping[str, Mapping[int, Trial]], baseline: str
) -> Measurement:
    trials = list(by_variant[variant].values())
    plain = by_variant.get(baseline, {})
    speed = estimate([trial.rate for trial in trials])
    tokens_per_round = _mean(trial.tokens_per_round for trial in trials)
    proposed = _sums(trial.proposed for trial in trials)
    accepted = _sums(trial.accepted for trial in trials)
    local = condition.load == "batch_size"
    expected = next((trial.sequences for trial in plain.values()), None)
    relative = {}
    if variant != baseline:
        pairs = [(_means(trial), _means(plain[i])) for i, trial in by_variant[variant].items() if i in plain]
        for name in _means(trials[0]):
            if ratios := [own[name] / other[name] for own, other in pairs if name in own and other.get(name)]:
                relative[name] = estimate(ratios)
    if variant == "k=auto" and (ratios := _to_best_fixed(by_variant)):
        relative["best_fixed"] = estimate(ratios)
    return Measurement(
        variant=variant,
        condition=condition,
        repeats=len(trials),
        tokens_per_second=speed,
        relative=relative,
        tokens_per_round=tokens_per_round,
        step_ms=1e3 * condition.value * tokens_per_round / speed.median if local and tokens_per_round else None,
        acceptance_rate=sum(accepted) / sum(proposed) if sum(proposed) else None,
        acceptance_by_position=accepted_shares(accepted, proposed) if local else [],
        identical=all(_same(trial.sequences, expected) for trial in trials) if local and expected else None,
        latency=None if local else _latency(trials),
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


def _latency(trials: Sequence[Trial]) -> Latency:
    responses = [response for trial in trials for response in trial.responses]
    good = [response for response in responses if response.error is None]
    gaps = [gap for response in good for gap in response.gaps]
    return Latency(
        requests=len(responses),
        errors=dict(Counter(response.error for response in responses if response.error is not None)),
        requests_per_second=median(sum(r.error is None for r in trial.responses) / trial.seconds for trial in trials),
        ttft=percentiles([response.ttft for response in good]),
        itl=percentiles(gaps) if gaps else None,
        e2e=percentiles([response.e2e for response in good]),
        completion_tokens=fmean(response.tokens for response in good),
        counted=dict(Counter(response.counted for response in good)),
    )


def _means(trial: Trial) -> dict[str, float]:
    """Return what is compared with the baseline: the speed, and the mean latencies of a server."""
    good = [response for response in trial.responses if response.error is None]
    latencies = {
        "ttft": _mean(response.ttft for response in good),
        "itl": _mean(gap for response in good for gap in response.gaps),
        "e2e": _mean(response.e2e for response in good),
    }
    return {"tokens_per_second": trial.rate} | {name: mean for name, mean in latencies.items() if mean is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _same(sequences: list[list[int]], expected: list[list[int]]) -> bool:
    """Compare as far as both go: a run ends with its fastest sequence, so the others may be shorter."""
    return all(a[: len(b)] == b[: len(a)] for a, b in zip(sequences, expected, strict=True))
