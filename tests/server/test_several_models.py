"""Several models on one server: who is loaded, who makes way, and what requests notice of it."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from running import HANG, tokenizer, wait_until

from checkpoints import write
from headstart.checkpoint import load_model
from headstart.engine import DeviceThread, Engine, Request
from headstart.sampling import SamplingParams
from headstart.server import ModelPool, PooledModel, Server, bind, create_app

NAMES = ("red", "green", "blue")
PROMPTS = ("one", "two and", "three, then")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 8192, "max_position_embeddings": 2048}
    return {name: write(root / name, "dense", seed=seed, **sizes) for seed, name in enumerate(NAMES)}


def budget_for(models: int, one: PooledModel) -> int:
    """Enough for so many models of this size with a few short requests, and not for one more."""
    return int((models + 0.5) * one.needs.weights + models * 4 * one.needs.request)


@contextmanager
def serving(pool: ModelPool, **options: Any) -> Iterator[httpx.Client]:
    app = create_app(pool, **options)
    with bind("127.0.0.1", 0) as place:
        server = Server(app, pool.device, deadline=5.0)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            with httpx.Client(base_url=f"http://127.0.0.1:{place.getsockname()[1]}", timeout=HANG) as http:
                yield http
        finally:
            server.should_exit = True
            thread.join(HANG)
            assert not thread.is_alive()


def complete(http: httpx.Client, model: str | None, prompt: str, tokens: int = 8, **fields: Any) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "num_draft_tokens": 2}
    body |= fields
    response = http.post("/v1/completions", json={k: v for k, v in body.items() if v is not None})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@cache
def alone(folder: Path, prompt: str, tokens: int = 8) -> str:
    """What an engine says that has nothing but this model and this prompt."""
    engine = Engine(loaded(folder), tokenizer())
    ids = tokenizer().encode(prompt, add_special_tokens=False)
    handle = engine.submit(Request(ids, SamplingParams(max_tokens=tokens, min_tokens=tokens)))
    return "".join(text for event in handle for text in event.texts)


@cache
def loaded(folder: Path) -> Any:
    return load_model(folder)


def states(http: httpx.Client) -> dict[str, str]:
    return {model["id"]: model["state"] for model in http.get("/v1/models").json()["data"]}


class Run:
    """Three models, of which the budget holds two, and what requests to them found."""

    def __init__(self, folders: dict[str, Path], **rule: float):
        self.expected = {(name, text): alone(folders[name], text) for name in NAMES for text in PROMPTS}
        loaded.cache_clear()
        mx.clear_cache()
        self.models = [PooledModel.of(folder) for folder in folders.values()]
        self.budget = budget_for(2, self.models[0])
        self.pool = ModelPool(DeviceThread(), self.models, budget=self.budget, max_queue=None, **rule)
        self.before, self.most_bytes, self.most_loaded, self.answers = mx.get_active_memory(), 0, 0, 0

    def ask(self, http: httpx.Client, name: str, i: int) -> None:
        text = PROMPTS[i % len(PROMPTS)]
        assert complete(http, name, text) == self.expected[name, text]
        self.answers += 1
        self.most_bytes = max(self.most_bytes, mx.get_active_memory() - self.before)
        self.most_loaded = max(self.most_loaded, sum(each.loaded is not None for each in self.models))

    @property
    def loads(self) -> list[int]:
        return [model.loads for model in self.models]


def test_three_models_in_the_memory_of_two_answer_as_if_alone_and_do_not_thrash(folders: dict[str, Path]) -> None:
    """Each has a client that asks again and again: the third model waits until one of the others is not used."""
    run = Run(folders, idle_seconds=3.0, turn_seconds=1000.0)
    with serving(run.pool) as http, ThreadPoolExecutor(3) as clients:
        list(clients.map(lambda name: [run.ask(http, name, i) for i in range(6)], NAMES))
    assert run.answers == 18
    assert run.loads == [1, 1, 1]
    assert run.most_loaded == 2
    assert run.most_bytes <= run.budget


@pytest.mark.slow
def test_many_requests_that_alternate_between_models_are_all_answered(folders: dict[str, Path]) -> None:
    run, turn, requests = Run(folders, idle_seconds=0.5, turn_seconds=2.0), 2.0, 300
    began = time.monotonic()
    with serving(run.pool) as http, ThreadPoolExecutor(12) as clients:
        list(clients.map(lambda i: run.ask(http, NAMES[i % 3], i), range(requests)))
    seconds = time.monotonic() - began
    print(f"{requests} requests, {seconds:.0f} s, loads {run.loads}, {run.most_bytes:,} of {run.budget:,} bytes")
    assert run.answers == requests
    assert run.most_loaded == 2
    assert run.most_bytes <= run.budget
    # A load follows an idle moment of another model, when all clients wait for this one, or the end of a turn.
    assert sum(run.loads) <= 3 + requests / 12 + 2 * seconds / turn
