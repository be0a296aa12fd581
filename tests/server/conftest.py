from collections.abc import Iterator

import pytest
from openai import OpenAI
from running import Running, running


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """One server for all tests that leave it as it was."""
    with running(max_rows=4) as here:
        yield here


@pytest.fixture(scope="session")
def client(server: Running) -> OpenAI:
    return server.openai()
