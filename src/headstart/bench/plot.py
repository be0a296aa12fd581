"""Draw a benchmark: speed and latencies, one row of panels for each kind of prompts. matplotlib is an extra."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HeadstartError, RequestError
from .estimate import Estimate, Percentiles
from .measurement import Measurement
from .report import BenchReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
MARKERS = "osD^vP*X"


def check_plot(path: Path) -> None:
    """Refuse before anything is measured what could not be drawn after it."""
    if path.suffix.lower() not in FORMATS:
        raise RequestError(f"--plot {path}: the name must end in one of {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise HeadstartError("--plot needs matplotlib: pip install matplotlib") from error


def plot_report(report: BenchReport, path: Path) -> None:
    from matplotlib.figure import Figure  # not pyplot, which would open windows and keep state

    prompts = list(dict.fromkeys(each.condition.prompts for each in report.measurements))
    panels = list(dict.fromkeys(name for each in report.measurements for name in _values(each)))
    figure = Figure(figsize=(max(4 * len(panels), 6), 3.2 * len(prompts) + 0.6), layout="constrained")
    axes = figure.subplots(len(prompts), len(panels), squeeze=False)
    for row, name in zip(axes, prompts, strict=True):
        here = [each for each in report.measurements if each.condition.prompts == name]
        for panel, what in zip(row, panels, strict=True):
            panel.set_title(f"{name}: {what}", fontsize=10)
            values = [(str(each.condition.load), each.variant, _values(each).get(what)) for each in here]
            _draw(panel, values, by_depth="local" in report.models)
    axes[0][0].legend(frameon=False)
    figure.suptitle(f"{report.title} · {report.system.device}, {report.system.processor}", fontsize=10)
    figure.savefig(path, dpi=150)


def _values(measurement: Measurement) -> dict[str, Estimate]:
    """Return a marker and the ends of its bar by panel: all repeats of the speed, p50 to p95 of a latency."""
    values = {"tokens/s": measurement.tokens_per_second}
    if (latency := measurement.latency) is not None:
        values["ms to the first token"] = _up_to_p95(latency.ttft)
        if latency.itl is not None:
            values["ms between tokens"] = _up_to_p95(latency.itl)
    return values


def _up_to_p95(latency: Percentiles) -> Estimate:
    return Estimate(1e3 * latency.p50, 1e3 * latency.p50, 1e3 * latency.p95)


def _draw(panel: "Axes", values: list[tuple[str, str, Estimate | None]], *, by_depth: bool) -> None:
    """Draw a line for each server over the loads, or for each load over the depths.

    `values`: load, variant and what was measured.
    """
    points = [(load, variant, value) for load, variant, value in values if value is not None]
    if by_depth:
        points = [(variant, load, value) for load, variant, value in points]
    ticks = list(dict.fromkeys(tick for tick, _, _ in points))
    lines = list(dict.fromkeys(line for _, line, _ in points))
    for number, name in enumerate(lines):
        own = [(ticks.index(tick), estimate) for tick, line, estimate in points if line == name]
        aside = 0.09 * (number - (len(lines) - 1) / 2)  # so that bars do not hide one another
        panel.errorbar(
            [place + aside for place, _ in own],
            [estimate.median for _, estimate in own],
            yerr=[[e.median - e.low for _, e in own], [e.high - e.median for _, e in own]],
            marker=MARKERS[number % len(MARKERS)], markersize=5, linewidth=1.3, elinewidth=1, capsize=2, label=name,
        )  # fmt: skip
    panel.set_xticks(range(len(ticks)), ticks)
    panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
