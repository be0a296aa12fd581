"""Requests of all APIs name an adapter as `model:adapter`, beside others for the model itself."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import running

from adapters import write_adapter
from checkpoints import write
from headstart.engine import DeviceThread
from headstart.server.model_pool import ModelPool
from headstart.server.pooled_model import PooledModel

Served = tuple[httpx.Client, PooledModel, Path]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one"}], "max_tokens": 8},
    "/v1/messages": {"messages": [{"role": "user", "content": "one"}], "max_tokens": 8},
    "/v1/responses": {"input": "one", "max_output_tokens": 16},
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("models")
    folder = write(root / "red", "dense", vocab_size=8192, max_position_embeddings=2048)
    adapters = {name: write_adapter(root / name, folder, seed=seed) for seed, name in enumerate(("a", "b-2"))}
    model = PooledModel.of(folder, adapters=adapters)
    pool = ModelPool(DeviceThread(), [model])
    with running.serving(pool) as server, server.http() as http:
        assert http.post("/v1/models/load", json={"model": "red"}).status_code == 200
        yield http, model, folder


def text_of(answer: dict[str, Any]) -> str:
    match answer:
        case {"choices": [{"text": str(text)}]} | {"choices": [{"message": {"content": str(text)}}]}:
            return text
        case {"content": [{"text": str(text)}]} | {"output": [{"content": [{"text": str(text)}]}]}:
            return text
    raise AssertionError(answer)


@pytest.mark.parametrize("path", BODIES)
def test_every_api_takes_an_adapter_and_names_it_in_its_answer(path: str, here: Served) -> None:
    http, _, folder = here

    def ask(name: str | None) -> dict[str, Any]:
        response = http.post(path, json={**BODIES[path], "temperature": 0, **({"model": name} if name else {})})
        assert response.status_code == 200, response.text
        return dict(response.json())

    names = (None, "red:a", "red:b-2", f"{folder}:a", "red", "red:b-2")
    alone = [ask(name) for name in names]
    with ThreadPoolExecutor(len(names)) as clients:
        together = list(clients.map(ask, names))
    assert [each["model"] for each in together] == ["red", "red:a", "red:b-2", "red:a", "red", "red:b-2"]
    assert [text_of(each) for each in together] == [text_of(each) for each in alone]
    assert len({text_of(each) for each in alone}) == 3
    refused = http.post(path, json={**BODIES[path], "model": "red:c"})
    assert refused.status_code == 404
    assert "'red:c' is not served here: this server has 'red', 'red:a', 'red:b-2'" in refused.text


def test_adapters_are_listed_and_their_acceptance_is_reported(here: Served) -> None:
    http, model, _ = here
    entries = {entry["id"]: entry for entry in http.get("/v1/models").json()["data"]}
    assert list(entries) == ["red", "red:a", "red:b-2"]
    assert "parent" not in entries["red"]
    assert entries["red:a"]["parent"] == "red"
    assert entries["red:a"]["adapter"] == {"rank": 4, "scale": 2.0}
    assert http.get("/v1/models/red:a").json()["id"] == "red:a"
    assert http.get("/v1/settings?model=red:a").json() == http.get("/v1/settings").json()
    body = {"prompt": "one", "max_tokens": 12, "model": "red:a", "num_draft_tokens": 3}
    before = model.counters.adapters["a"].proposed.total() if "a" in model.counters.adapters else 0
    stats = http.post("/v1/completions", json=body).json()["generation_stats"]
    assert stats["adapter"] == "a"
    told = http.get("/v1/mtp/stats").json()["models"]["red"]
    assert told["adapters"]["a"]["proposed_draft_tokens"] == before + stats["proposed_draft_tokens"] > before
    assert 0 <= told["adapters"]["a"]["acceptance_rate"] <= 1
    assert told["proposed_draft_tokens"] >= told["adapters"]["a"]["proposed_draft_tokens"]
    assert told["kernels"].endswith("31 linear layers with adapters are not fused")
    proposed = told["adapters"]["a"]["proposed_draft_tokens"]
    metric = f'headstart_adapter_proposed_draft_tokens_total{{adapter="a",model="red"}} {float(proposed)}'
    assert metric in http.get("/metrics").text
    counted = http.post("/v1/messages/count_tokens", json={**BODIES["/v1/messages"], "model": "red:a"})
    assert counted.json()["input_tokens"] > 0
