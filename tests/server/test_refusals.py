"""Requests that cannot be honoured, rejected in the format that the openai client turns into typed exceptions."""

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import ValidationError
from running import Running, read, running, wait_until

from checkpoints import write
from headstart.checkpoint import load_model, load_tokenizer, read_layout
from headstart.server.anthropic_request import MessagesRequest
from headstart.server.errors import Refusal
from headstart.server.openai_request import ChatCompletionRequest, CompletionRequest
from headstart.server.pooled_model import PooledModel
from headstart.server.request_fields import RequestModel
from headstart.server.settings import Limits

HI = [{"role": "user", "content": "hi"}]


def post(server: Running, body: Any, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
    with server.http() as http:
        if isinstance(body, (str, bytes)):
            return http.post(path, content=body, headers={"Content-Type": "application/json"} | more)
        return http.post(path, json=body)


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 2.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"top_n_sigma": -1}, "top_n_sigma"),
    ({"presence_penalty": 5}, "presence_penalty"),  # OpenAI's range is -2 to 2
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": "a" * 257}, "stop"),
    ({"logit_bias": {str(i): 1 for i in range(1024)}}, "logit_bias"),
    ({"messages": HI * 20_000}, "messages"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"num_draft_tokens": "deep"}, "num_draft_tokens"),
    ({"num_draft_tokens": -1}, "num_draft_tokens"),
    ({"acceptance": "always"}, "acceptance"),
    ({"acceptance": "optimistic", "seed": 1}, "acceptance"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]"),
    ({"model": 5}, "model"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: json.dumps(value)[:60])
def test_a_wrong_value_is_a_400_that_names_the_field(server: Running, fields: dict[str, Any], param: str) -> None:
    error = refused(post(server, {"messages": HI, "max_tokens": 4, **fields}))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error["message"]


WRONG_ELEMENTS: list[tuple[type[RequestModel], dict[str, Any]]] = [
    (CompletionRequest, {"prompt": [None] * 1000}),
    (CompletionRequest, {"prompt": [[None] * 1000]}),
    (CompletionRequest, {"prompt": "a", "stop": [5] * 1000}),
    (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(2000)), "x")}),
    (ChatCompletionRequest, {"messages": [5] * 1000}),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": [5] * 1000}]}),
    (ChatCompletionRequest, {"messages": [{"role": "assistant", "tool_calls": [5] * 1000}]}),
    (ChatCompletionRequest, {"messages": HI, "tools": [5] * 1000}),
    (MessagesRequest, {"max_tokens": 1, "messages": [5] * 1000}),
    (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": [5] * 1000}]}),
    (MessagesRequest, {"max_tokens": 1, "messages": HI, "system": [5] * 1000}),
    (MessagesRequest, {"max_tokens": 1, "messages": HI, "tools": [5] * 1000}),
    (MessagesRequest, {"max_tokens": 1, "messages": HI, "stop_sequences": [5] * 1000}),
]


@pytest.mark.parametrize(("shape", "body"), WRONG_ELEMENTS, ids=lambda value: str(value)[:60])
def test_of_many_wrong_elements_the_first_is_reported(shape: type[RequestModel], body: dict[str, Any]) -> None:
    """To report each takes seconds, in which no other request is served."""
    with pytest.raises(ValidationError) as error:
        shape.model_validate(body)
    assert error.value.error_count() <= 4  # one for each type that it could have had


def test_a_prompt_of_too_many_ids_is_refused(server: Running) -> None:
    context = server.served.model.context_length
    error = refused(post(server, {"prompt": [40] * 10 * context}, "/v1/completions"))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


NOT_HONOURED = [("functions", [{}]), ("best_of", 3), ("suffix", "end"), ("modalities", ["audio"])]


@pytest.mark.parametrize(("name", "value"), NOT_HONOURED)
def test_a_known_field_that_is_not_honoured_is_refused(server: Running, name: str, value: Any) -> None:
    error = refused(post(server, {"messages": HI, "max_tokens": 4, name: value}))
    assert (error["param"], error["code"]) == (name, "unsupported")


OF_CHATS = [("tools", [{}]), ("tool_choice", "required"), ("enable_thinking", True), ("thinking_budget", 5)]


@pytest.mark.parametrize(("name", "value"), OF_CHATS)
def test_a_completion_does_nothing_that_only_chats_can(server: Running, name: str, value: Any) -> None:
    error = refused(post(server, {"prompt": "hi", "max_tokens": 4, name: value}, "/v1/completions"))
    assert (error["param"], error["code"]) == (name, "unsupported")


@pytest.mark.parametrize("kind", ["video_url", "input_audio", "file"])
def test_input_other_than_text_and_images_is_refused_as_unsupported(server: Running, kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": kind, kind: {}}]}]
    error = refused(post(server, {"messages": messages}))
    assert error["param"] == "messages[0].content[1]"
    name = {"video_url": "video", "input_audio": "audio"}.get(kind, kind)
    assert f"{name} input is not supported here" in error["message"]


def test_such_fields_may_have_their_default_value(server: Running) -> None:
    harmless = {
        "n": 1, "logprobs": False, "top_logprobs": None, "tools": [], "tool_choice": "auto",
        "response_format": {"type": "text"}, "chat_template_kwargs": {}, "enable_thinking": None,
    }  # fmt: skip
    response = post(server, {"messages": HI, "max_tokens": 4, **harmless})
    assert response.status_code == 200
    assert response.json()["generation_stats"]["ignored_fields"] == []


def test_every_field_may_be_null(server: Running) -> None:
    with server.http() as http:
        shapes = http.get("/openapi.json").json()["components"]["schemas"]
    for shape, path, needed in (
        ("ChatCompletionRequest", "/v1/chat/completions", {"messages": HI}),
        ("CompletionRequest", "/v1/completions", {"prompt": "hi"}),
    ):
        nulls = dict.fromkeys(shapes[shape]["properties"])
        assert len(nulls) > 20
        response = post(server, nulls | needed | {"stop": ["\n", "e"], "max_tokens": 4}, path)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("prompt", [[], ["a", ""], [9999], {"a": 1}, "", [""]], ids=str)
def test_a_prompt_that_cannot_be_read_is_refused(server: Running, prompt: Any) -> None:
    assert refused(post(server, {"prompt": prompt}, "/v1/completions"))["param"] == "prompt"


BODIES = [b"", b"{", b"[]", b"null", b'"hi"', b"\xff\xfe\x00", b"[" * 100_000, b'{"messages": [], "messages"']


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:12]))
def test_a_body_that_is_not_a_json_object_is_a_400(server: Running, body: bytes) -> None:
    refused(post(server, body))


def test_a_body_without_its_content_type_is_refused_with_a_remedy(server: Running) -> None:
    with server.http() as http:
        response = http.post("/v1/chat/completions", content=json.dumps({"messages": HI}))
    assert "Content-Type" in refused(response)["message"]


def test_a_compressed_body_is_refused_with_a_remedy(server: Running) -> None:
    with server.http() as http:
        body = gzip.compress(json.dumps({"messages": HI}).encode())
        response = http.post("/v1/chat/completions", content=body, headers={"Content-Encoding": "gzip"})
    assert "without Content-Encoding" in refused(response)["message"]


@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "\\ud800": 1}',
        '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stop": "\\ud800"}',
        '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "model": "\\ud800"}',
        '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logit_bias": {"\\ud800": 1}}',
        '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": NaN}',
        '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 1e999}',
        '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": ' + "9" * 5000 + "}",
    ],
)
def test_odd_characters_and_numbers_are_refused_and_break_nothing(server: Running, body: str) -> None:
    refused(post(server, body))


def test_a_conversation_longer_than_the_context_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 5000}])
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")
    assert "4095" in error.value.message


def test_unknown_paths_and_methods_have_the_same_shape(server: Running) -> None:
    with server.http() as http:
        refused(http.get("/v1/nothing"), 404)
        for path in ("/v1/audio/speech", "/v1/images/generations", "/rerank", "/infill"):
            message = refused(http.post(path, json={}), 404)["message"]
            assert message.startswith("no such endpoint. This server has /v1/chat/completions, /v1/completions")
        for answer in (http.get("/api/tags"), http.get("/api/v0/models")):
            assert refused(answer, 404)["message"].startswith("no such endpoint. The APIs of Ollama and LM Studio")
        twice = refused(http.post("/v1/v1/chat/completions", json={}), 404)["message"]
        assert "Leave /v1 out of the client's base URL" in twice
        refused(http.get("/v1/chat/completions"), 405)
        refused(http.post("/v1/requests/nobody/cancel"), 404)


def test_limits_are_kept() -> None:
    limits = Limits(body_bytes=2000, prompt_tokens=30)
    with running(limits=limits) as server, server.http() as http:
        long = {"messages": [{"role": "user", "content": "x" * 3000}]}
        assert refused(http.post("/v1/chat/completions", json=long), 413)["code"] == "request_too_large"

        def pieces() -> Any:  # no Content-Length
            yield from (b"x" * 500 for _ in range(10))

        headers = {"Content-Type": "application/json"}
        refused(http.post("/v1/chat/completions", content=pieces(), headers=headers), 413)
        text = "one two three four five six seven eight nine ten " * 5
        error = refused(post(server, {"messages": [{"role": "user", "content": text}]}))
        assert error["code"] == "context_length_exceeded"
        assert post(server, {"messages": HI, "max_tokens": 2}).status_code == 200


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    with running(max_sequences=1, max_queue=1) as server:
        client = server.openai()
        fields: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 2000, "stream": True}

        def ask() -> Any:
            return client.chat.completions.create(**fields, extra_body={"min_tokens": 2000})

        with ask():
            wait_until(lambda: server.room.running)
            with ask():
                wait_until(lambda: server.room.queued)
                with pytest.raises(openai.RateLimitError) as error:
                    ask()
        assert int(error.value.response.headers["retry-after"]) >= 1
        assert error.value.code == "busy"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/v1/completions", {"prompt": "hi"}, "prompt"), ("/v1/chat/completions", {"messages": HI}, "messages")],
)
def test_what_no_memory_will_do_for_is_refused_by_the_field_it_came_in(
    path: str, body: dict[str, Any], param: str
) -> None:
    with running(memory_limit=1000) as server:
        error = refused(post(server, body, path))
    assert error["param"] == param
    assert error["message"].startswith(f"{param} has ")


def test_a_model_without_a_head_refuses_drafts_and_reports_why_elsewhere() -> None:
    with running(head=False) as server:
        error = refused(post(server, {"messages": HI, "num_draft_tokens": 3}))
        assert error["param"] == "num_draft_tokens"
        assert error["message"].startswith("num_draft_tokens is 3, but this model cannot draft")
        assert error["message"].endswith("Use 'auto' or 0")
        answer = post(server, {"messages": HI, "max_tokens": 4}).json()
        assert answer["generation_stats"]["drafter_kind"] == "copy"
        assert answer["generation_stats"]["bypass_reason"]
        with server.http() as http:
            told = http.get("/v1/models/tiny").json()["native_mtp"]
            assert told["available"] is False
            assert told["reason"] == answer["generation_stats"]["bypass_reason"]
            assert refused(http.patch("/v1/settings", json={"speculation": True}))["param"] == "speculation"


@pytest.mark.parametrize(
    ("template", "code"), [("{{ raise_exception('roles must alternate') }}", "invalid_value"), (None, "unsupported")]
)
def test_what_the_chat_template_refuses_is_refused(tmp_path: Path, template: str | None, code: str) -> None:
    folder = write(tmp_path / "model", vocab_size=8192)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink()
    known = PooledModel.of_loaded(read_layout(folder), load_model(folder), load_tokenizer(folder))
    with pytest.raises(Refusal) as refusal:
        read(ChatCompletionRequest.model_validate({"messages": HI}), known)
    assert (refusal.value.status_code, refusal.value.param, refusal.value.code) == (400, "messages", code)
    assert template is None or "roles must alternate" in refusal.value.detail


def test_embeddings_are_refused_in_words(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="its card names no pooling") as error:
        server.openai().embeddings.create(model="tiny", input="hi")
    assert error.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        server.openai().embeddings.create(model="other", input="hi")
