"""The file that keeps what was set: written whole, read with distrust."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest
from running import Running, running


def settings(server: Running) -> dict[str, object]:
    with server.http() as http:
        told: dict[str, object] = http.get("/v1/settings").json()
    return told


def patch(server: Running, **change: object) -> dict[str, object]:
    with server.http() as http:
        told: dict[str, object] = http.patch("/v1/settings", json=change).json()
    return told


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "headstart" / "settings.json"


def test_what_was_set_holds_after_a_restart(file: Path) -> None:
    with running(settings_file=file) as server:
        assert settings(server) == {"speculation": True, "max_k": 8, "problem": None}
        assert not file.exists(), "nothing was set"
        patch(server, max_k=2)
        assert json.loads(file.read_text()) == {"max_k": 2}, "what was not set follows the model"
        patch(server, speculation=False)
    with running(settings_file=file) as again:
        assert settings(again) == {"speculation": False, "max_k": 2, "problem": None}
        patch(again, speculation=True)
    assert json.loads(file.read_text()) == {"speculation": True, "max_k": 2}
    assert [path.name for path in file.parent.iterdir()] == ["settings.json"]


def test_a_refused_change_is_not_kept(file: Path) -> None:
    with running(settings_file=file) as server:
        patch(server, max_k=3)
        for wrong in (9, -1):
            assert "error" in patch(server, max_k=wrong)
    assert json.loads(file.read_text()) == {"max_k": 3}


@pytest.mark.parametrize(
    ("broken", "why"),
    [(b'{"max_k": 2', "delimiter"), (b"[]", "the whole"), (b'{"max_k": 99}', "max_k is 99"), (b"\xff", "utf-8"),
     (b'{"speculation": "no"}', "speculation: "), (b'{"depth": 2}', "depth: "),
     pytest.param(b"[" * 10**5, "recursion", id="deep")],
)  # fmt: skip
def test_a_broken_file_is_reported_and_ignored(
    file: Path, broken: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.mkdir()
    file.write_bytes(broken)
    with caplog.at_level(logging.WARNING), running(settings_file=file) as server:
        told = settings(server)
        assert (told["speculation"], told["max_k"]) == (True, 8)
        assert why in str(told["problem"])
        assert str(file.parent) not in str(told["problem"]), "clients may be anywhere"
        assert file.read_bytes() == broken, "nothing is lost before something is set"
        assert str(file) in caplog.text
        assert patch(server, max_k=1)["problem"] is None
    assert json.loads(file.read_text()) == {"max_k": 1}


def test_two_servers_leave_each_other_what_they_have_set(file: Path) -> None:
    with running(settings_file=file) as one, running(settings_file=file) as two:
        patch(one, max_k=2)
        patch(two, speculation=False)
        assert json.loads(file.read_text()) == {"max_k": 2, "speculation": False}
        patch(two, max_k=4)
        patch(one, speculation=True)
    assert json.loads(file.read_text()) == {"max_k": 4, "speculation": True}


def test_a_file_that_is_a_link_stays_one(file: Path, tmp_path: Path) -> None:
    file.parent.mkdir()
    file.symlink_to(tmp_path / "elsewhere.json")
    with running(settings_file=file) as server:
        assert patch(server, max_k=2)["problem"] is None
    assert file.is_symlink()
    assert json.loads((tmp_path / "elsewhere.json").read_text()) == {"max_k": 2}


def test_a_depth_that_was_kept_for_another_model_is_held_to_this_ones(file: Path) -> None:
    file.parent.mkdir()
    file.write_text('{"max_k": 5, "speculation": true}')
    with running(head=False, settings_file=file) as server:
        assert settings(server) == {"speculation": True, "max_k": 0, "problem": None}
    assert json.loads(file.read_text())["max_k"] == 5


def test_a_change_that_cannot_be_written_holds_and_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with running(settings_file=tmp_path / "file" / "settings.json") as server:
        told = patch(server, max_k=2)
        assert told["max_k"] == 2
        assert "cannot be written" in str(told["problem"])
        assert settings(server) == told
        (tmp_path / "file").unlink()
        assert patch(server, speculation=False)["problem"] is None
    kept = json.loads((tmp_path / "file" / "settings.json").read_text())
    assert kept == {"max_k": 2, "speculation": False}, "and is kept as soon as it can be"


def test_a_write_that_fails_leaves_the_file_as_it_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(settings_file=file) as server:
        patch(server, max_k=3)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        assert "No space left" in str(patch(server, max_k=2)["problem"])
    assert json.loads(file.read_text()) == {"max_k": 3}
    assert [path.name for path in file.parent.iterdir()] == ["settings.json"]


def test_without_a_file_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with running() as server:
        patch(server, max_k=2)
    with running() as again:
        assert settings(again)["max_k"] == 8
    assert list(tmp_path.iterdir()) == []


def test_two_servers_that_write_at_once_never_tear_the_file(file: Path) -> None:
    with running(settings_file=file) as one, running(settings_file=file) as two:
        patch(one, max_k=1)

        def keep_changing(server: Running) -> None:
            for n in range(16):
                assert patch(server, max_k=n % 8, speculation=bool(n % 2))["problem"] is None

        threads = [threading.Thread(target=keep_changing, args=(server,)) for server in (one, two)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert json.loads(file.read_text()).keys() <= {"max_k", "speculation"}
        for thread in threads:
            thread.join()
        assert json.loads(file.read_text()) == {"max_k": 7, "speculation": True}, "the last writer's"
    assert [path.name for path in file.parent.iterdir()] == ["settings.json"]
