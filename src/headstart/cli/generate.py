"""`headstart generate`: one prompt, one answer."""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from ..errors import CheckpointError, RequestError
from ..open_files import read_text
from . import machines, options, show
from .download import find_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..library import GenerationResponse


@options.with_message
@options.with_model
@options.with_sampling
def generate_command(
    model: str | None,
    message: str | None,
    prompt: str | None = Option(None, "--prompt", "-p", help="What to answer."),
    prompt_file: str | None = Option(None, help="Read the prompt from a file; - is standard input."),
    mtp: bool | None = options.MTP,
    head: str | None = options.HEAD,
    drafter: str | None = options.DRAFTER,
    kv_bits: int | None = options.KV_BITS,
    adapter_path: str | None = options.ADAPTER,
    raw: bool = Option(False, "--raw", help="Continue the prompt as it is, without a chat template."),
    as_json: bool = Option(False, "--json", help="Print a JSON object: text, tokens, finish_reason, stats."),
    show_drafts: bool = options.SHOW_DRAFTS,
    split: options.Split = options.SPLIT,
    *,
    sampling: dict[str, Any],
) -> None:
    """Answer one prompt. The text goes to standard output, a line of statistics to standard error. The prompt is
    MESSAGE, --prompt or --prompt-file; without a MODEL, `headstart generate "Hello"` is enough."""
    from rich.console import Console

    from ..checkpoint.template import chat_tokens
    from ..cluster import follow, lead
    from ..library import stream_generate

    if model is not None and message is prompt is prompt_file is None and not _is_model(model):
        model, message = None, model
        typer.echo("No model has this name: it is the prompt, for the small built-in one.", err=True)
    if message is not None and prompt is not None:
        raise RequestError("the prompt is given twice: as MESSAGE and with --prompt")
    prompt = message if prompt is None else prompt
    parts: machines.Parts = {"mtp": mtp, "head": head, "drafter": drafter, "kv_bits": kv_bits}
    if adapter_path is not None:
        parts["adapter_path"] = adapter_path
    with machines.connect_machines() as cluster:
        if cluster is not None and cluster.rank:
            follow(cluster, *machines.load_share(find_model(model), cluster, split, **parts)).run()
            return
        text = _read_prompt(prompt, prompt_file)
        loaded, tokenizer = machines.load_share(find_model(model), cluster, split, **parts)
        engine = lead(cluster, loaded, tokenizer, max_sequences=1) if cluster is not None else None
        tokens = text if raw else chat_tokens(tokenizer, [{"role": "user", "content": text}])
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


def _is_model(name: str) -> bool:
    from ..checkpoint.hub import locate

    try:
        return bool(locate(name))
    except CheckpointError:
        return False


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
