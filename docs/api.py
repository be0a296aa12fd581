"""Write docs/reference/cli.md and docs/reference/python-api.md from the code: `python docs/api.py`.

The command line comes from the commands' own help, the Python API from signatures, docstrings and, for fields of
dataclasses, the comments beside them. tests/test_docs.py compares the pages with what this would write.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
import tokenize
from collections.abc import Callable
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

import headstart
from headstart import errors
from headstart.cli.main import app
from headstart.engine import FinishReason, Handle, Origin

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by `python docs/api.py`. Change the code instead. -->\n\n"
# The classes on the page, with the methods and properties that users call.
RESPONSES = {"GenerationResponse": ["logprobs"], "BatchResponse": []}
CLASSES: dict[str, list[str]] = {
    "SamplingParams": [],
    "GrammarSpec": ["json_schema"],
    "Request": [],
    "Engine": ["submit", "warm_up", "clear_prefix", "cancel_all"],
    "EngineThread": ["submit", "start", "warm_up", "close"],
    "AsyncEngine": ["stream", "generate"],
    "Handle": ["cancel"],
    "Event": [],
    "Stats": [
        *("tokens_per_round", "proposed_draft_tokens", "accepted_draft_tokens", "acceptance_by_position"),
        *("paused_reason", "prompt_tps", "generation_tps", "as_dict"),
    ],
    "PrefixCache": ["stats", "clear"],
    "PromptCache": [],
}


def pages() -> dict[Path, str]:
    """Return the text of each generated page by its path."""
    return {REFERENCE / "cli.md": command_line(), REFERENCE / "python-api.md": python_api()}


def command_line() -> str:
    group: Any = typer.main.get_command(app)
    parts = [
        "# Command line\n\n"
        + NOTE
        + "Every command prints its options with `--help`. A MODEL is a folder, a built-in "
        "model (`tiny-qwen3.5`, `tiny-qwen3.5-moe`), a name in the Hugging Face cache, or a hub id; a hub id that is "
        "not cached is downloaded, except by `inspect`. [Exit codes](errors.md#exit-codes).\n"
    ]
    return "".join([*parts, *[_command(name, command) for name, command in group.commands.items()]])


def _command(name: str, command: Any) -> str:
    params = [param for param in command.params if param.name != "help"]
    arguments = [param for param in params if param.param_type_name == "argument"]
    usage = " ".join([f"headstart {name}", *[_argument_name(each) for each in arguments], "[OPTIONS]"])
    lines = [f"\n## headstart {name}\n\n`{usage}`\n\n{_paragraph(command.help or '')}\n\n"]
    lines.append("| option | | default |\n| --- | --- | --- |\n")
    for param in params:
        label = _argument_name(param).strip("[]") if param in arguments else _option_names(param)
        lines.append(f"| `{_cell(label)}` | {_cell(param.help or '')} | {_cell(_default(param))} |\n")
    return "".join(lines)


def _argument_name(param: Any) -> str:
    name = param.name.upper() + (" …" if param.nargs == -1 else "")
    return name if param.required else f"[{name}]"


def _option_names(param: Any) -> str:
    names = ", ".join(sorted(param.opts, key=len, reverse=True))
    if param.secondary_opts:
        return f"{names} / {', '.join(param.secondary_opts)}"
    return names if param.is_flag or param.is_bool_flag else f"{names} {_value(param)}"


def _value(param: Any) -> str:
    annotation = param.type_descriptor.annotation
    if param.metavar:
        return str(param.metavar)
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    return "N" if annotation is int else "X" if annotation is float else "TEXT"


def _default(param: Any) -> str:
    if param.required:
        return "required"
    shown = param.show_default if isinstance(param.show_default, str) else None
    if shown is None and param.default not in (None, False, ()) and param.default != []:
        shown = f"{param.default:g}" if isinstance(param.default, float) else str(param.default)
    envvar = f"`{param.envvar}`" if isinstance(getattr(param, "envvar", None), str) else ""
    return " ".join(filter(None, [shown, envvar]))


def python_api() -> str:
    functions = [name for name in headstart.__all__ if inspect.isfunction(getattr(headstart, name))]
    order = ["load", "generate", "stream_generate", "batch_generate", "make_sampler", "make_prompt_cache"]
    functions = sorted(functions, key=lambda name: order.index(name) if name in order else len(order))
    parts = ["# Python API\n\n" + NOTE + "How to use it: [Use from Python](../guides/python.md).\n\n## Functions\n"]
    parts += [_function(f"headstart.{name}", getattr(headstart, name), f"\n### {name}\n") for name in functions]
    parts.append("\n## Responses\n")
    parts += [_class(getattr(headstart, name), members) for name, members in RESPONSES.items()]
    parts.append("\n## Requests and engines\n")
    parts += [_class(Handle if name == "Handle" else getattr(headstart, name), m) for name, m in CLASSES.items()]
    parts.append("\n### Named values\n\n| type | values |\n| --- | --- |\n")
    rule = get_type_hints(headstart.SamplingParams)["accept"]
    for name, type_ in (("Origin", Origin), ("FinishReason", FinishReason), ("Rule", rule)):
        parts.append(f"| `{name}` | {', '.join(f'`{value}`' for value in get_args(type_))} |\n")
    parts.append("\n## Errors\n\nIn `headstart.errors`; see [errors](errors.md#python).\n\n")
    parts.append("| class | base | |\n| --- | --- | --- |\n")
    for name, each in vars(errors).items():
        if inspect.isclass(each) and issubclass(each, errors.HeadstartError):
            parts.append(f"| `{name}` | `{each.__base__.__name__}` | {_cell(_paragraph(each.__doc__ or ''))} |\n")
    return "".join(parts)


def _function(name: str, function: Callable[..., Any], heading: str = "") -> str:
    text, arguments = _docstring(function)
    parts = [heading, f"\n```py\n{_signature(name, function)}\n```\n", text]
    if arguments:
        parts.append(_table("argument", arguments))
    return "".join(parts)


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Return the signature as the source has it, without `self`."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    given = node.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    arguments = [_argument(*each) for each in zip(given.args, defaults, strict=True)]
    if given.args and given.args[0].arg in ("self", "cls"):
        arguments.pop(0)
    if given.kwonlyargs:
        arguments += ["*", *[_argument(*each) for each in zip(given.kwonlyargs, given.kw_defaults, strict=True)]]
    if given.kwarg:
        arguments.append("**" + _argument(given.kwarg, None))
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    one_line = f"{name}({', '.join(arguments)}){returns}"
    if len(one_line) <= 100:
        return one_line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in arguments) + f"){returns}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    annotated = f"{argument.arg}: {ast.unparse(argument.annotation)}" if argument.annotation else argument.arg
    return annotated if default is None else f"{annotated} = {ast.unparse(default)}"


def _class(kind: type, members: list[str]) -> str:
    name = kind.__name__
    text, documented = _docstring(kind)
    parts = [f"\n### {name}\n", text]
    if dataclasses.is_dataclass(kind):
        comments = _comments(kind)
        parts.append("\n| field | type | default | |\n| --- | --- | --- | --- |\n")
        for field in dataclasses.fields(kind):
            if not field.name.startswith("_"):
                type_, comment = comments[field.name]
                about = documented.get(field.name) or comment
                parts.append(
                    f"| `{field.name}` | `{_cell(type_)}` | {_cell(_field_default(field))} | {_cell(about)} |\n"
                )
    elif kind is not Handle:  # which only an engine makes
        parts.append(_function(name, vars(kind)["__init__"]))
    found = {member: inspect.getattr_static(kind, member) for member in members}
    kinds = (property, cached_property)
    properties = {m: _paragraph(v.__doc__ or "") for m, v in found.items() if isinstance(v, kinds)}
    if properties:
        parts.append(_table("property", properties))
    for member, value in found.items():
        if not isinstance(value, kinds):
            parts.append(_function(f"{name}.{member}", getattr(value, "__func__", value)))
    return "".join(parts)


def _docstring(thing: Any) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring and its documented arguments."""
    doc = thing.__doc__ or ""
    if inspect.isclass(thing) and doc.startswith(f"{thing.__name__}("):  # a dataclass without one
        return "", {}
    before, _, rest = inspect.cleandoc(doc).partition("Args:\n")
    arguments, after = {}, ""
    if rest:
        block, _, after = rest.partition("\n\n")
        for match in re.finditer(r"^    (\w+): (.*(?:\n     .*)*)", block, re.MULTILINE):
            arguments[match.group(1)] = _paragraph(match.group(2))
    paragraphs = [_paragraph(each) for each in re.split(r"\n\s*\n", f"{before}\n\n{after}") if each.strip()]
    return "".join(f"\n{each}\n" for each in paragraphs), arguments


def _comments(kind: type) -> dict[str, tuple[str, str]]:
    """Return the type of each field of a dataclass, and the comment beside it."""
    source = textwrap.dedent(inspect.getsource(kind))
    beside = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    return {
        each.target.id: (ast.unparse(each.annotation), beside.get(each.end_lineno or 0, ""))
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def _field_default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is dataclasses.MISSING:
        return ""
    return f"`{field.default_factory.__name__}()`"  # type: ignore[union-attr]


def _table(of: str, rows: dict[str, str]) -> str:
    lines = [f"| `{name}` | {_cell(about)} |\n" for name, about in rows.items()]
    return f"\n| {of} | |\n| --- | --- |\n" + "".join(lines)


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for path, page in pages().items():
        path.write_text(page, encoding="utf-8")
