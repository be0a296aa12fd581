"""The built-in model's text follows the law of its own logits, token by token. Slow: prints the table of the docs.

Its vocabulary is too large to enumerate prefixes. Instead every token is turned into a number between 0 and 1: the
mass of the tokens more probable than it, plus a random part of its own. Where each token is drawn from its own law
these numbers are uniform and independent, whatever the law was; Pearson's test on 20 bins does the rest.
"""

import random
import secrets
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from chisquare import p_value

from fixtures import builtin_model, collect, submit
from headstart.engine import Engine
from headstart.sampling import SamplingParams, SequenceParams, controls
from headstart.sampling.distribution import Distribution, process_logits, sampling_distribution

judging = import_module("headstart.kernels.sampling")
PROMPTS = [[5, 900, 31, 7], [1200, 4], [77, 78, 79, 80, 81, 82], [3000, 2, 2], [44, 1, 90], [15, 2600, 8]]
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature .6, top_k 20, top_p .95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "temperature .6, min_p .05": {"temperature": 0.6, "min_p": 0.05},
    "temperature 1, repetition 1.2": {"temperature": 1.0, "repetition_penalty": 1.2},
    "temperature 1, presence 1, frequency .3": {
        "temperature": 1.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.3,
    },
    "temperature 1, seeded": {"temperature": 1.0, "seeded": True},
}


def numbers(
    prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, rng: np.random.Generator
) -> np.ndarray:
    """[len(tokens)], uniform if every token was drawn from its law, which one pass over the whole text gives.

    It is not mlx-lm's pass: in bfloat16 its kernels round otherwise, and cut other tokens where two are almost equal.
    """
    model, size = builtin_model(), max(params.context_size, 1)
    text = [*prompt, *tokens]
    logits = model.score(mx.array([text]), model.make_state(1)).logits[:, len(prompt) - 1 : -1]
    padded = [-1] * size + text
    seen = [padded[n : n + size] for n in range(len(prompt), len(text))]
    ruled = controls([SequenceParams(params, 0, 0, 10**6)], model.vocabulary)
    adjusted = process_logits(logits, ruled, mx.array([seen]), mx.full((1, len(tokens)), 10**6))
    law = np.array(sampling_distribution(adjusted, ruled, None).dense(model.vocabulary)[0], np.float64)
    law /= law.sum(axis=-1, keepdims=True)
    own = law[np.arange(len(tokens)), tokens]
    assert (own > 0).all(), "a token that cannot be drawn"
    more = (law * (law > own[:, None])).sum(axis=1)
    return np.minimum(more + rng.random(len(tokens)) * own, 1)  # rounding would lose the rarest


def sample(name: str, k: int, requests: int, length: int) -> tuple[np.ndarray, float]:
    """Numbers of all tokens, and tokens per round."""
    engine, rng, asked = Engine(builtin_model(), max_sequences=24), np.random.default_rng(0), []
    for n in range(requests):
        settings = dict(SETTINGS[name])
        if settings.pop("seeded", False):
            settings["seed"] = n
        prompt = PROMPTS[n % len(PROMPTS)]
        asked.append((prompt, SamplingParams(**settings), submit(engine, prompt, k=k, max_tokens=length, **settings)))
    found, rounds, said = [], 0, 0
    for prompt, params, handle in asked:
        answer = collect(handle)
        found.append(numbers(prompt, answer.tokens, params, rng))
        rounds, said = rounds + len(answer.bursts), said + len(answer.tokens)
    return np.concatenate(found), said / rounds


def uniformity(found: np.ndarray) -> float:
    return p_value(np.histogram(found, bins=20, range=(0, 1))[0])


@pytest.mark.slow
def test_every_token_is_drawn_from_its_law(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "randbits", random.Random(0).getrandbits)  # the same keys every time: no bad luck
    lines, values = [], []
    for name in SETTINGS:
        for k in (1, 3, 5):
            found, rate = sample(name, k, requests=24, length=40)
            values.append(uniformity(found))
            lines.append(f"| {name} | {k} | {len(found):,} | {rate:.2f} | {values[-1]:.3f} |")
    with capsys.disabled():
        print("\n| request | k | tokens | tokens per round | p-value |\n| --- | ---: | ---: | ---: | ---: |")
        print("\n".join(lines))
    assert min(values) * len(values) > 0.001


@pytest.mark.slow
@pytest.mark.usefixtures("stock_ops")
def test_a_bias_of_two_hundredths_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundredths of every law moved to its least probable token."""
    original = judging.distribution

    def biased(logits, context, first):
        found = original(logits, context, first)
        if logits.shape[1] == 1:
            return found  # the drafter's
        p = mx.exp(found.logp)
        rarest = mx.argmin(mx.where(p > 0, p, 2), axis=-1, keepdims=True)
        one_hot = (mx.arange(p.shape[-1]) == rarest).astype(p.dtype)
        return Distribution(found.ids, mx.log(0.98 * p + 0.02 * one_hot))

    monkeypatch.setattr(judging, "distribution", biased)
    monkeypatch.setattr(secrets, "randbits", random.Random(0).getrandbits)
    assert uniformity(sample("temperature 1", 3, requests=120, length=40)[0]) < 0.001
