"""Errors as HTTP responses, in the shape that the clients of each API turn into their typed exceptions."""

from collections.abc import Mapping
from math import ceil
from typing import Any, NoReturn

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.exceptions import HTTPException as StarletteHTTPException

from ..error_log import log_error
from ..errors import Busy, EngineDown, GrammarLimit, HeadstartError, OutOfMemory, RequestError
from .log import LOG

MESSAGES_ROUTE = "/v1/messages"  # Anthropic's shape is used here and below
RESPONSES_ROUTE = "/v1/responses"
LLAMA_ROUTE = "/v1/completion"
OPENAI_TYPES = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error",
    500: "server_error", 503: "unavailable_error",
}  # fmt: skip
ANTHROPIC_TYPES = OPENAI_TYPES | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models")

# The engine's names of fields that the API calls otherwise.
API_FIELDS = {"k": "num_draft_tokens", "accept": "acceptance"}

MOST_SAID, MOST_NAMED = 2000, 100  # characters of a message, which may quote a body, and of a field's name


class Refusal(HTTPException):
    """A request that is answered with an error. `param` is the field at fault, `code` what programs look at."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message if len(message) <= MOST_SAID else f"{message[: MOST_SAID - 2]} …", headers)
        self.param = param and param[:MOST_NAMED]
        self.code = code

    @property
    def openai_body(self) -> dict[str, Any]:
        details = {"message": self.detail, "type": self._type(OPENAI_TYPES), "param": self.param, "code": self.code}
        return {"error": details}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": self._type(ANTHROPIC_TYPES), "message": self.detail}}

    def response(self, path: str) -> JSONResponse:
        """Return the error in the shape that clients of `path` know."""
        is_anthropic = path == MESSAGES_ROUTE or path.startswith(MESSAGES_ROUTE + "/")
        return JSONResponse(self.anthropic_body if is_anthropic else self.openai_body, self.status_code, self.headers)

    def event(self, path: str) -> str:
        """Return the error as the last event of a stream, in the shape that clients of `path` know."""
        if path == RESPONSES_ROUTE:
            data = {"type": "error", "code": self.code, "message": self.detail, "param": self.param}
            # Open Responses has them in an object of their own.
            return f"event: error\ndata: {_to_json({**data, **self.openai_body, 'sequence_number': 0})}\n\n"
        if path == MESSAGES_ROUTE:
            return f"event: error\ndata: {_to_json(self.anthropic_body)}\n\n"
        done = "" if path == LLAMA_ROUTE else "data: [DONE]\n\n"
        return f"data: {_to_json(self.openai_body)}\n\n{done}"

    def _type(self, types: dict[int, str]) -> str:
        return types.get(self.status_code, "invalid_request_error" if self.status_code < 500 else types[500])


def _to_json(value: dict[str, Any]) -> str:
    return to_json(value).decode()


def refuse(param: str, problem: str, code: str = "invalid_value") -> NoReturn:
    """Refuse a request because of its field `param`."""
    raise Refusal(400, f"{param}: {problem}", param=param, code=code)


def to_refusal(error: Exception, *, prompt: str = "prompt") -> Refusal:
    """Return the refusal that answers an error; unexpected errors are logged.

    A RequestError begins with the name of the field it is about. `prompt`: the field that the prompt came in.
    """
    match error:
        case Refusal():
            return error
        case RequestValidationError():
            return _invalid(error)
        case RequestError():
            word, _, rest = str(error).partition(" ")
            field = (API_FIELDS | {"prompt": prompt}).get(word, word)
            param = field if field.isidentifier() else None
            return Refusal(400, f"{field} {rest}", param=param, code="invalid_value")
        case Busy():
            headers = {"Retry-After": str(max(1, ceil(error.retry_after)))}
            return Refusal(429, str(error), code="busy", headers=headers)
        case OutOfMemory():
            return Refusal(503, str(error), code="out_of_memory", headers={"Retry-After": "1"})
        case GrammarLimit():
            return Refusal(400, str(error), code="grammar_limit")
        case EngineDown():
            return Refusal(503, str(error), code="unavailable")
        case StarletteHTTPException(status_code=400):  # FastAPI's, of a body that could not be decoded
            remedy = "send UTF-8 JSON, uncompressed, of ordinary depth and with ordinary numbers"
            return Refusal(400, f"the body is not valid JSON: {remedy}", code="invalid_json")
        case StarletteHTTPException():
            return Refusal(error.status_code, str(error.detail), headers=error.headers)
        case HeadstartError():
            return Refusal(500, str(error))
        case _:
            log_error(LOG, "a request failed", error=error)  # without its message, which may quote the prompt
            return Refusal(500, "internal server error: the server's log says more")


async def respond_to_error(http: Request, error: Exception) -> JSONResponse:
    """Return the response to a request that raised an error."""
    path = http.scope["path"]
    if isinstance(error, StarletteHTTPException) and error.detail == "Not Found":
        known = {"/api/": "The APIs of Ollama and LM Studio are not served. ",
                 "/v1/v1/": "Leave /v1 out of the client's base URL. "}  # fmt: skip
        hint = next((hint for start, hint in known.items() if path.startswith(start)), "")
        others = f"{hint}This server has {', '.join(ENDPOINTS)}; /openapi.json lists all"
        error = Refusal(404, f"no such endpoint. {others}", headers=error.headers)
    return to_refusal(error).response(path)


def _invalid(error: RequestValidationError) -> Refusal:
    """Return what is wrong with a body or query. FastAPI would answer 422, in a shape of its own."""
    problems = error.errors()
    # A value that could have had several types has a problem with each: the deepest one is what was meant.
    path, problem = max(((_path(each, error.body), each) for each in problems), key=lambda found: len(found[0]))
    if not path:
        remedy = "send one JSON object, with Content-Type: application/json"
        return Refusal(400, f"the body is not a JSON object: {remedy}", code="invalid_json")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return Refusal(400, f"{param}: {problem['msg']}", param=param, code="invalid_value")


def _path(problem: Any, body: object) -> list[int | str]:
    """Return where in the body a problem is. Pydantic's location also names the types that were tried: skip those."""
    path: list[int | str] = []
    location = problem["loc"][1:]
    for i, part in enumerate(location):
        missing = problem["type"] == "missing" and i == len(location) - 1
        if isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        elif isinstance(body, dict) and (part in body or missing):
            body = body.get(part)
        else:
            continue
        path.append(part)
    return path
