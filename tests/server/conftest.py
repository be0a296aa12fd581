import threading
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from running import Running, running

import headstart.engine.intake


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """One server for all tests that leave it as it was."""
    with running(max_rows=4) as here:
        yield here


@pytest.fixture(scope="session")
def client(server: Running) -> OpenAI:
    return server.openai()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Prompts are taken in no further until it is set."""
    opened, prefill = threading.Event(), headstart.engine.intake.prefill

    def waiting(*arguments: Any) -> None:
        opened.wait(60)
        prefill(*arguments)

    monkeypatch.setattr(headstart.engine.intake, "prefill", waiting)
    yield opened
    opened.set()
