"""The `headstart` command.

Nothing here, and nothing at the top of a command's file, imports mlx, mlx-lm or transformers: those
take seconds, and `headstart --help` must not. Commands import them when they run.
"""

from typing import Annotated

import typer

from .inspect import inspect

app = typer.Typer(name="headstart", no_args_is_help=True)


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


app.command()(inspect)
