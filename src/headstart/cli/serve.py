"""`headstart serve`: the model behind an HTTP server."""

import os
import shlex
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import machines, options

if TYPE_CHECKING:
    from ..engine import Settings
    from ..models import Model

PANEL = "Limits"
OPEN_FILES = 65_536


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a built-in model, a name in the Hugging Face cache, or a hub id.",
            show_default="the built-in model",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen. Beyond this machine a key is wanted.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    model_id: Annotated[
        str | None, typer.Option(help="What clients call the model.", show_default="its hub id, or its folder's name")
    ] = None,
    mtp: options.Mtp = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="HEADSTART_API_KEY", help="A key that clients must bring; may be given several times."),
    ] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Listen beyond this machine without a key.")] = False,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A web page's origin that may call; * is any.", show_default="none")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A host name that clients may use in URLs; * is any.", show_default="this machine's own"),
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Answers at a time.", rich_help_panel=PANEL)] = 16,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.", rich_help_panel=PANEL)] = 256,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest prompt.", show_default="the model's context", rich_help_panel=PANEL),
    ] = None,
    max_connections: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Open connections, half of them of one client.",
            show_default="2048, or what `ulimit -n` allows",
            rich_help_panel=PANEL,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that one request may take.", rich_help_panel=PANEL)
    ] = 600.0,
    shutdown_timeout: Annotated[
        float,
        typer.Option(min=0, help="Seconds that answers have left when it stops.", rich_help_panel=PANEL),
    ] = 30.0,
    prefix_cache_gb: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Memory for beginnings of prompts; 0 keeps none.",
            show_default="2, or a quarter of what the model leaves",
            rich_help_panel=PANEL,
        ),
    ] = None,
    prefix_cache_8bit: Annotated[
        bool, typer.Option("--prefix-cache-8bit", help="Keep them in 8 bits: not exact.", rich_help_panel=PANEL)
    ] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="What is logged on standard error.")
    ] = "warning",
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log one line for every request: no prompts, answers or keys.")
    ] = False,
    split: options.Split = "tensor",
) -> None:
    """Serve a model to OpenAI's and Anthropic's clients. Ctrl-C stops it once the running answers have ended."""
    _reopen_closed_streams()
    from ..checkpoint import read_layout, resolve
    from ..cluster import Follower, Leader, SharedPrefix
    from ..engine import EngineThread
    from ..engine.memory import memory_for_prefixes
    from ..open_files import raise_limit
    from ..server import (
        Keys,
        Limits,
        ServedModel,
        Server,
        bind,
        check_reach,
        configure_log,
        connection_limit,
        create_app,
        hosts_for,
        listen,
        user_settings_file,
    )
    from ..state import Prefix

    configure_log(log_level, access=access_log)
    keys = Keys(api_key or ())
    check_reach(host, keys, no_key=no_key)
    raise_limit(OPEN_FILES)
    connections = connection_limit(max_connections)
    # The place to listen at comes before a model is loaded for nothing.
    with machines.joined() as cluster, nullcontext() if cluster and cluster.rank else bind(host, port) as place:
        folder = resolve(model)
        loaded, tokenizer = machines.load(folder, cluster, split, mtp=mtp)
        served = ServedModel.of(read_layout(folder), loaded, tokenizer, id=model_id)
        bytes_ = memory_for_prefixes() if prefix_cache_gb is None else int(prefix_cache_gb * 1e9)
        if cluster is None:
            prefix = Prefix(bytes_, eight_bits=prefix_cache_8bit) if bytes_ else None
            room = EngineThread(
                served.model, tokenizer, max_sequences=max_sequences, max_queue=max_queue, prefix=prefix
            )
        else:
            shared = SharedPrefix(bytes_, eight_bits=prefix_cache_8bit) if bytes_ else None
            if place is None:
                Follower(cluster, loaded, tokenizer, prefix=shared).run(warm_up=True)
                return
            leader = partial(Leader, cluster, prefix=shared)
            room = EngineThread(
                served.model, tokenizer, max_sequences=max_sequences, max_queue=max_queue, make=leader
            )
        assert place is not None, "only those that follow have none"
        room.engine.warm_up()
        limits = Limits(prompt_tokens=max_prompt_tokens, request_seconds=timeout, connections=connections)
        app = create_app(
            room,
            served,
            keys=keys,
            limits=limits,
            allowed_hosts=hosts_for(host, allowed_host or (), key=bool(keys)),
            cors_origins=cors_origin or (),
            settings_file=user_settings_file(),
        )
        drafts = _drafts(loaded, room.settings)
        listen(place)
        with suppress(OSError):  # a reader of standard output who has gone must not stop the server
            typer.echo(_greeting(served.id, drafts, host, place.getsockname()[1], key=bool(keys)))
        with suppress(KeyboardInterrupt):  # uvicorn has stopped by then, and says it again
            Server(app, room, deadline=shutdown_timeout).run(sockets=[place])


def _reopen_closed_streams() -> None:
    """Open /dev/null where a standard stream is closed: a socket that got its number would be sent error messages."""
    for file in range(3):
        try:
            os.fstat(file)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _drafts(model: "Model", settings: "Settings") -> str:
    if not model.has_head:
        return f"off: {model.head_unavailable}"
    if not settings.speculation or settings.max_k == 0:
        return "off: switched off in the settings"
    return f"on, up to {settings.max_k} drafts a round"


def _greeting(name: str, drafts: str, host: str, port: int, *, key: bool) -> str:
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"
    # The first key, where the variable holds several.
    token = "${HEADSTART_API_KEY%% *}" if "HEADSTART_API_KEY" in os.environ else "KEY"
    authorization = f' -H "Authorization: Bearer {token}"' if key else ""
    question = (
        '{"messages": [{"role": "user", "content": "Write a function that adds two numbers."}], "max_tokens": 200}'
    )
    return (
        f"Model:       {name}\n"
        f"Address:     {address}/v1\n"
        f"Speculation: {drafts}\n"
        f"Try:         curl {address}/v1/chat/completions "
        f"-H 'Content-Type: application/json'{authorization} -d {shlex.quote(question)}\n"
        f"Dashboard:   {address}/"
    )
