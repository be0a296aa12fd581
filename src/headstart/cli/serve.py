"""`headstart serve`: the model behind an HTTP server."""

import os
import shlex
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Literal

import typer
from typer import Option

from ..errors import RequestError
from ..limits import MAX_IMAGE_PIXELS
from . import machines, options
from .download import find_model

if TYPE_CHECKING:
    from ..models import Model

OPEN_FILES = 65_536
QUESTION = '{"messages": [{"role": "user", "content": "Write a function that adds two numbers."}], "max_tokens": 200}'


@options.with_model
def serve_command(
    model: str | None,
    host: str = Option("127.0.0.1", help="Where to listen. Beyond this machine a key is needed."),
    port: int = Option(8000, min=0, max=65535, help="0 takes a free one."),
    model_id: str | None = Option(None, help="What clients call it.", show_default="its hub id or folder's name"),
    mtp: bool | None = options.MTP,
    head: str | None = options.HEAD,
    api_key: list[str] | None = Option(
        None, metavar="KEY", envvar="HEADSTART_API_KEY", help="A key that clients must send. Repeat for more."
    ),
    no_key: bool = Option(False, "--no-key", help="Listen beyond this machine without a key."),
    cors_origin: list[str] | None = Option(None, metavar="ORIGIN", help="A web page that may call; * is any."),
    allowed_host: list[str] | None = Option(None, metavar="HOST", help="A further host name in URLs; * is any."),
    max_sequences: int = Option(16, min=1, help="Requests decoded together."),
    max_queue: int = Option(256, min=1, help="Requests that may wait."),
    max_client_requests: int | None = Option(
        None, min=1, help="Requests of one key, or of one address without keys, at a time.", show_default="no limit"
    ),
    max_prompt_tokens: int | None = Option(None, min=1, help="Longest prompt.", show_default="the model's context"),
    max_connections: int | None = Option(
        None, min=2, help="Connections, half of them per client.", show_default="2048, or what `ulimit -n` allows"
    ),
    timeout: float = Option(600.0, min=1, help="Seconds that one request may take."),
    shutdown_timeout: float = Option(30.0, min=0, help="Seconds to finish running requests when it stops."),
    prefix_cache_gb: float | None = Option(
        None, min=0, help="Memory for the prefix cache; 0 is off.", show_default="2, or a quarter of what is left"
    ),
    images: bool = Option(False, "--images", help="Load the model's vision tower and accept images."),
    max_image_pixels: int = Option(MAX_IMAGE_PIXELS, min=1024, help="Larger images are scaled down to this."),
    allow_image_urls: bool = Option(False, "--allow-image-urls", help="Fetch images from public web addresses."),
    prefix_cache_8bit: bool = Option(False, "--prefix-cache-8bit", help="Cache prefixes in 8 bits: not exact."),
    log_level: Literal["debug", "info", "warning", "error"] = Option("warning", help="Log to standard error."),
    access_log: bool = Option(False, "--access-log", help="Log a line per request: no prompts, answers or keys."),
    split: options.Split = options.SPLIT,
) -> None:
    """Serve a model to OpenAI and Anthropic clients. Ctrl-C stops it once the running requests have finished."""
    _reopen_closed_streams()
    from .. import server
    from ..checkpoint import read_layout
    from ..cluster import Follower, Leader, SharedPrefix
    from ..engine import Engine, EngineThread
    from ..engine.memory import memory_for_prefixes
    from ..open_files import raise_limit
    from ..state import PrefixCache

    server.configure_log(log_level, access=access_log)
    keys = server.Keys(api_key or ())
    server.check_reach(host, keys, no_key=no_key)
    raise_limit(OPEN_FILES)
    connections = server.connection_limit(max_connections)
    # Bind first: a port that is taken is known before a model is loaded.
    with (
        machines.connect_machines() as cluster,
        nullcontext() if cluster and cluster.rank else server.bind(host, port) as bound,
    ):
        folder = find_model(model, vision=images)
        most_pixels = max_image_pixels if images else None
        loaded, tokenizer = machines.load_share(
            folder, cluster, split, mtp=mtp, head=head, max_image_pixels=most_pixels
        )
        if images and loaded.tower is None:
            raise RequestError(f"--images: this model cannot see: {loaded.tower_unavailable}")
        served = server.ServedModel.of(read_layout(folder), loaded, tokenizer, id=model_id)
        cache_bytes = memory_for_prefixes() if prefix_cache_gb is None else int(prefix_cache_gb * 1e9)
        if cluster is None:
            prefix = PrefixCache(cache_bytes, eight_bits=prefix_cache_8bit) if cache_bytes else None
            engine = Engine(loaded, tokenizer, prefix=prefix, max_sequences=max_sequences, max_queue=max_queue)
        else:
            shared = SharedPrefix(cache_bytes, eight_bits=prefix_cache_8bit) if cache_bytes else None
            if bound is None:
                Follower(cluster, loaded, tokenizer, prefix=shared).run(warm_up=True)
                return
            sizes = {"max_sequences": max_sequences, "max_queue": max_queue}
            engine = Leader(cluster, loaded, tokenizer, prefix=shared, **sizes)
        assert bound is not None, "only followers do not listen"
        engine.warm_up()
        engine_thread = EngineThread(engine)
        app = server.create_app(
            engine_thread,
            served,
            keys=keys,
            limits=server.Limits(
                body_bytes=server.Limits.body_bytes + (server.Limits.image_bytes if images else 0),
                image_urls=allow_image_urls,
                prompt_tokens=max_prompt_tokens,
                requests_per_client=max_client_requests,
                request_seconds=timeout,
                connections=connections,
            ),
            allowed_hosts=server.hosts_for(host, allowed_host or (), key=bool(keys)),
            cors_origins=cors_origin or (),
        )
        drafts = _drafts(loaded)
        server.listen(bound)
        with suppress(OSError):  # a closed standard output must not stop the server
            typer.echo(_greeting(served.id, drafts, host, bound.getsockname()[1], key=bool(keys)))
        with suppress(KeyboardInterrupt):  # uvicorn has stopped by then, and raises it again
            server.Server(app, engine_thread, deadline=shutdown_timeout).run(sockets=[bound])


def _reopen_closed_streams() -> None:
    """Open /dev/null where a standard stream is closed: a socket that got its number would be sent error messages."""
    for file in range(3):
        try:
            os.fstat(file)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _drafts(model: "Model") -> str:
    if not model.has_head:
        return f"off: {model.head_unavailable}"
    return f"on, up to {model.max_k} drafts per step"


def _greeting(name: str, drafts: str, host: str, port: int, *, key: bool) -> str:
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"
    # The first key, where the variable holds several.
    token = "${HEADSTART_API_KEY%% *}" if "HEADSTART_API_KEY" in os.environ else "KEY"
    authorization = f' -H "Authorization: Bearer {token}"' if key else ""
    return (
        f"Model:       {name}\n"
        f"Address:     {address}/v1\n"
        f"Speculation: {drafts}\n"
        f"Try:         curl {address}/v1/chat/completions "
        f"-H 'Content-Type: application/json'{authorization} -d {shlex.quote(QUESTION)}\n"
        f"Dashboard:   {address}/"
    )
