"""A picture of a report: speed by depth, one panel for each number of rows. matplotlib is an extra."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HeadstartError, RequestError
from .report import Report
from .run import K

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
MARKS = "osD^vP*X"


def check_plot(path: Path) -> None:
    """Refuse before anything is measured what could not be drawn after it."""
    if path.suffix.lower() not in FORMATS:
        raise RequestError(f"--plot {path}: the name must end in one of {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise HeadstartError("--plot needs matplotlib: pip install matplotlib") from error


def plot(report: Report, path: Path) -> None:
    from matplotlib.figure import Figure as Picture  # not pyplot: there is no window, and nothing global

    all_rows = list(dict.fromkeys(figure.rows for figure in report.figures))
    picture = Picture(figsize=(max(4.2 * len(all_rows), 6), 4.4), layout="constrained")
    panels = picture.subplots(1, len(all_rows), sharey=True, squeeze=False)[0]
    for panel, rows in zip(panels, all_rows, strict=True):
        _panel(panel, report, rows)
    panels[0].set_ylim(bottom=0)  # shared by all: a ratio is seen against nothing, not against the slowest
    panels[0].set_ylabel("speed against k = 0")
    panels[0].legend(frameon=False)
    title = f"{report.model} · {report.machine.device}, {report.machine.processor}"
    picture.suptitle(f"{title}\n{report.imposed}" if report.imposed else title, fontsize=10)
    picture.savefig(path, dpi=150)


def _panel(panel: "Axes", report: Report, rows: int) -> None:
    here = [figure for figure in report.figures if figure.rows == rows]
    depths = sorted({figure.k for figure in here if figure.k != "auto"})
    places: dict[K, int] = {**{k: i for i, k in enumerate(depths)}, "auto": len(depths)}
    kinds = list(dict.fromkeys(figure.kind for figure in here))
    panel.axhline(1, color="0.6", linewidth=1)
    for number, kind in enumerate(kinds):
        aside = (number - (len(kinds) - 1) / 2) * 0.09  # so that intervals do not hide one another
        colour, mark = f"C{number}", MARKS[number % len(MARKS)]
        for points, label in (
            ([figure for figure in here if figure.kind == kind and figure.k != "auto"], kind),
            ([figure for figure in here if figure.kind == kind and figure.k == "auto"], None),
        ):
            ratios = [figure.to_plain for figure in points]
            panel.errorbar(
                [places[figure.k] + aside for figure in points],
                [ratio.median for ratio in ratios],
                yerr=[[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]],
                color=colour, marker=mark, markersize=5, linewidth=1.3, elinewidth=1, capsize=2, label=label,
            )  # fmt: skip
    ticks = [k for k in places if any(figure.k == k for figure in here)]
    panel.set_xticks([places[k] for k in ticks], [str(k) for k in ticks])
    panel.set_xlabel("k, drafts per round")
    panel.set_title(f"{rows} row{'s' if rows > 1 else ''}", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
