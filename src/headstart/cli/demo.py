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
    console.print(f"\n[bold]{PROMPT}[/]\n")
    with Live(console=console, transient=True) as live:
        for side in sides:  # to be seen, and to warm up: these two runs are not timed
            for response in run(side):
                side.responses.append(response)
                live.update(_panels(sides))
        started = time.perf_counter()
        # Machines are noisy: the two take turns, and the middle of several runs counts.
        while len(on.rates) < FEWEST_RUNS or (
            len(on.rates) < MOST_RUNS and time.perf_counter() - started < ENOUGH_SECONDS
        ):
            for side in sides:
                live.update(Group(_panels(sides), f"[dim]timing both, run {len(on.rates) + 1}[/]"))
                responses = list(run(side))
                side.rates.append(responses[-1].stats.generation_tps)
                differing += [response.token for response in responses] != off.tokens
    differing += on.tokens != off.tokens

    console.print(_panels(sides))
    if show.in_colour(console):
        console.print(show.legend(console))
    console.line()
    console.print(_numbers(off, on))
    if not differing:
        console.print(f"\n{len(off.tokens)} token ids, identical in all {2 * (1 + len(on.rates))} runs.\n")
    elif on.stats.exact:
        raise HeadstartError(f"the token ids are not those of plain decoding in {differing} of the runs")
    else:
        console.print(f"\nThe token ids differ in {differing} of the runs: this device rounds windows otherwise.\n")


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

    slow, fast = median(off.rates), median(on.rates)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for heading in ("speculation", "off", "on", ""):
        table.add_column(heading, justify="right" if heading else "left")
    table.columns[0].justify = "left"
    table.add_row("tokens/s, median", f"{slow:.1f}", f"[bold]{fast:.1f}[/]", f"[bold]{fast / slow:.2f} ×[/]")
    table.add_row(
        f"of {len(on.rates)} runs each, from/to", *(f"{min(s.rates):.1f}/{max(s.rates):.1f}" for s in (off, on))
    )
    table.add_row("rounds", str(off.stats.rounds), str(on.stats.rounds))
    table.add_row("tokens per round", f"{off.stats.tokens_per_round:.2f}", f"{on.stats.tokens_per_round:.2f}")
    table.add_row("acceptance by position", "–", show.acceptance(on.stats))
    return table
