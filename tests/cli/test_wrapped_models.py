"""Every command with a model that mlx-lm runs: it works, or the refusal says why."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headstart.cli.main import app
from others import write_other


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_other(tmp_path_factory.mktemp("model") / "tiny-lfm2", "lfm2")


def run(*arguments: str | Path, **how: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], **how)  # type: ignore[arg-type]


def test_inspect_says_whose_forward_runs_it(folder: Path) -> None:
    report = json.loads(run("inspect", folder, "--json").stdout)
    assert (report["family"], report["layout"], report["forward"]) == ("lfm2", "converted", "mlx-lm")
    assert report["parameters"] == report["bytes"] // 4 > 0
    assert "mlx-lm's own forward runs lfm2 models" in report["native_mtp"]["reason"]
    assert "mlx-lm" in run("inspect", folder).stdout


def test_generate_and_chat_answer(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = json.loads(run("generate", folder, "-p", "Hello", "-n", "5", "--json").stdout)
    assert len(made["tokens"]) == 5
    assert "mlx-lm's own forward runs lfm2 models, in batches, without drafts" in caplog.text
    said = run("chat", folder, "-n", "5", input="Hello\n")
    assert said.exit_code == 0, said.output


def test_bench_measures(folder: Path) -> None:
    made = run("bench", folder, "--k", "0,auto", "--tokens", "20", "--repeats", "1", "--prompts", "code", "--json")
    assert made.exit_code == 0, made.output


@pytest.mark.parametrize(
    ("command", "because"),
    [
        (["convert", "{}", "{}-converted", "--bits", "4"], "mlx_lm.convert"),
        (["graft", "{}", "--from", "tiny-qwen3.5"], "which mlx-lm runs"),
        (["train-head", "{}", "-o", "{}-head"], "no head is trained for lfm2"),
        (["probe", "{}"], "no head to probe"),
    ],
)
def test_what_has_no_meaning_for_it_is_refused_in_one_line(command: list[str], because: str, folder: Path) -> None:
    refused = run(*(part.format(folder) for part in command))
    assert refused.exit_code == 1
    assert because in refused.output
    assert "Traceback" not in refused.output


def test_what_neither_runs_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    for model_type in ("no_such_model", "../../etc", "olmo", "base"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        refused = run("inspect", tmp_path)
        assert refused.exit_code == 1
        assert f"model_type {model_type!r} is unknown" in refused.output


def test_code_that_comes_with_a_model_is_never_run(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_file": "evil.py"}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    refused = run("generate", tmp_path, "-p", "Hello")
    assert refused.exit_code == 1
    assert "never run" in refused.output
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"hidden_size": 48}, "mlx-lm cannot load it"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"vocab_size": "many"}, "mlx-lm cannot load it"),
        ({"quantization": 4}, "quantization is 4; it must be a JSON object"),
    ],
)
def test_a_damaged_config_is_one_line(changes: dict[str, object], because: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    refused = run("generate", tmp_path, "-p", "Hello")
    assert refused.exit_code == 1
    assert because in refused.output
    assert len(refused.stderr.strip().splitlines()) == 1


def test_a_truncated_file_is_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    refused = run("generate", tmp_path, "-p", "Hello")
    assert refused.exit_code == 1
    assert "not a safetensors file, or truncated" in refused.output
