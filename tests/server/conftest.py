import json
import threading
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hostile import Target, target
from huggingface_hub import constants
from openai import OpenAI
from running import CONTEXT, HUB_ID, Running, folder, running
from seeing import running_with_tower

import headstart.engine.engine
import headstart.engine.prefill
from checkpoints import write
from headstart.engine.step_time import time_steps
from headstart.server.settings import Limits
from headstart.server.workers import Workers
from towers import write_seeing


@pytest.fixture(scope="session", autouse=True)
def servers_start_at_once() -> Iterator[None]:
    """Most servers here never need a worker process, and a process takes longer than most tests. The model of each is
    timed at a glance: no test is of the depth chosen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workers, "start", lambda self: None)
        timed: Any = lambda model, most, rows, budget: time_steps(model, most, rows, 0.01)  # noqa: E731
        patch.setattr(headstart.engine.engine, "time_steps", timed)
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """One server for all tests that leave it as it was."""
    with running(max_sequences=4) as here:
        yield here


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model sees, and which fetches pictures."""
    with running_with_tower(tmp_path_factory.mktemp("seeing"), limits=Limits(image_urls=True)) as here:
        yield here


@pytest.fixture(scope="session")
def seeing_gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model is a Gemma 4."""
    write = partial(write_seeing, shape="gemma4_a4b")
    with running_with_tower(tmp_path_factory.mktemp("gemma"), write) as here:
        yield here


@pytest.fixture(params=["seeing", "seeing_gemma"])
def each_seeing(request: pytest.FixtureRequest) -> Running:
    """Every server whose model sees."""
    found: Running = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def client(server: Running) -> OpenAI:
    return server.openai()


@pytest.fixture(scope="session")
def anthropic() -> ModuleType:
    """Anthropic's client, imported by the workers that use it."""
    return import_module("anthropic")


@pytest.fixture(scope="session")
def attacked() -> Iterator[Target]:
    """One server process for all attacks that it survives."""
    with target("--allowed-host", "My-Mac.local", "--allowed-host", "proxy.example:443") as here:
        yield here


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Hugging Face cache: the model that `running` serves, one that lost its head, one that lost a file, one of
    another family, and a folder that is no model of the hub's."""
    root = tmp_path_factory.mktemp("cache")
    model = folder(True, CONTEXT)
    _repo(root, HUB_ID).joinpath("snapshots").symlink_to(model.parent)
    write(_repo(root, "mlx-community/Qwen3.5-0.8B-4bit") / "snapshots" / "0123abc", "dense", "stripped", bits=4)
    torn = write(_repo(root, "someone/torn") / "snapshots" / "0123abc", "dense")
    (torn / "model-00001-of-00002.safetensors").unlink()
    for name in ("someone/else", "someone/copy--of--it"):
        config = _repo(root, name) / "snapshots" / "0123abc" / "config.json"
        config.parent.mkdir(parents=True)
        config.write_text(json.dumps({"model_type": "bark"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(root))
        yield root


def _repo(root: Path, name: str) -> Path:
    repo = root / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / "main").write_text("0123abc")
    return repo


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Prefill waits until it is set."""
    opened, prefill = threading.Event(), headstart.engine.prefill.prefill_by_layers

    def waiting(*arguments: Any) -> Any:
        opened.wait(60)
        return prefill(*arguments)

    monkeypatch.setattr(headstart.engine.prefill, "prefill_by_layers", waiting)
    yield opened
    opened.set()
