"""A report says the same as Markdown, as JSON and as a picture, and says in each when acceptance was imposed."""

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headstart.bench.cost import Cost
from headstart.bench.figures import Figure, Judged, Verdict
from headstart.bench.interval import Estimate
from headstart.bench.machine import Machine
from headstart.bench.plot import check_plot, plot
from headstart.bench.report import Report, table
from headstart.errors import HeadstartError, RequestError

ONE = Estimate(1.0, 1.0, 1.0)
REPORT = Report(
    model="some-model",
    machine=Machine("Linux 6.1", "A processor", 2, 16.0, "cpu", {"mlx": "0.32"}),
    tokens=64,
    repeats=5,
    acceptance=None,
    figures=[
        Figure("code", 1, 0, 100.0, ONE, 1.0, 0.0, [], [], True),
        Figure("code", 1, 2, 130.0, Estimate(1.3, 1.2, 1.4), 2.1, 2.0, [0.8, 0.6], [0.8, 0.75], True),
        Figure("code", 1, "auto", 128.0, Estimate(1.28, 1.1, 1.3), 2.0, 1.9, [0.8], [0.8], True),
    ],
    costs=[
        Cost(1, 0, 0.01, 1.0, 1.0, None, None),
        Cost(1, 2, 0.016, 1.6, 1.4, 0.1, 0.42),
        Cost(1, 8, 0.1, 10, 8, 0.2, None),
    ],
    auto=Verdict([Judged("code", 1, [2, 2], Estimate(0.98, 0.96, 1.0), Estimate(1.28, 1.1, 1.3))]),
    past_end={"code": 0.25},
    exact=True,
)
IMPOSED = replace(REPORT, acceptance=(0.88, 0.75), auto=None)


def cells(markdown: str, start: str) -> list[str]:
    line = next(line for line in markdown.splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_markdown_has_every_figure_with_its_machine() -> None:
    text = REPORT.markdown()
    assert "cpu · A processor, 2 cores, 16 GB · Linux 6.1 · mlx 0.32" in text
    assert "64 tokens a row, medians of 5 interleaved runs" in text
    assert "Past the model's own end: 25% of code." in text
    speed = ["code", "1", "2", "130.0", "1.30", "1.20–1.40", "2.10", "2.00", "80% 75%", "80% 60%"]
    assert cells(text, "| code | 1    | 2 ") == speed
    assert cells(text, "| 1    | 2 ") == ["1", "2", "16.00", "1.60", "1.40", "0.10", "42%"]
    assert cells(text, "| 1    | 8 ")[-1] == "never"
    assert cells(text, "| code | 1    | 1.28 ") == ["code", "1", "1.28", "1.10–1.30", "2", "0.98", "0.96–1.00"]
    assert "0.980 (geometric mean)" in text
    assert "wholly below 0.95 of the best fixed k: none." in text
    assert "imposed" not in text.lower()
    assert "Not complete" not in text
    assert "**Not complete: interrupted**" in replace(REPORT, stopped="interrupted").markdown()
    assert "Not the tokens" not in text


def test_tokens_that_differ_and_cells_that_lose_are_named() -> None:
    other = replace(REPORT.figures[1], identical=False)
    slow = Verdict([Judged("code", 4, [0, 0], Estimate(0.9, 0.9, 0.94), Estimate(0.9, 0.9, 0.98))])
    text = replace(REPORT, figures=[REPORT.figures[0], other], auto=slow).markdown()
    assert "**Not the tokens of k = 0:** code with 1 row at k = 2." in text
    assert "wholly below 0.95 of the best fixed k: code with 4 rows." in text
    assert "wholly below 0.97 of k = 0: none." in text


def test_json_has_all_of_it() -> None:
    report = json.loads(json.dumps(REPORT.as_dict()))
    assert report["model"] == "some-model"
    assert report["machine"]["versions"] == {"mlx": "0.32"}
    assert report["imposed_acceptance"] is None
    assert report["figures"][1]["to_plain"] == {"median": 1.3, "low": 1.2, "high": 1.4}
    assert report["figures"][2]["k"] == "auto"
    assert report["costs"][1] == {
        "rows": 1, "k": 2, "seconds": 0.016, "ratio": 1.6, "verify": 1.4, "draft": 0.1, "break_even": 0.42,
    }  # fmt: skip
    assert report["auto"]["to_best"] == pytest.approx(0.98)
    assert report["auto"]["below_best"] == []


def test_an_imposed_acceptance_is_said_in_every_output(tmp_path: Path) -> None:
    assert "**Acceptance is imposed (0.88, 0.75, cumulative)" in IMPOSED.markdown()
    assert IMPOSED.as_dict()["imposed_acceptance"] == [0.88, 0.75]
    assert IMPOSED.as_dict()["auto"] is None
    plot(IMPOSED, tmp_path / "imposed.svg")
    plot(REPORT, tmp_path / "real.svg")
    # The letters of an SVG are shapes, and comments say which.
    assert "Acceptance is imposed" in (tmp_path / "imposed.svg").read_text()
    assert "imposed" not in (tmp_path / "real.svg").read_text()


def test_a_picture_has_a_panel_for_each_number_of_rows(tmp_path: Path) -> None:
    more = [replace(figure, rows=4) for figure in REPORT.figures]
    plot(replace(REPORT, figures=[*REPORT.figures, *more]), tmp_path / "both.svg")
    drawn = (tmp_path / "both.svg").read_text()
    for text in (
        "<!-- 1 row -->",
        "<!-- 4 rows -->",
        "<!-- auto -->",
        "<!-- code -->",
        "<!-- speed against k = 0 -->",
    ):
        assert text in drawn
    plot(REPORT, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_refused_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"--plot a\.gif: the name must end in one of \.png"):
        check_plot(Path("a.gif"))
    honest = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name == "matplotlib":
            raise ImportError(name)
        return honest(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(HeadstartError, match=r"--plot needs matplotlib: pip install matplotlib"):
        check_plot(Path("a.png"))


def test_a_table_is_readable_as_it_is() -> None:
    assert table(["a", "long"], [["1", "2"], ["12345", "6"]]).splitlines() == [
        "| a     | long |",
        "| ----- | ---- |",
        "| 1     | 2    |",
        "| 12345 | 6    |",
    ]
