"""`headstart probe`: what it prints and writes, and its exit status."""

import json
import socket
from pathlib import Path

import mlx.core as mx
import pytest
from typer.testing import CliRunner, Result

from checkpoints import write
from headstart.checkpoint import read_layout, resolve
from headstart.checkpoint.convert import SIDECAR, convert, plan_conversion
from headstart.checkpoint.quantize import Recipe
from headstart.cli.main import app

PROMISED = {
    "passed", "identical", "first_divergence", "acceptance_by_position", "tokens_per_round", "cost_by_k", "best_k",
}  # fmt: skip


def probe(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["probe", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_builtin_model_passes_and_the_page_has_no_private_names(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    result = probe("--k", 1, "--tokens", 20, "--output", page)
    assert result.exit_code == 0, result.output
    for text in (result.stdout, page.read_text()):
        assert "tiny-qwen3.5" in text
        assert "Every answer is that of plain decoding, at k = 1 to 1 and auto." in text
        assert text.rstrip().endswith("- Passed.")
    assert result.stdout == page.read_text()
    first, plan, *steps = result.stderr.splitlines()
    assert first == "No model given: probing the small built-in one. Name a model to probe yours."
    assert plan == "Probing tiny-qwen3.5: 15 runs of 20 tokens, at k=0 to 1 and auto."
    assert steps[0] == "0 of 15 runs: warming up, k=0"
    assert steps[1].startswith("1 of 15 runs, about ")
    written = page.read_text()
    assert written.startswith("# Probe of tiny-qwen3.5: passed\n")
    assert "| k " in written
    assert "kernels: " in written
    assert "- k: the number of tokens drafted per step." in written
    assert "mlx-lm " in written
    for private in (str(tmp_path), str(resolve(None)), str(Path.home()), socket.gethostname()):
        assert private not in written


def test_a_damaged_head_fails_with_the_way_out(tmp_path: Path) -> None:
    folder, page = tmp_path / "model", tmp_path / "page.md"
    raw = write(tmp_path / "raw", "dense", vocab_size=8192)
    convert(plan_conversion(read_layout(raw), folder, Recipe(mx.bfloat16)))
    head = str(folder / SIDECAR)
    tensors, metadata = mx.load(head, return_metadata=True)
    mx.save_safetensors(head, {name: mx.zeros_like(array) for name, array in tensors.items()}, metadata)

    result = probe(folder, "--k", 1, "--tokens", 20, "--json", "--output", page)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert set(report) >= PROMISED
    assert (report["passed"], report["identical"], report["first_divergence"]) == (False, True, None)
    assert report["first_draft_acceptance"] < 0.1
    assert f"Delete {SIDECAR}" in report["remedy"]
    assert "headstart graft MODEL --from" in report["remedy"]
    assert list(report["cost_by_k"]) == ["0", "1"]
    assert list(report["tokens_per_round"]) == ["0", "1", "auto"]
    assert len(report["acceptance_by_position"]) == 1
    assert "Its weights are damaged or belong to another model." in page.read_text()
    assert report["remedy"] in page.read_text()
    assert page.read_text().rstrip().endswith("- Failed.")


def test_the_error_for_a_model_without_a_head_names_the_remedy(tmp_path: Path) -> None:
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
        (["--k", "16"], "Invalid value for '--k': Input should be less than or equal to 15"),
        (["--tokens", "2"], "Input should be greater than or equal to 20"),
        (["--output", "nowhere/page.md"], "--output nowhere/page.md: cannot be written"),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_model_is_searched(arguments: list[str], message: str) -> None:
    result = probe("no-such-model", *arguments)
    assert result.exit_code != 0
    assert result.stdout == ""
    assert message in result.stderr
    assert "no-such-model" not in result.stderr
