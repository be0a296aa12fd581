"""The `headstart` command.

Nothing here, and nothing at the top of a command's file, imports mlx, mlx-lm or transformers: those
take seconds, and `headstart --help` must not. Commands import them when they run.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import HeadstartError
from . import machines
from .bench import bench
from .chat import chat
from .convert import convert
from .demo import demo
from .generate import generate
from .graft import graft
from .inspect import inspect
from .models import models
from .probe import probe
from .serve import serve

# Only its tokenizers are used: spare users the advice to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

CHOICE = "`pip install 'mlx[cpu]'`, or `'mlx[cuda13]'` for NVIDIA's GPUs."


class Commands(TyperGroup):
    """All commands. What a user can put right is one line on standard error, never a traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except HeadstartError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from error
        except ImportError as error:
            # A module that is not there is known by its name, a library that cannot be loaded by its place.
            if "mlx" not in ((error.name or "").partition(".")[0], Path(error.path or "").parent.name):
                raise
            typer.echo(f"error: mlx cannot be loaded ({error}). On Linux its backend is a choice: {CHOICE}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(name="headstart", cls=Commands, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from headstart import __version__

        typer.echo(f"headstart {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Run language models faster with their own multi-token-prediction head, without changing a token.

    Without a model's name a small built-in one runs: try `headstart demo`, then `headstart serve` and a browser.
    """
    machines.check(context.invoked_subcommand)


PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Run a model": (demo, generate, chat, serve),
    "Find and make models": (models, inspect, convert, graft),
    "Measure and check": (probe, bench),
}
for panel, commands in PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
