"""Several models on one server: who is loaded, who makes way, and what requests notice of it."""

import os
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
import running
from running import HANG, tokenizer, wait_until

import headstart.checkpoint.load
from checkpoints import write
from headstart.checkpoint import load_model
from headstart.engine import DeviceThread, Engine, Request
from headstart.sampling import SamplingParams
from headstart.server.model_pool import ModelPool
from headstart.server.pooled_model import PooledModel

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
def serving(pool: ModelPool) -> Iterator[httpx.Client]:
    with running.serving(pool) as server, server.http() as http:
        yield http


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
        list(clients.map(lambda name: [run.ask(http, name, i) for i in range(3)], NAMES))
    assert run.answers == 9
    assert run.loads == [1, 1, 1]
    assert run.most_loaded == 2
    assert run.most_bytes <= run.budget


@pytest.mark.slow
def test_many_requests_that_alternate_between_models_are_all_answered(folders: dict[str, Path]) -> None:
    run, turn, requests = Run(folders, idle_seconds=0.5, turn_seconds=2.0), 2.0, int(os.environ.get("REQUESTS", 300))
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


@pytest.fixture(scope="module")
def here(folders: dict[str, Path]) -> Iterator[tuple[httpx.Client, ModelPool]]:
    """Three models in the memory of two: red is pinned and loaded, the others are not."""
    models = [PooledModel.of(folder, pinned=name == "red") for name, folder in folders.items()]
    pool = ModelPool(DeviceThread(), models, budget=budget_for(2, models[0]), idle_seconds=0.0, turn_seconds=1000.0)
    with serving(pool) as http:
        assert http.post("/v1/models/load", json={"model": "red"}).status_code == 200
        yield http, pool


def test_a_model_is_loaded_when_it_is_named_and_the_first_is_meant_otherwise(
    here: tuple[httpx.Client, ModelPool], folders: dict[str, Path]
) -> None:
    http, pool = here
    assert complete(http, None, "one") == complete(http, "red", "one") == alone(folders["red"], "one")
    for name, other in (("green", "blue"), ("blue", "green")):
        assert complete(http, str(folders[name]), "one") == alone(folders[name], "one")
        assert states(http) == {"red": "loaded", name: "loaded", other: "unloaded"}
    wait_until(lambda: not any(model.requests for model in pool.models))


def test_other_names_are_not_found_and_every_route_knows_the_models(here: tuple[httpx.Client, ModelPool]) -> None:
    http, _ = here
    for response in (
        http.post("/v1/completions", json={"model": "grey", "prompt": "hi"}),
        http.get("/v1/models/grey"),
        http.get("/v1/settings?model=grey"),
        http.get("/v1/cache", params={"model": "grey"}),
        http.get("/v1/mtp/stats?model=grey"),
        http.post("/v1/models/load", json={"model": "someone/grey"}),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert "'red', 'green', 'blue'" in response.text


def test_settings_statistics_and_cache_are_of_one_model_and_outlive_its_unloading(
    here: tuple[httpx.Client, ModelPool],
) -> None:
    http, pool = here
    complete(http, "green", "two and")
    assert http.patch("/v1/settings?model=green", json={"max_k": 1}).json() == {"speculation": True, "max_k": 1}
    assert http.get("/v1/settings").json()["max_k"] == 8
    assert http.get("/v1/cache?model=green").json()["enabled"]
    told = http.get("/v1/mtp/stats?model=green").json()["models"]
    assert list(told) == ["green"]
    before = mx.get_active_memory()
    assert http.post("/v1/models/unload", json={"model": "green"}).json()["state"] == "unloaded"
    assert before - mx.get_active_memory() >= pool.models[1].needs.weights
    assert http.get("/v1/settings?model=green").json()["max_k"] == 1
    assert http.get("/v1/cache?model=green").json() == {"enabled": False}
    assert http.get("/v1/mtp/stats").json()["models"]["green"]["rounds"] == told["green"]["rounds"] > 0
    loads = http.get("/v1/models/green").json()["loads"]
    assert f'headstart_model_loads_total{{model="green"}} {float(loads)}' in http.get("/metrics").text
    assert http.post("/v1/models/load", json={"model": "green"}).json()["state"] == "loaded"
    assert http.get("/v1/settings?model=green").json()["max_k"] == 1
    assert http.post("/v1/models/unload", json={"model": "red"}).json()["error"]["code"] == "model_in_use"


def test_a_model_that_is_unloaded_gives_its_memory_back(folders: dict[str, Path]) -> None:
    models = [PooledModel.of(folders["red"], id="red")]
    pool = ModelPool(DeviceThread(), models, budget=budget_for(1, models[0]))
    before = mx.get_active_memory()
    with serving(pool) as http:
        complete(http, "red", "two and " * 300)
        assert mx.get_active_memory() - before > models[0].needs.weights
        assert http.post("/v1/models/unload", json={"model": "red"}).json()["state"] == "unloaded"
        assert mx.get_active_memory() - before < models[0].needs.weights // 10


@pytest.fixture
def slow_reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No weights are read until it is set."""
    opened, read = threading.Event(), headstart.checkpoint.load.read_parameter

    def waiting(*arguments: Any, **options: Any) -> mx.array:
        opened.wait(HANG)
        return read(*arguments, **options)

    monkeypatch.setattr(headstart.checkpoint.load, "read_parameter", waiting)
    yield opened
    opened.set()


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/completions", {"prompt": "one"}, "data: [DONE]"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "one"}]}, "event: message_stop"),
        ("/v1/responses", {"input": "one", "max_output_tokens": 4}, "event: response."),
    ],
)
def test_a_stream_waits_for_its_model_and_reports_how_far_it_is(
    here: tuple[httpx.Client, ModelPool], slow_reading: threading.Event, path: str, body: dict[str, Any], end: str
) -> None:
    http, pool = here
    http.post("/v1/models/unload", json={"model": "blue"})
    limit = {} if "input" in body else {"max_tokens": 4}
    with http.stream("POST", path, json={"model": "blue", "stream": True, **body, **limit}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith(": blue is ")
        assert http.get("/v1/models/blue").json()["state"] in ("unloaded", "loading")
        wait_until(lambda: states(http)["blue"] == "loading")
        assert http.get("/health").json()["queued"] == 1
        slow_reading.set()
        events = [line for line in lines if line and not line.startswith(":")]
    assert any(line.startswith(end) for line in events)
    wait_until(lambda: not pool.models[2].requests)


def test_a_client_that_leaves_while_its_model_is_loaded_leaves_nothing_behind(
    here: tuple[httpx.Client, ModelPool], slow_reading: threading.Event
) -> None:
    http, pool = here
    http.post("/v1/models/unload", json={"model": "blue"})
    for stream in (True, False):
        body = {"model": "blue", "prompt": "one", "stream": stream}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{http.base_url}/v1/completions", json=body, timeout=httpx.Timeout(HANG, read=0.3))
    slow_reading.set()
    wait_until(lambda: states(http)["blue"] == "loaded")
    wait_until(lambda: not pool.models[2].requests and not pool.waiting)


def test_a_model_that_cannot_be_read_fails_its_own_requests_and_can_be_tried_again(
    here: tuple[httpx.Client, ModelPool], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    http, _ = here
    http.post("/v1/models/unload", json={"model": "green"})
    shard = next(folders["green"].glob("*.safetensors"))
    hidden = shard.rename(shard.with_suffix(".hidden"))
    failed = http.post("/v1/completions", json={"model": "green", "prompt": "one"})
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_not_loaded")
    assert "green" in failed.json()["error"]["message"]
    assert str(folders["green"]) not in failed.text
    assert states(http)["green"] == "failed"
    body = {"model": "green", "prompt": "one", "stream": True}
    streamed = http.post("/v1/completions", json=body).text.split("\n\n")
    assert "model_not_loaded" in streamed[-3]
    assert streamed[-2] == "data: [DONE]"
    assert complete(http, "red", "one") == alone(folders["red"], "one")
    hidden.rename(shard)
    assert complete(http, "green", "one") == alone(folders["green"], "one")


def test_a_model_that_never_fits_is_refused_with_figures(folders: dict[str, Path]) -> None:
    models = [PooledModel.of(folders["red"]), PooledModel.of(folders["green"], pinned=True)]
    pool = ModelPool(DeviceThread(), models, budget=budget_for(1, models[0]))
    with serving(pool) as http:
        refused = http.post("/v1/completions", json={"model": "red", "prompt": "one", "stream": True})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_too_large")
    assert "model 'red' does not fit: its weights take 0." in error["message"]
    assert "pinned models take 0." in error["message"]
    assert "raise --memory-gb" in error["message"]


def test_a_model_that_is_always_in_use_makes_way_when_its_turn_is_over(folders: dict[str, Path]) -> None:
    """Without that, the third would wait for ever; what runs ends first, and what comes meanwhile waits."""
    run = Run(folders, idle_seconds=1000.0, turn_seconds=0.0)
    with serving(run.pool) as http, ThreadPoolExecutor(8) as clients:
        list(clients.map(lambda i: run.ask(http, NAMES[i % 3], i), range(15)))
    assert run.answers == 15
    assert min(run.loads) >= 1
    assert sum(run.loads) > 3
    assert run.most_bytes <= run.budget
