"""`headstart draft-vocabulary` writes the list that a model is loaded with."""

import shutil
from pathlib import Path

from typer.testing import CliRunner

from headstart.checkpoint import load_model, load_tokenizer, resolve
from headstart.cli.main import app


def test_a_list_is_chosen_from_a_text_and_used(tmp_path: Path) -> None:
    folder, text = tmp_path / "model", tmp_path / "text.py"
    shutil.copytree(resolve(None), folder)
    text.write_text("def add(a, b):\n    return a + b\n" * 3)
    result = CliRunner().invoke(app, ["draft-vocabulary", str(folder), "--size", "64"])
    assert "64 of 8192 tokens, lowest ids (not measured)" in result.output
    listed = load_model(folder).draft_vocabulary
    assert listed is not None
    assert listed.tokens == frozenset(range(64))
    result = CliRunner().invoke(app, ["draft-vocabulary", str(folder), "--size", "64", "--text", str(text)])
    assert "64 of 8192 tokens, frequencies of 36 tokens" in result.output
    listed = load_model(folder).draft_vocabulary
    assert listed is not None
    assert set(load_tokenizer(folder).encode(text.read_text())) <= listed.tokens
    for wrong, why in ((["--size", "9000"], "Use a smaller --size"), (["--text", "none", "--size", "9"], "none: ")):
        result = CliRunner().invoke(app, ["draft-vocabulary", str(folder), *wrong])
        assert result.exit_code == 1
        assert why in result.output
