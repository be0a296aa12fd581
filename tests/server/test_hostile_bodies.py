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
        assert "JSON" in response.json()["error"]["message"]
        assert http.get("/health").json()["status"] == "ok"
