"""`headstart report`: all parts, nothing private, and a part that fails does not take the others along."""

import getpass
import re
import socket
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from checkpoints import write
from headstart.bench import kernel_times, machine_report
from headstart.bench.machine_report import MachineReport
from headstart.checkpoint import resolve
from headstart.cli.main import app

TITLES = [
    "# Headstart report",
    "## Device",
    "## Memory",
    "## tiny-qwen3.5",
    "### tiny-qwen3.5: decoding",
    "### tiny-qwen3.5: kernels",
    "## Load and thermal state",
]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_report, "DEEPEST", 1)
    monkeypatch.setattr(machine_report, "TOKENS", 16)
    monkeypatch.setattr(kernel_times, "REPEATS", 1)


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "200"})


def titles(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#")]


def test_a_kernel_that_failed_and_an_unknown_load_are_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = kernel_times.KernelTime("product", "8×8", "stock", True, others="metal-split: failed: x", failed=True)
    monkeypatch.setattr(machine_report, "kernel_times", lambda model: [wrong])
    monkeypatch.setattr(machine_report, "current_load", lambda: 1 // 0)
    monkeypatch.setenv("HEADSTART_MTP", "0")  # few depths to measure
    result = report()
    assert result.exit_code == 1
    failed = "load before, tiny-qwen3.5, kernels (product 8×8), Load and thermal state"
    assert f"**Failed: {failed}.**" in result.stdout
    assert "metal-split: failed: x" in result.stdout


def test_a_report_has_every_part_and_no_private_name(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    result = report("--output", page)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert text == page.read_text()
    assert titles(text) == TITLES
    assert re.search(r"^\d{4}-\d\d-\d\d\. Nothing failed\.$", text, re.MULTILINE)
    for fact in ("processor", "kernels", "headstart", "mlx-lm", "python", "left for Headstart", "computed in"):
        assert f"\n| {fact} " in text
    exact = "**Exactness: the same greedy tokens in all 16 answers**; the same tokens are promised"
    assert f"{exact} (k = 0 to 1 and auto alone, k = 0 and 1 in a batch of 4)." in text
    assert "first drafts are accepted." in text
    for operation in ("gated delta net", "attention", "feed-forward", "product"):
        assert re.search(rf"^\| {operation} .*\| (ours|stock) +\| yes ", text, re.MULTILINE)
    plan, first, *_ = result.stderr.splitlines()
    assert plan.startswith("Measuring kernels, and decoding at k = 0 to 4, alone and in a batch: about a minute for")
    assert f"0 of {machine_report.STEPS} steps: tiny-qwen3.5: loading" in first
    private = (str(tmp_path), str(resolve(None)), str(Path.home()), socket.gethostname(), getpass.getuser())
    for name in private:
        assert not re.search(rf"\b{re.escape(name)}\b", text)


def test_a_named_model_is_measured_too_and_may_have_no_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_MTP", "0")
    folder = write(tmp_path / "ada" / "mine", "dense", "stripped", vocab_size=8192)
    result = report(folder)
    assert result.exit_code == 0, result.output
    assert titles(result.stdout) == [*TITLES[:6], "## mine", "### mine: decoding", "### mine: kernels", TITLES[6]]
    without = r"No drafts: [^.]+\. Without them [\d.]+ tokens/s, one sequence\."
    assert len(re.findall(without, result.stdout)) == 2
    assert "for mine (0.0 GB) as long as decoding 1,200 tokens one by one" in result.stderr
    assert "ada" not in result.stdout


def test_a_part_that_fails_is_reported_and_the_others_still_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise OSError(f"{Path.home()}/notes/kernel.metal: does not compile")

    monkeypatch.setattr(machine_report, "decode_depths", broken)
    folder = write(tmp_path / "untold", "dense")
    (folder / "tokenizer.json").write_text("{")
    result = report(folder)
    assert result.exit_code == 1
    assert titles(result.stdout) == [*TITLES[:6], "## untold", TITLES[6]]
    assert "**Failed: tiny-qwen3.5: decoding, untold.**" in result.stdout
    assert "**Failed.** OSError: ~/notes/kernel.metal: does not compile" in result.stdout
    assert "**Failed.** CheckpointError: …/untold: no usable tokenizer" in result.stdout
    assert "| gated delta net |" in result.stdout
    assert str(Path.home()) not in result.stdout
    assert str(tmp_path) not in result.stdout


def test_ctrl_c_prints_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(report: MachineReport, models: object) -> None:
        report.add("## Device", lambda: "a Mac")
        raise KeyboardInterrupt

    monkeypatch.setattr(machine_report, "report_machine", interrupted)
    result = report()
    assert result.exit_code == 130
    assert "**Failed: interrupted.**\n\n## Device\n\na Mac\n" in result.stdout


def test_what_cannot_be_done_is_one_line_before_anything_is_measured() -> None:
    for arguments, message in (
        (["no-such-model"], "error: no-such-model"),
        (["--output", "nowhere/page.md"], "error: --output nowhere/page.md: cannot be written"),
    ):
        result = report(*arguments)
        assert result.exit_code == 1
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith(message)


GITHUB = Path(__file__).parents[2] / ".github"


@pytest.mark.skipif(not GITHUB.exists(), reason="not a clone of the repository")
def test_issues_ask_for_it_and_a_workflow_keeps_one_of_a_mac() -> None:
    templates = [yaml.safe_load(path.read_text()) for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml")]
    assert len(templates) == 2
    for template in templates:
        (asked,) = [field for field in template["body"] if field["id"] == "report"]
        assert "`headstart report" in asked["attributes"]["description"]
        assert asked["validations"]["required"]
    workflow = (GITHUB / "workflows/macos.yml").read_text()
    steps = yaml.safe_load(workflow)["jobs"]["macos"]["steps"]
    assert any("headstart report tiny-qwen3.5-moe --output report.md" in step.get("run", "") for step in steps)
    assert any(step.get("with", {}).get("path") == "report.md" for step in steps)
    assert workflow.startswith("# Never run so far")
