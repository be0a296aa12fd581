"""`headstart launch`: a coding agent that talks to a local server, with settings of its own."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

import typer
from typer.core import TyperCommand

from ..errors import HeadstartError, RequestError

DEFAULT_PORT = 8000  # where a running server is looked for: the default of `headstart serve`
FIND_SECONDS = 10.0  # for the answer of a server that may be another program's
STOP_SECONDS = 15.0
AGENT_ARGUMENTS = "headstart.agent_arguments"
STARTED = "Address:"  # begins the line that `headstart serve` prints once it listens


@dataclass(frozen=True)
class LocalServer:
    url: str
    key: str
    model: str
    context: int


def claude_profile(folder: Path, server: LocalServer) -> dict[str, str]:
    """Return the environment of Claude Code. Its own folder has no login, so it does not ask for one."""
    (folder / ".claude.json").write_text(json.dumps({"hasCompletedOnboarding": True}))
    tiers = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{tier}_MODEL" for tier in ("OPUS", "SONNET", "HAIKU")))
    return {
        "CLAUDE_CONFIG_DIR": str(folder),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        **dict.fromkeys(tiers, server.model),
    }


def codex_profile(folder: Path, server: LocalServer) -> dict[str, str]:
    """Return the environment of Codex, whose settings are a file in its own folder."""
    settings = {"model": server.model, "model_provider": "headstart", "model_context_window": server.context}
    provider = {"name": "Headstart", "base_url": f"{server.url}/v1", "wire_api": "responses"}
    provider |= {"env_key": "HEADSTART_API_KEY"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in (settings | {"web_search": "disabled"}).items()]
    lines += ["[model_providers.headstart]", *(f"{name} = {json.dumps(value)}" for name, value in provider.items())]
    lines += ["stream_idle_timeout_ms = 600000"]  # a long prompt takes a while
    (folder / "config.toml").write_text("\n".join(lines) + "\n")
    return {"CODEX_HOME": str(folder), "HEADSTART_API_KEY": server.key}


def opencode_profile(folder: Path, server: LocalServer) -> dict[str, str]:
    """Return the environment of opencode. It has no folder of its own: replace its part of the user's folders."""
    limit = {"context": server.context, "output": server.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Headstart",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
        "models": {server.model: {"name": server.model, "tool_call": True, "limit": limit}},
    }
    settings = {"provider": {"headstart": provider}, "model": f"headstart/{server.model}", "autoupdate": False}
    environment = {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)}
    users = {"XDG_CONFIG_HOME": ".config", "XDG_DATA_HOME": ".local/share", "XDG_STATE_HOME": ".local/state"}
    for variable, default in users.items():
        users_folder, private = Path(os.environ.get(variable) or Path.home() / default), folder / variable
        private.mkdir()
        environment[variable] = str(private)
        for other in users_folder.iterdir() if users_folder.is_dir() else ():
            if other.name != "opencode":  # git and others that it runs find theirs
                (private / other.name).symlink_to(other)
    return environment


@dataclass(frozen=True)
class Agent:
    install: str
    tokens: int  # before the first question, about
    profile: Callable[[Path, LocalServer], dict[str, str]]  # writes its settings into a folder


AGENTS = {
    "claude": Agent("npm install -g @anthropic-ai/claude-code", 24_000, claude_profile),
    "codex": Agent("npm install -g @openai/codex", 11_000, codex_profile),
    "opencode": Agent("npm install -g opencode-ai", 9_000, opencode_profile),
}


class LaunchCommand(TyperCommand):
    """A command that leaves everything after `--` to the agent."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[AGENT_ARGUMENTS] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


def launch_command(
    context: typer.Context,
    agent: Literal["claude", "codex", "opencode"] = typer.Argument(help="Claude Code, Codex or opencode."),
    model: str | None = typer.Argument(
        None, metavar="MODEL", help="A folder, a cached model, or hub id.", show_default="that of a running server"
    ),
    port: int | None = typer.Option(
        None, min=1, max=65535, help="Of the server.", show_default="8000 if one runs there, else a free one"
    ),
) -> None:
    """Start a coding agent on a local model. A server that runs already is used, otherwise one is started and ends
    with the agent. Your own settings of the agent are neither used nor changed. Arguments after `--` are the
    agent's."""
    found = shutil.which(agent)
    if found is None:
        raise HeadstartError(f"{agent} is not installed: `{AGENTS[agent].install}`, then try again")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    server = _find_server(port or DEFAULT_PORT, model)
    with tempfile.TemporaryDirectory(prefix=f"headstart-{agent}-") as folder, _server(server, model, port) as server:
        typer.echo(f"{agent} uses {server.model} at {server.url}", err=True)
        if server.context <= AGENTS[agent].tokens:
            typer.echo(
                f"{server.model} has a context of {server.context:,} tokens, and {agent} sends about "
                f"{AGENTS[agent].tokens:,} before the first question: choose another of `headstart recommend`",
                err=True,
            )
        private = Path(folder) / "profile"
        private.mkdir()
        environment = {**os.environ, **AGENTS[agent].profile(private, server)}
        environment.pop("ANTHROPIC_API_KEY", None)  # Claude Code would ask which of the two to use
        environment["NO_PROXY"] = ",".join(filter(None, ("127.0.0.1", os.environ.get("NO_PROXY"))))
        status = _run([found, *context.meta[AGENT_ARGUMENTS]], environment)
    raise typer.Exit(status)


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run the agent to its end and return its exit status. Ctrl-C is the agent's."""
    before = signal.signal(signal.SIGINT, _ignore)  # a handler, unlike SIG_IGN, is not inherited
    process = subprocess.Popen(command, env=environment)
    try:
        status = process.wait()
    finally:
        _stop(process)
        signal.signal(signal.SIGINT, before)
    return status if status >= 0 else 128 - status


@contextmanager
def _server(running: LocalServer | None, model: str | None, port: int | None) -> Iterator[LocalServer]:
    """Yield the server that was found, or one that ends with this block."""
    if running is not None:
        yield running
        return
    if model is None:
        raise RequestError(
            f"MODEL: none named, and no server runs at port {port or DEFAULT_PORT}: name one of `headstart recommend`"
        )
    from .download import find_model

    folder, key = find_model(model), secrets.token_urlsafe(24)
    command = [sys.executable, "-m", "headstart", "serve", str(folder), "--port", str(port or 0)]
    command += ["--shutdown-timeout", "1", "--drain-seconds", "0"]
    typer.echo(f"Loading {model} …", err=True)
    with tempfile.TemporaryFile("w+") as log:
        # In a session of its own, so that Ctrl-C does not reach it.
        process = subprocess.Popen(
            command,
            env={**os.environ, "HEADSTART_API_KEY": key},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith(STARTED)), None)
            if line is None:
                process.wait()
                log.seek(0)
                last = (log.read().strip().splitlines() or ["no message"])[-1]
                raise HeadstartError(f"the server did not start: {last.removeprefix('error: ')}")
            yield _describe(line.removeprefix(STARTED).strip().removesuffix("/v1"), key)
        finally:
            _stop(process)


def _find_server(port: int, model: str | None) -> LocalServer | None:
    """Return the Headstart server on this machine that serves the model, or any if none is named."""
    key = server_key()
    with suppress(OSError, ValueError, LookupError, TypeError):  # nothing there, or something else
        return _describe(f"http://127.0.0.1:{port}", key, model, FIND_SECONDS)
    return None


def _describe(url: str, key: str, model: str | None = None, timeout: float | None = None) -> LocalServer:
    """Ask a server for a model, by default the first that it lists."""
    path = f"/v1/models/{quote(model, safe='')}" if model is not None else "/v1/models"
    answer = get_json(url + path, key, timeout)
    found = answer if model is not None else answer["data"][0]
    if found["owned_by"] != "headstart":
        raise URLError("another server")
    return LocalServer(url, key, str(found["id"]), int(found["context_length"]))


def server_key() -> str:
    """Return the key that a server asks for, as far as it is known here."""
    return os.environ.get("HEADSTART_API_KEY", "").split(" ")[0] or "none"


def get_json(url: str, key: str, timeout: float | None = None, body: Mapping[str, Any] | None = None) -> Any:
    """Ask a server of this machine, past any proxy. With a body it is a POST."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = Request(url, json.dumps(body).encode() if body is not None else None, headers)
    with build_opener(ProxyHandler({})).open(request, timeout=timeout) as response:
        return json.load(response)


def _stop(process: "subprocess.Popen[Any]") -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Leave Ctrl-C to the agent, which gets it too."""
