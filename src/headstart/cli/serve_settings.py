"""Everything that `headstart serve` can be told: each field is a flag and a key of the file of --config."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from typer import Option

from ..errors import ClusterError, RequestError
from ..limits import MAX_IMAGE_PIXELS, MAX_K
from . import options
from .config import use_config_file
from .machines import Parts

if TYPE_CHECKING:
    from ..server.middleware import Keys
    from ..server.settings import Limits


@dataclass
class ServeSettings:
    config: Path | None = Option(
        None, metavar="FILE", is_eager=True, callback=use_config_file, help="Defaults for all flags: a TOML file."
    )
    host: str = Option("127.0.0.1", help="Where to listen. Beyond this machine a key is needed.")
    port: int = Option(8000, min=0, max=65535, help="0 takes a free one.")
    all_models: bool = Option(False, "--all", help="Serve every model on this machine, loaded when it is needed.")
    pin: list[str] | None = Option(None, metavar="MODEL", help="Load this one at the start, and never unload it.")
    allow_download: bool = Option(
        False, "--allow-download", help="Let clients download models from the hub, and remove them."
    )
    memory_gb: float | None = Option(
        None, min=0, help="Memory for all loaded models and their requests.", show_default="what is free"
    )
    model_id: str | None = Option(None, help="What clients call it.", show_default="its hub id or folder's name")
    model_alias: list[str] | None = Option(
        None, metavar="NAME=MODEL", help="Another name by which clients may call a model. Repeat for more."
    )
    default_model: str | None = Option(
        None, metavar="MODEL", help="What clients get who name a model that is not served.", show_default="an error"
    )
    mtp: bool | None = options.MTP
    head: str | None = options.HEAD
    drafter: str | None = options.DRAFTER
    adapter: list[str] | None = Option(
        None,
        metavar="NAME=PATH",
        help="A LoRA adapter of the first model, which clients call MODEL:NAME. MODEL:NAME=PATH is another's.",
    )
    speculation: bool = Option(
        True, "--speculation/--no-speculation", help="Draft. PATCH /v1/settings changes it while the server runs."
    )
    max_k: int | None = Option(
        None, min=0, max=MAX_K, help="Most drafts per step; PATCH changes it too.", show_default="the model's"
    )
    api_key: list[str] | None = Option(
        None, metavar="KEY", envvar="HEADSTART_API_KEY", help="A key that clients must send. Repeat for more."
    )
    no_key: bool = Option(False, "--no-key", help="Listen beyond this machine without a key.")
    cors_origin: list[str] | None = Option(None, metavar="ORIGIN", help="A web page that may call; * is any.")
    allowed_host: list[str] | None = Option(None, metavar="HOST", help="A further host name in URLs; * is any.")
    max_sequences: int = Option(16, min=1, help="Requests decoded together.")
    max_queue: int = Option(256, min=1, help="Requests that may wait.")
    max_client_requests: int | None = Option(
        None, min=1, help="Requests of one key, or of one address without keys, at a time.", show_default="no limit"
    )
    max_prompt_tokens: int | None = Option(None, min=1, help="Longest prompt.", show_default="the model's context")
    max_connections: int | None = Option(
        None, min=2, help="Connections, half of them per client.", show_default="2048, or what `ulimit -n` allows"
    )
    timeout: float = Option(600.0, min=1, help="Seconds that one request may take.")
    restart: bool = Option(True, "--restart/--no-restart", help="Start anew if the GPU ignores this process.")
    drain_seconds: float = Option(
        5.0, min=0, help="Seconds after SIGTERM in which requests are still taken, though /health is not ready."
    )
    shutdown_timeout: float = Option(30.0, min=0, help="Seconds to finish running requests when it stops.")
    kv_bits: int | None = options.KV_BITS
    prefix_cache_gb: float | None = Option(
        None, min=0, help="Memory for the prefix cache; 0 is off.", show_default="2, or a quarter of what is left"
    )
    images: bool = Option(False, "--images", help="Load the model's vision tower and accept images.")
    max_image_pixels: int = Option(MAX_IMAGE_PIXELS, min=1024, help="Larger images are scaled down to this.")
    allow_image_urls: bool = Option(False, "--allow-image-urls", help="Fetch images from public web addresses.")
    prefix_cache_8bit: bool = Option(False, "--prefix-cache-8bit", help="Cache prefixes in 8 bits: not exact.")
    prefix_cache_dir: Path | None = Option(
        None, metavar="DIR", help="Also keep prefixes in this folder, across restarts.", show_default="memory only"
    )
    prefix_cache_dir_gb: float = Option(20.0, min=0, help="Most that --prefix-cache-dir may take.")
    log_level: Literal["debug", "info", "warning", "error"] = Option("warning", help="Log to standard error.")
    record: Path | None = Option(
        None, metavar="FILE", help="Keep all prompts and answers in a file of yours, for `train-head`."
    )
    access_log: bool = Option(False, "--access-log", help="Log a line per request: no prompts, answers or keys.")
    split: options.Split = options.SPLIT

    @property
    def parts(self) -> Parts:
        return {"mtp": self.mtp, "head": self.head, "drafter": self.drafter, "kv_bits": self.kv_bits}

    @property
    def sizes(self) -> dict[str, int]:
        return {"max_sequences": self.max_sequences, "max_queue": self.max_queue}

    @property
    def drafting(self) -> dict[str, Any]:
        """Return what the user said of the settings that `PATCH /v1/settings` changes."""
        depth = {} if self.max_k is None else {"max_k": self.max_k}
        return depth if self.speculation else {"speculation": False, **depth}

    @property
    def prefix_bytes(self) -> int | None:
        return None if self.prefix_cache_gb is None else int(self.prefix_cache_gb * 1e9)

    def several(self, models: list[str]) -> bool:
        """Return whether these models, with those that the settings name, are more than one."""
        return self.all_models or len({*models, *(self.pin or ())}) > 1

    def check(self, models: list[str]) -> None:
        """Refuse flags that do not go with several models, and aliases that are none."""
        _ = self.aliases
        for_one = {
            "--model-id": self.model_id,
            "--head": self.head,
            "--drafter": self.drafter,
            "--images": self.images,
            "--max-k": self.max_k is not None,
        }
        for flag, given in for_one.items():
            if given and self.several(models):
                raise RequestError(f"{flag} is for one model, and there are several")

    def check_cluster(self, models: list[str]) -> None:
        """Refuse flags that do not go with several machines."""
        if self.several(models) or self.memory_gb is not None:
            raise RequestError("MODEL: several machines share one model, and all of their memory: name one")
        alone = {"--prefix-cache-dir": self.prefix_cache_dir, "--images": self.images, "--adapter": self.adapter}
        if refused := next((flag for flag, given in alone.items() if given), None):
            raise ClusterError(f"{refused} is not available on several machines: leave it out")

    @property
    def aliases(self) -> dict[str, str]:
        """Return the other names of models."""
        split = {each: each.partition("=") for each in self.model_alias or ()}
        if wrong := next((each for each, (name, _, model) in split.items() if not name or not model), None):
            raise RequestError(f"--model-alias {wrong}: write NAME=MODEL")
        return {name: model for name, _, model in split.values()}

    def keys(self) -> "Keys":
        """Return the keys that clients must send, if who can connect without one may."""
        from ..server.middleware import Keys, check_reach

        keys = Keys(self.api_key or ())
        check_reach(self.host, keys, no_key=self.no_key)
        return keys

    def limits(self) -> "Limits":
        """Return the limits, and the recorder where there is one."""
        from ..server.listen import connection_limit
        from ..server.settings import Limits

        recorder = None
        if self.record is not None:
            from ..server.log import LOG
            from ..server.record import Recorder

            recorder = Recorder(self.record)
            LOG.warning("RECORDING: every prompt and every answer of every client is written to %s", self.record)
        limits = Limits(
            recorder=recorder,
            body_bytes=Limits.body_bytes + (Limits.image_bytes if self.images else 0),
            image_urls=self.allow_image_urls,
            connections=connection_limit(self.max_connections),
        )
        self.change(limits)
        return limits

    def change(self, limits: "Limits") -> None:
        """Set those of the limits that a reload may change."""
        limits.prompt_tokens, limits.requests_per_client = self.max_prompt_tokens, self.max_client_requests
        limits.request_seconds = self.timeout


def settings_of(params: dict[str, Any]) -> ServeSettings:
    """Return the settings among the parameters of the command."""
    return ServeSettings(**{each.name: params[each.name] for each in fields(ServeSettings)})


def with_settings(command: options.Command) -> options.Command:
    """Give a command a flag for every field. It gets their values as `settings`."""
    types = get_type_hints(ServeSettings)
    flags = {each.name: (types[each.name], each.default) for each in fields(ServeSettings)}
    return options.replace_parameter(command, "settings", flags, settings_of)
