"""`headstart generate`: one prompt, one answer."""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from ..errors import RequestError
from ..open_files import read_text
from . import machines, options, show
from .download import find_model, message_alone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..library import GenerationResponse


@options.with_message
@options.with_model
@options.with_parts
@options.with_sampling
def generate_command(
    model: str | None,
    message: str | None,
    prompt: str | None = Option(None, "--prompt", "-p", help="What to answer."),
    prompt_file: str | None = Option(None, help="Read the prompt from a file; - is standard input."),
    system_prompt: str | None = options.SYSTEM,
    raw: bool = Option(False, "--raw", help="Continue the prompt as it is, without a chat template."),
    as_json: bool = Option(False, "--json", help="Print a JSON object: text, tokens, finish_reason, stats."),
    show_drafts: bool = options.SHOW_DRAFTS,
    split: options.Split = options.SPLIT,
    *,
    parts: machines.Parts,
    sampling: dict[str, Any],
) -> None:
    """Answer one prompt. The text goes to standard output, a line of statistics to standard error. The prompt is
    MESSAGE, --prompt or --prompt-file; without a MODEL, `headstart generate "Hello"` is enough."""
    from rich.console import Console

    from ..checkpoint.template import chat_tokens
    from ..cluster import follow, lead
    from ..library import stream_generate

    if prompt is prompt_file is None:
        model, message = message_alone(model, message)
    if message is not None and prompt is not None:
        raise RequestError("the prompt is given twice: as MESSAGE and with --prompt")
    if raw and system_prompt is not None:
        raise RequestError("--system-prompt is written by a chat template: leave out --raw")
    prompt = message if prompt is None else prompt
    with machines.connect_machines() as cluster:
        if cluster is not None and cluster.rank:
            follow(cluster, *machines.load_share(find_model(model), cluster, split, **parts)).run()
            return
        text = _read_prompt(prompt, prompt_file)
        loaded, tokenizer = machines.load_share(find_model(model), cluster, split, **parts)
        engine = lead(cluster, loaded, tokenizer, max_sequences=1) if cluster is not None else None
        messages = [*options.system_message(system_prompt), {"role": "user", "content": text}]
        tokens = text if raw else chat_tokens(tokenizer, messages)
        aside = Console(stderr=True, highlight=False)
        shared = {"prompt_progress_callback": show.prompt_progress(aside), "engine": engine, **sampling}
        responses = stream_generate(loaded, tokenizer, tokens, **shared)
        if as_json:
            with closing(responses):
                typer.echo(_as_json(responses))
            return
        console = Console(highlight=False)
        if show_drafts:
            console.print(show.legend(console), end="\n\n")
        _, stopped = show.print_answer(responses, console, aside, origins=show_drafts)
        if stopped:
            raise typer.Exit(130)


def _read_prompt(prompt: str | None, file: str | None) -> str:
    """Return the prompt itself, or the contents of a file; `-` is standard input."""
    if (prompt is None) == (file is None):
        raise RequestError(
            "give the prompt with either --prompt or --prompt-file (- is standard input), or after MODEL"
        )
    option = "--prompt" if file is None else f"--prompt-file {file}"
    try:
        if file is not None:
            prompt = read_text(sys.stdin if file == "-" else Path(file))
        assert prompt is not None
        prompt.encode()
    except (OSError, UnicodeError) as error:
        raise RequestError(f"{option}: cannot be read as text: {error}") from error
    if not prompt:
        raise RequestError(f"{option} is empty: write a prompt")
    return prompt


def _as_json(responses: "Iterator[GenerationResponse]") -> str:
    text, tokens = "", []
    for response in responses:  # one at a time: each holds its logits
        text += response.text
        tokens.append(response.token)
    last = {"finish_reason": response.finish_reason, "stats": response.stats.as_dict()}
    return json.dumps({"text": text, "tokens": tokens, **last})
