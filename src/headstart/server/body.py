"""How many values a body holds, before it is parsed: that blocks the event loop for 2 µs a value."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from .errors import Refusal

MOST_VALUES = 2**17  # beside the token ids of a prompt


class BoundedRoute(APIRoute):
    """Refuses a body of too many JSON values. `most` is set by a subclass: see `bounded_route`."""

    most = MOST_VALUES

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(http: Request) -> Response:
            if http.method in ("POST", "PATCH"):
                check_values(await _body(http), self.most)
            return await handle(http)

        return bounded


def bounded_route(context: int) -> type[BoundedRoute]:
    """Return a class of routes for a model that reads prompts of so many tokens."""
    return type("Route", (BoundedRoute,), {"most": MOST_VALUES + context})


async def _body(http: Request) -> bytes:
    try:
        return await http.body()
    except ClientDisconnect:
        raise Refusal(499, "the client has gone", code="gone") from None


def check_values(body: bytes, most: int) -> None:
    """Refuse a body that is not UTF-8, or holds more JSON values than `most`, without parsing it."""
    if body and json.detect_encoding(body) not in ("utf-8", "utf-8-sig"):
        raise Refusal(400, "the body is not JSON: it is not in UTF-8", code="invalid_json")
    if _structure(body) <= most:
        return
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # what is left of quotes begins or ends a string
    if plain.count(b'"') <= 4 * most and _structure(b"".join(plain.split(b'"')[::2])) <= most:
        return
    message = f"the body holds more than {most:,} JSON values: send less"
    raise Refusal(413, message, code="request_too_large")


def _structure(text: bytes) -> int:
    """Return at least the number of values, strings aside."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")
