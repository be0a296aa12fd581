"""The routes of an app that need its models."""

from dataclasses import asdict
from typing import Any

import mlx.core as mx
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict

from .anthropic_request import CountTokensRequest, MessagesRequest
from .anthropic_response import AnthropicWriter
from .dashboard import add_dashboard
from .downloads import Downloads
from .errors import refuse
from .llama_request import LlamaCompletionRequest
from .llama_response import LlamaWriter
from .metrics import Metrics
from .middleware import Keys, owner_of
from .model_pool import ModelPool
from .openai_request import ChatCompletionRequest, CompletionRequest
from .openai_response import OpenAIWriter
from .request_handler import RequestHandler
from .responses_routes import add_responses_routes
from .states import ServerState
from .token_routes import add_probe_routes, add_token_routes


async def open_app(app: FastAPI, state: ServerState, pool: ModelPool, *, allow_download: bool = False) -> None:
    """Open an app for requests to some models. Its server closes them.

    `allow_download`: clients may have models downloaded from the hub.
    """
    keys, threads = app.state.keys, app.state.threads
    downloads = Downloads(pool) if allow_download else None
    metrics = Metrics(state, pool)
    handler = RequestHandler(pool, keys, pool.limits, metrics, find=downloads.find if downloads else pool.find)
    add_generation_routes(app, handler)
    add_responses_routes(app, handler, threads, state)
    add_token_routes(app, handler)
    add_status_routes(app, pool, metrics, keys)
    add_probe_routes(app, pool)
    add_model_routes(app, pool, downloads)
    add_settings_routes(app, pool)
    add_dashboard(app)
    pool.start()
    state.open(pool)


class EmbeddingsRequest(BaseModel):
    model: str | None = None
    input: Any = None


def add_generation_routes(app: FastAPI, handler: RequestHandler) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, http: Request) -> Response:
        return await handler.reply(body, http, OpenAIWriter)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        return await handler.reply(body, http, OpenAIWriter)

    @app.post("/v1/completion")
    async def completion(body: LlamaCompletionRequest, http: Request) -> Response:
        return await handler.reply(body, http, LlamaWriter)

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, http: Request) -> Response:
        return await handler.reply(body, http, AnthropicWriter)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, http: Request) -> dict[str, int]:
        return {"input_tokens": await handler.count_tokens(body, http)}

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingsRequest) -> None:
        model = handler.find(body.model)
        refuse("model", f"{model.id} has no embeddings: its card names no pooling", "unsupported")

    @app.post("/v1/requests/{id}/cancel")
    async def cancel(id: str, http: Request) -> dict[str, Any]:
        handler.cancel(id, http)
        return {"id": id, "cancelled": True}


def add_status_routes(app: FastAPI, pool: ModelPool, metrics: Metrics, keys: Keys) -> None:
    @app.get("/v1/mtp/stats")
    async def mtp_stats(model: str | None = None) -> dict[str, Any]:
        wanted = pool.models if model is None else [pool.find(model)]
        memory = {"active_bytes": mx.get_active_memory(), "cache_bytes": mx.get_cache_memory()}
        return {"models": {each.id: each.report() for each in wanted}, "memory": memory}

    @app.get("/v1/mtp/tokens")
    async def generated_tokens(http: Request) -> dict[str, Any]:
        owner = owner_of(http.scope, keys)
        return {"models": {each.id: each.counters.tokens.get(owner, {}) for each in pool.models}}

    @app.get("/metrics")
    def prometheus() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


class ModelName(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: str


def add_model_routes(app: FastAPI, pool: ModelPool, downloads: Downloads | None) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        data = [entry | {"aliases": pool.names.of(model)} for model in pool.models for entry in model.entries()]
        if downloads is None:
            return {"object": "list", "data": data}
        removable = {model.id for model in pool.models if downloads.can_remove(model)}
        data = [entry | {"removable": entry["id"] in removable} for entry in data]
        return {"object": "list", "data": data, "downloads": downloads.describe()}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return pool.find(name).describe(pool.names.resolve(name))

    @app.delete("/v1/models/{name:path}")
    async def remove(name: str) -> dict[str, Any]:
        model = pool.find(name)
        if downloads is None:
            refuse("model", "the disk is not changed: start the server with --allow-download", "unsupported")
        await downloads.remove(model)
        return {"id": model.id, "object": "model", "deleted": True}

    @app.post("/v1/models/pull")
    async def start_download(body: ModelName) -> dict[str, Any]:
        if downloads is None:
            refuse("model", "downloads are off: start the server with --allow-download", "unsupported")
        return asdict(downloads.start(body.model))

    @app.post("/v1/models/load")
    async def load(body: ModelName) -> dict[str, Any]:
        model = pool.find(body.model)
        await pool.load(model)
        return model.describe()

    @app.post("/v1/models/unload")
    async def unload(body: ModelName) -> dict[str, Any]:
        model = pool.find(body.model)
        await pool.unload(model)
        return model.describe()


class SettingsChange(BaseModel):
    """New settings. Those left out, or null, stay as they are."""

    model_config = ConfigDict(strict=True, extra="forbid")

    speculation: bool | None = None
    max_k: int | None = None


def add_settings_routes(app: FastAPI, pool: ModelPool) -> None:
    """Add the routes of the settings and the prefix cache, of the first model unless `?model=` names another. Those
    that wait for the engine, which may hold the cache for a while, run in a thread of their own."""

    @app.get("/v1/settings")
    async def settings(model: str | None = None) -> dict[str, Any]:
        return asdict(pool.find(model).current_settings)

    @app.patch("/v1/settings")
    async def change_settings(change: SettingsChange, model: str | None = None) -> dict[str, Any]:
        return asdict(pool.find(model).configure(**change.model_dump(exclude_none=True)))

    @app.get("/v1/cache")
    def cache(model: str | None = None) -> dict[str, Any]:
        engine = pool.find(model).engine
        stats = engine.prefix.stats() if engine is not None and engine.prefix is not None else None
        return {"enabled": stats is not None, **(asdict(stats) if stats else {})}

    @app.delete("/v1/cache")
    def clear_cache(model: str | None = None) -> dict[str, Any]:
        engine = pool.find(model).engine
        if engine is not None:
            engine.clear_prefix()
        return cache(model)
