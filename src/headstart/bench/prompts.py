"""Prompts to measure with: built-in ones by kind of text, made-up ones of a length, or a user's own.

How many drafts are accepted depends on the text, so figures are given by kind. Made-up prompts are for servers: each
begins with a key that never occurred before, so that a prefix cache cannot help by chance.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import RequestError

KINDS = ("code", "prose", "chat", "repetitive")  # of the built-in prompts
LENGTHS = {"short": 50, "medium": 400, "long": 1600}  # words of made-up prompts
OWN = "own"  # the kind of a user's prompts that have none


@dataclass(frozen=True)
class BenchPrompt:
    """A text to continue, or a conversation to answer."""

    kind: str
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()

    @property
    def as_text(self) -> str:
        return self.text or "\n\n".join(message["content"] for message in self.messages)

    def tokens(self, tokenizer: TokenizerWrapper) -> list[int]:
        """Return token ids. Without a chat template a conversation is read as its paragraphs."""
        if self.messages and tokenizer.has_chat_template:
            # None is neither yes nor no, so that the template's own default holds. mlx-lm would say yes.
            messages = [dict(message) for message in self.messages]
            return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=None))
        return list(tokenizer.encode(self.as_text + ("\n\n" if self.messages else "")))


@dataclass(frozen=True)
class PromptSource:
    """Prompts by name."""

    given: Mapping[str, Sequence[BenchPrompt]] = field(default_factory=dict)  # by kind, sent as they are
    words: Mapping[str, int] = field(default_factory=dict)  # of made-up prompts, by name
    salt: str = field(default_factory=token_hex)  # differs between benchmarks: servers remember the last one

    @property
    def names(self) -> list[str]:
        return [*self.given, *self.words]

    def prompt(self, name: str, number: int, key: str = "", *, cached: bool = False) -> BenchPrompt:
        """Return prompt `number` of a name. A made-up one differs by `key`, unless it shares the cached prefix."""
        if name in self.given:
            return self.given[name][number % len(self.given[name])]
        questions = _questions()
        question = questions[number % len(questions)]
        filler = self._filler(name, "" if cached else f"{number} {key}", self.words[name] - len(question.split()))
        return BenchPrompt(name, text=f"{filler}\n\n{question}")

    def shared_prefix(self, name: str) -> BenchPrompt:
        """Return a prompt that puts the prefix of cached prompts into a server's cache."""
        return BenchPrompt(name, text=f"{self._filler(name, '', self.words[name])}\n\nHello.")

    def _filler(self, name: str, key: str, words: int) -> str:
        """Return sentences in random order, after the key that makes them unique."""
        rng = Random(f"{self.salt} {name} {key}")
        text = [f"({rng.randbytes(4).hex()})"]
        while len(text) < words:
            text += rng.choice(_sentences()).split()
        return " ".join(text[: max(words, 1)])


def prompt_source(names: Sequence[str]) -> PromptSource:
    """Return the prompts of `--prompts`: kinds, lengths, numbers of words, or files."""
    given: dict[str, list[BenchPrompt]] = {}
    words: dict[str, int] = {}
    for name in names:
        if name in LENGTHS:
            words[name] = LENGTHS[name]
        elif name.isdecimal() and int(name):
            words[f"{name} words"] = int(name)
        else:
            for prompt in builtin_prompts([name]) if name in KINDS else read_prompts(Path(name)):
                given.setdefault(prompt.kind, []).append(prompt)
    return PromptSource(given, words)


def builtin_prompts(kinds: Sequence[str] = KINDS) -> list[BenchPrompt]:
    source = files(__package__).joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return [prompt for prompt in _jsonl("prompts.jsonl", source) if prompt.kind in kinds]


def read_prompts(path: Path) -> list[BenchPrompt]:
    """Read a file of prompts: JSON objects, one per line, where its name ends in .jsonl, else one text per line."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        known = ", ".join((*KINDS, *LENGTHS))
        raise RequestError(
            f"--prompts {path}: not one of {known}, not a number of words, and cannot be read as a file: {error}"
        ) from error
    if path.suffix == ".jsonl":
        prompts = list(_jsonl(str(path), source))
    else:
        prompts = [BenchPrompt(OWN, text=line) for line in source.splitlines() if line.strip()]
    if not prompts:
        raise RequestError(f"--prompts {path}: the file has no prompt")
    return prompts


def _jsonl(name: str, source: str) -> Iterator[BenchPrompt]:
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip():
            yield _parse_prompt(line, f"{name}, line {number}")


def _parse_prompt(line: str, where: str) -> BenchPrompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: not JSON: {error}") from error
    fields = entry if isinstance(entry, dict) else {}
    kind, text, messages = fields.get("kind", OWN), fields.get("text", ""), fields.get("messages", [])
    words = isinstance(kind, str) and isinstance(text, str) and kind
    chat = isinstance(messages, list) and all(map(_is_message, messages))
    if not (words and chat and bool(text) != bool(messages)) or fields.keys() - {"kind", "text", "messages"}:
        raise RequestError(
            f'{where}: must be {{"text": "…"}} or {{"messages": [{{"role": "…", "content": "…"}}]}}, and may have a '
            '"kind", a word'
        )
    return BenchPrompt(kind, text, tuple(messages))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


@cache
def _sentences() -> list[str]:
    return [f"{part.strip(' .')}." for each in builtin_prompts(["prose"]) for part in each.text.split(". ")]


@cache
def _questions() -> list[str]:
    return [each.messages[-1]["content"] for each in builtin_prompts(["chat"])]
