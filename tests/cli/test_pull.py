"""`headstart pull` and `headstart remove`, against a hub on loopback."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpoints import write
from headstart.checkpoint import local, read_layout, resolve
from headstart.cli.main import app
from loopback_hub import Hub, running_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(monkeypatch, tmp_path / "cache") as hub:
        hub.models["org/model"] = write(tmp_path / "model", "dense")
        yield hub


def run(*arguments: str, code: int = 0, text: str | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), input=text)
    assert result.exit_code == code, result.output
    return result.output


def test_a_model_is_downloaded_listed_and_removed(hub: Hub, tmp_path: Path) -> None:
    pulled = run("pull", "org/model")
    assert "Downloading org/model: 2 files" in pulled
    assert "its head drafts up to 8 tokens" in pulled
    assert read_layout(resolve("org/model")).mtp.available
    assert "org/model" in run("list")
    requests = hub.requests
    assert "Downloading" not in run("pull", "org/model")
    assert hub.requests == requests
    assert "Delete org/model, 0.00 GB?" in run("remove", "org/model", code=1, text="n\n")
    assert "org/model" in run("list")
    assert "freed" in run("remove", "model", "--yes")
    assert not list((tmp_path / "cache").glob("models--*"))
    assert "not in " in run("remove", "org/model", code=1)


def test_run_downloads_what_is_not_there_and_answers(hub: Hub) -> None:
    hub.models["org/small"] = resolve("tiny-qwen3.5-moe")
    for downloads in (True, False):
        result = CliRunner().invoke(app, ["run", "org/small", "Hello", "-n", "4"])
        assert result.exit_code == 0, result.output
        assert ("Downloading org/small" in result.output) == downloads
        assert result.stdout.strip()


def test_only_downloaded_models_are_removed(hub: Hub, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", "dense")
    assert f"Delete the folder {folder} yourself" in run("remove", str(folder), "--yes", code=1)
    assert "It comes with Headstart, and stays." in run("remove", "tiny-qwen3.5", "--yes", code=1)
    assert read_layout(folder)


def test_a_built_in_model_has_nothing_to_download() -> None:
    told = run("pull", "tiny-qwen3.5")
    assert told.startswith("tiny-qwen3.5: nothing to download: it is the folder /")
    assert told.count("\n") == 1


def test_a_model_that_is_only_looked_at_is_not_said_to_be_downloaded(hub: Hub) -> None:
    told = run("inspect", "no/such", code=1)
    assert told.startswith("error: no/such: could not be read from http://127.0.0.1")
    assert "download" not in told


MISTYPED = ["org/a..b", "org/-bad-", "org/a--b", "org/model.", ".org/model", "org/model.git", f"org/{'a' * 97}",
            f"org/{'a' * 300}", f"{'a' * 97}/model"]  # fmt: skip


@pytest.mark.parametrize("command", ["pull", "inspect", "remove"])
@pytest.mark.parametrize("name", MISTYPED, ids=lambda name: name[:12])
def test_a_mistyped_id_is_one_line_and_asks_nobody(hub: Hub, command: str, name: str) -> None:
    told = run(command, name, code=1)
    assert told.startswith(f"error: {name}: ")
    assert told.count("\n") == 1
    assert hub.requests == 0
    if command != "remove":
        assert "not a hub id (org/name)" in told


@pytest.mark.parametrize("prefix", ["https://huggingface.co/", "huggingface.co/", "hf.co/"])
def test_an_address_of_the_hub_is_an_id(hub: Hub, prefix: str) -> None:
    assert "Downloading org/model: 2 files" in run("pull", f"{prefix}org/model")


def test_an_interrupted_download_says_so_and_keeps_complete_files(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    hub.cut = second
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: None)  # before huggingface_hub tries again
        assert "could not be downloaded" in run("pull", "org/model", code=1)
        patch.setattr(local, "download_files", interrupted)
        assert "org/model: interrupted: complete files are kept" in run("pull", "org/model", code=1)
    assert first in hub.downloaded
    hub.cut, done = None, []
    hub.downloaded.clear()
    folder = local.pull("org/model", lambda here, total: done.append((here, total)))
    assert hub.downloaded == [second]
    assert done[-1] == ((folder / second).stat().st_size,) * 2
    assert read_layout(folder).mtp.available


def interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt
