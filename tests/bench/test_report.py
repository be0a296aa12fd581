"""A report has the same content as Markdown and as JSON."""

import json
from dataclasses import replace

from bench.load_report import LoadMeasurement, LoadReport, Percentiles
from headstart.bench.measurement import Estimate, Measurement
from headstart.bench.plan import BenchPlan, Condition
from headstart.bench.report import BenchReport, table
from headstart.bench.system import SystemInfo

CODE, CHAT = (Condition(name, "batch_size", 1) for name in ("code", "chat"))
SYSTEM = SystemInfo("Linux 6.1", "A processor", 2, 16.0, "cpu", "stock", {"mlx": "0.32"})


def gains(speed: float, **more: Estimate) -> dict[str, Estimate]:
    return {"tokens_per_second": Estimate(speed, speed - 0.1, speed + 0.1), **more}


LOCAL = BenchReport(
    model="some-model",
    machine=SYSTEM,
    plan=BenchPlan(["k=0", "k=2", "k=auto"], ["code", "chat"], "batch_size", [1]),
    measurements=[
        Measurement("k=0", CODE, 3, Estimate(100, 99, 101), {}, 1.0, 10.0, identical=True),
        Measurement("k=2", CODE, 3, Estimate(130, 120, 140), gains(1.3), 2.1, 16.0, 0.7, [0.8, 0.6], True),
        Measurement("k=auto", CODE, 3, Estimate(128, 110, 130), gains(1.28, best_fixed=Estimate(0.98, 0.9, 1)), 2.0),
        Measurement("k=0", CHAT, 3, Estimate(100, 99, 101), {}, 1.0, 10.0, identical=True),
        Measurement("k=2", CHAT, 3, Estimate(70, 60, 80), gains(0.7), 1.5, 20.0, 0.2, [0.2], True),
    ],
)
SHORT = Condition("short", "concurrency", 4)


def load(server: str, speed: float, relative: dict[str, Estimate]) -> LoadMeasurement:
    return LoadMeasurement(
        variant=server,
        condition=SHORT,
        repeats=3,
        tokens_per_second=Estimate(speed, speed - 1, speed + 1),
        requests_per_second=1.5,
        relative=relative,
        tokens_per_round=None,
        acceptance_rate=0.5,
        requests=6,
        errors={"answered 503: full": 2},
        ttft=Percentiles(0.5, 0.6, 0.7),
        itl=Percentiles(0.04, 0.05, 0.06),
        e2e=Percentiles(1.0, 2.0, 3.0),
        completion_tokens=8.0,
        counted={"usage": 3, "chunks": 1},
    )


SERVERS = LoadReport(
    models={"one": "a-model", "other": "a-model"},
    machine=SYSTEM,
    plan=BenchPlan(["one", "other"], ["short"], "concurrency", [4]),
    measurements=[load("one", 10, {}), load("other", 20, gains(2.0, ttft=Estimate(0.5, 0.4, 0.6)))],
)


def cells(markdown: str, *start: str) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if "|" in line]
    return next(row for row in rows if row[: len(start)] == list(start))


def test_markdown_of_depths_has_every_figure_and_what_it_means() -> None:
    text = LOCAL.markdown()
    assert text.startswith(
        "# Benchmark: some-model\n\nMeasured on cpu, kernels: stock · A processor, 2 cores, 16 GB · "
    )
    assert "64 tokens per sequence. Medians of 3 interleaved repeats (lowest–highest)." in text
    assert "- code, batch of 1: k=2 is fastest, 1.30 (1.20–1.40) times the speed without drafts." in text
    assert "- chat, batch of 1: k=2 comes closest: speculation does not pay here, 0.70 (0.60–0.80) times" in text
    assert "auto reaches 98% of the best fixed depth's speed" in text
    assert cells(text, "code", "batch of 1", "k=2") == [
        "code", "batch of 1", "k=2", "130.0 (120.0–140.0)", "1.30 (1.20–1.40)", "", "2.10", "16.0", "80% 60%",
    ]  # fmt: skip
    assert "Positions drafted fewer than 10 times are left out." in text
    assert "- k: the number of tokens drafted per step. k=0 is decoding without drafts.\n" in text
    for word in ("Latency", "Not complete", "Not the tokens", "β", "δ", "to k = 0"):
        assert word not in text


def test_what_is_wrong_with_a_report_comes_first() -> None:
    other = replace(LOCAL.measurements[1], identical=False)
    text = replace(LOCAL, measurements=[LOCAL.measurements[0], other], stopped="interrupted").markdown()
    assert "**Not complete: interrupted**\n\n**Not the tokens of k=0:** k=2, code, batch of 1.\n\n## Result" in text


def test_markdown_of_servers_has_latencies_and_failures() -> None:
    text = SERVERS.markdown()
    assert text.startswith("# Benchmark: one, other\n")
    assert "Model: a-model." in text
    assert cells(text, "short", "4 at a time", "other")[3:5] == ["20.0 (19.0–21.0)", "2.00 (1.90–2.10)"]
    assert "500 / 600 / 700" in text
    assert "40 / 50 / 60" in text
    assert "one does not count its tokens: chunks were counted" in text
    assert "one, 2 of 6 requests failed: answered 503: full" in text
    assert "speculation" not in text


def test_json_has_all_of_it() -> None:
    report = json.loads(json.dumps(LOCAL.as_dict()))
    assert report["model"] == "some-model"
    assert (report["plan"]["variants"], report["plan"]["repeats"]) == (["k=0", "k=2", "k=auto"], 3)
    assert report["stopped"] is None
    assert report["machine"]["versions"] == {"mlx": "0.32"}
    drafted = report["measurements"][1]
    assert drafted["variant"] == "k=2"
    assert drafted["condition"] == {"prompts": "code", "load": "batch_size", "value": 1}
    assert drafted["relative"]["tokens_per_second"]["median"] == 1.3
    servers = json.loads(json.dumps(SERVERS.as_dict()))["measurements"]
    assert [(each["variant"], each["condition"]["value"]) for each in servers] == [("one", 4), ("other", 4)]
    assert servers[0]["ttft"] == {"p50": 0.5, "p95": 0.6, "p99": 0.7}


def test_a_table_is_readable_as_it_is_and_has_no_empty_columns() -> None:
    assert table(["a", "empty", "long"], [["1", "", "2"], ["12345", "", "6"]]).splitlines() == [
        "| a     | long |",
        "| ----- | ---- |",
        "| 1     | 2    |",
        "| 12345 | 6    |",
    ]
