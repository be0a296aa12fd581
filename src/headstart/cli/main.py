"""The `headstart` command.

Nothing here, and nothing at the top of a command's file, imports mlx, mlx-lm or transformers: those
take seconds, and `headstart --help` must not. Commands import them when they run.
"""

import os
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import HeadstartError
from . import (
    bench,
    chat,
    config,
    convert,
    demo,
    draft_vocabulary,
    generate,
    inspect,
    launch,
    machines,
    probe,
    pull,
    recommend,
    report,
    serve,
)

# Only the tokenizers of transformers are used: suppress its advice to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

BACKENDS = "`pip install 'mlx[cpu]'`, or `'mlx[cuda13]'` for NVIDIA GPUs."


class Commands(TyperGroup):
    """All commands. An error that the user can fix is one line on standard error, never a traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except HeadstartError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from error
        except ImportError as error:
            # A missing module is known by its name, a library that cannot be loaded by its path.
            if "mlx" not in ((error.name or "").partition(".")[0], Path(error.path or "").parent.name):
                raise
            typer.echo(f"error: mlx cannot be loaded ({error}). On Linux, install a backend: {BACKENDS}", err=True)
            raise typer.Exit(1) from error


# Help without rich: its tables call switches <bool> and break long words.
app = typer.Typer(name="headstart", cls=Commands, no_args_is_help=True, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        from headstart import __version__

        typer.echo(f"headstart {__version__}")
        raise typer.Exit


@app.callback()
def headstart_command(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
    ),
) -> None:
    """Run language models faster with their own multi-token-prediction head, without changing a token.

    Commands that take a MODEL use a small built-in one if you give none. Try `headstart demo` first, then
    `headstart serve` and a browser.
    """
    machines.require_one_machine(context.invoked_subcommand)


app.command("demo")(demo.demo_command)
app.command("generate")(generate.generate_command)
app.command("chat")(chat.chat_command)
app.command("serve", cls=config.ConfiguredCommand)(serve.serve_command)
app.command("config")(config.config_command)
app.command("launch", cls=launch.LaunchCommand)(launch.launch_command)
app.command("recommend")(recommend.recommend_command)
app.command("list")(inspect.list_command)
app.command("pull")(pull.pull_command)
app.command("remove")(pull.remove_command)
app.command("inspect")(inspect.inspect_command)
app.command("convert")(convert.convert_command)
app.command("graft")(convert.graft_command)
app.command("draft-vocabulary")(draft_vocabulary.draft_vocabulary_command)
app.command("probe")(probe.probe_command)
app.command("bench")(bench.bench_command)
app.command("report")(report.report_command)
