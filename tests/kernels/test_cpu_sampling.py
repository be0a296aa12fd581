"""The CPU's operations of sampling draw and accept what MLX's do, token by token, whatever the parameters."""

import random
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from headstart.kernels import Backend, choose_backend
from headstart.kernels.cpu.backend import CpuBackend, StockCpu
from headstart.sampling import BatchContext, Proposal, SamplingParams, SequenceParams, controls
from headstart.sampling.noise import Purpose

pytestmark = pytest.mark.skipif(not isinstance(choose_backend(), CpuBackend), reason="no CPU kernels")

Rng = np.random.Generator
KINDS: dict[str, Callable[[Rng, tuple[int, ...]], np.ndarray]] = {
    "flat": lambda rng, shape: rng.standard_normal(shape) * 0.5,
    "usual": lambda rng, shape: rng.standard_normal(shape) * 4,
    "all equal": lambda rng, shape: np.zeros(shape),
    "ties": lambda rng, shape: np.round(rng.standard_normal(shape) * 3),
    "peaked": lambda rng, shape: rng.standard_normal(shape) * 2 + (rng.random(shape) < 1 / shape[-1]) * 20,
    "mostly forbidden": lambda rng, shape: np.where(rng.random(shape) < 0.9, -np.inf, rng.standard_normal(shape)),
    "one candidate": lambda rng, shape: np.where(np.arange(shape[-1]) == 5, 2.0, -np.inf) + np.zeros(shape),
    "far away": lambda rng, shape: rng.standard_normal(shape) * 3 - 4000,
}


def some_params(rng: random.Random) -> SamplingParams:
    params: dict[str, object] = {"temperature": rng.choice([0.0, 0.1, 0.6, 0.8, 1.0, 1.5])}
    if rng.random() < 0.5:
        params["top_p"] = rng.choice([0.1, 0.5, 0.8, 0.95, 0.99, 0.9999])
    if rng.random() < 0.5:
        params["top_k"] = rng.choice([1, 2, 5, 20, 64])
    if rng.random() < 0.4:
        params |= {"min_p": rng.choice([0.01, 0.05, 0.3]), "min_tokens_to_keep": rng.choice([1, 3])}
    if rng.random() < 0.3:
        params |= {"xtc_probability": rng.choice([0.5, 1.0]), "xtc_threshold": rng.choice([0.05, 0.1, 0.3])}
        params["xtc_special_tokens"] = rng.choice([(), (3, 7)])
    if rng.random() < 0.3:
        params["top_n_sigma"] = rng.choice([0.5, 1.0, 3.0])
    params["seed"] = rng.choice([None, rng.getrandbits(32)])
    return SamplingParams(**params)  # type: ignore[arg-type]


def some_batch(rng: random.Random, vocabulary: int) -> tuple[BatchContext, mx.array, int]:
    """The context of a batch, logits [B, W, V] of either type, and W."""
    sequences, width = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4, 6])
    each = [SequenceParams(some_params(rng), rng.getrandbits(64), 0, 1000) for _ in range(sequences)]
    numbers = [mx.array([rng.randrange(50) for _ in each], mx.int32) for _ in range(2)]
    left = mx.array([rng.choice([1, 3, 100]) for _ in each], mx.int32)
    context = BatchContext(controls(each, vocabulary), *numbers, mx.zeros((sequences, 0), mx.int32), left)
    made = KINDS[rng.choice([*KINDS])](np.random.default_rng(rng.getrandbits(32)), (sequences, width, vocabulary))
    return context, mx.array(made, mx.float32).astype(rng.choice([mx.float32, mx.bfloat16])), width


def windows(backend: Backend, logits: mx.array, drafters: list[mx.array], certain: mx.array, max_k: mx.array,
            context: BatchContext) -> list[list[object]]:  # fmt: skip
    """What a window drafts and generates, by sequence; None where logits are not finite."""
    proposal = Proposal.none(logits.shape[0])
    for i, drafter in enumerate(drafters):
        proposal = backend.propose(drafter, proposal, context, certain[:, i : i + 1])
    window = mx.concatenate([mx.zeros_like(max_k)[:, None], proposal.tokens], axis=1)
    verdict = backend.accept(backend.choose(logits, window, proposal, max_k, context), window, max_k, context)
    accepted, drafts = verdict.accepted.tolist(), proposal.tokens.tolist()
    return [
        [drafts[b], verdict.tokens[b, : n + 1].tolist() if verdict.finite[b].item() else None]
        for b, n in enumerate(accepted)  # type: ignore[arg-type]
    ]


def check_draws(rng: random.Random, vocabulary: int) -> int:
    context, logits, width = some_batch(rng, vocabulary)
    ours, stock = choose_backend(), StockCpu()
    for purpose, first in ((Purpose.NEXT, 0), (Purpose.DRAFT, 2)):
        found, _ = ours.draw(logits, context, purpose, first)
        expected, _ = stock.draw(logits, context, purpose, first)
        assert found.tolist() == expected.tolist()
    return 2 * logits.shape[0] * width


def check_windows(rng: random.Random, vocabulary: int) -> None:
    context, logits, width = some_batch(rng, vocabulary)
    noise = mx.random.normal((*logits.shape[:1], width - 1, vocabulary), key=mx.random.key(rng.getrandbits(30)))
    near = mx.where(mx.isfinite(logits[:, : width - 1]), logits[:, : width - 1] + noise / 4, -20).astype(logits.dtype)
    drafters = [near[:, i : i + 1] for i in range(width - 1)]
    forced = np.random.default_rng(rng.getrandbits(32)).random((logits.shape[0], width)) < rng.choice([0, 0.4])
    certain = mx.array(np.where(forced, 5, -1), mx.int32)
    max_k = mx.array([rng.randrange(width + 1) for _ in range(logits.shape[0])], mx.int32)
    given = logits, drafters, certain, max_k, context
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
