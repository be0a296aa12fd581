"""The options that commands share, and the one place where flags become a request's parameters."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

from typer import Argument, Option

from ..errors import RequestError, check_text

Command = Callable[..., None]
Split = Literal["tensor", "pipeline"]
Rule = Literal["auto", "ratio", "coupled", "optimistic"]

MTP = Option(None, "--mtp/--no-mtp", help="Load the MTP head or not.", show_default="yes, unless HEADSTART_MTP is 0")
HEAD = Option(
    None, metavar="MODEL", help="Draft with the head of another model or drafter.", show_default="the model's own"
)
DRAFTER = Option(
    None,
    metavar="DRAFTER",
    help="Draft with a drafter made for the model (DFlash, DFlash2, a Gemma 4's assistant): a folder or hub id.",
)
KV_BITS = Option(None, metavar="8", help="Keep KV caches in 8 bits: half the memory, not exact.")
ADAPTER = Option(
    None, "--adapter-path", metavar="FOLDER", help="Answer with a LoRA adapter that `mlx_lm.lora` has written."
)
SPLIT = Option("tensor", help="Under mlx.launch: machines share every layer, or have some layers each.")
SHOW_DRAFTS = Option(
    False, "--show-drafts", help="Show where tokens came from: draft, copy, correction, bonus or plain."
)
DRY_RUN = Option(False, "--dry-run", help="Show the plan and its sizes, and write nothing.")
MTP_BITS = Option(
    None, metavar="keep|2..8", help="Bits of the head, but of `mtp.fc`.", show_default="8 if the rest is quantised"
)
FEWEST_TOKENS = 20  # that can be timed: a step may produce sixteen, and the first step is not timed
JSON = Option(False, "--json", help="Print JSON.")
OUTPUT = Option(None, metavar="FILE", help="Also write the report: JSON to a .json, else Markdown.")
MODEL = Argument(
    None, metavar="MODEL", help="A folder, a built-in or cached model, or hub id.", show_default="built-in"
)
SYSTEM = Option(None, "--system-prompt", help="The system message before the conversation.")
MESSAGE = Argument(None, metavar="MESSAGE", help="What to answer.", show_default=False)
# The sampling flags by their names in SamplingParams, which has their defaults: what is not given is None.
SAMPLING: dict[str, tuple[Any, Any]] = {
    "max_tokens": (int, Option(None, "--max-tokens", "-n", show_default="256", help="Most tokens to generate.")),
    "k": (str, Option(None, metavar="auto|N", show_default="auto", help="Drafts per step; 0 drafts nothing.")),
    "temperature": (float, Option(None, "--temperature", "--temp", "-t", show_default="0", help="0 is greedy.")),
    "top_p": (float, Option(None, show_default="1", help="Keep the likeliest tokens that add up to this.")),
    "top_k": (int, Option(None, show_default="0", help="Keep this many tokens; 0 keeps all.")),
    "min_p": (float, Option(None, show_default="0", help="Keep tokens this likely, relative to the likeliest.")),
    "top_n_sigma": (
        float,
        Option(None, show_default="0", help="Keep tokens so many standard deviations near the best; 0 keeps all."),
    ),
    "repetition_penalty": (float, Option(None, show_default="1", help="Above 1: less of the last 20 tokens.")),
    "presence_penalty": (float, Option(None, show_default="0", help="Above 0: less of the last 20 tokens.")),
    "frequency_penalty": (float, Option(None, show_default="0", help="The same, by how often each occurs.")),
    "accept": (Rule, Option(None, show_default="auto", help="When a draft is accepted; optimistic is not exact.")),
    "seed": (int, Option(None, show_default="none", help="The same text again, at any depth.")),
}


def system_message(text: str | None) -> list[dict[str, str]]:
    """Return the messages that begin a conversation."""
    if text is not None:
        check_text(text, "--system-prompt")
    return [] if text is None else [{"role": "system", "content": text}]


def with_model(command: Command) -> Command:
    """Give a command MODEL as an argument and as --model. It gets whichever the user wrote, as `model`."""

    def model(given: dict[str, Any]) -> str | None:
        if None not in given.values():
            raise RequestError(f"MODEL is {given['model']}, and --model is {given['model_option']}: name it once")
        return given["model_option"] if given["model"] is None else given["model"]

    option = Option(None, "--model", "-m", metavar="MODEL", help="The same as MODEL.")
    return replace_parameter(command, "model", {"model": (str, MODEL), "model_option": (str, option)}, model)


def with_message(command: Command) -> Command:
    """Give a command that has MODEL and --model a second argument, MESSAGE. With --model it is the first."""

    @wraps(command)
    def shifted(**arguments: Any) -> None:
        if arguments["message"] is None and arguments["model_option"] is not None:
            arguments |= {"model": None, "message": arguments["model"]}
        command(**arguments)

    return replace_parameter(shifted, "message", {"message": (str, MESSAGE)}, lambda given: given["message"])


def with_models(command: Command) -> Command:
    """Give a command MODELs as arguments and as --model. It gets those that the user wrote, as `models`."""

    def models(given: dict[str, Any]) -> list[str]:
        if all(given.values()):
            named = [", ".join(each) for each in given.values()]
            raise RequestError(f"MODEL is {named[0]}, and --model is {named[1]}: name it once")
        return given["model"] or given["model_option"] or []

    many = Argument(
        None, metavar="MODEL…", help="Folders, built-in or cached models, or hub ids.", show_default="built-in"
    )
    option = Option(None, "--model", "-m", metavar="MODEL", help="The same as MODEL.")
    flags = {"model": (list[str], many), "model_option": (list[str], option)}
    return replace_parameter(command, "models", flags, models)


def with_parts(command: Command) -> Command:
    """Give a command the flags for what of a model is loaded beside its trunk. It gets their values as `parts`."""
    flags: dict[str, tuple[Any, Any]] = {
        "mtp": (bool, MTP),
        "head": (str, HEAD),
        "drafter": (str, DRAFTER),
        "kv_bits": (int, KV_BITS),
        "adapter_path": (str, ADAPTER),
    }
    return replace_parameter(command, "parts", flags, lambda given: given)


def with_sampling(command: Command) -> Command:
    """Give a command the flags in SAMPLING, except those that it has itself. It gets those that the user gave as
    `sampling`, keyword arguments for SamplingParams."""

    def sampling(given: dict[str, Any]) -> dict[str, Any]:
        """Refuse what cannot be honoured before a model is loaded."""
        from ..sampling import SamplingParams

        params = {name: value for name, value in given.items() if value is not None}
        if str(params.get("k", "")).isdecimal():
            params["k"] = int(params["k"])
        SamplingParams(**params)
        return params

    own = inspect.signature(command).parameters
    flags = {name: flag for name, flag in SAMPLING.items() if name not in own}
    return replace_parameter(command, "sampling", flags, sampling)


def replace_parameter(
    command: Command, name: str, parameters: dict[str, tuple[Any, Any]], combine: Callable[[dict[str, Any]], Any]
) -> Command:
    """Return a command with `parameters` in place of the one called `name`, which `combine` makes of their values.

    `parameters`: type and default by name. All are optional.
    """

    @wraps(command)
    def replaced(**arguments: Any) -> None:
        given = {each: arguments.pop(each) for each in parameters}
        command(**arguments, **{name: combine(given)})

    signature = inspect.signature(command)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != name]
    added = [
        inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=type_ | None)
        for each, (type_, default) in parameters.items()
    ]
    replaced.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    return replaced
