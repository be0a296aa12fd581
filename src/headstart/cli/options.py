"""The options that commands share, and the one place where flags become a request's parameters."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Literal

import typer

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A folder, a built-in model, a name in the Hugging Face cache, or a hub id.",
        show_default="the built-in model",
    ),
]
Mtp = Annotated[
    bool | None,
    typer.Option(
        "--mtp/--no-mtp",
        help="Load the model with its MTP head, or without.",
        show_default="with it, unless HEADSTART_MTP is 0",
    ),
]
Split = Annotated[
    Literal["tensor", "pipeline"],
    typer.Option(help="Under mlx.launch: machines share every layer, or have some layers each."),
]
ShowDrafts = Annotated[
    bool, typer.Option("--show-drafts", help="Show where every token came from: draft, correction, bonus or plain.")
]


def _flag(type_: Any, *names: str, default: str, panel: str | None = "Sampling", **how: Any) -> Any:
    """A flag that is None where it is not given: SamplingParams has the defaults."""
    return Annotated[type_ | None, typer.Option(*names, show_default=default, rich_help_panel=panel, **how)]


def _max_tokens(default: int) -> Any:
    return _flag(int, "--max-tokens", "-n", default=str(default), panel=None, help="Most tokens to write.")


# By their names in SamplingParams.
SAMPLING = {
    "max_tokens": _max_tokens(256),
    "k": _flag(str, "--k", default="auto", panel=None, metavar="auto|N", help="Drafts a round; 0 drafts nothing."),
    "temperature": _flag(float, "--temperature", "-t", default="0", help="0 is greedy."),
    "top_p": _flag(float, "--top-p", default="1", help="Keep the likeliest tokens that make up this much."),
    "top_k": _flag(int, "--top-k", default="0", help="Keep so many tokens; 0 keeps all."),
    "min_p": _flag(float, "--min-p", default="0", help="Keep tokens this likely, relative to the likeliest."),
    "repetition_penalty": _flag(
        float, "--repetition-penalty", default="1", help="Above 1: less of the last 20 tokens."
    ),
    "presence_penalty": _flag(float, "--presence-penalty", default="0", help="Above 0: less of the last 20 tokens."),
    "frequency_penalty": _flag(float, "--frequency-penalty", default="0", help="The same, by how often each occurs."),
    "accept": _flag(
        Literal["auto", "ratio", "coupled", "optimistic"],
        "--accept",
        default="auto",
        help="How drafts are judged: coupled where there is a seed, else ratio; optimistic is not exact.",
    ),
    "seed": _flag(int, "--seed", default="none", help="The same text again, whatever the depth."),
}


def with_sampling(max_tokens: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags above. It takes those given as `sampling`, keyword arguments for SamplingParams.
    `max_tokens`: where it has a default of its own."""
    known, defaults = SAMPLING, dict[str, Any]()
    if max_tokens is not None:
        known, defaults = SAMPLING | {"max_tokens": _max_tokens(max_tokens)}, {"max_tokens": max_tokens}

    def give(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_flags(**arguments: Any) -> None:
            flags = {name: arguments.pop(name) for name in known}
            given = {name: flag for name, flag in flags.items() if flag is not None}
            command(**arguments, sampling=_checked(defaults | given))

        signature = inspect.signature(command)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != "sampling"]
        flags = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=flag)
            for name, flag in known.items()
        ]
        with_flags.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
        return with_flags

    return give


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse what cannot be honoured before a model is loaded for nothing."""
    from ..sampling import SamplingParams

    if str(given.get("k", "")).isdecimal():
        given["k"] = int(given["k"])
    SamplingParams(**given)
    return given
