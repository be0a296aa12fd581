"""`headstart probe`: what it prints and writes, and its exit status."""

import json
import socket
from pathlib import Path

import mlx.core as mx
import pytest
from typer.testing import CliRunner, Result

from checkpoints import write
from headstart.bench import probe as probe_module
from headstart.checkpoint import read_layout, resolve
from headstart.checkpoint.convert import SIDECAR, convert, plan_conversion
from headstart.checkpoint.quantize import Recipe
from headstart.cli.main import app

PROMISED = [
    "passed", "identical", "first_divergence", "acceptance_by_position", "tokens_per_round", "cost_by_k", "best_k",
    "faults",
]  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "TIMED_TOKENS", 12)


def probe(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["probe", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_builtin_model_passes_and_the_page_has_no_private_names(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    result = probe("--k", 1, "--tokens", 16, "--output", page)
    assert result.exit_code == 0, result.output
    for text in (result.stdout, page.read_text()):
        assert "tiny-qwen3.5" in text
        assert "Every answer is that of plain decoding, at k = 1 to 1 and auto." in text
        assert text.rstrip().endswith("- Passed.")
    assert result.stdout == page.read_text()
    first, plan, *steps = result.stderr.splitlines()
    assert first == "No model given: probing the small built-in one. Name a model to probe yours."
    assert steps[0] == "0 of 6 steps: comparing kernels on single tokens and windows"
    assert plan.startswith("Probing tiny-qwen3.5: decoding 4 prompts of 16 tokens at k=0 to 1 and auto, checking")
    written = page.read_text()
    assert written.startswith("# Probe of tiny-qwen3.5: passed\n")
    assert "| k " in written
    assert "kernels: " in written
    assert "- k: the number of tokens drafted per step." in written
    assert "mlx-lm " in written
    for private in (str(tmp_path), str(resolve(None)), str(Path.home()), socket.gethostname()):
        assert private not in written


@pytest.mark.slow
def test_a_stored_fault_fails_and_is_named_with_the_way_out(tmp_path: Path) -> None:
    folder, page = tmp_path / "model", tmp_path / "page.md"
    convert(plan_conversion(read_layout(resolve(None)), folder, Recipe(mx.bfloat16)))
    head = str(folder / SIDECAR)
    tensors, metadata = mx.load(head, return_metadata=True)
    twice = {name: array + 1 if "norm" in name else array for name, array in tensors.items()}
    mx.save_safetensors(head, twice, metadata)

    result = probe(folder, "--k", 1, "--json", "--output", page)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert list(report)[: len(PROMISED)] == PROMISED
    assert (report["passed"], report["identical"], report["first_divergence"]) == (False, True, None)
    (fault,) = report["faults"]
    assert (fault["name"], fault["where"]) == ("norms_shifted_twice", "all norms")
    assert fault["acceptance_rate"] < fault["repaired_acceptance_rate"]
    assert f"Delete {SIDECAR}" in report["remedy"]
    assert "headstart graft MODEL --from" in report["remedy"]
    assert list(report["cost_by_k"]) == ["0", "1"]
    assert list(report["tokens_per_round"]) == ["0", "1", "auto"]
    assert len(report["acceptance_by_position"]) == 1
    assert "norms_shifted_twice" in page.read_text()
    assert page.read_text().rstrip().endswith("- Failed.")


def test_the_error_for_a_model_without_a_head_says_how_to_get_one(tmp_path: Path) -> None:
    write(tmp_path, "dense", "stripped")
    result = probe(tmp_path)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "no head to probe: config.json promises an MTP head but no file holds it" in line
    assert f"headstart graft {tmp_path}" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "9"], "--k is 9; this probe can draft 1 to 8"),
        (["--tokens", "2"], "--tokens is 2"),
        (["--output", "nowhere/page.md"], "--output nowhere/page.md: cannot be written"),
    ],
)
def test_what_cannot_be_done_is_one_line_before_a_model_is_looked_for(arguments: list[str], message: str) -> None:
    result = probe("no-such-model", *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")
