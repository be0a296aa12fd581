"""What servers are asked under load: questions of a length, after a beginning that they have read before or not.

A server that keeps the beginnings of prompts answers sooner when it meets one again. So that chance has no part in
it, the beginning of a miss occurs once in the world, and that of a hit is sent ahead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import cycle, islice
from random import Random
from secrets import token_hex

from ...errors import RequestError
from ..prompts import Prompt, builtin_prompts

LENGTHS = {"short": 50, "medium": 400, "long": 1600}  # words


@dataclass(frozen=True)
class Asking:
    """Which request it is: the same text goes to every server, and twice to none."""

    repeat: int
    number: int
    cell: str
    variant: int = 0  # of those that share one server


@dataclass(frozen=True)
class Questions:
    """Made up, by the number of words, or given, by kind."""

    given: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    words: Mapping[str, int] = field(default_factory=lambda: LENGTHS)
    salt: str = field(default_factory=token_hex)  # of this measurement: servers remember the last one

    @property
    def names(self) -> list[str]:
        return list(self.given or self.words)

    def prompt(self, name: str, asking: Asking, *, hit: bool) -> Prompt:
        if self.given:
            return next(islice(cycle(self.given[name]), asking.number, None))
        question = _questions()[asking.number % len(_questions())]
        key = self._shared(name) if hit else self._key(asking)
        begun = _filled(key, self.words[name] - len(question.split()))
        return Prompt(name, text=f"{begun}\n\n{question}")

    def ahead(self, name: str) -> Prompt:
        """What must have been read for the others to be hits. It ends differently, as they do."""
        return Prompt(name, text=f"{_filled(self._shared(name), self.words[name])}\n\nHello.")

    def _shared(self, name: str) -> str:
        return blake2b(f"{self.salt} {name}".encode(), digest_size=4).hexdigest()

    def _key(self, asking: Asking) -> str:
        return blake2b(f"{self.salt} {asking}".encode(), digest_size=4).hexdigest()


def made_up(lengths: Sequence[str]) -> Questions:
    words: dict[str, int] = {}
    for length in lengths:
        if length in LENGTHS:
            words[length] = LENGTHS[length]
        elif length.isdecimal() and int(length):
            words[f"{length} words"] = int(length)
        else:
            raise RequestError(f"--lengths: {length!r} is not one of {', '.join(LENGTHS)}, nor a number of words")
    return Questions(words=words)


def is_hit(number: int, share: float) -> bool:
    """Spread evenly: of any first n requests, share · n are hits, to one."""
    return int((number + 1) * share + 1e-9) > int(number * share + 1e-9)


def _filled(key: str, words: int) -> str:
    """Sentences in an order of the key's, which comes first: nothing before it can be shared."""
    rng, text = Random(key), [f"({key})"]
    while len(text) < words:
        text += rng.choice(_sentences()).split()
    return " ".join(text[: max(words, 1)])


@cache
def _sentences() -> list[str]:
    return [f"{part.strip(' .')}." for each in builtin_prompts(["prose"]) for part in each.text.split(". ")]


@cache
def _questions() -> list[str]:
    return [each.messages[-1]["content"] for each in builtin_prompts(["chat"])]
