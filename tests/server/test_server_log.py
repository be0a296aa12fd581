"""The log: one line for a request where that is asked for, and nothing ever waits for who reads it."""

import logging
import os
import re
from contextlib import suppress

import pytest
from running import Running, tokenizer

from headstart.server.log import StderrHandler, TracebackFormatter, configure_log

ACCESS = "uvicorn.access"
SECRET = "the words of a prompt"


def test_the_access_log_has_a_line_for_every_request_and_nothing_of_its_content(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, ACCESS), server.http() as http:
        body = {"prompt": SECRET, "max_tokens": 5, "min_tokens": 5}
        http.post("/v1/completions", json=body | {"stream": True, "n": 2}, headers={"x-api-key": "sesame"})
        http.post("/v1/completions", json=body | {"stop": 5})
        http.get("/nothing%0Aforged?key=sesame")
    lines = [re.sub(r"^127.0.0.1:\d+ ", "", record.getMessage()) for record in caplog.records]
    assert lines == [
        '- "POST /v1/completions HTTP/1.1" 200',
        '- "POST /v1/completions HTTP/1.1" 400',
        '- "GET /nothing%0Aforged HTTP/1.1" 404',
    ]
    assert "sesame" not in caplog.text
    assert SECRET not in caplog.text


def test_without_being_asked_for_there_is_no_access_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, ACCESS), server.http() as http:
        http.get("/health")
    assert caplog.records == []


def test_a_long_prompt_makes_transformers_log_nothing(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would warn of "indexing errors", which the model does not have."""
    hf = tokenizer()._tokenizer
    monkeypatch.setattr(hf, "model_max_length", 3)
    monkeypatch.setattr(hf, "deprecation_warnings", {})
    loggers = [logging.getLogger(name) for name in ("transformers", "headstart", ACCESS)]
    levels, handlers = [each.level for each in loggers], logging.getLogger().handlers[:]
    try:
        configure_log("warning", access=False)
        hf.encode("one two three four five six seven eight nine ten")
    finally:
        logging.getLogger().handlers[:] = handlers
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
    assert "indexing" not in caplog.text + "".join(capfd.readouterr())


def record(message: str, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("headstart", logging.ERROR, __file__, 1, message, (), info)


def test_a_log_that_nobody_reads_drops_records() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        log = StderrHandler(stream)
        for i in range(2000):
            log.emit(record(f"{i} " + "x" * 100))
        seen = os.read(reading, 2**20).decode()
        assert seen.startswith("0 xxx")
        assert seen.count("xxx\n") < 2000
        log.emit(record("again"))
        assert os.read(reading, 2**20).decode().endswith("again\n")
    os.close(reading)


def test_a_log_whose_reader_has_gone_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    log = StderrHandler(stream)
    log.emit(record("to nobody"))
    with suppress(BrokenPipeError):
        stream.close()
    log.emit(record("to a file that is closed"))
    assert capfd.readouterr().err == ""


def test_a_traceback_of_another_library_has_no_words() -> None:
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        told = TracebackFormatter("%(message)s").format(record("it failed", error))
    assert told.startswith("it failed\nKeyError\n")
    assert "test_server_log.py" in told
    assert told.count(SECRET) == told.count(f"raise KeyError({SECRET!r})") == 0
