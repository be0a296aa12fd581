"""The parsed output does not depend on how it is split into tokens and steps."""

import json
from functools import lru_cache
from itertools import pairwise
from random import Random

import pytest
from documents import TOOLS, Document, Message, document
from running import tokenizer

from headstart.engine.text import TextStream
from headstart.server.markup import Delta, OutputParser, merge

SEEDS = pytest.mark.parametrize("seeds", [400, pytest.param(2000, marks=pytest.mark.slow)])


def read(written: Document, pieces: list[str]) -> list[Delta]:
    parser = OutputParser(TOOLS, thinking=written.thinking)
    return merge([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish())


@lru_cache(100_000)
def tokens_of(piece: str) -> list[int]:
    return list(tokenizer().encode(piece, add_special_tokens=False))


def bursts(text: str, rng: Random) -> list[str]:
    """Cut at random places, each piece made tokens of by itself, and these emitted in rounds of several."""
    often = rng.choice([0.0, 0.1, 0.5, 1.0])
    places = [0, *(at for at in range(1, len(text)) if rng.random() < often), len(text)]
    cuts = [text[a:b] for a, b in pairwise(places)]
    tokens = [token for piece in cuts for token in tokens_of(piece)]
    stream = TextStream(tokenizer(), ())
    texts = [stream.add(token) for token in tokens] + [stream.finish()]
    assert "".join(texts) == text
    rounds, most = [], rng.choice([1, 4, 40])
    while texts:
        count = rng.randint(1, most)
        rounds.append("".join(texts[:count]))
        texts = texts[count:]
    return rounds


@SEEDS
def test_the_same_is_read_however_an_answer_is_split(seeds: int) -> None:
    for seed in range(seeds // 8):
        rng = Random(seed)
        written = document(rng)
        whole = read(written, [written.text])
        for _ in range(4):
            assert read(written, bursts(written.text, rng)) == whole, (seed, written.text)


@SEEDS
def test_what_is_read_is_what_was_written(seeds: int) -> None:
    for seed in range(seeds):
        written = document(Random(seed))
        message = Message.of(read(written, [written.text]))
        calls = [(call.name, json.loads(call.arguments)) for call in message.calls]
        assert (message.content, message.reasoning) == (written.content, written.reasoning), (seed, written.text)
        assert calls == written.calls, (seed, written.text)


@SEEDS
def test_no_markup_of_well_formed_calls_is_ever_shown(seeds: int) -> None:
    checked = 0
    for seed in range(seeds):
        rng = Random(seed)
        written = document(rng)
        if not written.calls or not written.well_formed:
            continue
        checked += 1
        shown = [delta.text for delta in read(written, bursts(written.text, rng)) if delta.kind == "content"]
        for mark in ("<tool_call>", "</tool_call>", "<function=", "<parameter=", "</think>"):
            assert mark not in "".join(shown), (seed, written.text)
    assert checked > seeds // 10
