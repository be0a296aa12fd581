"""What clients of llama.cpp's server, vLLM and SGLang find here: paths, tokens, templates, grammars and times."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running import CONTEXT, Running, chat_tokens, tokenizer
from scripted import ScriptedRoom, scripted

from headstart.server.anthropic_request import MessagesRequest
from headstart.server.llama_request import LlamaCompletionRequest
from headstart.server.openai_request import ChatCompletionRequest, CompletionRequest
from headstart.server.request_fields import RequestModel
from headstart.server.responses_request import ResponsesRequest

Here = tuple[Running, ScriptedRoom]
HI = [{"role": "user", "content": "Hi"}]
TALK = [*HI, {"role": "assistant", "content": "Hello th"}]
TEXT = "What is the capital of Norway? Ås é 媽"


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with scripted(burst=3) as server:
        yield server


@pytest.fixture(scope="module")
def http(here: Here) -> Iterator[httpx.Client]:
    with here[0].http() as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def events(http: httpx.Client, path: str, **body: Any) -> list[Any]:
    lines = http.post(path, json=body | {"stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": HI}),
        ("/completions", {"prompt": "Hi"}),
        ("/responses", {"input": "Hi"}),
        ("/messages", {"messages": HI, "max_tokens": 9}),
        ("/messages/count_tokens", {"messages": HI}),
        ("/tokenize", {"content": "Hi"}),
    ],
)
def test_paths_are_the_same_without_their_prefix(here: Here, http: httpx.Client, path: str, body: Any) -> None:
    here[1].scripts.clear()
    here[1].scripts.extend(["Yes."] * 2)
    assert post(http, path, **body).keys() == post(http, f"/v1{path}", **body).keys()
    assert http.post(path, content=b"{").json()["error"]
    here[1].scripts.clear()


def test_the_list_of_models_has_a_short_path_too(http: httpx.Client) -> None:
    assert http.get("/models").json() == http.get("/v1/models").json()
    assert http.get("/models/tiny").json()["id"] == "tiny"


def test_texts_become_tokens_and_tokens_texts(http: httpx.Client) -> None:
    ids = tokenizer().encode(TEXT, add_special_tokens=False)
    found = post(http, "/tokenize", content=TEXT)
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), CONTEXT)
    assert post(http, "/tokenize", model="tiny", prompt=TEXT)["tokens"] == tokenizer().encode(TEXT)
    assert post(http, "/detokenize", tokens=ids) == dict.fromkeys(("content", "prompt", "text"), TEXT)
    pieces = post(http, "/tokenize", content=TEXT, with_pieces=True)["tokens"]
    spelled = [piece["piece"] if isinstance(piece["piece"], list) else piece["piece"].encode() for piece in pieces]
    assert b"".join(map(bytes, spelled)).decode() == TEXT
    assert [piece["id"] for piece in pieces] == ids
    control, plain = (post(http, "/tokenize", content="<|im_end|>", parse_special=parse) for parse in (True, False))
    assert (control["count"], plain["count"] > 1) == (1, True)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/apply-template", {"messages": []}, "messages"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(http: httpx.Client, path: str, body: Any, param: str) -> None:
    assert refused(http, path, **body)["param"] == param


def test_a_template_is_applied_and_its_tokens_counted(http: httpx.Client) -> None:
    text = post(http, "/apply-template", messages=HI)["prompt"]
    assert text == tokenizer().decode(chat_tokens("Hi"))
    count = len(tokenizer().encode(text, add_special_tokens=False))
    assert post(http, "/v1/chat/completions/input_tokens", messages=HI) == {"input_tokens": count}
    without = post(http, "/apply-template", messages=HI, add_generation_prompt=False)["prompt"]
    assert text.startswith(without)
    assert "assistant" not in without


def test_the_last_message_can_be_continued(here: Here, http: httpx.Client) -> None:
    here[1].scripts.append("ere.")
    chat = post(http, "/chat/completions", messages=TALK, continue_final_message=True, add_generation_prompt=False)
    assert chat["choices"][0]["message"]["content"] == "ere."
    assert tokenizer().decode(list(here[1].requests[-1].prompt)).endswith("Hello th")
    odd = [*HI, {"role": "assistant", "content": "Hello <|im_end|>"}]
    assert post(http, "/apply-template", messages=odd, continue_final_message=True)["prompt"].endswith("<|im_end|>")
    for body in ({"messages": HI}, {"messages": TALK, "add_generation_prompt": True}):
        error = refused(http, "/chat/completions", continue_final_message=True, **body)
        assert error["param"] == "continue_final_message"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_grammar_of_llama_cpp_is_followed(here: Here, http: httpx.Client, path: str) -> None:
    body: Any = {"messages": HI} if "chat" in path else {"prompt": "Hi"}
    grammar = '# of colours\nroot ::= colour ("," colour)*\ncolour ::= "red" | [b-c] "lue"'
    here[1].scripts.extend(["red,blue", "red,green"])
    choice = post(http, path, **body, grammar=grammar)["choices"][0]
    assert (choice["message"]["content"] if "chat" in path else choice["text"]) == "red,blue"
    assert "grammar" in http.post(path, json=body | {"grammar": grammar}).json()["error"]["message"]
    for broken in ("root ::= this is (not valid", "root ::= missing", "root ::= " + "(" * 20_000):
        error = refused(http, path, **body, grammar=broken)
        assert (error["param"], "GBNF" in error["message"]) == ("grammar", True)


@pytest.mark.parametrize(
    "field",
    [{"json_schema": {"const": "42"}}, {"response_format": {"type": "json_object", "schema": {"const": "42"}}}],
)
def test_schemas_under_the_names_of_llama_cpp(here: Here, http: httpx.Client, field: Any) -> None:
    here[1].scripts.append('"42"')
    assert post(http, "/chat/completions", messages=HI, **field)["choices"][0]["message"]["content"] == '"42"'
    broken = {"json_schema": 5} if "json_schema" in field else {"response_format": field["response_format"]}
    broken.get("response_format", {})["schema"] = {"type": "hiccup"}
    refused(http, "/chat/completions", messages=HI, **broken)


def test_the_times_of_an_answer(here: Here, http: httpx.Client) -> None:
    here[1].scripts.extend(["one two three four five"] * 3)
    timings = post(http, "/chat/completions", messages=HI)["timings"]
    assert timings["predicted_n"] > 5
    assert timings["prompt_n"] + timings["cache_n"] == len(here[1].requests[-1].prompt)
    chunks = events(http, "/chat/completions", messages=HI, timings_per_token=True)
    assert [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk][-1] == timings["predicted_n"]
    assert "timings" not in chunks[0]
    told = events(http, "/responses", input="Hi", timings_per_token=True, return_progress=True)
    progress = [event["prompt_progress"] for event in told if "prompt_progress" in event]
    assert [each["processed"] for each in progress] == [progress[0]["cache"], progress[0]["total"]]
    assert all("timings" in event for event in told if event["type"].endswith((".delta", ".completed")))


def test_what_gateways_ask(http: httpx.Client) -> None:
    asked = {
        path: http.get(path).json() for path in ("/server_info", "/model_info", "/v1/loads", "/version", "/props")
    }
    assert http.get("/get_server_info").json().keys() == asked["/server_info"].keys()
    assert http.get("/get_model_info").json() == asked["/model_info"]
    info = asked["/server_info"]
    assert (info["served_model_name"], info["context_length"], info["max_running_requests"]) == ("tiny", CONTEXT, 16)
    assert info["max_total_num_tokens"] >= CONTEXT
    (load,) = asked["/v1/loads"]["loads"]
    assert (load["dp_rank"], load["num_running_reqs"], load["num_waiting_reqs"], load["token_usage"]) == (0, 0, 0, 0)
    assert asked["/version"]["version"] == info["version"]
    assert asked["/props"]["default_generation_settings"]["n_ctx"] == CONTEXT


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        ("/v1/chat/completions", {"messages": HI}, ChatCompletionRequest),
        ("/v1/completions", {"prompt": "Hi"}, CompletionRequest),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}, MessagesRequest),
        ("/v1/responses", {"input": "Hi"}, ResponsesRequest),
        ("/completion", {"prompt": "Hi"}, LlamaCompletionRequest),
    ],
)
def test_a_gateways_own_fields_and_nulls_are_accepted(
    here: Here, http: httpx.Client, path: str, body: dict[str, Any], shape: type[RequestModel]
) -> None:
    """As they re-serialise a request: every field that they know, null where it was absent, floats as integers."""
    here[1].scripts.append("Yes.")
    nulls = dict.fromkeys(shape.model_fields) | {"user": None, "routing_hint": None}
    numbers = {"temperature": 1, "top_p": 1, "top_k": -1, "priority": 0}
    headers = {"X-SMG-Target": "tiny", "X-Priority": "9"}
    response = http.post(path, json=nulls | numbers | {"rid": "x"} | body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.json()["generation_stats"]["ignored_fields"] == ["rid"]
    request = here[1].requests[-1]
    assert (request.params.temperature, request.params.top_k, request.priority) == (1, 0, 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/loads", "/server_info", "/slots"])
def test_a_gateways_headers_give_no_rights(path: str) -> None:
    forged = {
        "X-Forwarded-For": "127.0.0.1", "X-Real-IP": "127.0.0.1", "Forwarded": "for=127.0.0.1",
        "X-Forwarded-User": "admin", "X-Authenticated-User": "admin", "X-Forwarded-Authorization": "Bearer sesame",
        "X-SMG-Target": "tiny", "X-Internal-Request": "true",
    }  # fmt: skip
    with scripted(key="sesame") as (server, _), httpx.Client(base_url=server.url, headers=forged) as stranger:
        method = "POST" if path.endswith("completions") else "GET"
        assert stranger.request(method, path, json={"messages": HI}).status_code == 401
