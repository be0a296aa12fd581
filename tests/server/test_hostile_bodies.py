"""Bodies that are not JSON, or none that can be read: a 400 with the reason, on every route that takes one."""

import gzip
import json

import pytest
from hostile import Case, error_code
from running import Running

GOOD = json.dumps({"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).encode()
GZIPPED = {"Content-Encoding": "gzip"}
BODIES: dict[str, tuple[bytes, dict[str, str]]] = {
    "empty": (b"", {}),
    "half an object": (b"{", {}),
    "a list": (b"[]", {}),
    "invalid UTF-8": (b'{"prompt": "\xff"}', {}),
    "UTF-16 without a mark": ('{"prompt": "\u4e2d"}'.encode("utf-16-le")[1:], {}),
    "100,000 lists deep": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}),
    "100,000 objects deep": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, {}),
    "an integer of 5,000 digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", {}),
    "gzip": (gzip.compress(GOOD), GZIPPED),
    "gzip without saying so": (gzip.compress(GOOD), {}),
}
ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"]
CASES = [
    Case(f"{path} {name}", path, body, 400, None if "messages" in path else "invalid_json", headers)
    for path in ROUTES
    for name, (body, headers) in BODIES.items()
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_body_that_cannot_be_read_is_refused(case: Case, server: Running) -> None:
    with server.http() as http:
        response = case.send(http)
        assert (response.status_code, error_code(response)) == (case.status, case.code), response.text[:500]
        assert response.json()["error"]["type"] == "invalid_request_error"
        told = "the body is compressed (gzip)" if case.headers == GZIPPED else "JSON"
        assert told in response.json()["error"]["message"]
        assert http.get("/health").json()["status"] == "ok"


LONG = "é" * 100_000
USER = {"role": "user", "content": "a"}
ECHOED = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    ("/v1/chat/completions", {"messages": [USER], "guided_regex": f"({LONG}"}),
    ("/v1/models/load", {"model": "tiny-qwen3.5", LONG: 1}),
    ("/detokenize", {"tokens": [int("9" * 4000)]}),
]


@pytest.mark.parametrize(("path", "body"), ECHOED, ids=["a part", "a block", "a grammar", "a name", "digits"])
def test_a_refusal_does_not_repeat_what_is_long(path: str, body: dict[str, object], server: Running) -> None:
    with server.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 400
    assert len(response.json()["error"]["message"]) <= 2000
    assert len(response.json()["error"].get("param") or "") <= 100


def test_a_grammar_that_its_compiler_panics_at_is_refused_in_a_line(server: Running) -> None:
    schema = {"type": "object", "required": LONG[:300]}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    with server.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": [USER], "response_format": wanted})
    assert response.status_code == 400
    assert "backtrace" not in response.json()["error"]["message"]
