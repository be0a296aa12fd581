"""A server of models that mlx-lm runs: several clients at a time, and mlx-lm's own text."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import running
from running import HANG, tokenizer

from fixtures import mlx_lm_greedy
from headstart.checkpoint import load_model
from headstart.engine import DeviceThread
from headstart.server.model_pool import ModelPool
from headstart.server.pooled_model import PooledModel
from others import write_other

NAMES = ("gpt_oss", "lfm2", "llama4")  # with copies, without, and one at a time
PROMPTS = ("one", "two and", "three, then")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_other(root / name, name) for name in NAMES}


@pytest.fixture(scope="module")
def http(folders: dict[str, Path]) -> Iterator[httpx.Client]:
    pool = ModelPool(DeviceThread(), [PooledModel.of(folder) for folder in folders.values()], budget=10**10)
    with running.serving(pool) as server, server.http() as client:
        yield client


@pytest.mark.parametrize("name", NAMES)
def test_clients_get_mlx_lms_text(name: str, http: httpx.Client, folders: dict[str, Path]) -> None:
    model = load_model(folders[name])

    def ask(prompt: str) -> str:
        body = {"model": name, "prompt": prompt, "max_tokens": 12, "temperature": 0}
        answer = http.post("/v1/completions", json=body, timeout=HANG)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(3) as clients:
        texts = list(clients.map(ask, PROMPTS))
    tokens = [mlx_lm_greedy(model, tokenizer().encode(prompt), 12) for prompt in PROMPTS]
    assert texts == [tokenizer().decode(each) for each in tokens]


def test_chats_streams_and_models_are_answered(http: httpx.Client) -> None:
    (found,) = (each for each in http.get("/v1/models").json()["data"] if each["id"] == "lfm2")
    assert (found["family"], found["native_mtp"]["available"]) == ("lfm2", False)
    assert "mlx-lm's own forward runs lfm2 models" in found["native_mtp"]["reason"]
    chat = {"model": "lfm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    answer = http.post("/v1/chat/completions", json=chat, timeout=HANG).json()
    assert answer["usage"]["completion_tokens"] == 4
    streamed = http.post("/v1/chat/completions", json={**chat, "stream": True}, timeout=HANG).text
    assert streamed.rstrip().endswith("data: [DONE]")


def test_several_answers_of_a_model_that_runs_one_at_a_time_are_refused(http: httpx.Client) -> None:
    body = {"model": "llama4", "prompt": "one", "max_tokens": 2, "n": 2}
    refused = http.post("/v1/completions", json=body, timeout=HANG)
    assert refused.status_code == 400
    assert "at most 1 answers can run at a time" in refused.json()["error"]["message"]
