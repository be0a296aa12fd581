"""What load.py measured: one record for each server under each condition, as Markdown and as JSON."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, quantiles
from typing import Any

from bench.client import TimedResponse
from headstart.bench.measurement import Estimate
from headstart.bench.plan import BenchPlan, Condition, Trials
from headstart.bench.report import bullets, format_estimate, opening, table
from headstart.bench.system import SystemInfo

RATIOS = ("tokens_per_second", "ttft", "itl", "e2e")


@dataclass(frozen=True)
class LoadTrial:
    """A server, put under load once. At least one request has succeeded."""

    responses: list[TimedResponse]

    @property
    def good(self) -> list[TimedResponse]:
        return [response for response in self.responses if response.error is None]

    @property
    def seconds(self) -> float:
        return max(each.due + each.e2e for each in self.responses) - min(each.due for each in self.responses)

    @property
    def means(self) -> dict[str, float | None]:
        """Return what is compared with the baseline: the speed, and mean latencies."""
        return {
            "tokens_per_second": sum(response.tokens for response in self.good) / self.seconds,
            "ttft": fmean(response.ttft for response in self.good),
            "itl": _mean(gap for response in self.good for gap in response.gaps),
            "e2e": fmean(response.e2e for response in self.good),
        }


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        """Return percentiles with linear interpolation between neighbours, as numpy does by default."""
        cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [*values] * 99
        return cls(cuts[49], cuts[94], cuts[98])


@dataclass(frozen=True)
class LoadMeasurement:
    """What the clients of a server saw, over all repeats. Latencies in seconds."""

    variant: str  # a server
    condition: Condition
    repeats: int
    tokens_per_second: Estimate
    requests_per_second: float
    relative: dict[str, Estimate]  # ratios to the first server in the same repeat: speed, and means of latencies
    tokens_per_round: float | None
    acceptance_rate: float | None  # of all drafts
    requests: int
    errors: dict[str, int]  # how often each
    ttft: Percentiles  # time to first token
    itl: Percentiles | None  # inter-token latency; None where every response came in one chunk
    e2e: Percentiles  # whole response
    completion_tokens: float  # mean per request
    counted: dict[str, int]  # responses by who counted their tokens


def summarise_load(plan: BenchPlan, trials: Trials[LoadTrial]) -> list[LoadMeasurement]:
    """Return measurements in the order of the plan. Where the baseline is missing there are no ratios."""
    return [
        _measurement(variant, condition, trials[condition], plan.variants[0])
        for condition in plan.conditions
        for variant in plan.variants
        if variant in trials.get(condition, {})
    ]


def _measurement(
    variant: str, condition: Condition, by_variant: Mapping[str, Mapping[int, LoadTrial]], baseline: str
) -> LoadMeasurement:
    trials = list(by_variant[variant].values())
    plain = by_variant.get(baseline, {})
    pairs = [(trial.means, plain[i].means) for i, trial in by_variant[variant].items() if i in plain]
    relative = {}
    for name in RATIOS if variant != baseline else ():
        if ratios := [own[name] / other[name] for own, other in pairs if own[name] and other[name]]:
            relative[name] = Estimate.of(ratios)
    responses = [response for trial in trials for response in trial.responses]
    good = [response for response in responses if response.error is None]
    gaps = [gap for response in good for gap in response.gaps]
    proposed, accepted, rounds = (sum(counts) for counts in zip(*(each.drafts for each in good), strict=True))
    return LoadMeasurement(
        variant=variant,
        condition=condition,
        repeats=len(trials),
        tokens_per_second=Estimate.of([trial.means["tokens_per_second"] or 0.0 for trial in trials]),
        requests_per_second=median(len(trial.good) / trial.seconds for trial in trials),
        relative=relative,
        tokens_per_round=sum(each.tokens for each in good if each.stats) / rounds if rounds else None,
        acceptance_rate=accepted / proposed if proposed else None,
        requests=len(responses),
        errors=dict(Counter(response.error for response in responses if response.error is not None)),
        ttft=Percentiles.of([response.ttft for response in good]),
        itl=Percentiles.of(gaps) if gaps else None,
        e2e=Percentiles.of([response.e2e for response in good]),
        completion_tokens=fmean(response.tokens for response in good),
        counted=dict(Counter(response.counted for response in good)),
    )


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None


@dataclass(frozen=True)
class LoadReport:
    models: dict[str, str]  # by server
    machine: SystemInfo  # of the clients
    plan: BenchPlan
    measurements: list[LoadMeasurement]
    stopped: str | None = None  # why the benchmark is not complete

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def markdown(self) -> str:
        parts = opening(", ".join(self.models), self.machine, self.plan, self.stopped)
        parts.insert(2, f"Model: {', '.join(dict.fromkeys(self.models.values()))}.")
        parts += ["## Speed", self._speed_table()]
        parts += ["## Latency", "Milliseconds: p50 / p95 / p99.", self._latency_table()]
        return "\n\n".join([*parts, bullets(self._notes())]).rstrip() + "\n"

    def _speed_table(self) -> str:
        heads = ["prompts", "load", "server", "tokens/s", f"× {self.plan.variants[0]}", "tokens per round"]
        heads += ["accepted", "requests/s", "answer tokens", "failed"]
        rows = []
        for each in self.measurements:
            row = [*_names(each), format_estimate(each.tokens_per_second, 1)]
            row.append(format_estimate(each.relative.get("tokens_per_second")))
            row.append("" if each.tokens_per_round is None else f"{each.tokens_per_round:.2f}")
            row.append("" if each.acceptance_rate is None else f"{each.acceptance_rate:.0%}")
            row += [f"{each.requests_per_second:.2f}", f"{each.completion_tokens:.1f}"]
            rows.append([*row, str(sum(each.errors.values()) or "")])
        return table(heads, rows)

    def _latency_table(self) -> str:
        heads = ["prompts", "load", "server", "first token", "between tokens", "whole answer"]
        heads += ["× first token", "× between tokens", "× whole answer"]
        rows = []
        for each in self.measurements:
            ratios = [format_estimate(each.relative.get(name)) for name in RATIOS[1:]]
            rows.append([*_names(each), *map(_milliseconds, (each.ttft, each.itl, each.e2e)), *ratios])
        return table(heads, rows)

    def _notes(self) -> Iterator[str]:
        for name in self.models:
            here = [each for each in self.measurements if each.variant == name]
            if any("chunks" in each.counted for each in here):
                yield f"{name} does not count its tokens: chunks were counted, which may hold several tokens."
            errors = sum((Counter(each.errors) for each in here), Counter[str]())
            total = sum(each.requests for each in here)
            yield from (f"{name}, {count} of {total} requests failed: {error}" for error, count in errors.items())


def _names(measurement: LoadMeasurement) -> list[str]:
    return [measurement.condition.prompts, measurement.condition.load_words, measurement.variant]


def _milliseconds(latency: Percentiles | None) -> str:
    values = [] if latency is None else [1e3 * value for value in (latency.p50, latency.p95, latency.p99)]
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in values)
