"""Prompts to measure with: built-in ones by kind of text, made-up ones of a length, or a user's own.

How many drafts are accepted depends on the text, so figures are given by kind. Made-up prompts are for servers: each
begins with a key that never occurred before, so that a prefix cache cannot help by chance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Annotated

from mlx_lm.tokenizer_utils import TokenizerWrapper
from pydantic import BaseModel, Field, ValidationError, model_validator

from ..errors import RequestError

KINDS = ("code", "prose", "chat", "repetitive")  # of the built-in prompts, by default
COPYING = ("edit", "json")  # whose answers repeat a part of the prompt
LENGTHS = {"short": 50, "medium": 400, "long": 1600}  # words of made-up prompts
OWN = "own"  # the kind of a user's prompts that have none
EXPECTED = 'Write {"text": "…"} or {"messages": [{"role": "…", "content": "…"}]}, and give it a "kind" if you like.'


class BenchPrompt(BaseModel, frozen=True, extra="forbid"):
    """A text to continue, or a conversation to answer."""

    kind: Annotated[str, Field(min_length=1)] = OWN
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "BenchPrompt":
        if bool(self.text) == bool(self.messages):
            raise ValueError("it needs either a text or messages")
        if not all({"role", "content"} <= message.keys() for message in self.messages):
            raise ValueError("a message needs a role and content")
        return self

    @property
    def as_text(self) -> str:
        return self.text or "\n\n".join(message["content"] for message in self.messages)

    def tokens(self, tokenizer: TokenizerWrapper) -> list[int]:
        """Return token ids. Without a chat template, encode a conversation as paragraphs."""
        if self.messages and tokenizer.has_chat_template:
            # None keeps the template's own default, where mlx-lm's default would turn thinking on.
            messages = list(self.messages)
            return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=None))
        return list(tokenizer.encode(self.as_text + ("\n\n" if self.messages else "")))


@dataclass(frozen=True)
class PromptSource:
    """Prompts by name."""

    given: Mapping[str, Sequence[BenchPrompt]] = field(default_factory=dict)  # by kind, sent as they are
    words: Mapping[str, int] = field(default_factory=dict)  # length of made-up prompts, by name
    salt: str = field(default_factory=token_hex)  # servers may still cache the prompts of an earlier benchmark

    @property
    def names(self) -> list[str]:
        return [*self.given, *self.words]

    def prompt(self, name: str, number: int, key: str = "") -> BenchPrompt:
        """Return prompt `number` of a name. A made-up one differs by `key`."""
        if name in self.given:
            return self.given[name][number % len(self.given[name])]
        questions = _questions()
        question = questions[number % len(questions)]
        filler = self._filler(f"{name} {number} {key}", self.words[name] - len(question.split()))
        return BenchPrompt(kind=name, text=f"{filler}\n\n{question}")

    def _filler(self, key: str, words: int) -> str:
        """Return sentences in random order, after a number that no other key has."""
        rng = Random(f"{self.salt} {key}")
        text = [f"({rng.randbytes(4).hex()})"]
        while len(text) < words:
            text += rng.choice(_sentences()).split()
        return " ".join(text[: max(words, 1)])


def prompt_source(names: Sequence[str]) -> PromptSource:
    """Return the prompts that `--prompts` names: kinds, lengths, numbers of words, or files."""
    given: dict[str, list[BenchPrompt]] = {}
    words: dict[str, int] = {}
    for name in names:
        if name in LENGTHS:
            words[name] = LENGTHS[name]
        elif name.isdecimal() and int(name):
            words[f"{name} words"] = int(name)
        else:
            for prompt in builtin_prompts([name]) if name in (*KINDS, *COPYING) else read_prompts(Path(name)):
                given.setdefault(prompt.kind, []).append(prompt)
    return PromptSource(given, words)


def builtin_prompts(kinds: Sequence[str] = KINDS) -> list[BenchPrompt]:
    lines = files(__package__).joinpath("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [_parse_prompt(line, "prompts.jsonl") for line in lines]
    return [prompt for prompt in prompts if prompt.kind in kinds]


def read_prompts(path: Path) -> list[BenchPrompt]:
    """Read a file of prompts: one JSON object per line where its name ends in .jsonl, else one text per line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        known = ", ".join((*KINDS, *LENGTHS, *COPYING))
        raise RequestError(
            f"--prompts {path}: not one of {known}, not a number of words, and cannot be read as a file: {error}"
        ) from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise RequestError(f"--prompts {path}: the file has no prompt")
    if path.suffix == ".jsonl":
        return [_parse_prompt(line, f"{path}, line {number}") for number, line in numbered]
    return [BenchPrompt(text=line) for _, line in numbered]


def _parse_prompt(line: str, where: str) -> BenchPrompt:
    try:
        return BenchPrompt.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        raise RequestError(f"{where}: {field}{': ' if field else ''}{problem['msg']}. {EXPECTED}") from error


@cache
def _sentences() -> list[str]:
    return [f"{part.strip(' .')}." for each in builtin_prompts(["prose"]) for part in each.text.split(". ")]


@cache
def _questions() -> list[str]:
    return [each.messages[-1]["content"] for each in builtin_prompts(["chat"])]
