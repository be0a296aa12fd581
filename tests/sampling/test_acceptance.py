"""How many drafts are accepted: in a block at least as many as one by one, and when greedy the same number."""

import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from enumerate import first_failure_law, longest_law, token_wise

from fixtures import builtin_model, collect, submit
from headstart.engine import Engine
from headstart.sampling.accept import BlockAcceptance

judging = import_module("headstart.kernels.sampling")
PROMPTS = [[5, 900, 31, 7], [1200, 4], [77, 78, 79, 80, 81, 82], [3000, 2, 2], [44, 1, 90], [15, 2600, 8]]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, k: int) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """The chances of every window that is judged by ratio: as a block, and token by token."""
    windows: list[tuple[np.ndarray, np.ndarray]] = []
    original = judging.block_acceptance

    def recorded_block(
        p: mx.array, q: mx.array, p_drafts: mx.array, q_drafts: mx.array, allowed: mx.array
    ) -> BlockAcceptance:
        found = original(p, q, p_drafts, q_drafts, allowed)
        single = token_wise(p_drafts, q_drafts, allowed)
        full = np.array(allowed) == k
        if p_drafts.shape[1] == k:  # at the end of an answer there are fewer
            windows.append((np.array(found.probability)[full], np.array(single)[full]))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(judging, "block_acceptance", recorded_block)
        patch.setattr(secrets, "randbits", random.Random(0).getrandbits)  # the same drafts every time
        yield windows


def expected_lengths(windows: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Drafts that stand per window, from the chances and not from the tosses: as a block, and token by token."""
    together, single = (np.concatenate(parts) for parts in zip(*windows, strict=True))
    count = np.arange(together.shape[1] + 1)
    return float((longest_law(together) @ count).mean()), float((first_failure_law(single) @ count).mean())


def measure(monkeypatch: pytest.MonkeyPatch, k: int, tokens: int, **params: Any) -> tuple[float, float]:
    engine = Engine(builtin_model())
    with recorded(monkeypatch, k) as windows:
        handles = [submit(engine, prompt, k=k, max_tokens=tokens, **params) for prompt in PROMPTS]
        for handle in handles:
            collect(handle)
    return expected_lengths(windows)


@pytest.mark.usefixtures("stock_ops")
def test_a_block_accepts_at_least_as_much_as_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    together, single = measure(monkeypatch, 3, 8, temperature=0.6)
    assert together >= single > 0


def test_greedy_acceptance_does_not_depend_on_sampled_sequences() -> None:
    def greedy(*others: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
        engine = Engine(builtin_model())
        handles = [submit(engine, prompt, k=3, max_tokens=12) for prompt in PROMPTS[:2]]
        for params in others:
            submit(engine, PROMPTS[2], k=3, max_tokens=14, **params)
        answers = [collect(handle) for handle in handles]
        return [(a.tokens, [len(burst) for burst in a.bursts]) for a in answers]

    alone = greedy()
    assert sum(len(bursts) for _, bursts in alone) < 24  # drafts are accepted at all
    assert greedy({"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.8, "seed": 1}) == alone
