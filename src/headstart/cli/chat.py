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
from . import options, show
from .download import find_drafter, find_model

if TYPE_CHECKING:
    from rich.console import Console


HELP = "/help shows this, /clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."
COMMAND = re.compile(r"/[a-z?]+( .*)?", re.IGNORECASE)  # and no path


@options.with_message
@options.with_model
@options.with_sampling
def chat_command(
    model: str | None,
    message: str | None,
    mtp: bool | None = options.MTP,
    head: str | None = options.HEAD,
    drafter: str | None = options.DRAFTER,
    kv_bits: int | None = options.KV_BITS,
    adapter_path: str | None = options.ADAPTER,
    show_drafts: bool = options.SHOW_DRAFTS,
    max_tokens: int = Option(1024, "--max-tokens", "-n", min=1, help="Most tokens of an answer."),
    *,
    sampling: dict[str, Any],
) -> None:
    """Talk with a model. /help lists the commands, Ctrl-C stops an answer. With a MESSAGE, answer it and leave."""
    from rich.console import Console

    from ..checkpoint.template import chat_tokens
    from ..library import load, stream_generate

    parts: dict[str, Any] = {"mtp": mtp, "head": head, "drafter": find_drafter(drafter), "kv_bits": kv_bits}
    loaded, tokenizer = load(find_model(model), adapter_path=adapter_path, **parts)
    console, aside = Console(highlight=False), Console(stderr=True, highlight=False)
    if message is None:
        aside.print(HELP, style="dim")
    if show_drafts:
        console.print(show.legend(console))
    with suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and history for input()

    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text are refused as a message
    messages: list[dict[str, str]] = []
    for line in iter(partial(_read_line, aside), None) if message is None else [message]:
        if line == "/clear":
            messages.clear()
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
