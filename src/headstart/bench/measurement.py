"""From trials to measurements: one record for each variant under each condition."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean, median

from .estimate import Estimate, Percentiles, accepted_shares, estimate, percentiles
from .plan import BenchPlan, Condition, Trial, Trials
from .stream import TimedResponse


@dataclass(frozen=True)
class Latency:
    """What the clients of a server saw, over all repeats. Seconds."""

    requests: int
    errors: dict[str, int]  # how often each
    requests_per_second: float
    ttft: Percentiles
    itl: Percentiles | None  # between tokens; None where every response came in one chunk
    e2e: Percentiles
    prompt_tokens: float | None  # mean per request
    cached_tokens: float | None
    completion_tokens: float
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
    acceptance: float | None = None  # of all drafts
    acceptance_by_position: list[float] = field(default_factory=list)  # cumulative; positions tried often enough
    identical: bool | None = None  # the tokens of all repeats are the baseline's; None where they are not known
    latency: Latency | None = None


def summarise(plan: BenchPlan, trials: Trials) -> list[Measurement]:
    """Return measurements in the order of the plan. Where the baseline is missing there are no ratios."""
    return [
        _measurement(variant, condition, trials[condition], plan.variants[0])
        for condition in plan.conditions
        for variant in plan.variants
        if variant in trials.get(condition, {})
    ]


def share_past_end(trials: Trials, end_tokens: set[int]) -> float:
    """Return the share of local tokens that came after the model would have ended its answer."""
    late = total = 0
    for by_variant in trials.values():
        for trial in (trial for by_repeat in by_variant.values() for trial in by_repeat.values()):
            for sequence in trial.sequences:
                end = next((i + 1 for i, token in enumerate(sequence) if token in end_tokens), len(sequence))
                late += len(sequence) - end
                total += len(sequence)
    return late / total if total else 0.0


def _measurement(
    variant: str, condition: Condition, by_variant: Mapping[str, Mapping[int, Trial]], baseline: str
) -> Measurement:
    trials = list(by_variant[variant].values())
    plain = by_variant.get(baseline, {})
    speed = estimate([trial.rate for trial in trials])
    known = [trial.tokens_per_round for trial in trials if trial.tokens_per_round is not None]
    tokens_per_round = fmean(known) if known else None
    proposed = _sums(trial.proposed for trial in trials)
    accepted = _sums(trial.accepted for trial in trials)
    local = condition.load.kind == "batch_size"
    expected = next((trial.sequences for trial in plain.values()), None)
    relative = {}
    if variant != baseline:
        metrics = RATIOS if not local else {"tokens_per_second": RATIOS["tokens_per_second"]}
        pairs = [(trial, plain[repeat]) for repeat, trial in by_variant[variant].items() if repeat in plain]
        for name, metric in metrics.items():
            values = [(metric(trial), metric(other)) for trial, other in pairs]
            if ratios := [value / other for value, other in values if value is not None and other]:
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
        step_ms=1e3 * condition.load.value * tokens_per_round / speed.median if local and tokens_per_round else None,
        acceptance=sum(accepted) / sum(proposed) if sum(proposed) else None,
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
        requests_per_second=median(len(_good(trial)) / trial.seconds for trial in trials),
        ttft=percentiles([response.ttft for response in good]),
        itl=percentiles(gaps) if gaps else None,
        e2e=percentiles([response.e2e for response in good]),
        prompt_tokens=_mean(response.prompt_tokens for response in good),
        cached_tokens=_mean(response.cached_tokens for response in good),
        completion_tokens=fmean(response.tokens for response in good),
        counted=dict(Counter(response.counted for response in good)),
    )


def _good(trial: Trial) -> list[TimedResponse]:
    return [response for response in trial.responses if response.error is None]


RATIOS: dict[str, Callable[[Trial], float | None]] = {
    "tokens_per_second": lambda trial: trial.rate,
    "ttft": lambda trial: _mean(response.ttft for response in _good(trial)),
    "itl": lambda trial: _mean(gap for response in _good(trial) for gap in response.gaps),
    "e2e": lambda trial: _mean(response.e2e for response in _good(trial)),
}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _same(sequences: list[list[int]], expected: list[list[int]]) -> bool:
    """Compare as far as both go: a run ends with its fastest sequence, so the others may be shorter."""
    return all(a[: len(b)] == b[: len(a)] for a, b in zip(sequences, expected, strict=True))
