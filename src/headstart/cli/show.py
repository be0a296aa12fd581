"""What commands print: tokens by origin, the line that closes an answer, tables, and reports with their files."""

import json
import os
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import typer

from ..errors import HeadstartError, RequestError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ..engine import Origin, Stats
    from ..library import GenerationResponse


class Look(NamedTuple):
    style: str
    mark: str  # stands before the token where there are no colours
    meaning: str


LOOKS: dict["Origin", Look] = {
    "draft": Look("green", "+", "accepted draft"),
    "copy": Look("blue", "=", "accepted copy"),
    "correction": Look("bold red", "!", "correction of a draft"),
    "bonus": Look("cyan", "*", "bonus token"),
    "plain": Look("", "", "plain"),
}


LONG = 512  # tokens of a prompt, whose prefill may take seconds


class Reportable(Protocol):
    def as_dict(self) -> dict[str, Any]: ...

    def markdown(self) -> str: ...


def print_token(console: "Console", response: "GenerationResponse", *, origins: bool) -> None:
    """Write the text that a token adds, at once."""
    look = LOOKS[response.origin]
    mark = look.mark if origins and not in_colour(console) and response.text else ""
    console.out(mark + response.text, style=look.style if origins else None, highlight=False, end="")


def print_answer(
    responses: "Generator[GenerationResponse]", console: "Console", aside: "Console", *, origins: bool
) -> tuple[str, bool]:
    """Print an answer as it is generated, and then a line of statistics. Return it, and whether Ctrl-C stopped it."""
    text, last, stopped = "", None, False
    with closing(responses):
        try:
            for last in responses:
                print_token(console, last, origins=origins)
                text += last.text
        except KeyboardInterrupt:
            stopped = True
    console.out()
    if last is not None:
        line = summary(last.stats, last.finish_reason)
        aside.print(f"{line} · stopped" if stopped else line, style="dim", soft_wrap=True)
    return text, stopped


def prompt_progress(aside: "Console") -> Callable[[int, int], None]:
    """Return a callback that shows on a terminal how much of a long prompt has been prefilled."""

    def show(done: int, total: int) -> None:
        if aside.is_terminal and (done or total > LONG):
            line = f"Reading the prompt: {done:,} of {total:,} tokens" if done < total else ""
            aside.out(line.ljust(60), end="\r", style="dim", highlight=False)

    return show


def legend(console: "Console") -> "Text":
    from rich.text import Text

    marks = not in_colour(console)
    return Text("  ").join(Text(marks * look.mark + look.meaning, look.style) for look in LOOKS.values())


def in_colour(console: "Console") -> bool:
    return console.color_system is not None and not console.no_color


def summary(stats: "Stats", finish_reason: str | None) -> str:
    """Return what ran, in one line."""
    parts = [f"{stats.generation_tokens} tokens"]
    if stats.rounds > 1:  # the time of the first counts as the prompt's
        parts.append(f"{stats.generation_tps:.1f} tokens/s")
    if stats.drafter_kind:
        depth = stats.proposed_draft_tokens / stats.rounds if stats.rounds else 0.0
        parts.append(f"{stats.tokens_per_round:.2f} tokens per round")
        if shares := acceptance(stats):
            parts.append(f"acceptance {shares}")
        parts.append(f"depth {depth:.1f}")
        if stats.paused_reason:
            parts.append(stats.paused_reason)
    else:
        parts.append(f"no drafts: {(stats.bypass_reason or '').rstrip('.')}")
    if not stats.exact:
        parts.append("not exact")
    if finish_reason == "length":
        parts.append("cut at the limit")
    return " · ".join(parts)


def acceptance(stats: "Stats") -> str:
    """Return by position how many rounds accepted a draft and all before it, where enough rounds drafted so far."""
    from ..bench.measurement import accepted_shares

    shares = accepted_shares(stats.accepted_by_position, stats.proposed_by_position)
    return " ".join(f"{share:.0%}" for share in shares)


def print_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print aligned columns, those in `right` aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        aligned = [cell.rjust(width) if n in right else cell.ljust(width) for n, (cell, width) in enumerate(cells)]
        typer.echo("  ".join(aligned).rstrip())


def check_output(output: Path | None) -> None:
    """Refuse an --output that cannot be written: minutes of measuring must not be lost."""
    if output is not None:
        target = output if output.exists() else output.absolute().parent
        if output.is_dir() or not target.exists() or not os.access(target, os.W_OK):
            raise RequestError(f"--output {output}: cannot be written. Name a file in a writable folder")


def print_report(report: Reportable, as_json: bool, output: Path | None) -> None:
    """Print Markdown or JSON, and write the file of `--output`: JSON where its name ends in .json, else Markdown."""
    typer.echo(json.dumps(report.as_dict()) if as_json else report.markdown(), nl=as_json)
    if output is not None:
        write_output(output, json.dumps(report.as_dict()) if output.suffix == ".json" else report.markdown())


def write_output(output: Path, text: str) -> None:
    """Write the file of `--output`."""
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HeadstartError(f"--output {output}: cannot be written: {error}") from error
