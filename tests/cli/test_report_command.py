"""`headstart report`: all parts, nothing private, and a part that fails does not take the others along."""

import getpass
import logging
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from checkpoints import write
from headstart.bench import kernel_times, machine_report
from headstart.bench.machine_costs import check_facts, settings
from headstart.bench.machine_report import MachineReport, report_machine
from headstart.bench.time_limit import WHOLE, TimeLimit, ended_if_it_hangs
from headstart.checkpoint import resolve
from headstart.cli.main import app
from headstart.kernels.checks import Candidate, KernelCheck

TITLES = [
    "# Headstart report",
    "## Device",
    "## Memory",
    "## tiny-qwen3.5",
    "### tiny-qwen3.5: decoding",
    "### tiny-qwen3.5: kernels",
    "### tiny-qwen3.5: costs",
    "## Warnings and errors",
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
    wrong = kernel_times.KernelTime("product", "8×8", "stock", True, others="metal: failed: x", failed=True)
    monkeypatch.setattr(machine_report, "kernel_times", lambda model, progress: [wrong])
    monkeypatch.setattr(machine_report, "current_load", lambda: 1 // 0)
    monkeypatch.setenv("HEADSTART_MTP", "0")  # few depths to measure
    result = report()
    assert result.exit_code == 1
    failed = "load before, tiny-qwen3.5, kernels (product 8×8), Load and thermal state"
    assert f"**Failed: {failed}.**" in result.stdout
    assert "metal: failed: x" in result.stdout


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
    for fact in ("settings", "CPU time to describe a step", "peak memory", "a sequence of 32,768 tokens"):
        assert f"\n| {fact} " in text
    plan, first, *_ = result.stderr.splitlines()
    assert plan.startswith(
        "About a minute for tiny-qwen3.5; at most 5 minutes, and what is not finished then says so."
    )
    last = result.stderr.splitlines()[-1]
    assert last.startswith(
        f"Read it, then paste the file {page} into a new issue of the project, of the kind *Report"
    )
    assert f"0 of {machine_report.STEPS} steps: tiny-qwen3.5: loading" in first
    private = (str(tmp_path), str(resolve(None)), str(Path.home()), socket.gethostname(), getpass.getuser())
    for name in private:
        assert not re.search(rf"\b{re.escape(name)}\b", text)


def test_a_named_model_is_measured_too_and_may_have_no_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_MTP", "0")
    folder = write(tmp_path / "ada" / "mine", "dense", "stripped", vocab_size=8192)
    result = report(folder)
    assert result.exit_code == 0, result.output
    assert titles(result.stdout) == [
        *TITLES[:7], "## mine", "### mine: decoding", "### mine: kernels", "### mine: costs", *TITLES[7:]
    ]  # fmt: skip
    without = r"No drafts: [^.]+\. Without them [\d.]+ tokens/s, one sequence\."
    assert len(re.findall(without, result.stdout)) == 2
    assert "and what it takes for mine (0.0 GB); at most 5 minutes" in result.stderr
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
    assert titles(result.stdout) == [*TITLES[:7], "## untold", *TITLES[7:]]
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


class SlowDevice:
    """A device that takes so many seconds for each thing that a report does."""

    def __init__(self, seconds: float):
        self.seconds, self.now = seconds, 0.0

    def clock(self) -> float:
        return self.now

    def begin(self, doing: str) -> None:
        self.now += self.seconds


def slow_report(seconds: float, *names: str) -> tuple[MachineReport, float]:
    device = SlowDevice(seconds)
    made = MachineReport(device.begin, TimeLimit(clock=device.clock))
    report_machine(made, [(name, resolve(None)) for name in names])
    return made, device.now


def test_on_a_slow_device_fewer_prompts_are_decoded() -> None:
    made, took = slow_report(9.0, "slow")
    text = made.markdown()
    assert not made.failed
    assert "## slow: decoding" in text
    assert "the same greedy tokens in all 12 answers" in text, "three prompts of four"
    assert took <= WHOLE


def test_a_part_that_takes_too_long_is_named_and_the_others_still_print() -> None:
    made, took = slow_report(70.0, "slower", "slowest")
    assert not made.failed
    assert made.unfinished[0] == "slower: decoding"
    text = made.markdown()
    assert "Nothing failed. Out of time: slower: decoding, " in text
    assert "**No figures: not finished in the time that it may take.**" in text
    assert "**No figures: left out: 300 s are over.**" in text
    assert "## Load and thermal state\n\n| what " in text
    assert took <= WHOLE + 70, "what runs is not interrupted"


def test_a_part_that_hangs_ends_with_what_there_is() -> None:
    said: list[str] = []
    ended: list[int] = []
    made = MachineReport(lambda doing: None, TimeLimit(whole=0.0))
    made.parts += ["## Device", "a Mac"]
    with ended_if_it_hangs(made.limit, lambda: said.append(made.hung().markdown()), ended.append, grace=0.0):
        while not ended:
            pass
    assert ended == [1]
    assert "**Failed: a part that hangs, after Device.**" in said[0]


def test_warnings_while_it_measures_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def recovered(*arguments: object, **named: object) -> None:
        logging.getLogger("headstart").warning("the GPU's driver ended a command")
        raise OSError("gone")

    monkeypatch.setattr(machine_report, "decode_depths", recovered)
    made, _ = slow_report(0.0, "tiny")
    assert "## Warnings and errors\n\n- warning: the GPU's driver ended a command\n" in made.markdown()


def test_what_the_check_of_kernels_took_is_told() -> None:
    few = "failed: Thread group size (512) is greater than  the maximum allowed threads per threadgroup (448)."
    ours = Candidate("metal", few, first=0.25)
    new = KernelCheck("norm", "64", "stock", True, (Candidate("stock", first=0.5), ours))
    facts = check_facts([new, replace(new, shape="65", candidates=(), kept=True)])
    assert facts == {
        "kernels checked": "1 now, whose first runs, with compiling, took 0.8 s; 1 of 2 choices from the cache",
        "threads of a pipeline": "512 are asked for, the pipeline takes 448",
    }
    assert check_facts([]) == {}
    assert settings({"MLX_MAX_OPS_PER_BUFFER": "50", "AGX_X": "1", "HEADSTART_API_KEY": "secret", "HOME": "/x"}) == (
        "AGX_X=1, MLX_MAX_OPS_PER_BUFFER=50"
    )


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
