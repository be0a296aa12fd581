"""Text that a model generates itself, which is what its head must learn to predict; and prompts for it."""

import json
import os
import random
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.template import chat_tokens
from ..engine import Engine, Request
from ..errors import RequestError
from ..models import Model
from ..sampling import SamplingParams
from ..state import PrefixCache
from .loss import WEIGHTS

PROMPTS = Path(__file__).with_name("prompts.toml")
PROMPT, CONVERSATION, ANSWER, HELD_ANSWER = 192, 1024, 256, 128  # most tokens
TEMPERATURE = 0.8
WIDE, NARROW = 64, 16  # sequences at a time, on a GPU and on a CPU; memory may allow fewer
HELD_OUT = 8  # of a user's prompts or conversations one in so many measures
EXPECTED = '{"text": "…"} or {"messages": [{"role": "…", "content": "…"}]}'
MULTIPLE = 32  # rows are padded to a multiple of so many tokens

Kind = TypeVar("Kind")
Prompt = str | tuple[dict[str, str], ...]  # a text, or messages


@dataclass(frozen=True)
class Row:
    """A prompt and its answer."""

    prompt: int  # tokens of the prompt
    tokens: list[int]


def shipped_prompts() -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train with and those to measure with, the kinds in turn."""
    kinds = tomllib.loads(PROMPTS.read_text(encoding="utf-8"))["kind"]
    return _in_turn(kinds, "topics"), _in_turn(kinds, "held_out")


def own_prompts(path: Path) -> tuple[list[Prompt], list[Prompt]]:
    """Return a user's prompts, from a file with a JSON object per line: {"text": …} or {"messages": […]}."""
    found: list[Prompt] = []
    lines: list[str] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines:
            if line.strip():
                given = json.loads(line)
                found.append(given["text"] if "text" in given else tuple(map(_message, given["messages"])))
    except (OSError, UnicodeError) as error:
        raise RequestError(f"--prompts {path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"--prompts {path}: {line[:60]!r} is no prompt. Write {EXPECTED}") from error
    if len(found) < 2:
        raise RequestError(f"--prompts {path}: has {len(found)} prompts; some train and others measure, so give more")
    return _divide(found)


def read_traffic(path: Path, vocabulary: int) -> tuple[list[Row], list[Row]]:
    """Return the conversations that `serve --record` wrote, to train with and to measure with."""
    rows = []
    for row in read_rows(path, f"--from-traffic {path}", vocabulary):
        if len(row.tokens) - row.prompt > len(WEIGHTS):
            skipped = max(0, row.prompt - CONVERSATION)
            rows.append(Row(row.prompt - skipped, row.tokens[skipped : row.prompt + ANSWER]))
    if len(rows) < 2:
        raise RequestError(f"--from-traffic {path}: has {len(rows)} answers; record more")
    return _divide(rows)


def read_rows(path: Path, name: str, vocabulary: int) -> Iterator[Row]:
    """Yield the rows of a file. A last line that a killed process left half written is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RequestError(f"{name}: {error}") from error
    for number, line in enumerate(lines[:-1], 1):
        try:
            given = json.loads(line)
            size, row = given["vocabulary"], Row(int(given["prompt"]), list(map(int, given["tokens"])))
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{name}, line {number}: not a conversation as `serve --record` writes it") from error
        if size != vocabulary or not all(0 <= token < vocabulary for token in row.tokens):
            raise RequestError(
                f"{name}, line {number}: of a model with {size} tokens, and this one has {vocabulary}. "
                "Record with the model that the head is for"
            )
        yield row


def row_line(row: Row, vocabulary: int) -> bytes:
    return json.dumps({"vocabulary": vocabulary, "prompt": row.prompt, "tokens": row.tokens}).encode() + b"\n"


class OwnText:
    """A model that answers prompts, many at a time."""

    def __init__(self, model: Model, tokenizer: TokenizerWrapper):
        self.width = WIDE if model.backend.asynchronous else NARROW
        self.engine = Engine(model, max_sequences=self.width, prefix=PrefixCache(0))  # whose tokens become no text
        self.tokenizer = tokenizer
        self.ends = frozenset(token for token in tokenizer.eos_token_ids if token < model.vocabulary)

    def answer(self, prompts: Iterable[Prompt], *, seed: int | None) -> list[Row]:
        """Return rows with answers, greedy ones without a seed."""
        asked = [self.encode(prompt) for prompt in prompts]
        handles = []
        for number, tokens in enumerate(asked):
            own = {} if seed is None else {"temperature": TEMPERATURE, "seed": seed + number}
            most = HELD_ANSWER if seed is None else ANSWER
            params: Any = {"max_tokens": most, "k": 0, "stop_ids": self.ends, **own}
            handles.append(self.engine.submit(Request(tokens, SamplingParams(**params))))
        rows = []
        for tokens, handle in zip(asked, handles, strict=True):
            said: list[int] = []
            for event in handle:
                if event.error is not None:
                    raise event.error
                said += event.tokens
            rows.append(Row(len(tokens), [*tokens, *said]))
        return [row for row in rows if len(row.tokens) - row.prompt > len(WEIGHTS)]

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt as the model reads it: by its chat template, or as it is where there is none."""
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        if self.tokenizer.has_chat_template:
            return chat_tokens(self.tokenizer, messages)[-PROMPT:]
        text = "\n\n".join(message["content"] for message in messages)
        return list(self.tokenizer.encode(text))[-PROMPT:]


def padded(rows: Sequence[Row]) -> tuple[mx.array, mx.array]:
    """Return rows as tokens [B, T + steps], and where chains count [B, T]: those that draft the answer."""
    steps = len(WEIGHTS)
    length = -(-max(len(row.tokens) for row in rows) // MULTIPLE) * MULTIPLE
    tokens, counts = [], []
    for row in rows:
        own = len(row.tokens)
        tokens.append(row.tokens + [0] * (length - own))
        counts.append([row.prompt <= t + 2 and t + steps < own for t in range(length - steps)])
    return mx.array(tokens), mx.array(counts, mx.float32)


def batch(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """Return some rows of nearly the same length. `rows` are in the order of their lengths."""
    first = random.Random(seed).randrange(max(1, len(rows) - count + 1))
    return list(rows[first : first + count])


def append_rows(path: Path, rows: Sequence[Row], vocabulary: int) -> None:
    """Add rows to a file, all of which is on the disk when this returns. What an earlier process left half written is
    removed first."""
    with path.open("ab+") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write(b"".join(row_line(row, vocabulary) for row in rows))
        file.flush()
        os.fsync(file.fileno())


def _in_turn(kinds: Sequence[dict[str, Any]], which: str) -> list[Prompt]:
    by_kind = []
    for number, kind in enumerate(kinds):
        each: list[Prompt] = [template.format(topic) for template in kind["templates"] for topic in kind[which]]
        random.Random(number).shuffle(each)
        by_kind.append(each)
    longest = max(map(len, by_kind))
    return [each[turn % len(each)] for turn in range(longest) for each in by_kind]


def _divide(found: Sequence[Kind]) -> tuple[list[Kind], list[Kind]]:
    last = len(found) - 1
    held = [number % HELD_OUT == HELD_OUT - 1 or (last < HELD_OUT and number == last) for number in range(len(found))]
    parts = [[each for each, out in zip(found, held, strict=True) if out == wanted] for wanted in (False, True)]
    return parts[0], parts[1]


def _message(given: dict[str, str]) -> dict[str, str]:
    return {"role": str(given["role"]), "content": str(given["content"])}
