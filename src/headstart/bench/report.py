"""A finished benchmark as Markdown, which is also what the terminal shows, and as JSON."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

from .measurement import MIN_TRIES, Estimate, Measurement
from .plan import BenchPlan
from .system import SystemInfo

NOTES = (
    "k: the number of tokens drafted per step. k=0 is decoding without drafts.",
    "tokens per round: what one sequence gains in a step, accepted drafts and the model's own token.",
    "accepted by position: how often a draft and all before it were accepted. Positions drafted fewer than "
    f"{MIN_TRIES} times are left out.",
    "Sequences continue past the model's own end, where repetitive text may flatter drafts.",
)


@dataclass(frozen=True)
class BenchReport:
    model: str
    machine: SystemInfo
    plan: BenchPlan
    measurements: list[Measurement]
    exact: bool = True  # the tokens of every depth are promised to be the same
    stopped: str | None = None  # why the benchmark is not complete

    @property
    def different(self) -> list[Measurement]:
        """Measurements whose tokens are not those of plain decoding."""
        return [each for each in self.measurements if each.identical is False]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def markdown(self) -> str:
        parts = opening(self.model, self.machine, self.plan, self.stopped)
        if self.different:
            named = "; ".join(f"{each.variant}, {each.condition}" for each in self.different)
            parts.append(f"**Not the tokens of {self.plan.variants[0]}:** {named}.")
        if conclusions := list(self._conclusions()):
            parts += ["## Result", bullets(conclusions)]
        return "\n\n".join([*parts, "## Speed", self._speed_table(), bullets(NOTES)]) + "\n"

    def _conclusions(self) -> Iterator[str]:
        """Say for each condition whether drafting pays on this machine."""
        for condition in self.plan.conditions:
            here = [each for each in self.measurements if each.condition == condition and each.relative]
            if here:
                best = max(here, key=lambda each: each.relative["tokens_per_second"].median)
                gain = best.relative["tokens_per_second"]
                pays = "is fastest" if gain.median > 1 else "comes closest: speculation does not pay here"
                yield f"{condition}: {best.variant} {pays}, {format_estimate(gain)} times the speed without drafts."
        if to_best := [e.relative["best_fixed"].median for e in self.measurements if "best_fixed" in e.relative]:
            yield f"auto reaches {geometric_mean(to_best):.0%} of the best fixed depth's speed, on average."

    def _speed_table(self) -> str:
        heads = ["prompts", "load", "depth", "tokens/s", f"× {self.plan.variants[0]}", "× best fixed k"]
        heads += ["tokens per round", "ms per step", "accepted by position"]
        rows = []
        for each in self.measurements:
            row = [each.condition.prompts, each.condition.load_words, each.variant]
            row.append(format_estimate(each.tokens_per_second, 1))
            row += [format_estimate(each.relative.get(name)) for name in ("tokens_per_second", "best_fixed")]
            row += [f"{each.tokens_per_round:.2f}", f"{each.step_ms:.1f}"]
            rows.append([*row, " ".join(f"{share:.0%}" for share in each.acceptance_by_position)])
        return table(heads, rows)


def opening(title: str, machine: SystemInfo, plan: BenchPlan, stopped: str | None) -> list[str]:
    """Return the first paragraphs of a report."""
    parts = [f"# Benchmark: {title}", f"Measured on {machine}"]
    how, interleaved = (
        plan.sampling_words.capitalize(),
        f"Medians of {plan.repeats} interleaved repeats (lowest–highest).",
    )
    parts.append(f"{how}; {plan.tokens} tokens per sequence. {interleaved}")
    return [*parts, f"**Not complete: {stopped}**"] if stopped else parts


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table that can be read as it is. Columns without any value are left out."""
    lines = [[" ".join(text.splitlines()).replace("|", r"\|") for text in line] for line in (heads, *rows)]
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(3, *map(len, column)) for column in columns]
    lines = [
        [text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in zip(*columns, strict=True)
    ]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_estimate(value: Estimate | None, digits: int = 2) -> str:
    return "" if value is None else f"{value.median:.{digits}f} ({value.low:.{digits}f}–{value.high:.{digits}f})"
