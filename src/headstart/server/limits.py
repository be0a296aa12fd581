"""How much a client may ask for."""

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Refusal


@dataclass(frozen=True)
class Limits:
    body_bytes: int = 16 * 2**20  # a context of 262,144 tokens is a megabyte or two
    prompt_tokens: int | None = None  # None: what the model's context holds
    request_seconds: float = 600.0  # from the door to the last token
    stall_seconds: float = 60.0  # that a client may leave an answer unread
    body_seconds: float = 60.0  # that a client may take to send its body
    prepare_seconds: float = 60.0  # that a prompt may take to be made into tokens and grammars
    grammar_seconds: float = 3.0  # of CPU time that a new grammar may take to be tried
    idle_seconds: float = 60.0  # that a connection may be without a request, or with incomplete headers
    linger_seconds: float = 30.0  # that the rest of a refused body is read, so that the client sees the refusal
    connections: int | None = None  # None: 2,048, or as many as the limit on open files allows


class BodyLimit:
    """Stops reading a body that is too long, whatever its headers say, or too long in coming."""

    def __init__(self, app: ASGIApp, limits: Limits):
        self.app, self.most, self.seconds = app, limits.body_bytes, limits.body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        if declared and "transfer-encoding" in headers:  # a proxy may read one, and we the other
            message = "the request has both Content-Length and Transfer-Encoding: send one of them"
            refusal = Refusal(400, message, code="invalid_http", headers={"Connection": "close"})
            await refusal.response(scope["path"])(scope, receive, send)
            return
        if declared.isdecimal() and int(declared) > self.most:
            await self._too_large().response(scope["path"])(scope, receive, send)
            return
        read, more, until = 0, True, asyncio.get_running_loop().time() + self.seconds

        async def counted() -> Message:
            nonlocal read, more
            try:
                async with asyncio.timeout_at(until if more else None):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            read, more = read + len(message.get("body", b"")), message.get("more_body", False)
            if read > self.most:
                raise self._too_large()
            return message

        await self.app(scope, counted, send)

    def _too_slow(self) -> Refusal:
        message = f"request body not received within {self.seconds:g} s"
        return Refusal(408, message, code="timeout", headers={"Connection": "close"})

    def _too_large(self) -> Refusal:
        message = f"the body is larger than {self.most:,} bytes: send less"
        return Refusal(413, message, code="request_too_large", headers={"Connection": "close"})
