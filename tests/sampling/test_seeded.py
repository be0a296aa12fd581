"""A seed fixes the text: not the drafts a round, not the neighbours, not the turn at which a request came."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from fixtures import builtin_model, collect, generate, submit
from headstart.engine import Engine, Request
from headstart.sampling import SamplingParams

PROMPTS = ([5, 900, 31, 7], [1200, 4], [77, 78, 79, 80, 81, 82], [3000, 2, 2])
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.3},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.02, "frequency_penalty": 0.3, "logit_bias": {5: 2.0}},
    {"temperature": 1.0, "frequency_penalty": 0.8, "frequency_context_size": None},
    {"temperature": 0.7, "xtc_probability": 0.5, "xtc_threshold": 0.05, "top_k": 30},
    {"temperature": 1.5, "top_n_sigma": 1.5, "top_p": 0.99},
]
STRANGERS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 7}, {"presence_penalty": 1.0},
    {"temperature": 1.0, "top_n_sigma": 1.0},
]  # fmt: skip


def text(prompt: Sequence[int], **params: Any) -> list[int]:
    return generate(builtin_model(), prompt, **params).tokens


def crowd(wanted: list[dict[str, Any]], rng: random.Random) -> list[list[int]]:
    """All of them in one engine, at different depths, among greedy, seeded and unseeded strangers, as they come."""
    engine = Engine(builtin_model(), max_sequences=rng.choice([3, 6, 16]))
    handles = []
    for params in wanted:
        for _ in range(rng.randrange(3)):
            strange = rng.choice(STRANGERS)
            submit(engine, rng.choice(PROMPTS), k=rng.randrange(4), max_tokens=rng.randrange(1, 12), **strange)
        handles.append(submit(engine, **params, k=rng.randrange(5)))
        for _ in range(rng.randrange(4)):
            engine.run_once()
    return [collect(handle).tokens for handle in handles]


def requests(count: int, length: int) -> list[dict[str, Any]]:
    return [
        {"prompt": PROMPTS[n % len(PROMPTS)], "seed": n * 17, "max_tokens": length, **SETTINGS[n % len(SETTINGS)]}
        for n in range(count)
    ]


def together(wanted: list[dict[str, Any]], k: int) -> list[list[int]]:
    engine = Engine(builtin_model())
    handles = [submit(engine, **params, k=k) for params in wanted]
    return [collect(handle).tokens for handle in handles]


def test_the_text_is_the_same_for_every_depth() -> None:
    wanted = requests(len(SETTINGS), 6)
    plain = together(wanted, 0)
    assert {len(tokens) for tokens in plain} == {6}
    for k in (1, 8):
        assert together(wanted, k) == plain


def test_the_text_is_the_same_in_any_batch() -> None:
    wanted = requests(len(SETTINGS), 6)
    alone = [text(**params, k=2) for params in wanted]
    assert crowd(wanted, random.Random(1)) == alone


@pytest.mark.slow
def test_the_text_is_the_same_for_every_depth_and_batch_at_length() -> None:
    wanted = requests(len(SETTINGS), 40)
    alone = [text(**params, k=3) for params in wanted]
    for k in range(9):
        assert together(wanted, k) == alone
    for seed in range(2):
        assert crowd(wanted, random.Random(seed)) == alone


def test_seeds_and_choices_differ_and_repeat() -> None:
    def said(n: int, seed: int) -> list[list[int]]:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=6, k=2)
        answers: list[list[int]] = [[] for _ in range(n)]
        for event in Engine(builtin_model()).submit(Request(PROMPTS[0], params, n=n)):
            answers[event.choice] += event.tokens
        return answers

    (first,), both = said(1, 7), said(2, 7)
    assert both[0] == first
    assert both[1] != first
    assert said(3, 7)[:2] == both
    assert said(1, 8) != [first]


def test_without_a_seed_texts_differ() -> None:
    engine = Engine(builtin_model())
    handles = [submit(engine, PROMPTS[0], temperature=1.0, max_tokens=8, k=2) for _ in range(3)]
    texts = {tuple(collect(handle).tokens) for handle in handles}
    assert len(texts) == 3


def test_a_seed_does_not_change_greedy_text() -> None:
    plain = text(PROMPTS[1], max_tokens=6, k=0)
    assert text(PROMPTS[1], max_tokens=6, k=3, seed=5) == plain


def test_a_top_n_sigma_of_almost_nothing_is_greedy_on_every_device() -> None:
    """Whatever draws: a kernel that did not know of it would draw other tokens."""
    plain = text(PROMPTS[1], max_tokens=6, k=0)
    for k in (0, 3):
        for seed in (5, None):
            assert text(PROMPTS[1], max_tokens=6, k=k, temperature=1.5, top_n_sigma=1e-6, seed=seed) == plain
