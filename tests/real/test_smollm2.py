"""SmolLM2-135M-Instruct, from a package registry: `make test-real`. Its weights went through Q4_1.

The answers of mlx-lm and the losses of transformers, both in float32, are recorded in tests/reference/smollm2.json.
"""

import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from openai import BadRequestError, OpenAI

from bench.real_model import real_model
from fixtures import collect, generate, submit
from headstart.checkpoint import load_model, load_tokenizer
from headstart.engine import Engine
from headstart.models import Model
from headstart.state import PrefixCache

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))
from make_smollm2 import ANSWER, LONGEST, QUESTIONS, texts

pytestmark = pytest.mark.real
REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "smollm2.json").read_text())
DEPTHS: tuple[Any, ...] = (0, "auto")
# Loss of the texts beside the unquantised model's.
WORSE = {8: 0.01, 4: 0.08}
HANG = 300.0


@cache
def folders() -> dict[int | None, Path]:
    return dict(zip((None, 8, 4), real_model(), strict=True))


@cache
def unquantised() -> Model:
    return load_model(folders()[None], dtype=mx.float32)


@cache
def tokenizer() -> TokenizerWrapper:
    return load_tokenizer(folders()[None])


def prompt(question: str) -> list[int]:
    return list(tokenizer().apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True))


def losses(model: Model) -> list[float]:
    found = []
    for text in texts():
        ids = mx.array([tokenizer().encode(text)[:LONGEST]])
        logits = model.logits(model.trunk(ids, model.make_state(1), certain=ids.shape[1]))[:, :-1].astype(mx.float32)
        chosen = mx.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
        found.append(float((mx.logsumexp(logits, axis=-1) - chosen).mean()))
    return found


@pytest.mark.parametrize("number", range(0, len(QUESTIONS), 2))
def test_answers_are_those_of_mlx_lm(number: int) -> None:
    answer = generate(unquantised(), prompt(QUESTIONS[number]), temperature=0, max_tokens=ANSWER, k=0)
    said = answer.tokens + ([] if answer.finish_reason == "length" else [tokenizer().eos_token_id])
    assert said[: len(REFERENCE["answers"][number])] == REFERENCE["answers"][number]


def test_perplexity_is_that_of_transformers() -> None:
    for ours, theirs in zip(losses(unquantised()), REFERENCE["losses"], strict=True):
        assert math.exp(ours) == pytest.approx(math.exp(theirs), rel=1e-3)


@pytest.mark.parametrize("bits", WORSE)
def test_quantised_models_are_nearly_as_good(bits: int) -> None:
    model = load_model(folders()[bits])
    assert sum(losses(model)) < sum(REFERENCE["losses"]) * (1 + WORSE[bits])


@pytest.mark.parametrize("bits", [None, 4])
def test_depths_and_batches_give_the_same_text(bits: int | None) -> None:
    model = load_model(folders()[bits])
    prompts = [prompt(f"{question} Answer twice, with the same words.") for question in QUESTIONS[:4]]
    alone = [generate(model, each, temperature=0, max_tokens=32, k=0).tokens for each in prompts]
    for k in DEPTHS:
        engine = Engine(model, prefix=PrefixCache(0))
        handles = [submit(engine, each, temperature=0, max_tokens=32, k=k) for each in prompts]
        assert [collect(handle).tokens for handle in handles] == alone


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "headstart", "serve", str(folders()[4]), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            give_up = time.monotonic() + HANG
            while time.monotonic() < give_up:
                assert server.poll() is None
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                        break
                except httpx.TransportError:
                    pass
            yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=HANG)
        finally:
            server.terminate()


def ask(client: OpenAI, question: str, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": client.models.list().data[0].id, "temperature": 0, "max_tokens": 64} | fields
    return client.chat.completions.create(messages=[{"role": "user", "content": question}], **given)


def test_a_served_answer_makes_sense_and_is_the_engines(client: OpenAI) -> None:
    said = ask(client, QUESTIONS[0]).choices[0].message.content
    assert "Paris" in said
    stream = ask(client, QUESTIONS[0], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == said


def test_a_schema_holds(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "european": {"type": "boolean"}},
        "required": ["capital", "european"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "country", "schema": schema, "strict": True}}
    answer = ask(client, "Describe France.", response_format=wanted)
    jsonschema.validate(json.loads(answer.choices[0].message.content), schema)


def test_tools_are_refused_because_its_template_has_none(client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(BadRequestError, match="chat template does not support tools"):
        ask(client, "What is the weather in Rome?", tools=[tool])
