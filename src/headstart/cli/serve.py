"""`headstart serve`: models behind an HTTP server."""

import os
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import typer

from ..errors import DeviceLost, HeadstartError, RequestError
from . import machines, options
from .config import read_again
from .progress import show_line
from .serve_settings import ServeSettings, settings_of, with_settings

if TYPE_CHECKING:
    from ..cluster import Machines
    from ..engine import DeviceThread
    from ..server.middleware import Keys
    from ..server.model_pool import ModelPool
    from ..server.pooled_model import PooledModel
    from ..server.server import Server
    from ..server.settings import Limits
    from ..server.states import ServerState

OPEN_FILES = 65_536
RESTARTED = "HEADSTART_RESTARTED"  # set by itself: when it was started anew, and why
RESTART_SECONDS = 60.0  # in which it does not start anew again
BUILT_IN = "tiny-qwen3.5"  # what is served where nothing is named
SHOWN_SECONDS = 0.2  # between two looks at how much of a model is loaded
QUESTION = '{"messages": [{"role": "user", "content": "Write a function that adds two numbers."}], "max_tokens": 200}'


@options.with_models
@with_settings
def serve_command(context: typer.Context, models: list[str], *, settings: ServeSettings) -> None:
    """Serve models to OpenAI and Anthropic clients. The first is loaded at the start, and used where a request names
    none; others are loaded when a request names them. Ctrl-C stops it once the running requests have finished."""
    _reopen_closed_streams()
    from ..open_files import raise_limit
    from ..server.log import configure_log

    configure_log(settings.log_level, access=settings.access_log)
    keys = settings.keys()
    raise_limit(OPEN_FILES)
    limits = settings.limits()
    settings.check(models)
    with machines.connect_machines() as cluster:
        if cluster is not None:
            settings.check_cluster(models)
        if cluster is not None and cluster.rank:
            from .serve_models import join_cluster

            join_cluster(cluster, models, settings, limits)
            return
        reload = partial(_reload, context, keys, limits) if settings.config is not None else None
        device, port = _serve(models, settings, keys, limits, cluster, reload)
    if device.lost:
        problem = device.problem or ""
        if not settings.restart or cluster is not None:
            raise DeviceLost(problem)
        _start_anew(problem, port)


def _serve(
    models: list[str],
    settings: ServeSettings,
    keys: "Keys",
    limits: "Limits",
    cluster: "Machines | None",
    reload: Callable[[], None] | None,
) -> "tuple[DeviceThread, int]":
    """Listen, find and load the models meanwhile, and serve them. Return the device's thread, which has ended, and
    the port."""
    from ..server.app import create_app
    from ..server.errors import Refusal
    from ..server.listen import bind
    from ..server.middleware import hosts_for
    from ..server.server import Server
    from ..server.states import ServerState

    state = ServerState(names=[settings.model_id] if settings.model_id else models or settings.pin or [BUILT_IN])
    state.restarted = _restarted()
    hosts = hosts_for(settings.host, settings.allowed_host or (), key=bool(keys))
    app = create_app(state, keys=keys, limits=limits, allowed_hosts=hosts, cors_origins=settings.cors_origin or ())
    server = Server(app, state, deadline=settings.shutdown_timeout, drain=settings.drain_seconds, reload=reload)
    with bind(settings.host, settings.port) as bound, server.running(bound):
        _, port, *_ = bound.getsockname()
        show_line("importing libraries")
        from ..server.routes import open_app  # this takes seconds
        from .serve_models import join_cluster, make_pool

        state.doing = f"finding {', '.join(state.names)}"
        show_line("")  # a download shows lines of its own
        shared = join_cluster(cluster, models, settings, limits) if cluster is not None else None
        pool, first = (shared, []) if shared is not None else make_pool(models, settings, limits)
        pool.names.use(settings.aliases, settings.default_model)
        for model in pool.models:
            try:
                model.configure(**settings.drafting)
            except Refusal as refused:
                raise RequestError(str(refused.detail)) from None
        server.call(open_app(app, state, pool, allow_download=settings.allow_download)).result()
        for model in first:
            _load(server, state, pool, model)
        state.doing = None
        with suppress(KeyboardInterrupt):  # of several machines
            server.wait(partial(_greet, pool, settings.host, port, key=bool(keys)))
    return pool.device, port


def _load(server: "Server", state: "ServerState", pool: "ModelPool", model: "PooledModel") -> None:
    """Load a model, and do the measurements that its first request would wait for."""
    from ..server.errors import Refusal

    for work in (pool.load, pool.warm_up):
        future, shown = server.call(work(model)), ""
        while not wait([future], SHOWN_SECONDS).done:
            warming = model.loaded is not None
            state.doing = f"warming up {model.id}" if warming else f"loading {model.id}, {model.progress:.0%} read"
            if state.doing != shown:  # otherwise leave the line to what the warm-up itself says
                show_line(shown := state.doing)
        show_line("")
        try:
            future.result()
        except Refusal as refused:
            raise model.failure or HeadstartError(refused.detail) from None


def _start_anew(problem: str, port: int) -> None:
    """Replace this process by a new one with the same command line, unless that was done a moment ago."""
    if (before := _restarted()) is not None and time.monotonic() - before[1] < RESTART_SECONDS:
        raise DeviceLost(f"{problem}; it was started anew less than {RESTART_SECONDS:g} s ago, so that does not help")
    typer.echo(f"starting anew: {problem}", err=True)
    command = [sys.executable, *sys.orig_argv[1:], "--port", str(port)]  # also where --port 0 took a free one
    os.execve(sys.executable, command, {**os.environ, RESTARTED: f"{time.time()} {problem}"})


def _restarted() -> tuple[str, float] | None:
    """Return why and when, by time.monotonic, this process was started anew by the one before it."""
    when, _, problem = os.environ.get(RESTARTED, "").partition(" ")
    try:
        since = time.time() - float(when)
    except ValueError:  # none started it
        return None
    return f"the process was started anew ({problem or 'unknown'})", time.monotonic() - since


def _reload(context: typer.Context, keys: "Keys", limits: "Limits") -> None:
    """Take keys and limits from the file of --config as it is now. If it is wrong, log that and change nothing."""
    from ..server.log import LOG

    try:
        now = settings_of(read_again(context))
        changed = now.keys()
    except (HeadstartError, typer.BadParameter) as error:
        LOG.error("keys and limits stay as they were: %s", error)
        return
    keys.replace(changed)
    now.change(limits)
    LOG.warning("keys and limits were read again")


def _reopen_closed_streams() -> None:
    """Open /dev/null where a standard stream is closed: a socket that got its number would be sent error messages."""
    for file in range(3):
        try:
            os.fstat(file)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _greet(pool: "ModelPool", host: str, port: int, *, key: bool) -> None:
    first, *others = pool.models
    most = first.most_drafts
    drafts = f"on, up to {most} drafts per step" if most else f"off: {first.native_mtp['reason']}"
    name = f"{first.id}; when needed {', '.join(each.id for each in others)}" if others else first.id
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"
    # The first key, where the variable holds several.
    token = "${HEADSTART_API_KEY%% *}" if "HEADSTART_API_KEY" in os.environ else "KEY"
    authorization = f' -H "Authorization: Bearer {token}"' if key else ""
    greeting = (
        f"Model:       {name}\n"
        f"Address:     {address}/v1\n"
        f"Speculation: {drafts}\n"
        f"Try:         curl {address}/v1/chat/completions "
        f"-H 'Content-Type: application/json'{authorization} -d {shlex.quote(QUESTION)}\n"
        f"Dashboard:   {address}/"
    )
    with suppress(OSError):  # a closed standard output must not stop the server
        typer.echo(greeting)
