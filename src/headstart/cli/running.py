"""`headstart ps` and `headstart stop`: the models of the server on this machine."""

import json
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.error import HTTPError

import typer

from ..errors import HeadstartError
from .launch import DEFAULT_PORT, get_json, server_key
from .show import print_table

PORT = typer.Option(DEFAULT_PORT, help="Where the server listens.")
SECONDS = 30.0  # for an answer
T = TypeVar("T")


def ps_command(port: int = PORT) -> None:
    """List the models of the server on this machine: which are loaded, and their memory."""
    print_table([["model", "state", "GB"], *_ask(port, "/v1/models", read=_rows)], right=(2,))


def stop_command(model: str = typer.Argument(metavar="MODEL", help="As `ps` lists it."), port: int = PORT) -> None:
    """Unload a model from the server on this machine. Ctrl-C in its terminal stops the server itself."""
    state = _ask(port, "/v1/models/unload", {"model": model}, read=lambda answer: str(answer["state"]))
    typer.echo(f"{model}: {state}; the next request for it loads it again")


def _rows(answer: Any) -> list[list[str]]:
    """Return a row for each model: adapters have no memory of their own."""
    models = [each for each in answer["data"] if "parent" not in each]
    return [[each["id"], each["state"], f"{each['memory_bytes'] / 1e9:.2f}"] for each in models]


def _ask(port: int, path: str, body: dict[str, str] | None = None, *, read: Callable[[Any], T]) -> T:
    """Return what `read` makes of the server's answer. What is no Headstart server's is an error that says so."""
    try:
        try:
            return read(get_json(f"http://127.0.0.1:{port}{path}", server_key(), SECONDS, body))
        except HTTPError as error:
            raise HeadstartError(str(json.load(error)["error"]["message"])) from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        problem = f"no Headstart server answers on port {port} ({getattr(error, 'reason', error)})"
        raise HeadstartError(f"{problem}. Start one with `headstart serve`, or name its --port") from error
