"""Prompts to measure with: built-in ones by kind of text, or a user's own.

How many drafts are accepted depends on the text, so figures are given by kind.
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from mlx_lm.tokenizer_utils import TokenizerWrapper
from pydantic import BaseModel, Field, ValidationError, model_validator

from ..checkpoint.template import chat_tokens
from ..errors import RequestError
from ..open_files import read_text

KINDS = ("code", "prose", "chat", "repetitive")  # of the built-in prompts, by default
COPYING = ("edit", "json")  # whose answers repeat a part of the prompt
EXPECTED = 'Write {"text": "…"} or {"messages": [{"role": "…", "content": "…"}]}, and give it a "kind" if you like.'


class BenchPrompt(BaseModel, frozen=True, extra="forbid"):
    """A text to continue, or a conversation to answer."""

    kind: Annotated[str, Field(min_length=1)] = "own"
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
            return chat_tokens(tokenizer, self.messages)
        return list(tokenizer.encode(self.as_text + ("\n\n" if self.messages else "")))


def prompts_by_kind(names: Sequence[str]) -> dict[str, list[BenchPrompt]]:
    """Return the prompts that `--prompts` names: kinds of built-in ones, or files."""
    chosen: dict[str, list[BenchPrompt]] = {}
    for name in names:
        for prompt in builtin_prompts([name]) if name in (*KINDS, *COPYING) else read_prompts(Path(name)):
            chosen.setdefault(prompt.kind, []).append(prompt)
    return chosen


def builtin_prompts(kinds: Sequence[str] = KINDS) -> list[BenchPrompt]:
    lines = files(__package__).joinpath("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [_parse_prompt(line, "prompts.jsonl") for line in lines]
    return [prompt for prompt in prompts if prompt.kind in kinds]


def read_prompts(path: Path) -> list[BenchPrompt]:
    """Read a file of prompts: one JSON object per line where its name ends in .jsonl, else one text per line."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeError) as error:
        known = ", ".join((*KINDS, *COPYING))
        raise RequestError(f"--prompts {path}: not one of {known}, and not a readable file: {error}") from error
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
