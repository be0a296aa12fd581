"""Limits on what a client may send and how long it may take."""

import asyncio
import json
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .access import PROBE_PATHS
from .errors import Refusal

MAX_VALUES = 2**17  # JSON values in a body, beside the token ids of a prompt: parsing blocks the event loop 2 µs each
API_PREFIX = "/v1/"  # of all routes that have a body; elsewhere a body is not read
CLOSE = {"Connection": "close"}


@dataclass(frozen=True)
class Limits:
    body_bytes: int = 16 * 2**20  # a context of 262,144 tokens is a megabyte or two
    prompt_tokens: int | None = None  # None: what the model's context holds
    request_seconds: float = 600.0  # from arrival to the last token
    stall_seconds: float = 60.0  # that a client may leave a response unread
    body_seconds: float = 60.0  # that a client may take to send its body
    prepare_seconds: float = 60.0  # that rendering, tokenising and compiling grammars may take
    grammar_seconds: float = 3.0  # of CPU time that the trial of a new grammar may take
    idle_seconds: float = 60.0  # that a connection may be without a request, or with incomplete headers
    linger_seconds: float = 30.0  # that the rest of a refused body is read, so that the client sees the refusal
    connections: int | None = None  # None: 2,048, or as many as the limit on open files allows


@dataclass(frozen=True)
class Deadline:
    """When a request must have ended."""

    seconds: float
    at: float  # by the event loop's clock

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        return cls(seconds, asyncio.get_running_loop().time() + seconds)

    def missed(self) -> Refusal:
        message = f"request not finished within {self.seconds:g} s: ask for fewer tokens"
        return Refusal(408, message, code="timeout", headers={"x-should-retry": "false"})  # it would fail again


class RequestLimits:
    """Read the body for the app. Refuse it if it is too long, whatever its headers say, not received in time, or of
    too many JSON values; and refuse all but health checks on a connection above the limit."""

    def __init__(self, app: ASGIApp, limits: Limits, context_length: int):
        self.app = app
        self.limits = limits
        self.max_values = MAX_VALUES + context_length

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["state"].get("health_only") and scope["path"] not in PROBE_PATHS:
                headers = CLOSE | {"Retry-After": "1"}
                message = "too many connections: try again later"
                raise Refusal(503, message, code="too_many_connections", headers=headers)
            self._check_headers(Headers(scope=scope))
            if scope["method"] in ("POST", "PATCH") and scope["path"].startswith(API_PREFIX):
                body = await self._read(receive)
                check_values(body, self.max_values)
                receive = _replay(body, receive)
        await self.app(scope, receive, send)

    def _check_headers(self, headers: Headers) -> None:
        declared = headers.get("content-length", "")
        if declared and "transfer-encoding" in headers:  # a proxy may trust the one, and we the other
            message = "the request has both Content-Length and Transfer-Encoding: send one of them"
            raise Refusal(400, message, code="invalid_http", headers=CLOSE)
        self._check_size(int(declared) if declared.isdecimal() else 0)

    async def _read(self, receive: Receive) -> bytes:
        body = bytearray()
        more = True
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(499, "client disconnected", code="gone")
                    body += message.get("body", b"")
                    self._check_size(len(body))
                    more = message.get("more_body", False)
        except TimeoutError:
            text = f"request body not received within {self.limits.body_seconds:g} s"
            raise Refusal(408, text, code="timeout", headers=CLOSE) from None
        return bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self.limits.body_bytes:
            message = f"the body is larger than {self.limits.body_bytes:,} bytes: send less"
            raise Refusal(413, message, code="request_too_large", headers=CLOSE)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns `body` first."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def check_values(body: bytes, limit: int) -> None:
    """Refuse a body that is not UTF-8 or holds more JSON values than `limit`, without parsing it."""
    if body and json.detect_encoding(body) not in ("utf-8", "utf-8-sig"):
        raise Refusal(400, "the body is not JSON: it is not in UTF-8", code="invalid_json")
    if _count_values(body) <= limit:
        return
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # every quote that is left begins or ends a string
    # A value has at most four quotes, two of them its key's: with more than that there is no need to split. Of the
    # pieces between quotes, every other one is outside of strings, the first one too.
    if plain.count(b'"') <= 4 * limit and _count_values(b"".join(plain.split(b'"')[::2])) <= limit:
        return
    raise Refusal(413, f"the body holds more than {limit:,} JSON values: send less", code="request_too_large")


def _count_values(text: bytes) -> int:
    """Return at least the number of values less one: commas and brackets, those inside strings included."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")
