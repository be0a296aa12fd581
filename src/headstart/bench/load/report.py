"""What was measured, as Markdown for people, as a dictionary for programs, and every request as a line of CSV."""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import PurePath
from statistics import fmean
from typing import Any

from ..interval import Estimate
from ..machine import Machine, this_machine
from ..report import table
from .arrivals import Closed
from .figures import Figure, Percentiles, Ratio, figures, ratios
from .measure import Cell, Plan, Run

COLUMNS = (
    "server", "prompts", "hits", "concurrency", "rate", "repeat", "asked", "first_token", "end_to_end",
    "between_tokens", "tokens", "counted", "prompt_tokens", "cached_tokens", "proposed", "accepted", "rounds",
    "error",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    models: dict[str, str]  # by server
    machine: Machine  # where the clients were
    tokens: int
    repeats: int
    figures: list[Figure]
    ratios: list[Ratio]
    stopped: str | None = None  # why there is less than was asked for

    @property
    def behind(self) -> list[str]:
        """Where the first server loses for certain: less throughput, or a later first token."""
        return [
            f"{what} ({ratio.cell}, to {ratio.to})"
            for ratio in self.ratios
            for what, lost in (
                ("throughput", ratio.throughput.high < 1),
                ("first token", ratio.first_token.low > 1),
            )
            if lost
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "models": self.models,
            "machine": self.machine.as_dict(),
            "tokens": self.tokens,
            "repeats": self.repeats,
            "stopped": self.stopped,
            "figures": [asdict(figure) | {"cell": _cell(figure.cell)} for figure in self.figures],
            "ratios": [asdict(ratio) | {"cell": _cell(ratio.cell)} for ratio in self.ratios],
        }

    def markdown(self) -> str:
        parts = [f"# Under load: {', '.join(self.models)}", f"Clients on {self.machine}"]
        asked = ", ".join(dict.fromkeys(self.models.values()))
        parts.append(
            f"{asked}. Greedy answers of at most {self.tokens} tokens, streamed; {self.repeats} interleaved repeats."
        )
        if self.stopped:
            parts.append(f"**Not complete: {self.stopped}**")
        parts += ["## What a client sees", _latency_table(self.figures)]
        parts += ["## What a server does", _throughput_table(self.figures)]
        parts += [f"- {note}" for note in _notes(self.figures)]
        if self.ratios:
            parts += [f"## {self.ratios[0].target} against others", _ratio_table(self.ratios), self._verdict()]
        return "\n\n".join(parts) + "\n"

    def _verdict(self) -> str:
        if not self.behind:
            return "Nowhere is its throughput below, or its first token later, with the whole of the interval."
        return f"Behind with the whole of the interval: {'; '.join(self.behind)}."


def report(plan: Plan, runs: Sequence[Run], stopped: str | None = None) -> Report:
    names = [target.name for target in plan.targets]
    return Report(
        models={run.target: _shown(run.model) for run in sorted(runs, key=lambda run: names.index(run.target))},
        machine=this_machine(),
        tokens=plan.tokens,
        repeats=plan.repeats,
        figures=figures(runs, names),
        ratios=ratios(runs, names),
        stopped=stopped,
    )


def requests_csv(runs: Sequence[Run]) -> str:
    """Seconds; `asked` since the run began, `between_tokens` the mean of the answer."""
    page = StringIO()
    writer = csv.DictWriter(page, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in runs:
        began = min(answer.asked for answer in run.answers)
        for answer in run.answers:
            line: dict[str, Any] = {"server": run.target, "repeat": run.repeat, **_cell(run.cell)}
            line |= {"asked": answer.asked - began, "end_to_end": answer.seconds, "error": answer.error}
            if answer.error is None:
                gaps = list(answer.gaps())
                line |= {"first_token": answer.first, "between_tokens": fmean(gaps) if gaps else None}
                line |= {
                    name: getattr(answer, name) for name in ("tokens", "counted", "prompt_tokens", "cached_tokens")
                }
                line |= asdict(answer.drafts) if answer.drafts is not None else {}
            writer.writerow(line)
    return page.getvalue()


def _shown(model: str) -> str:
    """Some servers call a model by its folder, which is nobody's business."""
    return PurePath(model).name if PurePath(model).is_absolute() else model


def _cell(cell: Cell) -> dict[str, Any]:
    load = cell.load
    return {
        "prompts": cell.prompts,
        "hits": cell.hits,
        "concurrency": load.clients if isinstance(load, Closed) else None,
        "rate": None if isinstance(load, Closed) else load.rate,
    }


def _latency_table(figures: Sequence[Figure]) -> str:
    heads = ["prompts", "hits", "load", "server", "first token, ms", "between tokens, ms", "end to end, s"]
    rows = [
        (*_where(f.cell), f.target, _spread(f.first_token, 1e3), _spread(f.between_tokens, 1e3),
         _spread(f.end_to_end, 1), f"{f.tokens_per_second.p50:.1f}", str(sum(f.errors.values()) or ""))
        for f in figures
    ]  # fmt: skip
    return "p50 / p95 / p99.\n\n" + table([*heads, "tokens/s of a request", "errors"], rows)


def _throughput_table(figures: Sequence[Figure]) -> str:
    heads = ["prompts", "hits", "load", "server", "tokens/s in all", "95%", "requests/s", "prompt tokens", "cached"]
    rows = [
        (*_where(f.cell), f.target, *_estimate(f.throughput, 1), f"{f.requests_per_second:.2f}",
         _number(f.prompt_tokens, 0), _number(f.cached_tokens, 0), f"{f.tokens:.1f}",
         "" if f.acceptance is None else f"{f.acceptance:.0%}", _number(f.tokens_per_round, 2))
        for f in figures
    ]  # fmt: skip
    return table([*heads, "answer tokens", "accepted", "tokens per round"], rows)


def _ratio_table(ratios: Sequence[Ratio]) -> str:
    heads = ["prompts", "hits", "load", "to", "throughput", "95%", "first token", "95% "]
    rows = [
        (*_where(r.cell), r.to, *_estimate(r.throughput, 2), *_estimate(r.first_token, 2),
         *_estimate(r.between_tokens, 2), *_estimate(r.end_to_end, 2))
        for r in ratios
    ]  # fmt: skip
    return table([*heads, "between tokens", "95%  ", "end to end", "95%   "], rows)


def _notes(figures: Sequence[Figure]) -> list[str]:
    notes = []
    for target in dict.fromkeys(figure.target for figure in figures):
        here = [figure for figure in figures if figure.target == target]
        counted = sum((Counter(figure.counted) for figure in here), Counter[str]())
        if counted["chunks"]:
            notes.append(
                f"{target} does not count its tokens: chunks stand for them, which is wrong where a chunk holds "
                "several. Give --tokenizer."
            )
        for error, count in sum((Counter(figure.errors) for figure in here), Counter[str]()).items():
            notes.append(f"{target}, {count} of {sum(f.requests for f in here)} requests: {error}")
    return notes


def _where(cell: Cell) -> tuple[str, str, str]:
    return cell.prompts, f"{cell.hits:.0%}", str(cell.load)


def _spread(figures: Percentiles | None, scale: float) -> str:
    if figures is None:
        return ""
    values = [value * scale for value in (figures.p50, figures.p95, figures.p99)]
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in values)


def _estimate(estimate: Estimate | None, digits: int) -> tuple[str, str]:
    if estimate is None:
        return "", ""
    return f"{estimate.median:.{digits}f}", f"{estimate.low:.{digits}f}–{estimate.high:.{digits}f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
