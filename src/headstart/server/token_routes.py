"""Routes beside generation that clients of llama.cpp, vLLM and SGLang know, and what gateways ask a server."""

import time
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response

from .. import __version__
from ..engine import Engine
from .loaded_model import LoadedModel
from .model_pool import ModelPool
from .openai_request import ChatCompletionRequest
from .pooled_model import PooledModel
from .prepare import Preparation
from .request_handler import RequestHandler
from .response import json_response
from .tokens_request import DetokenizeRequest, TokenizeRequest


def add_token_routes(app: FastAPI, handler: RequestHandler) -> None:
    @app.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest, http: Request) -> Response:
        return json_response(await handler.prepare(body.model, http, body.answer))

    @app.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest, http: Request) -> dict[str, str]:
        return await handler.prepare(body.model, http, body.text)

    @app.post("/v1/apply-template")
    async def apply_template(body: ChatCompletionRequest, http: Request) -> dict[str, str]:
        async def text(served: LoadedModel, work: Preparation) -> str:
            prompt = await body.make_prompt(served, work)
            return str(await work.run(served.tokenizer.decode, prompt.tokens))

        body.check()
        return {"prompt": await handler.prepare(body.model, http, text)}

    @app.post("/v1/chat/completions/input_tokens")
    async def input_tokens(body: ChatCompletionRequest, http: Request) -> dict[str, int]:
        return {"input_tokens": await handler.count_tokens(body, http)}


def add_probe_routes(app: FastAPI, pool: ModelPool) -> None:
    """Add what gateways ask: which model this is, and how much it has to do."""

    @app.get("/props")
    async def props() -> dict[str, Any]:
        model = pool.models[0]
        tokenizer = model.loaded.tokenizer if model.loaded is not None else None
        defaults = model.sampling.params(thinking=False)
        return {
            "default_generation_settings": {"n_ctx": model.context_length, "params": defaults},
            "total_slots": pool.max_sequences,
            "model_alias": model.id,
            "model_path": model.id,
            "modalities": {"vision": model.vision, "audio": False},
            "chat_template": tokenizer.chat_template if tokenizer is not None else None,
            "build_info": f"headstart {__version__}",
            "system_fingerprint": model.loaded.fingerprint.text if model.loaded is not None else None,
        }

    @app.get("/slots")
    async def slots() -> list[dict[str, Any]]:
        """Return the sequences that can be decoded together. Which of them runs in which is not told apart."""
        running = sum(len(model.engine.scheduler.admitted) for model in pool.models if model.engine is not None)
        context = pool.models[0].context_length
        return [{"id": id, "n_ctx": context, "is_processing": id < running} for id in range(pool.max_sequences)]

    @app.get("/version")
    async def server_version() -> dict[str, str]:
        return {"version": __version__, "engine": "headstart", "mlx": version("mlx")}

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        return _model_info(pool.models[0])

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        model = pool.models[0]
        load = _load(model.engine, pool.max_sequences)
        sizes = {name: load[name] for name in ("max_total_num_tokens", "max_running_requests")}
        served = {"served_model_name": model.id, "context_length": model.context_length}
        return _model_info(model) | served | sizes | {"version": __version__, "tp_size": load["ranks"], "dp_size": 1}

    @app.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        loads = [_load(model.engine, pool.max_sequences) for model in pool.models if model.engine is not None]
        waiting = pool.waiting  # for a model to be loaded
        total = {name: sum(load[name] for load in loads) for name in ("num_running_reqs", "num_total_reqs")}
        queued = sum(load["num_waiting_reqs"] for load in loads) + waiting
        return {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "version": __version__,
            "dp_rank_count": len(loads),
            "loads": [{"dp_rank": rank, **load} for rank, load in enumerate(loads)],
            "aggregate": {"total_running_reqs": total["num_running_reqs"], "total_waiting_reqs": queued},
        }


def _model_info(model: PooledModel) -> dict[str, Any]:
    return {
        "model_path": model.id,
        "tokenizer_path": model.id,
        "model_type": model.family,
        "is_generation": True,
        "max_context_length": model.context_length,
        "preferred_sampling_params": model.sampling.params(thinking=False),
    }


def _load(engine: Engine | None, most: int) -> dict[str, Any]:
    """Return how much an engine has to do, in SGLang's words. Its memory decides how many tokens it can hold."""
    if engine is None:
        return {"max_total_num_tokens": 0, "max_running_requests": most, "ranks": 1}
    scheduler = engine.scheduler
    admitted = scheduler.admitted
    used = sum(len(each.tokens) for each in admitted)
    per_token = max(1, scheduler.footprint.position)
    total = min(most * engine.model.context_length, scheduler.left // per_token)
    waiting, cached = len(scheduler.queue), engine.prefix.stats() if engine.prefix is not None else None
    return {
        "num_running_reqs": len(admitted),
        "num_waiting_reqs": waiting,
        "num_total_reqs": len(admitted) + waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": total,
        "token_usage": round(used / total, 4) if total else 0.0,
        "cache_hit_rate": round(cached.hits / max(1, cached.hits + cached.misses), 4) if cached else 0.0,
        "cached_tokens": cached.tokens if cached else 0,
        "max_running_requests": most,
        "ranks": engine.model.share.ranks,
    }
