"""`headstart demo`: one model, one prompt, speculation off and on."""

import time
from statistics import median
from typing import TYPE_CHECKING, Literal

import typer

from ..errors import HeadError, HeadstartError
from . import options, show
from .download import find_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..engine import Stats
    from ..library import GenerationResponse

PROMPT = "Write a Python function that reads a JSON file and returns its contents."
MAX_TOKENS = 160  # the built-in model needs 46
MIN_RUNS, MAX_RUNS, ENOUGH_SECONDS = 3, 9, 10.0


@options.with_model
def demo_command(model: str | None) -> None:
    """Compare speculation off and on: watch a model write a function both ways, and see both measured."""
    from rich.console import Console

    from ..checkpoint.template import chat_tokens
    from ..library import load, stream_generate

    loaded, tokenizer = load(find_model(model))
    if not loaded.has_head:
        raise HeadError(f"there is nothing to compare: {loaded.head_unavailable or 'the model has no head'}")
    prompt = chat_tokens(tokenizer, [{"role": "user", "content": PROMPT}])

    def run(k: int | Literal["auto"]) -> "Iterator[GenerationResponse]":
        return stream_generate(loaded, tokenizer, prompt, MAX_TOKENS, k=k)

    def run_shown(title: str, k: int | Literal["auto"]) -> "list[GenerationResponse]":
        """Print the answer as it is generated. This also warms up: the runs after it are timed."""
        console.rule(title)
        responses = []
        for response in run(k):
            show.print_token(console, response, origins=show.in_colour(console))
            responses.append(response)
        console.out()
        return responses

    console = Console(highlight=False)
    which = "The small built-in model" if model is None else "One model"
    console.print(f"\n{which} answers one question twice: without speculation, then with it.\n\n[bold]{PROMPT}[/]\n")
    off, on = run_shown("speculation off", 0), run_shown("speculation on", "auto")
    if show.in_colour(console):
        console.print(show.legend(console))
    plain = [response.token for response in off]
    differing = int([response.token for response in on] != plain)
    rates: dict[int | Literal["auto"], list[float]] = {0: [], "auto": []}
    deadline = time.perf_counter() + ENOUGH_SECONDS
    typer.echo("\nTiming both a few times …\n", err=True)
    # Machines are noisy: the two take turns, and the median of several runs counts.
    while len(rates[0]) < MIN_RUNS or (len(rates[0]) < MAX_RUNS and time.perf_counter() < deadline):
        for k, measured in rates.items():
            responses = list(run(k))
            measured.append(responses[-1].stats.generation_tps)
            differing += [response.token for response in responses] != plain

    runs = len(rates[0])
    _print_comparison(list(rates.values()), (off[-1].stats, on[-1].stats))
    gain = median(rates["auto"]) / median(rates[0])
    pays = "" if gain > 1.02 else "Speculation does not pay on this machine for this text. "
    typer.echo(f"\n{pays}With speculation: {gain:.2f} times the tokens per second.")
    if not differing:
        typer.echo(f"The text is the same: all {len(plain)} tokens, in all {2 * (1 + runs)} runs.\n")
    elif on[-1].stats.exact:
        raise HeadstartError(f"{differing} runs did not generate the tokens of plain decoding")
    else:
        typer.echo(f"The tokens differ in {differing} of the runs: this device rounds windows differently.\n")
    typer.echo("Next: `headstart chat` to talk to it, `headstart serve` for a server with a dashboard.\n")


def _print_comparison(rates: "Sequence[Sequence[float]]", stats: "tuple[Stats, Stats]") -> None:
    """Print what was measured without speculation and with it."""
    rows = [
        ["speculation", "off", "on"],
        ["tokens per second", *(f"{median(each):.1f}" for each in rates)],
        [f"lowest to highest of {len(rates[0])} runs", *(f"{min(each):.1f}–{max(each):.1f}" for each in rates)],
        ["passes of the model", *(str(each.rounds) for each in stats)],
        ["tokens per pass", *(f"{each.tokens_per_round:.2f}" for each in stats)],
    ]
    if shares := show.acceptance(stats[1]):
        rows.append(["drafts accepted, by position", "–", shares])
    show.print_table(rows, right=(1, 2))
