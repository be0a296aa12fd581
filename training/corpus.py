"""`python -m training.corpus WHEELS --out FOLDER`: the wheels' text as tokens, to train and to evaluate with.

Writes `code-*.xz` and `chat-*.xz` (train), `held-code-*.xz` and `held-chat-*.xz` (held out), and `made-of.json`:
what each package gave.
"""

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper, load

from .chats import Message, Render, chats
from .functions import Function, functions
from .packages import LIST, Package, packages
from .sources import sources
from .tokens import write
from .vocabulary import ADDED

MOST_CODE = 3_000_000  # characters of one package, so that none sets the tone
MOST_FUNCTIONS = 6_000
TEST = re.compile(r"^(import (unittest|pytest)|from unittest)", re.M)
TESTS_KEPT = 0.3  # they are long and much alike


@dataclass
class Text:
    """What was taken, and the marks of it, so that nothing is taken twice."""

    code: list[str] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    made_of: dict[str, dict[str, Any]] = field(default_factory=dict)
    seen: set[bytes] = field(default_factory=set)

    def take(self, package: Package, wheel: Path) -> None:
        luck = random.Random(package.name)
        files = [file for file in sources(wheel) if self._is_new(re.sub(r"\s+", "", file))]
        found = [
            function
            for file in files
            for function in functions(file)
            if not any(token in function.source + function.purpose for token in ADDED)
            and self._is_new(function.name + re.sub(r"\W+", "", function.source))
        ]
        luck.shuffle(files)
        luck.shuffle(found)
        code, size = [], 0
        for file in files:
            if size + len(file) <= MOST_CODE and (not TEST.search(file) or luck.random() < TESTS_KEPT):
                code.append(file)
                size += len(file)
        found = found[:MOST_FUNCTIONS]
        self.code += code
        self.functions += found
        self.made_of[package.name] = {
            "version": package.version,
            "licence": package.licence,
            "held_out": package.held_out,
            "characters": size,
            "functions": len(found),
        }

    def _is_new(self, text: str) -> bool:
        mark = hashlib.blake2b(text.encode(), digest_size=8).digest()
        if mark in self.seen:
            return False
        self.seen.add(mark)
        return True


def template(tokenizer: TokenizerWrapper) -> Render:
    def render(messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))

    return render


def encode(tokenizer: TokenizerWrapper, texts: Sequence[str] | Iterator[str]) -> Iterator[list[int]]:
    backend = tokenizer._tokenizer.backend_tokenizer
    held: list[str] = []
    for text in texts:
        held.append(text)
        if len(held) == 1000:
            yield from (e.ids for e in backend.encode_batch_fast(held, add_special_tokens=False))
            held = []
    yield from (e.ids for e in backend.encode_batch_fast(held, add_special_tokens=False))


def build(wheels: Path, folder: Path, tokenizer_folder: Path, listed: Path = LIST) -> dict[str, int]:
    """Read, render, encode and write everything → tokens by kind."""
    tokenizer = load(tokenizer_folder)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    held_out, train, tokens = Text(), Text(), {}
    train.seen = held_out.seen  # held-out packages are read first: what is in both is theirs
    for package in packages(listed):
        (held_out if package.held_out else train).take(package, package.wheel(wheels))
    for prefix, text in (("", train), ("held-", held_out)):
        random.Random(0).shuffle(text.code)
        random.Random(0).shuffle(text.functions)
        documents = ([*ids, end] for ids in encode(tokenizer, text.code))
        tokens[f"{prefix}code"] = write(f"{prefix}code", documents, folder)
        rendered = chats(text.functions, template(tokenizer))
        tokens[f"{prefix}chat"] = write(f"{prefix}chat", encode(tokenizer, rendered), folder)
    made_of = {"tokens": tokens, "packages": {**held_out.made_of, **train.made_of}}
    (folder / "made-of.json").write_text(json.dumps(made_of, indent=1))
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--out", type=Path, default=Path("training/work/corpus"))
    parser.add_argument("--tokenizer", type=Path, default=Path("src/headstart/builtin/tiny-qwen3.5"))
    arguments = parser.parse_args()
    print(build(arguments.wheels, arguments.out, arguments.tokenizer))


if __name__ == "__main__":
    main()
