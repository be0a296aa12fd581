"""`headstart generate`: one prompt, one answer."""

import json
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import machines, options, show
from .prompt import chat_tokens, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..library import GenerationResponse


@options.with_sampling()
def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="What to answer.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="Read the prompt from a file; - is standard input.")] = None,
    model: options.Model = None,
    mtp: options.Mtp = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on from the prompt as it is, without a chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object: text, tokens, finish_reason, stats.")
    ] = False,
    show_drafts: options.ShowDrafts = False,
    split: options.Split = "tensor",
    *,
    sampling: dict[str, Any],
) -> None:
    """Answer one prompt. The text goes to standard output, a line of statistics to standard error."""
    from rich.console import Console

    from ..cluster import Follower, Leader
    from ..library import stream_generate

    with machines.joined() as cluster:
        if cluster is not None and cluster.rank:
            Follower(cluster, *machines.load(model, cluster, split, mtp=mtp)).run()
            return
        text = read_text(prompt, prompt_file)
        loaded, tokenizer = machines.load(model, cluster, split, mtp=mtp)
        engine = Leader(cluster, loaded, tokenizer, max_sequences=1) if cluster is not None else None
        tokens = text if raw else chat_tokens(tokenizer, [{"role": "user", "content": text}])
        aside = Console(stderr=True, highlight=False)
        progress = show.prompt_progress(aside)
        with closing(
            stream_generate(loaded, tokenizer, tokens, prompt_progress_callback=progress, engine=engine, **sampling)
        ) as responses:
            if as_json:
                typer.echo(_as_json(responses))
                return
            console = Console(highlight=False)
            if show_drafts:
                console.print(show.legend(console), end="\n\n")
            for response in responses:
                show.token(console, response, origins=show_drafts)
        console.out()
        aside.print(show.summary(response.stats, response.finish_reason), style="dim", soft_wrap=True)


def _as_json(responses: "Iterator[GenerationResponse]") -> str:
    text, tokens = "", []
    for response in responses:  # one at a time: each holds its logits
        text += response.text
        tokens.append(response.token)
    last = {"finish_reason": response.finish_reason, "stats": response.stats.as_dict()}
    return json.dumps({"text": text, "tokens": tokens, **last})
