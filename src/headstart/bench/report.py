"""A finished benchmark as Markdown, which is also what the terminal shows, and as JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from statistics import geometric_mean
from typing import Any

from .estimate import MIN_TRIES, Estimate, Percentiles
from .measurement import Measurement, share_past_end, summarise
from .plan import BenchPlan, Trials
from .system import SystemInfo, system_info


@dataclass(frozen=True)
class BenchReport:
    models: dict[str, str]  # by server; of a local benchmark one, under "local"
    system: SystemInfo  # of the clients, where servers are measured
    plan: BenchPlan
    measurements: list[Measurement]
    exact: bool = True  # the tokens of every depth are promised to be the same
    past_end: float = 0.0  # share of tokens after the model's own end
    stopped: str | None = None  # why the benchmark is not complete

    @property
    def title(self) -> str:
        return self.models.get("local") or ", ".join(self.models)

    @property
    def different(self) -> list[Measurement]:
        """Measurements whose tokens are not those of plain decoding."""
        return [each for each in self.measurements if each.identical is False]

    def as_dict(self) -> dict[str, Any]:
        return {
            "models": self.models,
            "machine": asdict(self.system),
            "tokens": self.plan.tokens,
            "repeats": self.plan.repeats,
            "baseline": self.plan.variants[0],
            "stopped": self.stopped,
            "exact": self.exact,
            "past_end": self.past_end,
            "measurements": [_as_dict(each) for each in self.measurements],
        }

    def markdown(self) -> str:
        parts = [f"# Benchmark: {self.title}", f"Measured on {self.system}"]
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
        parts += ["## Speed", _speed_table(self.measurements, self.plan.variants[0])]
        if any(each.latency for each in self.measurements):
            parts += ["## Latency", "Milliseconds: p50 / p95 / p99.", _latency_table(self.measurements)]
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
            yield "tokens per round: what one sequence gains in a step, accepted drafts and the model's own token."
            yield (
                "accepted by position: how often a draft and all before it were accepted. Positions drafted fewer "
                f"than {MIN_TRIES} times are left out."
            )
        if self.past_end >= 0.005:
            yield f"{self.past_end:.0%} of the tokens came after the model's own end."
        for name in self.models:
            here = [each.latency for each in self.measurements if each.variant == name and each.latency]
            if any("chunks" in latency.counted for latency in here):
                yield f"{name} does not count its tokens: chunks were counted, which may hold several tokens."
            errors = sum((Counter(latency.errors) for latency in here), Counter[str]())
            total = sum(latency.requests for latency in here)
            yield from (f"{name}, {count} of {total} requests failed: {error}" for error, count in errors.items())


def bench_report(
    plan: BenchPlan,
    trials: Trials,
    *,
    model: str | None = None,
    end_tokens: set[int] | None = None,
    stopped: str | None = None,
) -> BenchReport:
    """Summarise trials. `model`: the name of the local model; of servers the trials know."""
    done = [(k, trial) for by_variant in trials.values() for k, each in by_variant.items() for trial in each.values()]
    served = {k: _without_folder(trial.model) for k, trial in done}
    return BenchReport(
        models={k: served[k] for k in plan.variants if k in served} if model is None else {"local": model},
        system=system_info(),
        plan=plan,
        measurements=summarise(plan, trials),
        exact=all(trial.exact for _, trial in done),
        past_end=share_past_end(trials, end_tokens or set()),
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


def _speed_table(measurements: Sequence[Measurement], baseline: str) -> str:
    heads = ["prompts", "load", "depth" if baseline == "k=0" else "server", "tokens/s", f"× {baseline}"]
    heads += ["× best fixed k", "tokens per round", "ms per step", "accepted by position"]
    heads += ["accepted", "requests/s", "prompt tokens", "cached", "answer tokens"]
    rows = []
    for each in measurements:
        row = [each.condition.prompts, str(each.condition.load), each.variant, _estimate(each.tokens_per_second, 1)]
        row += [_estimate(each.relative.get(name), 2) for name in ("tokens_per_second", "best_fixed")]
        row += [_number(each.tokens_per_round, 2), _number(each.step_ms, 1)]
        row += [" ".join(f"{share:.0%}" for share in each.acceptance_by_position)]
        if (latency := each.latency) is not None:
            row += ["" if each.acceptance is None else f"{each.acceptance:.0%}"]
            row += [f"{latency.requests_per_second:.2f}", _number(latency.prompt_tokens, 0)]
            row += [_number(latency.cached_tokens, 0), f"{latency.completion_tokens:.1f}"]
        rows.append(row + [""] * (len(heads) - len(row)))
    return table(heads, rows)


def _latency_table(measurements: Sequence[Measurement]) -> str:
    heads = ["prompts", "load", "server", "first token", "between tokens", "whole answer"]
    heads += ["× first token", "× between tokens", "× whole answer", "failed"]
    rows = []
    for each in measurements:
        if (latency := each.latency) is not None:
            row = [each.condition.prompts, str(each.condition.load), each.variant]
            row += [_milliseconds(latency.ttft), _milliseconds(latency.itl), _milliseconds(latency.e2e)]
            row += [_estimate(each.relative.get(name), 2) for name in ("ttft", "itl", "e2e")]
            rows.append([*row, str(sum(latency.errors.values()) or "")])
    return table(heads, rows)


def _as_dict(measurement: Measurement) -> dict[str, Any]:
    condition = measurement.condition
    where = {"prompts": condition.prompts, condition.load.kind: condition.load.value}
    fields = asdict(measurement)
    del fields["condition"]
    return {"variant": fields.pop("variant"), **where, **fields}


def _without_folder(model: str) -> str:
    """Some servers call a model by its folder, which is the user's own affair."""
    return PurePath(model).name if PurePath(model).is_absolute() else model


def _estimate(value: Estimate | None, digits: int) -> str:
    return "" if value is None else f"{value.median:.{digits}f} ({value.low:.{digits}f}–{value.high:.{digits}f})"


def _milliseconds(latency: Percentiles | None) -> str:
    values = [] if latency is None else [1e3 * value for value in (latency.p50, latency.p95, latency.p99)]
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in values)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
