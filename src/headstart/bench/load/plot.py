"""A picture of a report: throughput and latencies by load, a row of panels for each kind of prompts."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..plot import MARKS
from .arrivals import Closed
from .figures import Figure, Percentiles
from .report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _to_p95(seconds: Percentiles | None) -> tuple[float, float, float] | None:
    return None if seconds is None else (seconds.p50 * 1e3, seconds.p50 * 1e3, seconds.p95 * 1e3)


# The foot of a bar, the mark, and its head.
PANELS: dict[str, Callable[[Figure], tuple[float, float, float] | None]] = {
    "tokens/s in all": lambda figure: (figure.throughput.low, figure.throughput.median, figure.throughput.high),
    "ms to the first token": lambda figure: _to_p95(figure.first_token),
    "ms between tokens": lambda figure: _to_p95(figure.between_tokens),
}


def plot(report: Report, path: Path) -> None:
    """Marks are medians. Bars show the interval of throughput, and reach to p95 of latencies."""
    from matplotlib.figure import Figure as Picture  # not pyplot: there is no window, and nothing global

    kinds = list(dict.fromkeys(_kind(figure) for figure in report.figures))
    picture = Picture(figsize=(4 * len(PANELS), 3.2 * len(kinds) + 0.6), layout="constrained")
    rows = picture.subplots(len(kinds), len(PANELS), squeeze=False)
    for row, kind in zip(rows, kinds, strict=True):
        for panel, what in zip(row, PANELS, strict=True):
            _panel(panel, report, kind, what)
    rows[0][0].legend(frameon=False)
    picture.suptitle(f"{', '.join(report.models)} · {report.machine.device}, {report.machine.processor}", fontsize=10)
    picture.savefig(path, dpi=150)


def _panel(panel: "Axes", report: Report, kind: str, what: str) -> None:
    here = [figure for figure in report.figures if _kind(figure) == kind]
    loads = list(dict.fromkeys(str(figure.cell.load) for figure in here))
    for number, name in enumerate(report.models):
        own = [(figure, PANELS[what](figure)) for figure in here if figure.target == name]
        points = [(loads.index(str(figure.cell.load)), each) for figure, each in own if each is not None]
        panel.errorbar(
            [place + (number - (len(report.models) - 1) / 2) * 0.09 for place, _ in points],
            [middle for _, (_, middle, _) in points],
            yerr=[
                [middle - low for _, (low, middle, _) in points],
                [high - middle for _, (_, middle, high) in points],
            ],
            marker=MARKS[number % len(MARKS)], markersize=5, linewidth=1.3, elinewidth=1, capsize=2, label=name,
        )  # fmt: skip
    closed = all(isinstance(figure.cell.load, Closed) for figure in here)
    panel.set_xticks(range(len(loads)), [load.removesuffix(" at a time") if closed else load for load in loads])
    panel.set_xlabel("requests at a time" if closed else "requests")
    panel.set_ylim(bottom=0)
    panel.set_title(f"{kind}: {what}", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)


def _kind(figure: Figure) -> str:
    hits = f", {figure.cell.hits:.0%} hits" if figure.cell.hits else ""
    return f"{figure.cell.prompts}{hits}"
