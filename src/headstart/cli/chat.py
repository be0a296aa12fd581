"""`headstart chat`: a conversation."""

import re
import sys
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from ..errors import HeadstartError, check_text
from . import machines, options, show
from .download import find_model, message_alone

if TYPE_CHECKING:
    from rich.console import Console


HELP = "/help shows this, /clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."
COMMAND = re.compile(r"/[a-z?]+( .*)?", re.IGNORECASE)  # and no path


@options.with_message
@options.with_model
@options.with_parts
@options.with_sampling
def chat_command(
    model: str | None,
    message: str | None,
    system_prompt: str | None = options.SYSTEM,
    show_drafts: bool = options.SHOW_DRAFTS,
    max_tokens: int = Option(1024, "--max-tokens", "-n", min=1, help="Most tokens of an answer."),
    *,
    parts: machines.Parts,
    sampling: dict[str, Any],
) -> None:
    """Talk with a model. /help lists the commands, Ctrl-C stops an answer. With a MESSAGE, answer it and leave."""
    from rich.console import Console

    from ..checkpoint.template import chat_tokens
    from ..library import stream_generate

    if model is not None and " " in model:  # one word is more likely a model that is not here
        model, message = message_alone(model, message)
    loaded, tokenizer = machines.load_share(find_model(model), None, **parts)
    console, aside = Console(highlight=False), Console(stderr=True, highlight=False)
    if message is None:
        aside.print(HELP, style="dim")
    if show_drafts:
        console.print(show.legend(console))
    with suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and history for input()

    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text are refused as a message
    first = options.system_message(system_prompt)
    messages = [*first]
    for line in iter(partial(_read_line, aside), None) if message is None else [message]:
        if line == "/clear":
            messages = [*first]
        elif COMMAND.fullmatch(line):
            aside.print(HELP if line == "/help" else f"{line.split()[0]} is unknown. {HELP}", style="dim")
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                check_text(line, "the message")
                tokens = chat_tokens(tokenizer, messages)
                shared = {"prompt_progress_callback": show.prompt_progress(aside), **sampling}
                responses = stream_generate(loaded, tokenizer, tokens, max_tokens, **shared)
                text, _ = show.print_answer(responses, console, aside, origins=show_drafts)
                messages.append({"role": "assistant", "content": text})
            except HeadstartError as error:  # of this message alone, such as a conversation that is too long
                if message is not None:
                    raise
                messages.pop()
                typer.echo(f"error: {error} (/clear forgets the conversation)", err=True)


def _read_line(aside: "Console") -> str | None:
    """Return the next line, or None where the user leaves. Ctrl-C at the prompt asks for help."""
    try:
        line = input("› ").strip()
    except EOFError:
        aside.out()
        return None
    except KeyboardInterrupt:
        aside.out()
        return "/help"
    return None if line in ("/exit", "/bye") else line
