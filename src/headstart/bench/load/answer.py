"""One answer, as its client saw it: what arrived when, counted in tokens.

A server that drafts sends several tokens at once. Counted in chunks, such a server would seem to pause between few
tokens where it says many. So tokens share the time since whatever arrived before them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import Literal

# Who counted the tokens of an answer. Chunks are the last resort: right only where every token is one.
Counted = Literal["usage", "tokenizer", "chunks"]


@dataclass(frozen=True)
class Arrival:
    """What came in one piece."""

    when: float
    tokens: int


@dataclass(frozen=True)
class Drafts:
    """What a server tells of its speculation. Rounds are headstart's own."""

    proposed: int
    accepted: int
    rounds: int | None = None


@dataclass(frozen=True)
class Answer:
    asked: float  # when it should have been: a client that is late may not hide that the server was
    ended: float
    arrivals: tuple[Arrival, ...] = ()
    counted: Counted = "chunks"
    error: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    drafts: Drafts | None = None

    @property
    def tokens(self) -> int:
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0].when - self.asked

    @property
    def seconds(self) -> float:
        """From end to end."""
        return self.ended - self.asked

    @property
    def rate(self) -> float:
        """Tokens a second, waiting included."""
        return self.tokens / self.seconds

    def gaps(self) -> Iterator[float]:
        """Seconds from token to token, of all that did not come with the first."""
        for before, arrival in pairwise(self.arrivals):
            yield from [(arrival.when - before.when) / arrival.tokens] * arrival.tokens


def apportion(total: int, sizes: Sequence[int]) -> list[int]:
    """Tokens of each piece, where only their sum and the pieces' sizes are known: one each, as most servers send
    them, and of the rest each to the piece that has most text for its tokens (the method of Sainte-Laguë)."""
    if total <= len(sizes):  # a token may be in two pieces: the later one has it
        ends = [(i + 1) * total // len(sizes) for i in range(len(sizes))]
        return [end - start for start, end in pairwise([0, *ends])]
    tokens = [1] * len(sizes)
    largest = [(-size / 3, i) for i, size in enumerate(sizes)]
    heapify(largest)
    for _ in range(total - len(sizes)):
        i = largest[0][1]
        tokens[i] += 1
        heapreplace(largest, (-sizes[i] / (2 * tokens[i] + 1), i))
    return tokens


def arrivals(times: Sequence[float], tokens: Sequence[int]) -> tuple[Arrival, ...]:
    """A piece without a token of its own is no arrival, except that the first word is seen when it comes."""
    if tokens and not tokens[0]:
        tokens = [1, *tokens[1:]]
    return tuple(Arrival(when, count) for when, count in zip(times, tokens, strict=True) if count)
