"""What went wrong, in the shape that clients turn into their typed exceptions."""

import json
from collections.abc import Mapping
from math import ceil
from typing import Any, NoReturn

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import Busy, EngineDown, HeadstartError, OutOfMemory, RequestError
from .anthropic_errors import ROUTE, anthropic_error
from .fault import report

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "unavailable_error",
}

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/models")

# What the engine calls otherwise than clients do.
FIELDS = {"k": "num_draft_tokens", "accept": "acceptance"}


class Details(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Failure(BaseModel):
    """The shape of every error."""

    error: Details


class Refusal(HTTPException):
    """A request that is answered with an error. `param` is the field it is about, `code` what programs look at."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status_code, "server_error")
        details = Details(message=self.detail, type=kind, param=self.param, code=self.code)
        return Failure(error=details).model_dump()

    def response(self, path: str) -> JSONResponse:
        """Clients of different makers call different paths, and each knows one shape."""
        theirs = path == ROUTE or path.startswith(ROUTE + "/")
        body = anthropic_error(self.status_code, self.detail) if theirs else self.body
        return JSONResponse(body, self.status_code, self.headers)

    @property
    def event(self) -> str:
        """Inside a stream, whose status has been sent."""
        return f"data: {json.dumps(self.body)}\n\n"


def refuse(param: str, problem: str, code: str = "invalid_value") -> NoReturn:
    """A field of a request is not as it must be."""
    raise Refusal(400, f"{param}: {problem}", param=param, code=code)


def refusal(error: Exception, *, prompt: str = "prompt") -> Refusal:
    """Any error as one of ours. A RequestError begins with the name of the field it is about; `prompt`: the one that
    the prompt came in."""
    match error:
        case Refusal():
            return error
        case RequestValidationError():
            return _invalid(error)
        case RequestError():
            word, _, rest = str(error).partition(" ")
            field = (FIELDS | {"prompt": prompt}).get(word, word)
            return Refusal(
                400, f"{field} {rest}", param=field if field.isidentifier() else None, code="invalid_value"
            )
        case Busy():
            headers = {"Retry-After": str(max(1, ceil(error.retry_after)))}
            return Refusal(429, str(error), code="busy", headers=headers)
        case OutOfMemory():
            return Refusal(503, str(error), code="out_of_memory", headers={"Retry-After": "1"})
        case EngineDown():
            return Refusal(503, str(error), code="unavailable")
        case StarletteHTTPException(status_code=400):  # FastAPI's, of a body that could not be decoded
            way_out = "send UTF-8 JSON, uncompressed, of ordinary depth and with ordinary numbers"
            return Refusal(400, f"the body is not JSON that can be read: {way_out}", code="invalid_json")
        case StarletteHTTPException():
            return Refusal(error.status_code, str(error.detail), headers=error.headers)
        case HeadstartError():
            return Refusal(500, str(error))
        case _:
            report(error)
            return Refusal(500, "the server failed: its log says more")


def _invalid(error: RequestValidationError) -> Refusal:
    """What is wrong with a body. FastAPI would answer 422, in a shape of its own."""
    problems = error.errors()
    if problems[0]["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {problems[0]['ctx']['error']}", code="invalid_json")
    place, *name = problems[0]["loc"]
    if place == "query":
        return Refusal(400, f"{name[0]}: {problems[0]['msg']}", param=str(name[0]), code="invalid_value")
    # A value that could have had several types has a problem with each: the deepest is what was meant.
    path, problem = max(((_path(each, error.body), each) for each in problems), key=lambda found: len(found[0]))
    if not path:
        way_out = "send one JSON object, with Content-Type: application/json"
        return Refusal(400, f"the body is not a JSON object: {way_out}", code="invalid_json")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return Refusal(400, f"{param}: {problem['msg']}", param=param, code="invalid_value")


def _path(problem: Any, body: object) -> list[int | str]:
    """Where in the body a problem is. Its location also names the types that were tried, which are not in there."""
    path: list[int | str] = []
    where = problem["loc"][1:]
    for i, part in enumerate(where):
        missing = problem["type"] == "missing" and i == len(where) - 1
        if isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        elif isinstance(body, dict) and (part in body or missing):
            body = body.get(part)
        else:
            continue
        path.append(part)
    return path


def answer_errors(app: FastAPI) -> None:
    """Every error of the app leaves it in our shape."""

    async def respond(http: Request, error: Exception) -> JSONResponse:
        path = http.scope["path"]
        if isinstance(error, StarletteHTTPException) and error.detail == "Not Found" and path.startswith("/v1/"):
            error = Refusal(404, f"no such endpoint: this server has {', '.join(ENDPOINTS)}; /openapi.json lists all")
        return refusal(error).response(path)

    for kind in (StarletteHTTPException, RequestValidationError, HeadstartError):
        app.add_exception_handler(kind, respond)


class Unforeseen:
    """Answers what no handler does. Starlette would hand it on to uvicorn, which logs its words."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, sent)
        except Exception as error:
            if scope["type"] != "http":
                raise
            response = refusal(error).response(scope["path"])
            if not begun:  # else uvicorn closes what is left unfinished
                await response(scope, receive, send)
