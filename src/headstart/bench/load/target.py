"""A server under load: where it is, what its model is called, and what every request there has in its body."""

import json
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx

from ...errors import HeadstartError, RequestError

SET_HERE = {"model", "messages", "prompt", "max_tokens", "stream", "stream_options"}  # by the measurement


@dataclass(frozen=True)
class Target:
    name: str
    url: str  # to /v1
    model: str | None = None  # None: the only one there
    key: str | None = field(default=None, repr=False)
    chat: bool = True
    body: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, address: str, *, name: str | None = None, **more: Any) -> "Target":
        """What stands behind a # is not part of an address: here it goes into the body of every request, such as
        #num_draft_tokens=0, so that one server can be compared with itself."""
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RequestError(f"{address}: not an address: it must be like http://127.0.0.1:8000")
        path = parts.path.rstrip("/") or "/v1"
        fragment = f"#{parts.fragment}" if parts.fragment else ""
        return cls(
            name=name or f"{parts.netloc}{fragment}",
            url=f"{parts.scheme}://{parts.netloc}{path}",
            body=_body(address, parts.fragment),
            **more,
        )

    def client(self, patience: float) -> httpx.AsyncClient:
        """`patience` is how long nothing may arrive, in seconds. Nobody waits for a connection here: load would
        otherwise queue in the client, unseen by the server."""
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(headers=headers, limits=limits, timeout=httpx.Timeout(patience, connect=10))

    async def found(self, http: httpx.AsyncClient) -> "Target":
        """This target with the name of its model, or an error that says why it cannot be asked."""
        try:
            response = await http.get(f"{self.url}/models")
        except httpx.HTTPError as error:
            raise HeadstartError(f"{self.url}: {reason(error)}: is the server running there?") from error
        if response.status_code in (401, 403):
            raise HeadstartError(f"{self.url}: {refusal(response.status_code, response.content)}: give its --api-key")
        if self.model is not None:
            return self
        served = _ids(response)
        if len(served) != 1:
            known = f"it names {', '.join(served)}" if served else "it does not name its models"
            raise HeadstartError(f"{self.url}: which model? Give --model; {known}")
        return replace(self, model=served[0])


def reason(error: httpx.HTTPError) -> str:
    """Some of httpx's errors have no words of their own."""
    match error:
        case httpx.ConnectTimeout():
            return "no connection within 10 s"
        case httpx.TimeoutException():
            return "stalled: nothing arrived for too long (--timeout)"
        case httpx.ConnectError():
            return "cannot be reached"
        case _:
            return f"the connection broke: {error or type(error).__name__}"


def refusal(status: int, content: bytes) -> str:
    """An answer that is none, in OpenAI's shape, in mlx-lm's, or in any other."""
    text = content.decode(errors="replace").strip()
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    error = told.get("error", told) if isinstance(told, dict) else text
    message = error.get("message", error) if isinstance(error, dict) else error
    return f"answered {status}: {str(message)[:300]}"


def _ids(response: httpx.Response) -> list[str]:
    try:
        return [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def _body(address: str, fragment: str) -> dict[str, Any]:
    try:
        fields = parse_qsl(fragment, keep_blank_values=True, strict_parsing=bool(fragment))
    except ValueError as error:
        raise RequestError(f"{address}: behind # stands name=value, and & between several") from error
    if wrong := next((name for name, _ in fields if name in SET_HERE), None):
        raise RequestError(f"{address}: {wrong} is not set behind #: there are options for it")
    return {name: _value(value) for name, value in fields}


def _value(text: str) -> Any:
    """JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
