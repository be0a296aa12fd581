"""How an answer looks in a terminal: its tokens by origin, and the line that closes it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

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
    "correction": Look("bold red", "!", "correction of a draft"),
    "bonus": Look("cyan", "*", "bonus after accepted drafts"),
    "plain": Look("", "", "plain"),
}


def token(console: "Console", response: "GenerationResponse", *, origins: bool) -> None:
    """Write what a token adds, at once."""
    look = LOOKS[response.origin]
    mark = look.mark if origins and not in_colour(console) and response.text else ""
    console.out(mark + response.text, style=look.style if origins else None, highlight=False, end="")


def prompt_progress(aside: "Console") -> Callable[[int, int], None]:
    """For a person who waits for a long prompt: how much of it has been read."""

    def show(done: int, total: int) -> None:
        if aside.is_terminal and 0 < done:
            line = f"reading the prompt: {done} of {total} tokens" if done < total else ""
            aside.out(line.ljust(60), end="\r", style="dim", highlight=False)

    return show


def legend(console: "Console") -> "Text":
    from rich.text import Text

    looks = [
        Text(look.meaning if in_colour(console) else look.mark + look.meaning, look.style) for look in LOOKS.values()
    ]
    return Text("  ").join(looks)


def in_colour(console: "Console") -> bool:
    return console.color_system is not None and not console.no_color


def summary(stats: "Stats", finish_reason: str | None) -> str:
    """What ran, in one line."""
    parts = [f"{stats.generation_tokens} tokens", f"{stats.generation_tps:.1f} tokens/s"]
    if stats.drafter_kind:
        depth = stats.proposed_draft_tokens / stats.rounds if stats.rounds else 0.0
        parts.append(f"{stats.tokens_per_round:.2f} tokens per round")
        if shares := acceptance(stats):
            parts.append(f"acceptance {shares}")
        parts.append(f"depth {depth:.1f}")
        if stats.paused_reason:
            parts.append(stats.paused_reason)
    else:
        parts.append(f"no drafts: {stats.bypass_reason}")
    if not stats.exact:
        parts.append("not exact")
    if finish_reason == "length":
        parts.append("cut at the limit")
    return " · ".join(parts)


def acceptance(stats: "Stats") -> str:
    """Return by position how many rounds accepted a draft and all before it, where enough rounds drafted so far."""
    from ..bench.estimate import accepted_shares

    return " ".join(
        f"{share:.0%}" for share in accepted_shares(stats.accepted_by_position, stats.proposed_by_position)
    )
