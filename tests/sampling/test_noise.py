"""Noise is a fair hash of its key: different wherever it must be, the same wherever it may be."""

import itertools
import math
from importlib import import_module

import mlx.core as mx
import numpy as np
import pytest
from chisquare import p_value

from headstart.kernels import Backend
from headstart.sampling import (
    BatchContext,
    Proposal,
    SamplingParams,
    SequenceParams,
    controls,
)
from headstart.sampling.distribution import gumbel_argmax
from headstart.sampling.noise import Keys, Purpose, bits, fold, gumbel, split, uniform

SEEDS = (0, 1, 2, 2**31, 2**32, 2**63 - 1, 123456789)
FAIR = 1e-4  # these tests have no luck of their own: the hash is fixed, so they pass or fail for ever


def keys_of(seed: int, *words: int) -> Keys:
    low, high = split(seed)
    keys = (mx.array(low, mx.uint32), mx.array(high, mx.uint32))
    for word in words:
        keys = fold(keys, mx.array(word))
    return keys


def words(keys: Keys) -> tuple[int, int]:
    return keys[0].item(), keys[1].item()


def ruled(accept: str = "ratio", keys: tuple[int, ...] = (5,), choices: tuple[int, ...] = (0,)):
    params = SamplingParams(temperature=1.0, accept=accept)  # type: ignore[arg-type]
    return controls([SequenceParams(params, key, choice, 100) for key in keys for choice in choices], 16)


def keyed(rows, purpose: Purpose, round: int, positions: list[int]) -> list[list[tuple[int, int]]]:
    B = len(rows.ratio)
    places = mx.broadcast_to(mx.array(positions), (B, len(positions)))
    first, second = rows.noise_keys(mx.full((B,), round), places)[purpose]
    return [list(zip(a, b, strict=True)) for a, b in zip(first.tolist(), second.tolist(), strict=True)]


def test_ratio_never_uses_a_key_twice() -> None:
    rows, seen = ruled(keys=tuple(range(20)), choices=(0, 1)), []
    for purpose, round in itertools.product((Purpose.DRAFT, Purpose.ACCEPT, Purpose.NEXT, Purpose.XTC), range(12)):
        for row in keyed(rows, purpose, round, list(range(1, 13))):
            seen += row
    assert len(seen) == 40 * 4 * 12 * 12
    assert len(set(seen)) == len(seen)
    assert len({first for first, _ in seen}) > len(seen) * 0.999  # nor does one word do all the work
    assert len({second for _, second in seen}) > len(seen) * 0.999


def test_coupled_drafts_and_chooses_with_the_same_noise_in_every_round() -> None:
    rows = ruled("coupled", keys=(5, 6), choices=(0, 1))
    drafts, choices = (keyed(rows, p, 3, [7, 8, 9]) for p in (Purpose.DRAFT, Purpose.NEXT))
    assert drafts == choices == keyed(rows, Purpose.DRAFT, 0, [7, 8, 9])
    assert [row[1] for row in drafts] == [row[0] for row in keyed(rows, Purpose.NEXT, 9, [8])]
    assert len({key for row in drafts for key in row}) == 12  # but not for another position, choice or seed
    assert keyed(rows, Purpose.XTC, 0, [7]) == keyed(rows, Purpose.XTC, 5, [7])
    assert keyed(rows, Purpose.XTC, 0, [7])[0] != drafts[0][:1]


def test_a_key_gives_the_same_bits_in_any_batch() -> None:
    ids = mx.arange(1000)
    rows = [keys_of(seed, p) for seed in SEEDS for p in range(5)]
    batch = (mx.stack([k[0] for k in rows]), mx.stack([k[1] for k in rows]))
    together = np.array(gumbel(batch, ids))
    for row, keys in zip(together, rows, strict=True):
        assert np.array_equal(row, np.array(gumbel(keys, ids)))
    shuffled = mx.array(np.random.default_rng(0).permutation(1000))
    assert np.array_equal(np.array(gumbel(rows[3], shuffled)), together[3][np.array(shuffled)])


def test_seeds_that_differ_key_differently() -> None:
    seeds = [*range(-200, 500), *[2**n for n in range(11, 64)], *[2**n + 1 for n in range(11, 64)]]
    assert len({words(keys_of(seed, 0, 0, 0, 1)) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in (0, 2**32) else pytest.mark.slow) for seed in SEEDS]
)
def test_ids_get_uniform_numbers(seed: int) -> None:
    """Over the ids of a large vocabulary, of positions that follow one another, in high and in low bits."""
    found = np.concatenate(
        [np.array(bits(keys_of(seed, 0, 0, 0, position), mx.arange(248_320))) for position in (1, 2)]
    )
    for shift in (24, 12, 0):
        assert p_value(np.bincount((found >> shift) & 255, minlength=256)) > FAIR
    assert len(np.unique(found[:248_320])) == 248_320  # a bijection for each key


def test_acceptance_numbers_are_uniform_and_inside() -> None:
    rows = ruled(keys=tuple(range(500)))
    keys = rows.noise_keys(mx.zeros((500,), mx.int32), mx.broadcast_to(mx.arange(200), (500, 200)))
    found = np.array(uniform(keys[Purpose.ACCEPT]))
    assert 0 < found.min() <= found.max() < 1
    assert p_value(np.histogram(found, bins=200, range=(0, 1))[0]) > FAIR


def pairs_are_independent(a: np.ndarray, b: np.ndarray) -> float:
    """p-value of the joint law of two numbers on a 16 × 16 grid."""
    return p_value(np.bincount((a >> 28) * 16 + (b >> 28), minlength=256))


@pytest.mark.parametrize("seed", SEEDS)
def test_neighbouring_keys_and_ids_are_independent(seed: int) -> None:
    ids = mx.arange(60_000)
    here = np.array(bits(keys_of(seed, 1, 1, 40), ids))
    assert pairs_are_independent(here[:-1], here[1:]) > FAIR
    beside = {
        "position": keys_of(seed, 1, 1, 41),
        "purpose": keys_of(seed, 1, 2, 40),
        "round": keys_of(seed, 2, 1, 40),
        "seed": keys_of(seed + 1, 1, 1, 40),
        "high word": keys_of(seed + 2**32, 1, 1, 40),
    }
    for name, keys in beside.items():
        there = np.array(bits(keys, ids))
        assert pairs_are_independent(here, there) > FAIR, name
        assert p_value(np.bincount((here ^ there) >> 24, minlength=256)) > FAIR, name
    # The numbers of one id over many positions, and of positions that follow one another.
    series = np.array(bits(fold(keys_of(seed, 1, 1), mx.arange(60_000)), mx.zeros((1,), mx.int32)))[:, 0]
    assert pairs_are_independent(series[:-1], series[1:]) > FAIR
    assert p_value(np.bincount(series >> 24, minlength=256)) > FAIR


def test_draft_acceptance_and_residual_of_a_position_are_independent() -> None:
    rows = ruled(keys=tuple(range(300)))
    positions = mx.broadcast_to(mx.arange(1, 201), (300, 200))
    found = {}
    for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.NEXT):
        for round in (0, 1):
            keys = rows.noise_keys(mx.full((300,), round), positions)[purpose]
            found[purpose, round] = np.array(bits(keys, mx.zeros((1,), mx.int32))).reshape(-1)
    for a, b in itertools.combinations(found, 2):
        assert pairs_are_independent(found[a], found[b]) > FAIR, (a, b)


def test_gumbel_noise_is_finite_over_millions_of_ids() -> None:
    for position in range(16):
        noise = gumbel(keys_of(3, position), mx.arange(250_000))
        assert bool(mx.isfinite(noise).all())
    # The words at both ends, where ((h >> 8) + .5)·2⁻²⁴ would come out as 1.
    ends = mx.array([0, 1, 2**32 - 1, 2**32 - 2, 2**32 - 129, 2**31], mx.uint32)
    from headstart.sampling import noise

    v = noise._unit(ends)
    assert 0 < v.min().item() <= v.max().item() < 1
    assert bool(mx.isfinite(-mx.log(-mx.log1p(-v))).all())


def test_gumbel_noise_has_its_law() -> None:
    noise = np.sort(np.array(gumbel(keys_of(1, 2), mx.arange(400_000))).astype(np.float64))
    exact = np.exp(-np.exp(-noise))
    assert np.abs(exact - (np.arange(len(noise)) + 0.5) / len(noise)).max() < 1.95 / math.sqrt(len(noise))


@pytest.mark.parametrize("bounded", [False, True])
def test_draws_follow_the_distribution(bounded: bool) -> None:
    p = np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.02 - 1e-3, 1e-3])
    N = 200_000
    keys = fold(keys_of(9, 1), mx.arange(N))
    logp = mx.broadcast_to(mx.log(mx.array(p, mx.float32)), (N, 8))
    ids = mx.broadcast_to(mx.array([70, 3, 248_319, 0, 11, 12, 13, 4]), (N, 8)) if bounded else None
    tokens = np.array(gumbel_argmax(logp, ids, keys))
    names = np.array([70, 3, 248_319, 0, 11, 12, 13, 4]) if bounded else np.arange(8)
    assert p_value(np.array([(tokens == name).sum() for name in names]), p) > FAIR
    nothing = mx.where(mx.arange(8) == 2, -mx.inf, logp)
    assert (np.array(gumbel_argmax(nothing, ids, keys)) != names[2]).all()


def test_no_number_serves_twice_in_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts, acceptance and what follows, over two rounds of the same positions: every key is new."""
    used: list[tuple[int, int]] = []

    def recorded(function):
        def call(keys: Keys, *rest):
            used.extend(zip(keys[0].reshape(-1).tolist(), keys[1].reshape(-1).tolist(), strict=True))
            return function(keys, *rest)

        return call

    monkeypatch.setattr(import_module("headstart.kernels.sampling"), "uniform", recorded(uniform))
    monkeypatch.setattr(import_module("headstart.sampling.distribution"), "gumbel", recorded(gumbel))
    B, k, V = 3, 4, 16
    rows = ruled(keys=(1, 2, 3))
    for round in (0, 1):
        counts = mx.full((B,), 9), mx.full((B,), round), mx.zeros((B, 0), mx.int32), mx.full((B,), 100)
        scene, proposal, backend = BatchContext(rows, *counts), Proposal.none(B), Backend()
        for _ in range(k):
            proposal = backend.propose(mx.zeros((B, 1, V)), proposal, scene)
        window, most = backend.window(mx.zeros((B,), mx.int32), proposal.tokens), mx.full((B,), k)
        mx.eval(backend.choose(mx.zeros((B, k + 1, V)), window, proposal, most, scene))
    assert len(used) == 2 * B * (k + k + 1)  # k drafts, k trials and one token that follows
    assert len(set(used)) == len(used)
