"""`headstart chat`: a conversation."""

from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import typer

from ..errors import HeadstartError, RequestError
from . import options, show
from .prompt import chat_tokens

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from rich.console import Console

    from ..engine import Engine

HELP = "/exit or Ctrl-D leaves, /clear forgets the conversation, Ctrl-C stops an answer."


@options.with_sampling(max_tokens=1024)
def chat(
    model: options.Model = None,
    mtp: options.Mtp = None,
    show_drafts: options.ShowDrafts = False,
    *,
    sampling: dict[str, Any],
) -> None:
    """Talk with a model. /exit leaves, /clear forgets the conversation, Ctrl-C stops an answer."""
    from rich.console import Console

    from ..engine import Engine
    from ..engine.memory import memory_for_prefixes
    from ..library import load
    from ..state import PrefixCache

    loaded, tokenizer = load(model, mtp=mtp)
    console, aside = Console(highlight=False), Console(stderr=True, highlight=False)
    aside.print(HELP, style="dim")
    if show_drafts:
        console.print(show.legend(console))
    with suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and history for input()

    messages: list[dict[str, str]] = []
    engine: Engine | None = None  # one for all answers, so that what was said before need not be read again
    while (line := _ask(aside)) is not None:
        if line == "/clear":
            messages.clear()
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                if engine is None:
                    engine = Engine(loaded, tokenizer, max_sequences=1, prefix=PrefixCache(memory_for_prefixes()))
                said, stopped = _answer(engine, tokenizer, messages, sampling, console, aside, show_drafts)
                messages.append({"role": "assistant", "content": said})
                if stopped:  # in the middle of whatever it was doing: it is not to be trusted any more
                    engine = None
            except HeadstartError as error:  # of this message alone, such as a conversation that is too long
                messages.pop()
                engine = engine if isinstance(error, RequestError) else None
                typer.echo(f"error: {error} (/clear forgets the conversation)", err=True)


def _ask(aside: "Console") -> str | None:
    """The next line; None where there is none."""
    while True:
        try:
            line = input("› ").strip()
        except EOFError:
            aside.out()
            return None
        except KeyboardInterrupt:
            aside.print(f"\n{HELP}", style="dim")
            continue
        return None if line == "/exit" else line


def _answer(
    engine: "Engine",
    tokenizer: "TokenizerWrapper",
    messages: list[dict[str, str]],
    sampling: dict[str, Any],
    console: "Console",
    aside: "Console",
    show_drafts: bool,
) -> tuple[str, bool]:
    """Write the answer as it comes, and say whether Ctrl-C ended it early; what was said stays said."""
    from ..library import stream_generate

    said, last, stopped = "", None, False
    tokens, progress = chat_tokens(tokenizer, messages), show.prompt_progress(aside)
    with closing(
        stream_generate(engine.model, tokenizer, tokens, prompt_progress_callback=progress, engine=engine, **sampling)
    ) as responses:
        try:
            for last in responses:
                show.token(console, last, origins=show_drafts)
                said += last.text
        except KeyboardInterrupt:
            stopped = True
    console.out()
    if last is not None:
        end = " · stopped" if stopped else ""
        aside.print(show.summary(last.stats, last.finish_reason) + end, style="dim", soft_wrap=True)
    return said, stopped
