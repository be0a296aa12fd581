"""The `headstart` command.

Nothing here, and nothing at the top of a command's file, imports mlx, mlx-lm or transformers: those
take seconds, and `headstart --help` must not. Commands import them when they run.
"""

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import HeadstartError
from .bench import bench
from .bench_serve import bench_serve
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


class Commands(TyperGroup):
    """All commands. What a user can put right is one line on standard error, never a traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except HeadstartError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(name="headstart", cls=Commands, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from headstart import __version__

        typer.echo(f"headstart {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Run language models faster with their own multi-token-prediction head."""


for command in (generate, chat, serve, demo, bench, bench_serve, models, inspect, convert, graft, probe):
    app.command()(command)
