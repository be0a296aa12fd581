"""The routes, put together."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from .. import __version__
from ..engine import EngineThread
from .anthropic_request import CountTokensRequest, MessagesRequest
from .anthropic_response import AnthropicResponse
from .auth import KeyRequired, Keys
from .body import bounded_route
from .dashboard import add_dashboard
from .errors import Failure, Unforeseen, answer_errors
from .history import History
from .hosts import HostRequired
from .limits import BodyLimit, Limits
from .log import AccessLog
from .metrics import CountStatus, Metrics
from .openai_request import ChatCompletionRequest, CompletionRequest
from .openai_response import OpenAIResponse
from .pool import Pool
from .request_handler import RequestHandler
from .served_model import ServedModel, model_list
from .settings import Change, Preferences


def create_app(
    room: EngineThread,
    served: ServedModel,
    *,
    keys: Keys | None = None,
    limits: Limits | None = None,
    allowed_hosts: Collection[str] = (),
    cors_origins: Collection[str] = (),
    settings_file: Path | None = None,
) -> FastAPI:
    """The app starts the room with itself. Whoever listens closes the room: see listen.py. Settings that clients
    change are kept in `settings_file`, if there is one."""
    keys, limits, metrics = keys or Keys(), limits or Limits(), Metrics(room)
    preferences, history = Preferences(room, settings_file), History(room, metrics.tally)
    desk = RequestHandler(room, served, keys, limits, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        room.start()
        desk.preparer.start()
        sampling = asyncio.create_task(history.keep())
        yield {"limits": limits, "pool": Pool(limits)}  # for connections: see connection.py
        sampling.cancel()
        await desk.preparer.close()

    app = FastAPI(
        title="Headstart",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        responses={"4XX": {"model": Failure}, "5XX": {"model": Failure}},
    )
    app.router.route_class = bounded_route(served.model.context_length)
    answer_errors(app)
    add_routes(app, desk, preferences, history)
    add_dashboard(app)
    # The last one added is the first to see a request.
    app.add_middleware(KeyRequired, keys=keys)
    app.add_middleware(BodyLimit, limits=limits)
    app.add_middleware(HostRequired, names=allowed_hosts)
    app.add_middleware(Unforeseen)
    if cors_origins:  # outside of Unforeseen: a page must be able to read that 500
        app.add_middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(CountStatus, tally=metrics.tally)
    app.add_middleware(AccessLog)
    return app


def add_routes(app: FastAPI, desk: RequestHandler, preferences: Preferences, history: History) -> None:
    room, served, metrics, prefix = desk.engine_thread, desk.served, desk.metrics, desk.engine_thread.engine.prefix

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, http: Request) -> Response:
        return await desk.reply(body, http, OpenAIResponse)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        return await desk.reply(body, http, OpenAIResponse)

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, http: Request) -> Response:
        return await desk.reply(body, http, AnthropicResponse)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, http: Request) -> dict[str, int]:
        return {"input_tokens": await desk.count_tokens(body, http)}

    @app.post("/v1/requests/{id}/cancel")
    async def cancel(id: str, http: Request) -> dict[str, Any]:
        desk.cancel(id, http)
        return {"id": id, "cancelled": True}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served.describe()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        served.check_name(name)
        return served.describe()

    @app.get("/v1/mtp/stats")
    async def mtp_stats() -> dict[str, Any]:
        return {"models": {served.id: metrics.tally.report()}}

    @app.get("/v1/history")
    async def recent(after: float = 0.0) -> JSONResponse:
        return JSONResponse({"models": {served.id: history.report(after)}})

    @app.get("/v1/cards")
    def cards() -> dict[str, Any]:
        return model_list(served.path)

    @app.get("/v1/settings")
    async def settings() -> dict[str, Any]:
        return preferences.report()

    @app.patch("/v1/settings")
    def change_settings(change: Change) -> dict[str, Any]:  # in a thread of its own: it writes a file
        preferences.change(change)
        return preferences.report()

    @app.get("/v1/cache")
    def cache() -> dict[str, Any]:  # in a thread of its own: the engine may hold the cache for a while
        return {"enabled": prefix is not None, **(asdict(prefix.stats()) if prefix else {})}

    @app.delete("/v1/cache")
    def clear_cache() -> dict[str, Any]:
        room.engine.clear_prefix()
        return cache()

    @app.get("/health", responses={503: {"description": "The engine's thread is not alive."}})
    async def health() -> JSONResponse:
        state = {
            "status": "ok" if room.healthy else "unhealthy",
            "model": served.id,
            "problem": room.problem,
            "restarts": room.restarts,
            "running": room.running,
            "entering": room.prefilling,
            "queued": room.queued,
        }
        return JSONResponse(state, 200 if room.healthy else 503)

    @app.get("/metrics")
    def prometheus() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)
