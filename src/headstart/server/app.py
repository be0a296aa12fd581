"""The app: what every request passes, and the routes that answer before the models are known."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware

from .. import __version__
from .bodies import BodyRoute
from .errors import respond_to_error
from .listen import Pool
from .middleware import Keys, RequestChecks, RestOfBody
from .settings import Limits
from .states import READY, ServerState
from .threads import Threads

BODY_THREADS = 2  # each of them delays the event loop


def create_app(
    state: ServerState,
    *,
    keys: Keys | None = None,
    limits: Limits | None = None,
    allowed_hosts: Collection[str] = (),
    cors_origins: Collection[str] = (),
) -> FastAPI:
    """Return the app of a server. `add_routes` of routes.py opens it for requests to its models."""
    keys, limits, threads = keys or Keys(), limits or Limits(), Threads(BODY_THREADS, "bodies")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        yield {"limits": limits, "pool": Pool(limits)}  # for connections: see listen.py
        if state.pool is not None:
            await state.pool.close()
        threads.close()

    app = FastAPI(
        title="Headstart",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        responses={"4XX": {"description": "An error of the request: see docs/reference/errors.md."}},
        exception_handlers={HTTPException: respond_to_error, RequestValidationError: respond_to_error},
    )
    app.router.route_class = BodyRoute
    app.state.threads, app.state.keys = threads, keys
    add_health_routes(app, state)
    # The last one added is the first to see a request.
    app.add_middleware(
        RequestChecks, state=state, keys=keys, hosts=allowed_hosts, limits=limits, origins=cors_origins
    )
    # Starlette's own handler of unexpected errors is outside of CORS: web pages could not read its response.
    app.add_middleware(ExceptionMiddleware, handlers={Exception: respond_to_error, HTTPException: respond_to_error})
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RestOfBody, limits=limits)
    return app


def add_health_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/health", responses={503: {"description": "The server is starting, draining or unhealthy."}})
    async def health() -> JSONResponse:
        return JSONResponse(state.report(), 200 if state.health().status in READY else 503)

    @app.get("/health/live", responses={503: {"description": "The process must be replaced."}})
    async def live() -> JSONResponse:
        health = state.health()
        return JSONResponse(health._asdict(), 503 if health.status == "unhealthy" else 200)
