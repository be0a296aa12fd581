"""`headstart serve`: models behind an HTTP server."""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from typer import Option

from ..errors import ClusterError, DeviceLost, HeadstartError, RequestError
from ..limits import MAX_IMAGE_PIXELS
from . import machines, options
from .config import read_again, use_config_file
from .download import find_drafter, find_model

if TYPE_CHECKING:
    from ..cluster import Machines
    from ..engine import EngineThread
    from ..server import Keys, Limits, ModelPool, PooledModel, ServedModel

OPEN_FILES = 65_536
RESTARTED = "HEADSTART_RESTARTED"  # set by itself: when it was started anew
RESTART_SECONDS = 60.0  # in which it does not start anew again
QUESTION = '{"messages": [{"role": "user", "content": "Write a function that adds two numbers."}], "max_tokens": 200}'


@options.with_models
def serve_command(
    context: typer.Context,
    models: list[str],
    config: Path | None = Option(
        None, metavar="FILE", is_eager=True, callback=use_config_file, help="Defaults for all flags: a TOML file."
    ),
    host: str = Option("127.0.0.1", help="Where to listen. Beyond this machine a key is needed."),
    port: int = Option(8000, min=0, max=65535, help="0 takes a free one."),
    all_models: bool = Option(False, "--all", help="Serve every model on this machine, loaded when it is needed."),
    pin: list[str] | None = Option(None, metavar="MODEL", help="Load this one at the start, and never unload it."),
    allow_download: bool = Option(
        False, "--allow-download", help="Let clients download models from the hub, and remove them."
    ),
    memory_gb: float | None = Option(
        None, min=0, help="Memory for all loaded models and their requests.", show_default="what is free"
    ),
    model_id: str | None = Option(None, help="What clients call it.", show_default="its hub id or folder's name"),
    mtp: bool | None = options.MTP,
    head: str | None = options.HEAD,
    drafter: str | None = options.DRAFTER,
    adapter: list[str] | None = Option(
        None,
        metavar="NAME=PATH",
        help="A LoRA adapter of the first model, which clients call MODEL:NAME. MODEL:NAME=PATH is another's.",
    ),
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
    restart: bool = Option(True, "--restart/--no-restart", help="Start anew if the GPU ignores this process."),
    shutdown_timeout: float = Option(30.0, min=0, help="Seconds to finish running requests when it stops."),
    kv_bits: int | None = options.KV_BITS,
    prefix_cache_gb: float | None = Option(
        None, min=0, help="Memory for the prefix cache; 0 is off.", show_default="2, or a quarter of what is left"
    ),
    images: bool = Option(False, "--images", help="Load the model's vision tower and accept images."),
    max_image_pixels: int = Option(MAX_IMAGE_PIXELS, min=1024, help="Larger images are scaled down to this."),
    allow_image_urls: bool = Option(False, "--allow-image-urls", help="Fetch images from public web addresses."),
    prefix_cache_8bit: bool = Option(False, "--prefix-cache-8bit", help="Cache prefixes in 8 bits: not exact."),
    prefix_cache_dir: Path | None = Option(
        None, metavar="DIR", help="Also keep prefixes in this folder, across restarts.", show_default="memory only"
    ),
    prefix_cache_dir_gb: float = Option(20.0, min=0, help="Most that --prefix-cache-dir may take."),
    log_level: Literal["debug", "info", "warning", "error"] = Option("warning", help="Log to standard error."),
    access_log: bool = Option(False, "--access-log", help="Log a line per request: no prompts, answers or keys."),
    split: options.Split = options.SPLIT,
) -> None:
    """Serve models to OpenAI and Anthropic clients. The first is loaded at the start, and used where a request names
    none; others are loaded when a request names them. Ctrl-C stops it once the running requests have finished."""
    _reopen_closed_streams()
    from .. import server
    from ..engine import DeviceThread
    from ..engine.prefix_disk import PrefixOptions
    from ..open_files import raise_limit

    server.configure_log(log_level, access=access_log)
    keys = server.Keys(api_key or ())
    server.check_reach(host, keys, no_key=no_key)
    raise_limit(OPEN_FILES)
    limits = server.Limits(
        body_bytes=server.Limits.body_bytes + (server.Limits.image_bytes if images else 0),
        image_urls=allow_image_urls,
        prompt_tokens=max_prompt_tokens,
        requests_per_client=max_client_requests,
        request_seconds=timeout,
        connections=server.connection_limit(max_connections),
    )
    several = len({*models, *(pin or ())}) > 1 or all_models
    for flag, given in {"--model-id": model_id, "--head": head, "--drafter": drafter, "--images": images}.items():
        if several and given:
            raise RequestError(f"{flag} is for one model, and there are several")
    parts: machines.Parts = {"mtp": mtp, "head": head, "drafter": drafter, "kv_bits": kv_bits}
    pixels = max_image_pixels if images else None
    # Bind first: a port that is taken is known before a model is loaded.
    with (
        machines.connect_machines() as cluster,
        nullcontext() if cluster and cluster.rank else server.bind(host, port) as bound,
    ):
        sizes = {"max_sequences": max_sequences, "max_queue": max_queue}
        cache_bytes = None if prefix_cache_gb is None else int(prefix_cache_gb * 1e9)
        prefixes = PrefixOptions(prefix_cache_8bit, prefix_cache_dir, int(prefix_cache_dir_gb * 1e9))
        if cluster is None:
            pool = server.ModelPool(
                DeviceThread(),
                _find_models(models, all_models, pin or [], parts, model_id, adapter or [], pixels),
                limits=limits,
                budget=_budget(memory_gb, several),
                prefix_bytes=cache_bytes,
                prefix_options=prefixes,
                **sizes,
            )
            for number, each in enumerate(pool.models):
                if number < max(1, len(models)) and (problem := pool.misfit(each)):
                    raise RequestError(problem)
            for each in pool.models:
                if each.pinned or each is pool.models[0]:
                    pool.load_now(each)
        else:
            if several or memory_gb is not None:
                raise RequestError("MODEL: several machines share one model, and all of their memory: name one")
            alone = {
                "--prefix-cache-dir": prefix_cache_dir is not None,
                "--images": images,
                "--adapter": bool(adapter),
            }
            if refused := next((flag for flag, given in alone.items() if given), None):
                raise ClusterError(f"{refused} is not available on several machines: leave it out")
            leader = _join_cluster(cluster, models, split, cache_bytes, prefix_cache_8bit, sizes, parts, model_id)
            if leader is None:
                return
            pool = server.ModelPool.of_one(*leader, limits)
        assert bound is not None, "only followers do not listen"
        hosts = server.hosts_for(host, allowed_host or (), key=bool(keys))
        app = server.create_app(
            pool, keys=keys, allowed_hosts=hosts, cors_origins=cors_origin or (), allow_download=allow_download
        )
        server.listen(bound)
        _, port, *_ = bound.getsockname()
        with suppress(OSError):  # a closed standard output must not stop the server
            typer.echo(_greeting(pool, host, port, key=bool(keys)))
        with suppress(KeyboardInterrupt):  # uvicorn has stopped by then, and raises it again
            reload = partial(_reload, context, keys, limits) if config is not None else None
            server.Server(app, pool.device, deadline=shutdown_timeout, reload=reload).run(sockets=[bound])
    if pool.device.lost:
        problem = pool.device.problem or ""
        if not restart or cluster is not None:
            raise DeviceLost(problem)
        _start_anew(problem, port)


def _start_anew(problem: str, port: int) -> None:
    """Replace this process by a new one with the same command line, unless that was done a moment ago."""
    if time.time() - float(os.environ.get(RESTARTED, 0)) < RESTART_SECONDS:
        raise DeviceLost(f"{problem}; it was started anew less than {RESTART_SECONDS:g} s ago, so that does not help")
    typer.echo(f"starting anew: {problem}", err=True)
    command = [sys.executable, *sys.orig_argv[1:], "--port", str(port)]  # also where --port 0 took a free one
    os.execve(sys.executable, command, {**os.environ, RESTARTED: str(time.time())})


def _reload(context: typer.Context, keys: "Keys", limits: "Limits") -> None:
    """Take keys and limits from the file of --config as it is now. If it is wrong, log that and change nothing."""
    from .. import server

    try:
        now = read_again(context)
        changed = server.Keys(now["api_key"] or ())
        server.check_reach(context.params["host"], changed, no_key=now["no_key"])
    except (HeadstartError, typer.BadParameter) as error:
        server.LOG.error("keys and limits stay as they were: %s", error)
        return
    keys.replace(changed)
    limits.prompt_tokens, limits.requests_per_client = now["max_prompt_tokens"], now["max_client_requests"]
    limits.request_seconds = now["timeout"]
    server.LOG.warning("keys and limits were read again")


def _find_models(
    names: list[str],
    all_models: bool,
    pinned: list[str],
    parts: machines.Parts,
    id: str | None,
    given: list[str],
    pixels: int | None,
) -> "list[PooledModel]":
    """Return the models to serve, in the order of the command line, and those to pin if they are not among them.

    `given`: adapters, as on the command line. `pixels`: with their vision towers, for images of at most so many.
    """
    from ..checkpoint.local import local_models
    from ..server import PooledModel

    vision = pixels is not None
    named = [*(names or [*pinned, None][:1]), *pinned]
    folders = [find_model(name, vision=vision) for name in named]
    pins = folders[len(folders) - len(pinned) :]
    adapters, own = _read_adapters(given, named), dict[Path, dict[str, Path]]()
    for name, folder in zip(named, folders, strict=True):
        own.setdefault(folder, {}).update(adapters.get(name, {}))
    mtp, head, drafter = parts["mtp"], parts["head"], find_drafter(parts["drafter"])
    read = partial(PooledModel.of, mtp=mtp, kv_bits=parts["kv_bits"], max_image_pixels=pixels)
    found = [
        read(folder, id=id, head=head, drafter=drafter, pinned=folder in pins, adapters=own[folder])
        for folder in dict.fromkeys(folders)
    ]
    for local in local_models() if all_models else ():
        if local.layout is not None and local.layout.path not in folders:
            with suppress(HeadstartError):  # `headstart list` says why
                found.append(read(local.layout.path))
    return found


def _read_adapters(given: list[str], models: Sequence[str | None]) -> dict[str | None, dict[str, Path]]:
    """Return the folders of adapters, by the model that they are for and by name."""
    found: dict[str | None, dict[str, Path]] = {}
    for each in given:
        left, _, path = each.partition("=")
        model, _, name = left.rpartition(":")
        if not name or not path:
            raise RequestError(f"--adapter {each}: write NAME=PATH, or MODEL:NAME=PATH")
        if model and model not in models:
            raise RequestError(f"--adapter {each}: {model} is not one of the models that the command names")
        of_model = found.setdefault(model or models[0], {})
        if name in of_model:
            raise RequestError(f"--adapter {each}: there is another {name}")
        of_model[name] = Path(path)
    return found


def _budget(memory_gb: float | None, several: bool) -> int | None:
    """Return the bytes for all models. One model without a limit of its own takes what it finds."""
    from ..models.memory import unused

    if memory_gb is not None:
        return int(memory_gb * 1e9)
    return unused() if several else None


def _join_cluster(
    cluster: "Machines",
    models: list[str],
    split: options.Split,
    cache_bytes: int | None,
    prefix_8bit: bool,
    sizes: dict[str, int],
    parts: machines.Parts,
    id: str | None,
) -> "tuple[EngineThread, ServedModel] | None":
    """Load this machine's part of a model. Return the engine that leads; one that follows runs here to its end."""
    from .. import server
    from ..checkpoint import read_layout
    from ..cluster import SharedPrefix, follow, lead
    from ..engine import EngineThread
    from ..engine.memory import memory_for_prefixes

    folder = find_model(models[0] if models else None)
    loaded, tokenizer = machines.load_share(folder, cluster, split, **parts)
    size = memory_for_prefixes() if cache_bytes is None else cache_bytes
    shared = SharedPrefix(size, eight_bits=prefix_8bit) if size else None
    if cluster.rank:
        follow(cluster, loaded, tokenizer, prefix=shared).run(warm_up=True)
        return None
    served = server.ServedModel.of(
        server.ModelInfo.of(read_layout(folder), id=id, mtp=parts["mtp"]), loaded, tokenizer
    )
    engine = lead(cluster, served.model, tokenizer, prefix=shared, **sizes)
    engine.warm_up()
    return EngineThread(engine), served


def _reopen_closed_streams() -> None:
    """Open /dev/null where a standard stream is closed: a socket that got its number would be sent error messages."""
    for file in range(3):
        try:
            os.fstat(file)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _greeting(pool: "ModelPool", host: str, port: int, *, key: bool) -> str:
    first, *others = pool.models
    most = first.info.most_drafts
    drafts = f"on, up to {most} drafts per step" if most else f"off: {first.info.native_mtp['reason']}"
    name = f"{first.id}; when needed {', '.join(each.id for each in others)}" if others else first.id
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
