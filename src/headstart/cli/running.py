"""`headstart ps` and `headstart stop`: the models of the server on this machine."""

import json
from typing import Any
from urllib.error import HTTPError

import typer

from ..errors import HeadstartError
from .launch import DEFAULT_PORT, get_json, server_key
from .show import print_table

PORT = typer.Option(DEFAULT_PORT, help="Where the server listens.")
SECONDS = 30.0  # for an answer


def ps_command(port: int = PORT) -> None:
    """List the models of the server on this machine: which are loaded, and their memory."""
    rows = [["model", "state", "GB"]]
    for model in _ask(port, "/v1/models")["data"]:
        if "parent" not in model:  # adapters have no memory of their own
            rows.append([model["id"], model["state"], f"{model['memory_bytes'] / 1e9:.2f}"])
    print_table(rows, right=(2,))


def stop_command(model: str = typer.Argument(metavar="MODEL", help="As `ps` lists it."), port: int = PORT) -> None:
    """Unload a model from the server on this machine. Ctrl-C in its terminal stops the server itself."""
    _ask(port, "/v1/models/unload", {"model": model})
    typer.echo(f"{model}: unloaded; the next request for it loads it again")


def _ask(port: int, path: str, body: dict[str, str] | None = None) -> Any:
    try:
        return get_json(f"http://127.0.0.1:{port}{path}", server_key(), SECONDS, body)
    except HTTPError as error:
        raise HeadstartError(json.load(error)["error"]["message"]) from error
    except (OSError, ValueError) as error:
        problem = f"no Headstart server answers on port {port} ({error}). Start one with `headstart serve`"
        raise HeadstartError(f"{problem}, or name its --port") from error
