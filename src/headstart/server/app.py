"""Put the server's routes and middleware together."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware

from .. import __version__
from ..engine import EngineThread
from .anthropic_request import CountTokensRequest, MessagesRequest
from .anthropic_response import AnthropicWriter
from .dashboard import add_dashboard
from .errors import refuse, respond_to_error
from .listen import Pool
from .metrics import Metrics
from .middleware import Keys, Limits, RequestChecks, RestOfBody, client_of
from .openai_request import ChatCompletionRequest, CompletionRequest
from .openai_response import OpenAIWriter
from .request_handler import RequestHandler
from .responses_request import ResponsesRequest
from .responses_response import ResponsesWriter
from .responses_store import ResponseStore
from .served_model import ServedModel


def create_app(
    engine_thread: EngineThread,
    served: ServedModel,
    *,
    keys: Keys | None = None,
    limits: Limits | None = None,
    allowed_hosts: Collection[str] = (),
    cors_origins: Collection[str] = (),
) -> FastAPI:
    """Return the app for a model. It starts the engine's thread; the Server that runs it closes it."""
    keys, limits, metrics = keys or Keys(), limits or Limits(), Metrics(engine_thread)
    handler = RequestHandler(engine_thread, served, keys, limits, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        engine_thread.start()
        handler.preparer.start()
        yield {"limits": limits, "pool": Pool(limits)}  # for connections: see listen.py
        await handler.preparer.close()

    app = FastAPI(
        title="Headstart",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        responses={"4XX": {"description": "An error of the request: see docs/reference/errors.md."}},
        exception_handlers={HTTPException: respond_to_error, RequestValidationError: respond_to_error},
    )
    add_generation_routes(app, handler)
    add_responses_routes(app, handler)
    add_status_routes(app, engine_thread, served, metrics)
    add_settings_routes(app, engine_thread)
    add_dashboard(app)
    # The last one added is the first to see a request.
    context = served.model.context_length
    app.add_middleware(RequestChecks, keys=keys, hosts=allowed_hosts, limits=limits, context_length=context)
    # Starlette's own handler of unexpected errors is outside of CORS: web pages could not read its response.
    app.add_middleware(ExceptionMiddleware, handlers={Exception: respond_to_error, HTTPException: respond_to_error})
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RestOfBody, limits=limits)
    return app


def add_generation_routes(app: FastAPI, handler: RequestHandler) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, http: Request) -> Response:
        return await handler.reply(body, http, OpenAIWriter)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        return await handler.reply(body, http, OpenAIWriter)

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, http: Request) -> Response:
        return await handler.reply(body, http, AnthropicWriter)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, http: Request) -> dict[str, int]:
        return {"input_tokens": await handler.count_tokens(body, http)}

    @app.post("/v1/requests/{id}/cancel")
    async def cancel(id: str, http: Request) -> dict[str, Any]:
        handler.cancel(id, http)
        return {"id": id, "cancelled": True}


def add_responses_routes(app: FastAPI, handler: RequestHandler) -> None:
    store = ResponseStore()

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, http: Request) -> Response:
        client = client_of(http.scope, handler.keys)
        writer = partial(ResponsesWriter, save=partial(store.put, client=client))
        return await handler.reply(store.with_history(body, client), http, writer)

    @app.get("/v1/responses/{id}")
    async def stored_response(id: str, http: Request, stream: bool = False) -> Response:
        if stream:
            refuse("stream", "a stored response is not streamed again: leave it out", "unsupported")
        return Response(store.get(id, client_of(http.scope, handler.keys)).json, media_type="application/json")

    @app.delete("/v1/responses/{id}")
    async def delete_response(id: str, http: Request) -> dict[str, Any]:
        store.delete(id, client_of(http.scope, handler.keys))
        return {"id": id, "object": "response.deleted", "deleted": True}


def add_status_routes(app: FastAPI, engine_thread: EngineThread, served: ServedModel, metrics: Metrics) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served.describe()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        served.check_name(name)
        return served.describe()

    @app.get("/v1/mtp/stats")
    async def mtp_stats() -> dict[str, Any]:
        return {"models": {served.id: metrics.report()}}

    @app.get("/v1/mtp/tokens")
    async def generated_tokens() -> dict[str, Any]:
        return {"models": {served.id: metrics.counters.tokens}}

    @app.get("/health", responses={503: {"description": "The engine's thread is not alive."}})
    async def health() -> JSONResponse:
        state = {
            "status": "ok" if engine_thread.healthy else "unhealthy",
            "model": served.id,
            "problem": engine_thread.problem,
            "restarts": engine_thread.restarts,
            "running": engine_thread.running,
            "prefilling": engine_thread.prefilling,
            "queued": engine_thread.queued,
        }
        return JSONResponse(state, 200 if engine_thread.healthy else 503)

    @app.get("/metrics")
    def prometheus() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


class SettingsChange(BaseModel):
    """New settings. Those left out, or null, stay as they are."""

    model_config = ConfigDict(strict=True, extra="forbid")

    speculation: bool | None = None
    max_k: int | None = None


def add_settings_routes(app: FastAPI, engine_thread: EngineThread) -> None:
    """Add the routes of the settings and the prefix cache. Those that wait for the engine, which may hold the cache
    for a while, run in a thread of their own."""
    prefix, model = engine_thread.engine.prefix, engine_thread.engine.model

    @app.get("/v1/settings")
    async def settings() -> dict[str, Any]:
        return asdict(engine_thread.settings)

    @app.patch("/v1/settings")
    async def change_settings(change: SettingsChange) -> dict[str, Any]:
        given = change.model_dump(exclude_none=True)
        for name, value in given.items():
            if value and not model.most_drafts:
                refuse(name, f"this model cannot draft: {model.head_unavailable}", "unsupported")
        if given.get("max_k", 0) > model.most_drafts:
            refuse("max_k", f"is {given['max_k']}; this model drafts at most {model.most_drafts}")
        engine_thread.configure(**given)
        return asdict(engine_thread.settings)

    @app.get("/v1/cache")
    def cache() -> dict[str, Any]:
        return {"enabled": prefix is not None, **(asdict(prefix.stats()) if prefix else {})}

    @app.delete("/v1/cache")
    def clear_cache() -> dict[str, Any]:
        engine_thread.engine.clear_prefix()
        return cache()
