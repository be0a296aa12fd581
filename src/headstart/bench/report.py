"""What was measured, as Markdown for people and as a dictionary for programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .cost import Cost
from .figures import AS_GOOD_AS_BEST, AS_GOOD_AS_PLAIN, Figure, Judged, Verdict
from .interval import Estimate
from .machine import Machine


@dataclass(frozen=True)
class Report:
    model: str
    machine: Machine
    tokens: int
    repeats: int
    acceptance: Sequence[float] | None  # imposed
    figures: list[Figure]
    costs: list[Cost]
    auto: Verdict | None
    past_end: dict[str, float]  # by kind
    exact: bool  # this device computes a row the same whatever stands beside it
    stopped: str | None = None  # why there is less than was asked for

    @property
    def imposed(self) -> str | None:
        """Said wherever a figure is shown: it is not what this model's head earns."""
        if self.acceptance is None:
            return None
        shares = ", ".join(f"{share:g}" for share in self.acceptance)
        return f"Acceptance is imposed ({shares}, cumulative), not this head's: costs are measured, earnings assumed."

    def as_dict(self) -> dict[str, Any]:
        auto = self.auto
        return {
            "model": self.model,
            "machine": self.machine.as_dict(),
            "tokens": self.tokens,
            "repeats": self.repeats,
            "stopped": self.stopped,
            "imposed_acceptance": None if self.acceptance is None else list(self.acceptance),
            "figures": [asdict(figure) for figure in self.figures],
            "costs": [cost.as_dict() for cost in self.costs],
            "auto": auto and {
                "cells": [asdict(cell) for cell in auto.cells],
                "to_best": auto.to_best,
                "below_best": [[cell.kind, cell.rows] for cell in auto.below_best],
                "below_plain": [[cell.kind, cell.rows] for cell in auto.below_plain],
            },
            "past_end": self.past_end,
            "exact": self.exact,
        }  # fmt: skip

    def markdown(self) -> str:
        parts = [f"# {self.model}", f"{self.machine}"]
        if self.imposed:
            parts.append(f"**{self.imposed}**")
        if self.stopped:
            parts.append(f"**Not complete: {self.stopped}**")
        parts += ["## Speed by depth", self._about_speed(), _speed_table(self.figures)]
        if wrong := [figure for figure in self.figures if not figure.identical]:
            parts.append(f"**Not the tokens of k = 0:** {', '.join(map(_name, wrong))}.")
        if self.auto is not None:
            parts += ["## Auto", _auto_table(self.auto), _auto_summary(self.auto)]
        if self.costs:
            parts += ["## Cost of a step", _cost_table(self.costs)]
        return "\n\n".join(parts) + "\n"

    def _about_speed(self) -> str:
        said = f"{self.tokens} tokens a row, medians of {self.repeats} interleaved runs, 95% intervals of the ratios."
        late = [f"{share:.0%} of {kind}" for kind, share in self.past_end.items() if share >= 0.005]
        return f"{said} Past the model's own end: {', '.join(late)}." if late else said


def _speed_table(figures: list[Figure]) -> str:
    heads = ("text", "rows", "k", "tokens/s", "to k = 0", "95%", "tokens per round", "drafts per round")
    rows = [
        (f.kind, str(f.rows), str(f.k), f"{f.tokens_per_second:.1f}", *_ratio(f.to_plain, f.k != 0),
         f"{f.tokens_per_round:.2f}", f"{f.drafts_per_round:.2f}", _shares(f.conditional), _shares(f.cumulative))
        for f in figures
    ]  # fmt: skip
    return table([*heads, "accepted, conditional", "cumulative"], rows)


def _auto_table(auto: Verdict) -> str:
    rows = [
        (cell.kind, str(cell.rows), *_ratio(cell.to_plain), "/".join(map(str, dict.fromkeys(cell.best))),
         *_ratio(cell.to_best))
        for cell in auto.cells
    ]  # fmt: skip
    return table(["text", "rows", "to k = 0", "95%", "best fixed k", "to best fixed k", "95% "], rows)


def _auto_summary(auto: Verdict) -> str:
    lines = [f"Against the best fixed k of each cell, chosen on other runs: {auto.to_best:.3f} (geometric mean)."]
    for cells, least, what in (
        (auto.below_best, AS_GOOD_AS_BEST, "the best fixed k"),
        (auto.below_plain, AS_GOOD_AS_PLAIN, "k = 0"),
    ):
        named = ", ".join(map(_name, cells)) or "none"
        lines.append(f"Cells that lie wholly below {least:g} of {what}: {named}.")
    return "\n".join(lines)


def _cost_table(costs: list[Cost]) -> str:
    rows = [
        (
            str(c.rows),
            str(c.k),
            f"{c.seconds * 1e3:.2f}",
            f"{c.ratio:.2f}",
            f"{c.verify:.2f}",
            "" if c.draft is None else f"{c.draft:.2f}",
            "" if c.k == 0 else "never" if c.break_even is None else f"{c.break_even:.0%}",
        )
        for c in costs
    ]
    return table(["rows", "k", "ms a step", "to k = 0", "verify β", "draft δ", "break-even acceptance"], rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are as wide as they must be, to be read as it is too."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [heads, ["-" * max(width, 3) for width in widths], *rows]
    padded = [[text.ljust(max(width, 3)) for text, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _ratio(ratio: Estimate, shown: bool = True) -> tuple[str, str]:
    return (f"{ratio.median:.2f}", f"{ratio.low:.2f}–{ratio.high:.2f}") if shown else ("", "")


def _shares(shares: list[float]) -> str:
    return " ".join(f"{share:.0%}" for share in shares)


def _name(cell: Figure | Judged) -> str:
    rows = f"{cell.kind} with {cell.rows} row{'s' if cell.rows > 1 else ''}"
    return f"{rows} at k = {cell.k}" if isinstance(cell, Figure) else rows
