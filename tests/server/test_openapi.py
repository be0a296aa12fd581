"""schemathesis sends what the OpenAPI document allows, and what it does not: nothing breaks the server."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from running import running
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from headstart.server.settings import Limits

ROUTES = {
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/requests/{id}/cancel"),
    ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"), ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{id}"), ("DELETE", "/v1/responses/{id}"),
    ("POST", "/v1/embeddings"), ("POST", "/v1/models/pull"),
    ("POST", "/v1/models/load"), ("POST", "/v1/models/unload"),
    ("GET", "/v1/models"), ("GET", "/v1/models/{name}"), ("DELETE", "/v1/models/{name}"),
    ("GET", "/v1/mtp/stats"), ("GET", "/v1/mtp/tokens"),
    ("GET", "/v1/settings"),
    ("PATCH", "/v1/settings"), ("GET", "/v1/cache"), ("DELETE", "/v1/cache"), ("GET", "/health"),
    ("GET", "/health/live"), ("GET", "/metrics"),
    ("POST", "/v1/responses/compact"), ("POST", "/v1/chat/completions/input_tokens"), ("POST", "/v1/tokenize"),
    ("POST", "/v1/detokenize"), ("POST", "/v1/apply-template"), ("GET", "/props"), ("GET", "/version"),
    ("GET", "/model_info"), ("GET", "/get_model_info"), ("GET", "/server_info"), ("GET", "/get_server_info"),
    ("GET", "/v1/loads"), ("POST", "/v1/completion"), ("GET", "/slots"),
}  # fmt: skip


# No such model, mostly.
NAMED = ("/v1/embeddings", "/v1/models/load", "/v1/models/unload", "/v1/models/pull", "/v1/responses/compact")

WITH_BODY = [
    ("PATCH", "/v1/settings"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"),
    ("POST", "/v1/messages"), ("POST", "/v1/responses"), ("POST", "/v1/responses/compact"), ("POST", "/v1/tokenize"),
    ("POST", "/v1/detokenize"), ("POST", "/v1/apply-template"), ("POST", "/v1/completion"),
]  # fmt: skip


@pytest.fixture(scope="module")
def document() -> Iterator[Any]:
    """Of a server whose context is so short that every answer is."""
    with running(context=64, limits=Limits(request_seconds=60)) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_the_document_has_every_route(document: Any) -> None:
    operations = [result.ok() for result in document.get_all_operations()]
    assert {(operation.method.upper(), operation.path) for operation in operations} == ROUTES


def send_all(document: Any, method: str, path: str, mode: GenerationMode, examples: int) -> Counter[int]:
    """How often each status came back."""
    answered: Counter[int] = Counter()

    @given(case=document[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    def send(case: schemathesis.Case) -> None:
        answered[case.call_and_validate(checks=[not_a_server_error], timeout=90).status_code] += 1

    send()
    return answered


@pytest.mark.parametrize(("method", "path"), sorted(ROUTES))
def test_nothing_that_the_document_allows_breaks_the_server(document: Any, method: str, path: str) -> None:
    # Few of the many fields of a completion go together.
    answered = send_all(document, method, path, GenerationMode.POSITIVE, 40 if path == "/v1/completions" else 4)
    assert answered[200] or "{" in path or path in NAMED, answered


@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_nothing_that_the_document_forbids_breaks_the_server(document: Any, method: str, path: str) -> None:
    answered = send_all(document, method, path, GenerationMode.NEGATIVE, 4)
    assert answered[400], answered


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_many_bodies(document: Any, method: str, path: str, mode: GenerationMode) -> None:
    assert send_all(document, method, path, mode, 100).total() > 50
