"""The CPU's operations of sampling draw and accept what MLX's do, token by token, whatever the parameters."""

import random

import mlx.core as mx
import pytest
from sampled import some_batch, some_drafters, windows

from headstart.kernels import choose_backend
from headstart.kernels.cpu.backend import CpuBackend, StockCpu
from headstart.sampling import BatchContext, Proposal, SamplingParams, SequenceParams, controls
from headstart.sampling.noise import Purpose

pytestmark = pytest.mark.skipif(not isinstance(choose_backend(), CpuBackend), reason="no CPU kernels")


def check_draws(rng: random.Random, vocabulary: int) -> int:
    context, logits, width = some_batch(rng, vocabulary)
    ours, stock = choose_backend(), StockCpu()
    for purpose, first in ((Purpose.NEXT, 0), (Purpose.DRAFT, 2)):
        found, _ = ours.draw(logits, context, purpose, first)
        expected, _ = stock.draw(logits, context, purpose, first)
        assert found.tolist() == expected.tolist()
    return 2 * logits.shape[0] * width


def check_windows(rng: random.Random, vocabulary: int) -> None:
    context, logits, _ = some_batch(rng, vocabulary)
    given = logits, *some_drafters(rng, logits), context
    assert windows(choose_backend(), *given) == windows(StockCpu(), *given)


@pytest.mark.parametrize("vocabulary", [16, 100, 3000])
def test_the_reference_draws_the_same_tokens(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    for _ in range(40):
        check_draws(rng, vocabulary)


@pytest.mark.parametrize("vocabulary", [16, 100, 3000])
def test_the_reference_accepts_the_same_drafts(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    for _ in range(25):
        check_windows(rng, vocabulary)


@pytest.mark.slow
def test_a_hundred_thousand_rows_draw_the_same_tokens() -> None:
    rng, rows = random.Random(1), 0
    while rows < 100_000:
        rows += check_draws(rng, rng.choice([16, 100, 1000, 12288]))
        check_windows(rng, rng.choice([16, 100, 1000, 12288]))


def test_what_cannot_be_sampled_is_said_so() -> None:
    """Logits that are NaN or infinite are no answer, and no crash."""
    params = SequenceParams(SamplingParams(temperature=0.8, top_p=0.9), 1, 0, 100)
    numbers = mx.zeros((1,), mx.int32)
    context = BatchContext(controls([params], 40), numbers, numbers, mx.zeros((1, 0), mx.int32), numbers + 9)
    for value in (mx.nan, mx.inf, -mx.inf):
        logits = mx.where(mx.arange(40) == 7, value, -mx.inf if value == -mx.inf else 0.0)[None, None]
        window = mx.zeros((1, 1), mx.int32)
        choice = choose_backend().choose(logits, window, Proposal.none(1), numbers, context)
        assert choice.finite.tolist() == [[0]]
        assert 0 <= int(choice.tokens.item()) < 40
