"""`headstart demo`: one model, one prompt, speculation off and on, side by side."""

import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Literal

from ..errors import HeadError, HeadstartError
from . import options, show
from .prompt import chat_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from ..engine import Stats
    from ..library import GenerationResponse

PROMPT = "Write a Python function that reads a JSON file and returns its contents."
MAX_TOKENS = 160  # the built-in model needs 46
FEWEST_RUNS, MOST_RUNS, ENOUGH_SECONDS = 3, 9, 10.0


@dataclass
class Side:
    """One of the two: what it wrote, and how fast it was each time."""

    title: str
    k: int | Literal["auto"]
    responses: list["GenerationResponse"] = field(default_factory=list)  # of the first run, the one that is shown
    rates: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [response.token for response in self.responses]

    @property
    def stats(self) -> "Stats":
        return self.responses[-1].stats


def demo(model: options.Model = None) -> None:
    """Watch a model write a function with speculation off, then on, and see both measured."""
    from rich.console import Console, Group
    from rich.live import Live

    from ..library import load, stream_generate

    loaded, tokenizer = load(model)
    if not loaded.has_head:
        raise HeadError(f"there is nothing to compare: {loaded.head_unavailable or 'the model has no head'}")
    prompt = chat_tokens(tokenizer, [{"role": "user", "content": PROMPT}])
    off, on = sides = Side("speculation off", 0), Side("speculation on", "auto")
    differing = 0

    def run(side: Side) -> "Iterator[GenerationResponse]":
        return stream_generate(loaded, tokenizer, prompt, MAX_TOKENS, k=side.k)

    console = Console(highlight=False)
    which = "The small built-in model" if model is None else "One model"
    console.print(f"\n{which} answers one question twice: without speculation, then with it.\n\n[bold]{PROMPT}[/]\n")
    with Live(console=console, transient=True) as live:
        for side in sides:  # to be seen, and to warm up: these two runs are not timed
            for response in run(side):
                side.responses.append(response)
                live.update(_panels(sides))
        started = time.perf_counter()
        # Machines are noisy: the two take turns, and the median of several runs counts.
        while len(on.rates) < FEWEST_RUNS or (
            len(on.rates) < MOST_RUNS and time.perf_counter() - started < ENOUGH_SECONDS
        ):
            for side in sides:
                live.update(
                    Group(_panels(sides), f"[dim]timing both, run {len(on.rates) + 1} of {FEWEST_RUNS} or more[/]")
                )
                responses = list(run(side))
                side.rates.append(responses[-1].stats.generation_tps)
                differing += [response.token for response in responses] != off.tokens
    differing += on.tokens != off.tokens

    console.print(_panels(sides))
    if show.in_colour(console):
        console.print(show.legend(console))
    console.line()
    console.print(_numbers(off, on))
    gain = median(on.rates) / median(off.rates)
    pays = "" if gain > 1.02 else "Speculation does not pay on this machine for this text. "
    console.print(f"\n{pays}With speculation: {gain:.2f} times the tokens per second.", soft_wrap=True)
    if not differing:
        console.print(f"The text is the same: all {len(off.tokens)} tokens, in all {2 * (1 + len(on.rates))} runs.\n")
    elif on.stats.exact:
        raise HeadstartError(f"{differing} runs did not generate the tokens of plain decoding")
    else:
        console.print(f"The tokens differ in {differing} of the runs: this device rounds windows differently.\n")
    console.print("Next: `headstart chat` to talk to it, `headstart serve` for a server with a dashboard.\n")


def _panels(sides: tuple[Side, Side]) -> "Table":
    """What both wrote, each token in the colour of its origin."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    panels = []
    for side in sides:
        written = Text.assemble(*((response.text, show.LOOKS[response.origin].style) for response in side.responses))
        rate = f"{median(side.rates):.1f} tokens/s" if side.rates else None
        panels.append(Panel(written, title=side.title, subtitle=rate, padding=(0, 1)))
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def _numbers(off: Side, on: Side) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    table.add_column("speculation")
    table.add_column("off", justify="right")
    table.add_column("on", justify="right")
    table.add_row("tokens per second", *(f"[bold]{median(side.rates):.1f}[/]" for side in (off, on)))
    lowest_to_highest = (f"{min(side.rates):.1f}–{max(side.rates):.1f}" for side in (off, on))
    table.add_row(f"lowest to highest of {len(on.rates)} runs", *lowest_to_highest)
    table.add_row("passes of the model", *(str(side.stats.rounds) for side in (off, on)))
    table.add_row("tokens per pass", *(f"{side.stats.tokens_per_round:.2f}" for side in (off, on)))
    if shares := show.acceptance(on.stats):
        table.add_row("drafts accepted, by position", "–", shares)
    return table
