"""A finished benchmark as Markdown, which is also what the terminal shows, and as JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from statistics import geometric_mean
from typing import Any

from .measurement import MIN_TRIES, Estimate, Measurement, Percentiles, summarise
from .plan import BenchPlan, Trials
from .system import SystemInfo, system_info


@dataclass(frozen=True)
class BenchReport:
    models: dict[str, str]  # by server; of a local benchmark one, under "local"
    machine: SystemInfo  # of the clients, where servers are measured
    plan: BenchPlan
    measurements: list[Measurement]
    exact: bool = True  # the tokens of every depth are promised to be the same
    stopped: str | None = None  # why the benchmark is not complete

    @property
    def title(self) -> str:
        return self.models.get("local") or ", ".join(self.models)

    @property
    def different(self) -> list[Measurement]:
        """Measurements whose tokens are not those of plain decoding."""
        return [each for each in self.measurements if each.identical is False]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def markdown(self) -> str:
        parts = [f"# Benchmark: {self.title}", f"Measured on {self.machine}"]
        if "local" not in self.models:
            parts.append(f"Model: {', '.join(dict.fromkeys(self.models.values()))}.")
        parts.append(
            f"Greedy, {self.plan.tokens} tokens per sequence. "
            f"Medians of {self.plan.repeats} interleaved repeats (lowest–highest)."
        )
        if self.stopped:
            parts.append(f"**Not complete: {self.stopped}**")
        if self.different:
            named = "; ".join(f"{each.variant}, {each.condition}" for each in self.different)
            parts.append(f"**Not the tokens of {self.plan.variants[0]}:** {named}.")
        if conclusions := [f"- {line}" for line in self._conclusions()]:
            parts += ["## Result", "\n".join(conclusions)]
        parts += ["## Speed", self._speed_table()]
        if any(each.latency for each in self.measurements):
            parts += ["## Latency", "Milliseconds: p50 / p95 / p99.", self._latency_table()]
        if notes := [f"- {note}" for note in self._notes()]:
            parts.append("\n".join(notes))
        return "\n\n".join(parts) + "\n"

    def _conclusions(self) -> Iterator[str]:
        """Say for each condition whether drafting pays on this machine."""
        for condition in self.plan.conditions if "local" in self.models else ():
            here = [each for each in self.measurements if each.condition == condition and each.relative]
            if here:
                best = max(here, key=lambda each: each.relative["tokens_per_second"].median)
                gain = best.relative["tokens_per_second"]
                pays = "is fastest" if gain.median > 1 else "comes closest: speculation does not pay here"
                yield f"{condition}: {best.variant} {pays}, {_estimate(gain, 2)} times the speed without drafts."
        if to_best := [e.relative["best_fixed"].median for e in self.measurements if "best_fixed" in e.relative]:
            yield f"auto reaches {geometric_mean(to_best):.0%} of the best fixed depth's speed, on average."

    def _notes(self) -> Iterator[str]:
        if "local" in self.models:
            yield "k: the number of tokens drafted per step. k=0 is decoding without drafts."
            yield "tokens per round: what one sequence gains in a step, accepted drafts and the model's own token."
            yield (
                "accepted by position: how often a draft and all before it were accepted. Positions drafted fewer "
                f"than {MIN_TRIES} times are left out."
            )
            yield "Sequences continue past the model's own end, where repetitive text may flatter drafts."
        for name in self.models:
            here = [each.latency for each in self.measurements if each.variant == name and each.latency]
            if any("chunks" in latency.counted for latency in here):
                yield f"{name} does not count its tokens: chunks were counted, which may hold several tokens."
            errors = sum((Counter(latency.errors) for latency in here), Counter[str]())
            total = sum(latency.requests for latency in here)
            yield from (f"{name}, {count} of {total} requests failed: {error}" for error, count in errors.items())

    def _speed_table(self) -> str:
        baseline = self.plan.variants[0]
        heads = [*self._heads, "tokens/s", f"× {baseline}", "× best fixed k", "tokens per round", "ms per step"]
        heads += ["accepted by position", "accepted", "requests/s", "answer tokens"]
        rows = []
        for each in self.measurements:
            row = [*_names(each), _estimate(each.tokens_per_second, 1)]
            row += [_estimate(each.relative.get(name), 2) for name in ("tokens_per_second", "best_fixed")]
            row += [_number(each.tokens_per_round, 2), _number(each.step_ms, 1)]
            row += [" ".join(f"{share:.0%}" for share in each.acceptance_by_position), "", "", ""]
            if (latency := each.latency) is not None:
                accepted = "" if each.acceptance_rate is None else f"{each.acceptance_rate:.0%}"
                row[-3:] = [accepted, f"{latency.requests_per_second:.2f}", f"{latency.completion_tokens:.1f}"]
            rows.append(row)
        return table(heads, rows)

    def _latency_table(self) -> str:
        heads = [*self._heads, "first token", "between tokens", "whole answer"]
        heads += ["× first token", "× between tokens", "× whole answer", "failed"]
        rows = []
        for each in self.measurements:
            if (latency := each.latency) is not None:
                row = [*_names(each), *map(_milliseconds, (latency.ttft, latency.itl, latency.e2e))]
                row += [_estimate(each.relative.get(name), 2) for name in ("ttft", "itl", "e2e")]
                rows.append([*row, str(sum(latency.errors.values()) or "")])
        return table(heads, rows)

    @property
    def _heads(self) -> list[str]:
        return ["prompts", "load", "depth" if "local" in self.models else "server"]


def bench_report(
    plan: BenchPlan, trials: Trials, *, model: str | None = None, stopped: str | None = None
) -> BenchReport:
    """Summarise trials. `model`: the name of the local model; of servers the trials know."""
    done = [(k, trial) for by_variant in trials.values() for k, each in by_variant.items() for trial in each.values()]
    # Some servers call a model by its folder, which is private.
    served = {k: PurePath(each.model).name if PurePath(each.model).is_absolute() else each.model for k, each in done}
    return BenchReport(
        models={k: served[k] for k in plan.variants if k in served} if model is None else {"local": model},
        machine=system_info(),
        plan=plan,
        measurements=summarise(plan, trials),
        exact=all(trial.exact for _, trial in done),
        stopped=stopped,
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table that can be read as it is. Columns without any value are left out."""
    columns = [[head, *cells] for head, *cells in zip(heads, *rows, strict=True) if any(cells)]
    widths = [max(3, *map(len, column)) for column in columns]
    lines = [
        [text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in zip(*columns, strict=True)
    ]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _names(measurement: Measurement) -> list[str]:
    return [measurement.condition.prompts, measurement.condition.load_words, measurement.variant]


def _estimate(value: Estimate | None, digits: int) -> str:
    return "" if value is None else f"{value.median:.{digits}f} ({value.low:.{digits}f}–{value.high:.{digits}f})"


def _milliseconds(latency: Percentiles | None) -> str:
    values = [] if latency is None else [1e3 * value for value in (latency.p50, latency.p95, latency.p99)]
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in values)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
