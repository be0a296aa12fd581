"""The `headstart` command.

Nothing here, and nothing at the top of a command's file, imports mlx, mlx-lm or transformers: those
take seconds, and `headstart --help` must not. Commands import them when they run.
"""

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from .. import open_files
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
    replay,
    report,
    running,
    serve,
    train_head,
)

# Only the tokenizers of transformers are used: suppress its advice to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

ALIASES = {"run": "chat", "show": "inspect", "rm": "remove", "ls": "list"}  # as Ollama calls them
UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what a full disk says of standard output
BACKENDS = "`pip install 'mlx[cpu]'`, or `'mlx[cuda13]'` for NVIDIA GPUs."


class Commands(TyperGroup):
    """All commands. An error that the user can fix is one line on standard error, never a traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        _fill_standard_streams()
        try:
            return super().main(*args, **options)
        except OSError as error:
            if error.errno not in UNWRITTEN or error.filename is not None:
                raise
            with suppress(OSError):
                typer.echo(f"error: the output could not be written: {error.strerror}", err=True)
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except OSError:  # the interpreter would try again when it ends, and say so
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            sys.exit(1)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def get_command(self, ctx: Any, name: str) -> Any:
        return super().get_command(ctx, ALIASES.get(name, name))

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except FileNotFoundError:
            with suppress(OSError):
                os.getcwd()
                raise
            typer.echo("error: the folder that this terminal is in was removed: change to another", err=True)
            raise typer.Exit(1) from None
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
HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(name="headstart", cls=Commands, no_args_is_help=True, rich_markup_mode=None, context_settings=HELP)


def _fill_standard_streams() -> None:
    """Read from and write to the null device where a standard stream is closed."""
    open_files.fill_standard_streams()
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


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
    `headstart serve` and a browser. Ollama's names work too: run is chat, show is inspect, rm is remove, ls is list.
    """
    machines.require_one_machine(context.invoked_subcommand)


app.command("demo")(demo.demo_command)
app.command("generate")(generate.generate_command)
app.command("chat")(chat.chat_command)
app.command("serve", cls=config.ConfiguredCommand)(serve.serve_command)
app.command("ps")(running.ps_command)
app.command("replay")(replay.replay_command)
app.command("stop")(running.stop_command)
app.command("config")(config.config_command)
app.command("launch", cls=launch.LaunchCommand)(launch.launch_command)
app.command("recommend")(recommend.recommend_command)
app.command("list")(inspect.list_command)
app.command("pull")(pull.pull_command)
app.command("remove")(pull.remove_command)
app.command("inspect")(inspect.inspect_command)
app.command("convert")(convert.convert_command)
app.command("graft")(convert.graft_command)
app.command("train-head")(train_head.train_head_command)
app.command("draft-vocabulary")(draft_vocabulary.draft_vocabulary_command)
app.command("probe")(probe.probe_command)
app.command("bench")(bench.bench_command)
app.command("report")(report.report_command)
