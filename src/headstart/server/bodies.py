"""Read the bodies of requests so that none delays the event loop, whatever it holds: one that is not small is parsed
and validated in a thread.
"""

from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json

from .errors import Refusal, to_refusal
from .middleware import client_of

SMALL_BODY = 2**12  # bytes that take a few milliseconds, whatever they say

Validate = Callable[..., tuple[Any, list[Any]]]


class BodyRoute(APIRoute):
    """A route of an app that has `threads` and `keys` in its state."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, field = super().get_route_handler(), self.body_field
        if field is None:
            return handle

        async def read(http: Request) -> Response:
            return await handle(BodyRequest(http, field.validate))

        return read


class BodyRequest(Request):
    """A request whose JSON is what its route takes, validated."""

    def __init__(self, http: Request, validate: Validate):
        super().__init__(http.scope, http.receive)
        self._validate = validate

    async def body(self) -> bytes:
        return self.state.body  # see RequestChecks

    async def json(self) -> Any:
        body, state = self.state.body, self.app.state
        if len(body) <= SMALL_BODY:
            return read_body(body, self._validate)
        return await state.threads.run(client_of(self.scope, state.keys), read_body, body, self._validate)


def read_body(body: bytearray, validate: Validate) -> Any:
    """Return what a body says, or refuse it. The body is empty afterwards, so that nothing keeps its memory."""
    if body.startswith(BOM_UTF8):
        del body[: len(BOM_UTF8)]
    try:
        value = from_json(body)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}", code="invalid_json") from None
    body.clear()
    found, problems = validate(value, loc=("body",))
    if problems:
        raise to_refusal(RequestValidationError(problems, body=value))
    return found
