"""What is checked of every request before a route sees it: the host name, the API key, and the body's size and time.

A web page can give its own host name the address 127.0.0.1 (DNS rebinding); to the browser this server is then part
of that page's origin, and the page may read its responses. The Host header gives such requests away.
"""

import asyncio
import ipaddress
import json
import re
from collections.abc import Collection
from contextlib import suppress
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RequestError
from .errors import Refusal
from .settings import Limits
from .states import ServerState

HEALTH_PATHS = ("/health", "/health/live")
PROBE_PATHS = (*HEALTH_PATHS, "/metrics")  # probes use any host name, and learn only the model's name and its load
NO_KEY_PATHS = ("/", *PROBE_PATHS)  # the dashboard's page asks for the key
NO_KEY_PREFIX = "/assets/"
MODELS_PATH = "/v1/models"
ANY_HOST = "*"
HOST_AND_PORT = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::\d*)?")
MAX_VALUES = 2**17  # JSON values in a body, beside the token ids of a prompt: all its threads share one interpreter
API_PREFIX = "/v1/"  # of all routes that have a body; elsewhere a body is not read
WITHOUT_PREFIX = (  # where paths begin that clients also send without it
    "chat", "completions", "completion", "responses", "messages", "models", "embeddings", "tokenize", "detokenize",
    "apply-template",
)  # fmt: skip
CLOSE = {"Connection": "close"}
DISCARDED_BODIES = 4  # what is read of a refused body, in times the largest
DISCARD_SECONDS = 30.0  # for all of it
PAUSE_SECONDS = 2.0  # without data: the client has stopped sending


class Keys:
    """The valid API keys, kept as digests. Each one is compared, in constant time."""

    def __init__(self, keys: Collection[str] = ()):
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in keys):
            raise RequestError("api_key: a key is printable ASCII without spaces around it, and not empty")
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def replace(self, other: "Keys") -> None:
        """Accept the keys of `other` from now on, and no others."""
        self._digests = other._digests

    def allows(self, headers: Headers) -> bool:
        """Return whether the headers hold a valid key. Without keys, every request is allowed."""
        given = _digest(_key(headers))
        return any([compare_digest(given, digest) for digest in self._digests]) or not self._digests  # noqa: C419


def client_of(scope: Scope, keys: Keys) -> str:
    """Return the client for fair scheduling: the owner of a key, or the address where no key is needed."""
    if keys:
        return owner_of(scope, keys)
    client: tuple[str, int] | None = scope.get("client")
    return client[0] if client else ""


def owner_of(scope: Scope, keys: Keys) -> str:
    """Return whose key a request came with; where no key is needed, all requests have one owner."""
    return _digest(_key(Headers(scope=scope))).hex() if keys else ""


def _key(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def check_key(scope: Scope, keys: Keys) -> None:
    """Refuse a request without a valid key."""
    path = scope["path"]
    is_open = path in NO_KEY_PATHS or path.startswith(NO_KEY_PREFIX)
    if not is_open and not keys.allows(Headers(scope=scope)):
        message = "no valid API key: send one as `Authorization: Bearer …` or `x-api-key`"
        raise Refusal(401, message, code="invalid_api_key")


def check_reach(host: str, keys: Keys, *, no_key: bool) -> None:
    """Refuse to listen where other machines can connect without a key."""
    if not keys and not no_key and not is_loopback(host):
        raise RequestError(
            f"host {host} can be reached from other machines, and there is no key: set --api-key or "
            "HEADSTART_API_KEY, or pass --no-key if everyone there may use this server"
        )


def hosts_for(bound: str, named: Collection[str], *, key: bool) -> Collection[str]:
    """Return the host names to accept for a server that listens on `bound`, where the user allowed those in `named`.

    Beyond this machine a server with keys accepts any name unless `named` says otherwise: clients use names that it
    cannot know, and a page without the key gets nothing from it.
    """
    if key and not named and not is_loopback(bound):
        return (ANY_HOST,)
    return (bound, *named)


def check_host(scope: Scope, names: Collection[str]) -> None:
    """Refuse a request to another host: not a loopback name, the address it arrived at, nor one of `names`.

    HTTP/1.0 requests need not have a Host header. Those without one are accepted: browsers always send it.
    """
    host = Headers(scope=scope).get("host")
    if host is None or ANY_HOST in names or scope["path"] in PROBE_PATHS:
        return
    name, (arrived_at, _) = _host_name(host[:300]), scope.get("server") or ("", None)
    address = _address(name)
    is_own = address is not None and address == _address(arrived_at)
    if not is_own and not is_loopback(name) and name not in map(_host_name, names):
        remedy = "start the server with --allowed-host and that name, or use localhost"
        raise Refusal(421, f"host {name[:100]!r} is not allowed: {remedy}", code="host_not_allowed")


def check_origin(scope: Scope, allowed: Collection[str]) -> None:
    """Refuse a web socket of another site's page: browsers let any page open one, and send no preflight request."""
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is None or origin in allowed or ANY_HOST in allowed:
        return
    if origin.lower() not in (f"{scheme}://{headers.get('host', '').lower()}" for scheme in ("http", "https")):
        message = "pages of this origin may not connect: start the server with --cors-origin and its name"
        raise Refusal(403, message, code="origin_not_allowed")


def is_loopback(name: str) -> bool:
    address = _address(name)
    return name == "localhost" if address is None else address.is_loopback


def _host_name(host: str) -> str:
    """Return the name in a Host header, without the port and in lower case."""
    found = HOST_AND_PORT.fullmatch(host)  # nothing for an IPv6 address without brackets, as users write it
    name = (found[1] or found[2] or "") if found else host
    return name.lower().removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


class RequestChecks:
    """Check the host and the key of a request, wait until the models are known, then read its body for the app.

    The body is refused if it is too long, whatever its headers say, not received in time, or of too many JSON values.
    On a connection above the limit, all but health checks are refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        keys: Keys,
        hosts: Collection[str],
        limits: Limits,
        origins: Collection[str] = (),
    ):
        self.app = app
        self.state = state
        self.keys = keys
        self.hosts = hosts
        self.limits = limits
        self.origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path", "").lstrip("/").partition("/")[0] in WITHOUT_PREFIX:
            scope["path"] = API_PREFIX + scope["path"].lstrip("/")
        if scope["type"] == "websocket":
            try:
                self._check(scope)
                check_origin(scope, self.origins)
                await self.state.wait_for_models()
            except Refusal as refused:
                await refused.response(scope["path"])(scope, receive, send)
                return
        elif scope["type"] == "http":
            self._check(scope)
            self._check_headers(Headers(scope=scope))
            if self.state.pool is None and scope["path"] == MODELS_PATH:
                await JSONResponse(self.state.list_names())(scope, receive, send)
                return
            if scope["path"] not in HEALTH_PATHS:
                await self.state.wait_for_models()
            if scope["method"] == "HEAD":  # load balancers ask for /health so; uvicorn leaves out the body
                scope = {**scope, "method": "GET"}
            if scope["method"] in ("POST", "PATCH") and scope["path"].startswith(API_PREFIX):
                scope["state"]["body"] = await self._read(receive)  # see bodies.py
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Refuse who may not connect, before anything is read or waited for."""
        check_host(scope, self.hosts)
        check_key(scope, self.keys)
        if scope["state"].get("health_only") and scope["path"] not in PROBE_PATHS:
            headers = CLOSE | {"Retry-After": "1"}
            raise Refusal(503, "too many connections: try again later", code="too_many_connections", headers=headers)

    def _check_headers(self, headers: Headers) -> None:
        declared = headers.get("content-length", "")
        if declared and "transfer-encoding" in headers:  # a proxy may trust the one, and we the other
            message = "the request has both Content-Length and Transfer-Encoding: send one of them"
            raise Refusal(400, message, code="invalid_http", headers=CLOSE)
        if (encoding := headers.get("content-encoding", "identity").lower()) != "identity":
            message = f"the body is compressed ({encoding[:50]}): send it as it is, without Content-Encoding"
            raise Refusal(400, message, code="invalid_json", headers=CLOSE)
        self._check_size(int(declared) if declared.isdecimal() else 0)

    async def _read(self, receive: Receive) -> bytearray:
        body, values = bytearray(), ValueCounter(MAX_VALUES + self.state.context_length)
        more = True
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(499, "client disconnected", code="gone")
                    piece = message.get("body", b"")
                    self._check_size(len(body) + len(piece))
                    body += piece
                    values.add(piece)
                    more = message.get("more_body", False)
        except TimeoutError:
            text = f"request body not received within {self.limits.body_seconds:g} s"
            raise Refusal(408, text, code="timeout", headers=CLOSE) from None
        if body and json.detect_encoding(bytes(body[:4])) not in ("utf-8", "utf-8-sig"):
            raise Refusal(400, "the body is not JSON: it is not in UTF-8", code="invalid_json")
        return body

    def _check_size(self, size: int) -> None:
        if size > self.limits.body_bytes:
            message = f"the body is larger than {self.limits.body_bytes:,} bytes: send less"
            raise Refusal(413, message, code="request_too_large", headers=CLOSE)


class ValueCounter:
    """Counts the JSON values of a body as it arrives, without parsing it."""

    def __init__(self, limit: int):
        self._limit = limit
        self._count = 0  # at least the number of values less one: commas and brackets outside of strings
        self._rest = b""  # a backslash that escapes what comes next
        self._in_string = False

    def add(self, piece: bytes) -> None:
        """Count the values in the next piece. Refuses a body that holds too many."""
        plain = (self._rest + piece).replace(rb"\\", b"").replace(rb"\"", b"")
        self._rest = plain[-1:] if plain.endswith(b"\\") else b""
        # Every quote that is left begins or ends a string: of the pieces between them, every other one is outside.
        pieces = plain.split(b'"')
        outside = b"".join(pieces[self._in_string :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        self._count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if self._count > self._limit:
            message = f"the body holds more than {self._limit:,} JSON values: send less"
            raise Refusal(413, message, code="request_too_large", headers=CLOSE)


class RestOfBody:
    """Read on where a request was refused before its body had arrived: if the server closed while the client is still
    sending, the client's system would discard the response."""

    def __init__(self, app: ASGIApp, limits: Limits):
        self.app = app
        self.most = DISCARDED_BODIES * limits.body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        unread = "content-length" in headers or "transfer-encoding" in headers

        async def watch() -> Message:
            nonlocal unread
            message = await receive()
            unread = message.get("more_body", False)
            return message

        async def finish(message: Message) -> None:
            if unread and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                await self._discard(receive)
                message = {"type": "http.response.body"}
            await send(message)

        await self.app(scope, watch, finish)

    async def _discard(self, receive: Receive) -> None:
        left, more = self.most, True
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while more and left > 0:
                    message = await asyncio.wait_for(receive(), PAUSE_SECONDS)
                    left -= len(message.get("body", b""))
                    more = message.get("more_body", False)
