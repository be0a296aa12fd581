"""What is shown around an answer: how far its prompt is read, and the line that closes it."""

import re
from io import StringIO

from rich.console import Console

from headstart.cli import show
from headstart.cli.show import summary
from headstart.engine import Stats


def line(proposed: list[int], accepted: list[int]) -> str:
    stats = Stats("native_mtp", None, proposed_by_position=proposed, accepted_by_position=accepted, rounds=20)
    return summary(stats, "stop")


def test_shares_of_positions_that_were_hardly_tried_are_left_out() -> None:
    assert "· acceptance 90% 80% · depth" in line([20, 10, 9, 2], [18, 8, 0, 0])


def test_without_enough_drafts_there_is_no_percentage() -> None:
    assert "%" not in line([9, 2], [8, 0])
    assert "acceptance" not in line([], [])


def test_an_answer_of_one_round_has_no_rate() -> None:
    """Its time is the prompt's."""
    stats = Stats("native_mtp", None, exact=True)
    stats.count(4, accepted=3, proposed=3, copied=0, seconds=0.5)
    assert summary(stats, "length") == "4 tokens · 4.00 tokens per round · depth 3.0 · cut at the limit"
    stats.count(4, accepted=3, proposed=3, copied=0, seconds=1.0)
    assert "8 tokens · 8.0 tokens/s ·" in summary(stats, "length")


def test_a_reason_that_ends_in_a_period_does_not_end_in_two() -> None:
    shown = summary(Stats(None, "no file holds it. `headstart graft` brings it back.", exact=True), None)
    assert shown.endswith("no drafts: no file holds it. `headstart graft` brings it back")


def test_a_long_prompt_is_announced_before_any_of_it_is_read() -> None:
    """Its first chunk may take a minute. A short one must not flicker."""
    written = StringIO()
    progress = show.prompt_progress(Console(file=written, force_terminal=True))
    progress(0, 100)
    assert written.getvalue() == ""
    progress(0, 11_000)
    progress(512, 11_000)
    assert re.findall("Reading .*? tokens", written.getvalue()) == [
        "Reading the prompt: 0 of 11,000 tokens",
        "Reading the prompt: 512 of 11,000 tokens",
    ]
