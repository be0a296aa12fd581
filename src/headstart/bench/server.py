"""A server to benchmark: where it is, what its model is called, and what every request to it carries."""

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx

from ..errors import HeadstartError, RequestError

SET_BY_BENCH = {"messages", "prompt", "max_tokens", "stream", "stream_options"}


@dataclass(frozen=True)
class BenchServer:
    name: str
    url: str  # up to and including /v1
    model: str | None = None  # None: the only one it serves
    key: str | None = field(default=None, repr=False)
    chat: bool = True  # /chat/completions; else /completions
    body: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, *, model: str | None = None, chat: bool = True) -> "BenchServer":
        """Read `[NAME=]URL[#FIELD=VALUE&…]`. The fields go into every request body, so that one server can be
        compared with itself, such as #num_draft_tokens=0."""
        name, address = re.fullmatch(r"(?:([^=:/#]+)=)?(.*)", text).groups()  # type: ignore[union-attr]
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RequestError(f"--url {text}: not a URL; give one such as http://127.0.0.1:8000")
        body = _fields(text, parts.fragment)
        fragment = f"#{parts.fragment}" if parts.fragment else ""
        return cls(
            name=name or f"{parts.netloc}{fragment}",
            url=f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}",
            model=body.pop("model", model),
            chat=chat,
            body=body,
        )

    def client(self, timeout: float) -> httpx.AsyncClient:
        """Return a client that waits `timeout` seconds for data. Connections are not limited: requests would queue in
        the client otherwise, unseen by the server."""
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(headers=headers, limits=limits, timeout=httpx.Timeout(timeout, connect=10))

    async def with_model(self, http: httpx.AsyncClient) -> "BenchServer":
        """Return this server with the name of its model, or raise why it cannot be measured."""
        try:
            response = await http.get(f"{self.url}/models")
        except httpx.HTTPError as error:
            raise HeadstartError(f"{self.url}: {describe_http_error(error)}: is the server running?") from error
        if response.status_code in (401, 403):
            failure = describe_failure(response.status_code, response.content)
            raise HeadstartError(f"{self.url}: {failure}: give its --api-key")
        if self.model is not None:
            return self
        try:
            served = [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            served = []
        if len(served) != 1:
            known = f"it serves {', '.join(served)}" if served else "it does not list its models"
            raise HeadstartError(f"{self.url}: give the name of the MODEL to measure; {known}")
        return replace(self, model=served[0])


def describe_http_error(error: httpx.HTTPError) -> str:
    match error:
        case httpx.ConnectTimeout():
            return "no connection within 10 s"
        case httpx.TimeoutException():
            return "no data received within --timeout"
        case httpx.ConnectError():
            return "cannot be reached"
        case _:
            return f"connection lost: {error or type(error).__name__}"


def describe_failure(status: int, content: bytes) -> str:
    """Return an error response in words, whether it is in OpenAI's format, in mlx-lm's or plain text."""
    text = content.decode(errors="replace").strip()
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else text
    message = error.get("message", error) if isinstance(error, dict) else error
    return f"answered {status}: {str(message)[:300]}"


def _fields(address: str, fragment: str) -> dict[str, Any]:
    try:
        fields = parse_qsl(fragment, keep_blank_values=True, strict_parsing=bool(fragment))
    except ValueError as error:
        raise RequestError(f"--url {address}: write fields after # as name=value, joined by &") from error
    if wrong := next((name for name, _ in fields if name in SET_BY_BENCH), None):
        raise RequestError(f"--url {address}: {wrong} cannot be set after #, the benchmark sets it")
    return {name: _value(name, value) for name, value in fields}


def _value(name: str, text: str) -> Any:
    """Read JSON where it is, else text. A model's name is always text."""
    try:
        return text if name == "model" else json.loads(text)
    except ValueError:
        return text
