"""Errors in Anthropic's shape, on the routes that its clients call."""

from typing import Literal

from pydantic import BaseModel

ROUTE = "/v1/messages"  # and what is below it

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesDetails(BaseModel):
    type: str
    message: str


class MessagesFailure(BaseModel):
    type: Literal["error"]
    error: MessagesDetails


def failure(status: int, message: str) -> MessagesFailure:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return MessagesFailure(type="error", error=MessagesDetails(type=kind, message=message))
