"""Small trainings: few texts, and short ones."""

from pathlib import Path

import pytest
from make_small import make_small

from families import write_family
from headstart.training import text, train


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(lambda module, name, value: monkeypatch.setattr(module, name, value), text, train)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a head, with the tokenizer and the chat template of the built-in model."""
    return write_family(tmp_path_factory.mktemp("models") / "llama", "llama", vocab_size=12288)
