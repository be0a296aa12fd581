"""The file of `headstart serve --config`, which may hold every flag; `headstart config` prints or checks one.

A value of the file is what the flag of that name would be given. Flags go before the environment, which goes before
the file.
"""

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from ..errors import HeadstartError
from ..open_files import read_text

ARGUMENTS = "headstart.arguments"
MODELS = "models"  # the key of the MODEL… arguments
EXCEPT = ("config", "help", "model")  # flags that a file does not have

Parameter = TyperArgument | TyperOption


class ConfiguredCommand(TyperCommand):
    """A command with a --config, whose file can be read again while it runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


def config_command(
    context: typer.Context,
    check: Path | None = typer.Option(None, metavar="FILE", help="Check a file, and name the line that is wrong."),
) -> None:
    """Print a file for `headstart serve --config` with every flag, or check one."""
    serve = context.parent.command.commands["serve"]  # type: ignore[union-attr]
    if check is not None:
        typer.echo(f"{check}: {len(read_config_file(check, serve))} settings, no problem")
        return
    for key, parameter in _parameters(serve).items():
        default = parameter.default if parameter.default is not None else "…"
        example = "true" if _is_switch(parameter) else f'"{default}"' if isinstance(default, str) else default
        typer.echo(f"# {parameter.help}\n# {key} = {f'[{example}]' if _is_list(parameter) else example}\n")


def use_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of a file as defaults: the callback of --config."""
    if path is not None:
        context.default_map = read_config_file(path, context.command)
    return path


def read_again(context: typer.Context) -> dict[str, Any]:
    """Return the values of a command's parameters as if it were started now: its file may have changed."""
    return dict(context.command.make_context(context.info_name, list(context.meta[ARGUMENTS])).params)


def read_config_file(path: Path, command: Any) -> dict[str, Any]:
    """Return the values in a file, by the names of the command's parameters in Python.

    Raises:
        HeadstartError: It cannot be read, or a line of it is wrong.
    """
    if path.is_dir():
        raise HeadstartError(f"{path}: a folder. Name the file")
    try:
        text = read_text(path)
        values = tomllib.loads(text)
    except (OSError, UnicodeError) as error:
        raise HeadstartError(f"{path}: cannot be read: {error}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:  # names the line
        raise HeadstartError(f"{path}: not TOML: {error}") from error
    parameters, found = _parameters(command), {}
    for key, value in values.items():
        place = f"{path}, line {_line(text, key)}: "
        if key not in parameters:
            near = difflib.get_close_matches(key.replace("_", "-"), parameters, 1)
            remedy = f"did you mean {near[0]}?" if near else "`headstart config` lists all"
            raise HeadstartError(f"{place}unknown key {key!r}: {remedy}")
        try:
            found[parameters[key].name] = _checked(command, parameters[key], value)
        except typer.BadParameter as error:
            raise HeadstartError(f"{place}{key}: {error.message}") from error
    return found


def _parameters(command: Any) -> dict[str, Parameter]:
    """Return what a file may hold: flags by their names without dashes."""
    named = {
        MODELS if isinstance(each, TyperArgument) else max(each.opts, key=len).lstrip("-"): each
        for each in command.params
    }
    return {key: each for key, each in named.items() if key not in EXCEPT}


def _line(text: str, key: str) -> int:
    begins = re.compile(rf"""\s*(["']?){re.escape(key)}\1\s*[=.]|\s*\[+\s*{re.escape(key)}\b""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if begins.match(line)), 1)


def _is_switch(parameter: Parameter) -> bool:
    return isinstance(parameter, TyperOption) and bool(parameter.is_flag)


def _is_list(parameter: Parameter) -> bool:
    return parameter.nargs == -1 or (isinstance(parameter, TyperOption) and parameter.multiple)


def _checked(command: Any, parameter: Parameter, value: Any) -> Any:
    """Return a value as the command takes it. The command's own parser checks it."""
    if _is_switch(parameter):
        if not isinstance(value, bool):
            raise typer.BadParameter(f"is {value!r}; it must be true or false")
        return value
    values = value if isinstance(value, list) and _is_list(parameter) else [value]
    for each in values:
        if not isinstance(each, str | int | float) or isinstance(each, bool):
            raise typer.BadParameter(f"is {each!r}; it must be a text or a number")
        flag = [] if isinstance(parameter, TyperArgument) else [parameter.opts[0]]
        command.make_context("config", [*flag, str(each)])
    return [str(each) for each in values] if _is_list(parameter) else str(value)
