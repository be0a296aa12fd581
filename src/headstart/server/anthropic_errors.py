"""Errors in Anthropic's format, on the routes that its clients call."""

from typing import Any

ROUTE = "/v1/messages"  # and what is below it
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error response, which is also an event of a stream."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
