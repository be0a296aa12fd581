"""The commands that write checkpoints print what they will do, do it, and name what is wrong in one line."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpoints import write
from headstart.checkpoint import read_layout
from headstart.checkpoint.layout import base_model_id
from headstart.cli.main import app
from headstart.errors import HubError
from loopback_hub import Hub, running_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def error(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_convert_and_graft(tmp_path: Path) -> None:
    raw, out = write(tmp_path / "raw", "moe"), tmp_path / "out"
    shown = run("convert", str(raw), str(out), "--bits", "4", "--dtype", "float16")
    assert "MTP head: 8 bits, mtp.fc and norms kept." in shown
    layout = read_layout(out)
    assert layout.quantization == {"bits": 4, "group_size": 64, "mode": "affine"}
    assert (layout.dtype, layout.mtp.available) == ("float16", True)
    kept = (out / "mtp/weights.safetensors").read_bytes()
    (out / "mtp/weights.safetensors").unlink()
    run("graft", str(out), "--from", str(raw))
    assert (out / "mtp/weights.safetensors").read_bytes() == kept


def test_a_dry_run_shows_files_and_sizes_and_writes_nothing(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "dense")
    shown = run("convert", str(raw), str(tmp_path / "dry"), "--mtp-bits", "keep", "--dry-run")
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]
    run("convert", str(raw), str(tmp_path / "out"), "--mtp-bits", "keep")
    written = {str(f.relative_to(tmp_path / "out")): f for f in (tmp_path / "out").rglob("*.safetensors")}
    lines = {line.split()[0]: line.split()[-1] for line in shown.splitlines() if line}
    assert written.keys() < lines.keys()
    for name, file in written.items():
        assert 0 < file.stat().st_size - int(lines[name].replace(",", "")) < 20_000  # the header
    assert "kept as it is" in shown

    lost = write(tmp_path / "lost", "dense", "stripped")
    assert "mtp/weights.safetensors" in run("graft", str(lost), "--from", str(raw), "--dry-run")
    assert not read_layout(lost).mtp.available


def test_of_a_hub_model_a_dry_run_downloads_no_weights(tmp_path: Path, hub: Hub) -> None:
    hub.models["org/model"] = raw = write(tmp_path / "raw", "dense", shards=3)
    (raw / "LICENSE").write_text("Do as you like.\n")
    size = sum(file.stat().st_size for file in raw.glob("*.safetensors"))
    shown = run("convert", "org/model", str(tmp_path / "out"), "--dry-run")
    assert f"org/model: 3 files, {size:,} bytes would be downloaded first." in shown
    assert not [file for file in hub.downloaded if file.endswith(".safetensors")]
    hub.models["org/lost"] = lost = write(tmp_path / "lost", "dense", "stripped")
    size = sum(file.stat().st_size for file in lost.glob("*.safetensors"))
    shown = run("graft", "org/lost", "--from", "org/model", "--dry-run")
    assert f"{size:,} bytes would be downloaded first." in shown
    assert "not available" in run("inspect", "org/lost")
    assert not [file for file in hub.downloaded if file.endswith(".safetensors")]
    shown = run("convert", "org/model", str(tmp_path / "out"))
    assert "Downloading org/model: 3 files, " in shown
    assert read_layout(tmp_path / "out").mtp.available
    assert "base_model: org/model" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "LICENSE").read_text() == "Do as you like.\n"


@pytest.mark.parametrize("command", ["generate", "bench", "probe", "serve"])
def test_the_size_of_a_download_is_shown_before_it_begins(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    hub.models["org/model"] = raw = write(tmp_path / "raw", "dense", shards=3)
    size = sum(file.stat().st_size for file in raw.glob("*.safetensors"))

    def stop(repo: str, folder: Path, files: dict[str, int]) -> None:
        raise HubError("far enough")

    monkeypatch.setattr("headstart.checkpoint.hub.download_files", stop)
    more = {"generate": ["-p", "Hello"], "serve": ["--port", "0"]}.get(command, [])
    result = CliRunner().invoke(app, [command, "org/model", *more])
    assert result.stderr.splitlines()[-2:] == [
        f"Downloading org/model: 3 files, {size:,} bytes.",
        "error: far enough",
    ]


@pytest.mark.parametrize(
    ("folder", "readme", "base"),
    [
        ("Qwen3.5-0.8B", None, "Qwen/Qwen3.5-0.8B"),
        ("Qwen3.5-0.8B", "Qwen/Qwen3.5-0.8B-Base", "Qwen/Qwen3.5-0.8B"),  # of the release, not of the conversion
        ("Qwen3.5-0.8B-tuned", None, None),  # not the model that it was tuned from
        ("tuned", "Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-0.8B"),
        ("Qwen3.5-0.8B-tuned", "me/tuned-before", "me/tuned-before"),
    ],
)
def test_a_conversion_claims_no_other_original_than_it_has(
    tmp_path: Path, folder: str, readme: str | None, base: str | None
) -> None:
    raw, out = write(tmp_path / folder, "dense"), tmp_path / "out"
    if readme:
        (raw / "README.md").write_text(f"---\nbase_model: {readme}\n---\n")
    run("convert", str(raw), str(out))
    assert base_model_id(out) == base
    name = base if folder == "Qwen3.5-0.8B" else folder
    assert f"{name}, converted to MLX by headstart" in (out / "README.md").read_text()


@pytest.mark.parametrize("family", ["dense", "next"])
def test_a_head_that_config_did_not_promise_drafts_once_it_is_converted(tmp_path: Path, family: str) -> None:
    raw, out = write(tmp_path / "raw", family), tmp_path / "out"
    config = json.loads((raw / "config.json").read_text())
    for field in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        config.get("text_config", config).pop(field, None)
    (raw / "config.json").write_text(json.dumps(config))
    field = "num_nextn_predict_layers" if family == "next" else "mtp_num_hidden_layers"
    message = error("probe", str(raw))
    assert "neither the model card nor config.json declares an MTP head" in message
    assert f"Declare it in config.json, `{field}`: 1." in message
    assert "MTP head: kept as it is." in run("convert", str(raw), str(out))
    assert read_layout(out).dispatch(mtp=True).drafts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "7"], "7 bits"),
        (["--mtp-bits", "some"], "--mtp-bits some: say keep, or one of 1, 2"),
        (["--group-size", "5"], "groups of 5"),
        (["--bits", "4", "--mix", "mine"], "mine: say keep, a number of bits"),
    ],
)
def test_wrong_options_are_named_before_the_source_is_searched(
    tmp_path: Path, options: list[str], message: str
) -> None:
    assert message in error("convert", "no/such", str(tmp_path / "out"), *options)


def test_an_unknown_group_size_is_named_before_the_model_is_searched() -> None:
    assert "groups of 48" in error("graft", "no/such", "--group-size", "48")


def test_a_type_that_there_is_not_is_no_command_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["convert", "no/such", str(tmp_path / "out"), "--dtype", "int8"])
    assert result.exit_code == 2
    assert "bfloat16" in result.stderr


def test_errors_are_one_line(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "dense")
    assert "exists already" in error("convert", str(raw), str(raw))
    assert "no such folder" in error("convert", str(tmp_path / "nowhere"), str(tmp_path / "out"))
    assert "not converted to MLX" in error("graft", str(raw), "--from", str(raw))


def test_models_lists_what_is_here_and_what_is_known(tmp_path: Path, hub: Hub) -> None:
    from headstart.checkpoint import resolve

    hub.models["org/model"] = write(tmp_path / "model", "dense")
    hub.models["mlx-community/Qwen3.5-0.8B-4bit"] = write(tmp_path / "stripped", "dense", "stripped", bits=4)
    for name in hub.models:
        resolve(name)
    listed = json.loads(run("list", "--json"))
    here = {model["id"]: model for model in listed["on_disk"]}
    assert here.keys() == {"tiny-qwen3.5", "tiny-qwen3.5-moe", *hub.models}
    assert here["tiny-qwen3.5"]["native_mtp"] == {"available": True, "reason": None, "default_k": 2, "max_k": 8}
    assert (here["org/model"]["native_mtp"]["available"], here["org/model"]["card"]) == (True, None)
    lost = here["mlx-community/Qwen3.5-0.8B-4bit"]
    head = lost["native_mtp"]
    assert (head["available"], lost["card"], head["default_k"]) == (False, "Qwen3.5-0.8B", 0)
    assert "--from Qwen/Qwen3.5-0.8B" in head["reason"]
    known = {card["name"]: card for card in listed["known"]}
    assert "Qwen3.5-0.8B" not in known
    head = known["Qwen3.6-27B"]["native_mtp"]
    assert head == {"num_layers": 1, "default_k": 2, "max_k": 5, "acceptance": []}, "no measured one"

    (next((tmp_path / "cache").rglob("snapshots/*/model-00001-of-00002.safetensors"))).unlink()
    shown = run("list")
    for word in ("tiny-qwen3.5", "usable", "Qwen/Qwen3.6-27B", "397B, 17B active"):
        assert word in shown
    assert any(model["problem"] for model in json.loads(run("list", "--json"))["on_disk"])


def test_models_in_folders_are_listed_where_they_are_named(tmp_path: Path, hub: Hub) -> None:
    one, two = write(tmp_path / "mine" / "one", "dense"), write(tmp_path / "mine" / "two", "dense", "stripped")
    (tmp_path / "mine" / "notes").mkdir()
    here = {model["id"]: model for model in json.loads(run("list", str(tmp_path / "mine"), "--json"))["on_disk"]}
    assert here.keys() == {"tiny-qwen3.5", "tiny-qwen3.5-moe", str(one), str(two)}
    assert [here[str(path)]["native_mtp"]["available"] for path in (one, two)] == [True, False]
    assert str(one) in [model["id"] for model in json.loads(run("list", str(one), "--json"))["on_disk"]]
    assert "no model, and no folder of a model in it" in error("list", str(tmp_path / "mine" / "notes"))
    assert "no such folder" in error("list", str(tmp_path / "nowhere"))
    (publisher := tmp_path / "models" / "publisher").parent.mkdir()
    (tmp_path / "mine").rename(publisher)  # as LM Studio has them
    listed = json.loads(run("list", str(publisher.parent), "--json"))["on_disk"]
    assert [model["id"] for model in listed[-2:]] == [str(publisher / "one"), str(publisher / "two")]
    told = f"this is not a model folder. It holds models: name them, for example {publisher}"
    assert f"{told}/one." in error("inspect", str(publisher.parent))
