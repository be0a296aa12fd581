"""What the model is asked while it is measured: prompts by kind of text.

How often drafts stand depends on the text, so figures are given by kind. The built-in prompts are in prompts.jsonl,
in the form that `--prompts` takes too.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import RequestError

KINDS = ("code", "prose", "chat", "repetitive")  # of the built-in prompts
OWN = "own"  # the kind of prompts from a file that does not say


@dataclass(frozen=True)
class Prompt:
    """A text to go on from, or a conversation to answer."""

    kind: str
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()

    def tokens(self, tokenizer: TokenizerWrapper) -> list[int]:
        """A model without a chat template reads a conversation as its paragraphs."""
        if self.messages and tokenizer.has_chat_template:
            # None is neither yes nor no, so that the template's own default holds. mlx-lm would say yes.
            messages = [dict(message) for message in self.messages]
            return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=None))
        text = self.text or "\n\n".join(message["content"] for message in self.messages) + "\n\n"
        return list(tokenizer.encode(text))


def builtin_prompts(kinds: Sequence[str] = KINDS) -> list[Prompt]:
    if wrong := next((kind for kind in kinds if kind not in KINDS), None):
        raise RequestError(f"--kinds: {wrong!r} is not one of {', '.join(KINDS)}")
    source = files(__package__).joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return [prompt for prompt in _jsonl("prompts.jsonl", source) if prompt.kind in kinds]


def read_prompts(path: Path) -> list[Prompt]:
    """A file of prompts: JSON objects, one a line, where its name ends in .jsonl, else one text a line."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise RequestError(f"--prompts {path}: cannot be read as text: {error}") from error
    if path.suffix == ".jsonl":
        prompts = list(_jsonl(str(path), source))
    else:
        prompts = [Prompt(OWN, text=line) for line in source.splitlines() if line.strip()]
    if not prompts:
        raise RequestError(f"--prompts {path}: there is no prompt in it")
    return prompts


def by_kind(prompts: Sequence[Prompt], tokenizer: TokenizerWrapper) -> dict[str, list[list[int]]]:
    """Token ids, the kinds in the order in which they first appear."""
    kinds: dict[str, list[list[int]]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.kind, []).append(prompt.tokens(tokenizer))
    return kinds


def _jsonl(name: str, source: str) -> Iterator[Prompt]:
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip():
            yield _prompt(line, f"{name}, line {number}")


def _prompt(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict) or ("text" in entry) == ("messages" in entry):
        raise RequestError(f'{where}: must be an object with either "text" or "messages"')
    if unknown := sorted(entry.keys() - {"kind", "text", "messages"}):
        raise RequestError(f'{where}: "{unknown[0]}" is not a field; there are "kind", "text" and "messages"')
    kind, text, messages = entry.get("kind", OWN), entry.get("text"), entry.get("messages")
    if not isinstance(kind, str) or not kind:
        raise RequestError(f'{where}: "kind" must be a word')
    if messages is None and (not isinstance(text, str) or not text):
        raise RequestError(f'{where}: "text" must be a string that is not empty')
    if messages is not None and not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise RequestError(f'{where}: "messages" must be a list of objects with the strings "role" and "content"')
    return Prompt(kind, text or "", tuple(messages or ()))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
