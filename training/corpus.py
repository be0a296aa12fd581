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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper, load

from .chats import Message, Render, chats
from .functions import Function, functions
from .packages import LIST, Package, packages
from .sources import sources
from .tokens import write

MOST_CODE = 3_000_000  # characters of one package, so that none sets the tone
MOST_FUNCTIONS = 6_000
TEST = re.compile(r"^(import (unittest|pytest)|from unittest)", re.M)
TESTS_KEPT = 0.3  # they are long and much alike


class File(NamedTuple):
    text: str
    functions: list[Function]


def files(wheel: Path) -> list[File]:
    return [File(text, functions(text)) for text in sources(wheel)]


@dataclass
class Text:
    """What was taken, and the marks of it, so that nothing is taken twice."""

    code: list[str] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    made_of: dict[str, dict[str, Any]] = field(default_factory=dict)
    seen: set[bytes] = field(default_factory=set)

    def take(self, package: Package, given: list[File]) -> None:
        luck = random.Random(package.name)
        new = [file for file in given if self._is_new(re.sub(r"\s+", "", file.text))]
        files = [file.text for file in new]
        found = [
            function
            for file in new
            for function in file.functions
            if self._is_new(function.name + re.sub(r"\W+", "", function.source))
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


def build(
    wheels: Path, folder: Path, tokenizer_folder: Path, listed: Path = LIST, processes: int | None = None
) -> dict[str, int]:
    """Read, render, encode and write everything → tokens by kind."""
    tokenizer = load(tokenizer_folder)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    held_out, train, tokens = Text(), Text(), {}
    train.seen = held_out.seen  # held-out packages are read first: what is in both is theirs
    found = packages(listed)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for package, given in zip(found, pool.map(files, [p.wheel(wheels) for p in found]), strict=True):
            (held_out if package.held_out else train).take(package, given)
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
    parser.add_argument("--processes", type=int, help="that read wheels; by default one for every core")
    arguments = parser.parse_args()
    print(build(arguments.wheels, arguments.out, arguments.tokenizer, processes=arguments.processes))


if __name__ == "__main__":
    main()
