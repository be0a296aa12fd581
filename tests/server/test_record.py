"""`serve --record`: what is kept of conversations, for whom, and when not."""

import json
import os
import stat
from pathlib import Path

import pytest
from running import running, tokenizer

from disks import small_disk
from headstart.engine import Event, Request
from headstart.errors import RequestError
from headstart.server.record import Recorder
from headstart.server.settings import Limits
from headstart.training.text import read_rows

HI = [{"role": "user", "content": "Say something."}]


def test_answers_are_kept_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    with running(limits=Limits(recorder=Recorder(file))) as server:
        said = server.openai().chat.completions.create(model="tiny", messages=HI, max_tokens=12, temperature=0)
        server.openai().completions.create(model="tiny", prompt="abc", max_tokens=5, n=2)
        vocabulary = server.served.model.vocabulary
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    rows = list(read_rows(file, "it", vocabulary))
    assert len(rows) == 3
    chat = rows[0]
    assert "Say something." in tokenizer().decode(chat.tokens[: chat.prompt])
    assert tokenizer().decode(chat.tokens[chat.prompt :]) == said.choices[0].message.content
    assert [len(row.tokens) - row.prompt for row in rows[1:]] == [5, 5]


def heard(recorder: Recorder, *events: Event) -> list[Event]:
    passed: list[Event] = []
    listen = recorder.following(Request([1, 2, 3]), 100, passed.append)
    for event in events:
        listen(event)
    return passed


def test_what_was_cancelled_is_not_kept(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "file")
    events = Event(tokens=[4, 5]), Event(finish_reason="cancelled")
    assert heard(recorder, *events) == list(events)
    assert (tmp_path / "file").read_bytes() == b""


def test_a_file_that_others_can_read_is_closed_to_them_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before\n")
    file.chmod(0o644)
    heard(Recorder(file), Event(tokens=[4], finish_reason="stop"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before, line = file.read_text().splitlines()
    assert before == "before"
    assert json.loads(line) == {"vocabulary": 100, "prompt": 3, "tokens": [1, 2, 3, 4]}


def test_a_full_disk_ends_the_recording_and_not_the_answer(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "64k") as disk:
        recorder = Recorder(disk / "file")
        end = Event(tokens=[7] * 4000, finish_reason="length")
        for _ in range(20):
            assert heard(recorder, end) == [end]
        lines = (disk / "file").read_text().splitlines()
        os.close(recorder._file)
        assert 0 < len(lines) < 20
        assert all(json.loads(line)["prompt"] == 3 for line in lines)


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--record"):
        Recorder(tmp_path / "missing" / "file")
