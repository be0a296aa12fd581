"""Every rule but the optimistic one leaves the target's distribution as it is: shown by adding up every case."""

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from enumerate import (
    Array,
    Pair,
    Rule,
    a_round,
    by_block,
    by_coupling,
    by_optimism,
    by_token,
    drawn,
    law,
    longest_law,
    make_pair,
    on_grid,
    total_variation,
)

from headstart.sampling import SamplingParams
from headstart.sampling.accept import accept_coupled, longest_accepted

PARAMS = {
    "temperature": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.3),
    "top_k": SamplingParams(temperature=0.8, top_k=2),
    "top_p": SamplingParams(temperature=1.2, top_p=0.8),
    "min_p": SamplingParams(temperature=0.7, min_p=0.2),
    "xtc": SamplingParams(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.2),
    "top_n_sigma": SamplingParams(temperature=1.0, top_n_sigma=1.2),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.8, repetition_context_size=3),
    "presence": SamplingParams(temperature=0.8, presence_penalty=1.5, presence_context_size=2),
    "frequency and top_p": SamplingParams(temperature=0.9, frequency_penalty=0.7, top_p=0.9),
    "presence of all generated": SamplingParams(temperature=0.8, presence_penalty=1.5, presence_context_size=None),
    "everything": SamplingParams(
        temperature=0.8, top_n_sigma=2.5, top_p=0.95, min_p=0.05, top_k=3,
        presence_penalty=0.5, repetition_penalty=1.3, logit_bias={1: 1.0},
    ),
}  # fmt: skip
EXACT = {"block_acceptance": by_block, "token-wise": by_token, "coupled": by_coupling}


def cases(*sizes: tuple[int, int], slow: Sequence[tuple[int, int]] = ()) -> list[Any]:
    """Every parameter at k = 2, and every k with all parameters together; the others are slow tests."""

    def is_slow(size: tuple[int, int], name: str) -> bool:
        return size in slow or (size[1] != 2 and name != "everything")

    return [
        pytest.param(*size, name, marks=pytest.mark.slow if is_slow(size, name) else [])
        for size in (*sizes, *slow)
        for name in PARAMS
    ]


def full(k: int):
    return lambda lines: np.full(len(lines), k, np.int32)


def ragged(k: int, shift: int = 0):
    """Another depth after every prefix, from 0 to k."""
    return lambda lines: ((lines * 7 + lines // 3 + shift) % (k + 1)).astype(np.int32)


@pytest.mark.parametrize(("vocabulary", "k", "name"), cases((4, 1), (4, 2), (3, 3), (3, 4)))
@pytest.mark.parametrize("rule", ["block_acceptance", "token-wise"])
def test_two_rounds_of_ratio_are_the_target(rule: str, vocabulary: int, k: int, name: str) -> None:
    pair = make_pair(PARAMS[name], vocabulary, 2 * (k + 1), seed=k)
    expected = pair.law()
    for depths in (full(k), ragged(k, shift=k), ragged(k, shift=k - 1))[: 3 if k < 4 else 2]:
        said = law(pair, k, EXACT[rule], depths)
        assert np.abs(said - expected).max() < 1e-12
        assert total_variation(said, expected) < 1e-12


SLOW = pytest.mark.slow
COPYING = cases((4, 1), (3, 2), slow=((3, 3), (4, 2)))


def copied(pair: Pair, rest: str) -> Pair:
    """A drafter that copies: certain of one token, at all positions or only at the first, then as it was."""
    drafter = {}
    for (start, n), table in pair.drafter.items():
        certain = np.zeros_like(table)
        certain[np.arange(len(table)), (np.arange(len(table)) + start) % pair.vocabulary] = 1
        drafter[start, n] = certain if rest == "copies" or n == start else table
    return Pair(pair.vocabulary, pair.target, drafter)


def reduced(pair: Pair) -> Pair:
    """A drafter that knows only every other token."""
    drafter = {}
    for at, table in pair.drafter.items():
        known = table * (np.arange(pair.vocabulary) % 2 == 0) + 1e-9 * (np.arange(pair.vocabulary) == 0)
        drafter[at] = known / known.sum(axis=1, keepdims=True)
    return Pair(pair.vocabulary, pair.target, drafter)


@pytest.mark.parametrize(
    ("rule", "vocabulary", "k", "name"),
    [
        *(pytest.param("block_acceptance", *case.values, marks=case.marks) for case in COPYING),
        *(  # which is shown below for any draft
            pytest.param("coupled", *case.values, marks=case.marks if case.values[2] == "everything" else SLOW)
            for case in COPYING
        ),
    ],
)
def test_two_rounds_of_copies_or_of_a_reduced_head_are_the_target(
    rule: str, vocabulary: int, k: int, name: str
) -> None:
    pair = make_pair(PARAMS[name], vocabulary, 2 * (k + 1), seed=k)
    for drafter in (copied(pair, "copies"), copied(pair, "head"), reduced(pair)):
        for depths in (full(k), ragged(k, shift=k)):
            assert total_variation(law(drafter, k, EXACT[rule], depths), pair.law()) < 1e-12


@pytest.mark.parametrize(("vocabulary", "k", "name"), cases((3, 3), (2, 5)))
def test_two_rounds_of_blocks_are_the_target(vocabulary: int, k: int, name: str) -> None:
    """All drafts of a block are drawn given the context alone; only penalties know of the drafts before."""
    pair = make_pair(PARAMS[name], vocabulary, 2 * (k + 1), seed=k, block=True)
    for rule in ("block_acceptance", "coupled"):
        for depths in (full(k), ragged(k, shift=k)):
            assert total_variation(law(pair, k, EXACT[rule], depths), pair.law()) < 1e-12


@pytest.mark.parametrize(("vocabulary", "k", "name"), cases((4, 1), (3, 2), (3, 3), (2, 4)))
def test_two_rounds_of_coupling_are_the_target_whatever_is_drafted(vocabulary: int, k: int, name: str) -> None:
    pair = make_pair(PARAMS[name], vocabulary, 2 * (k + 1), seed=k)
    for depths in (full(k), ragged(k)):
        assert total_variation(law(pair, k, by_coupling, depths), pair.law()) < 1e-12


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_coupling_generates_the_targets_own_sequence_for_every_draft_and_choice(k: int) -> None:
    """Not only in law: token for token, so the text of a seeded request does not depend on the drafts."""
    V = 3 if k < 4 else 2
    every = np.array(list(itertools.product(range(V), repeat=2 * k + 1)), np.int32)
    drafts, choices = every[:, :k], every[:, k:]
    for most in range(k + 1):
        verdict = accept_coupled(mx.array(choices), mx.array(drafts), mx.full((len(every),), most))
        accepted, tokens = np.array(verdict.accepted), np.array(verdict.tokens)
        agree = np.cumprod((drafts == choices[:, :k]) & (np.arange(k) < most), axis=1).sum(axis=1)
        assert (accepted == agree).all()
        said = np.arange(k + 1) <= accepted[:, None]
        assert (tokens == choices)[said].all()
        assert (np.array(verdict.next) == choices[np.arange(len(every)), accepted]).all()


def test_longest_is_what_independent_trials_come_to() -> None:
    """Numbers on a grid that every chance is a multiple of: counting is then exact."""
    grid = (np.arange(8) + 0.5) / 8
    tries = np.array(list(itertools.product(grid, repeat=3)))
    for chance in itertools.product([0, 0.25, 0.625, 1], repeat=3):
        chances = np.tile(chance, (len(tries), 1))
        found = np.array(longest_accepted(mx.array(chances, mx.float32), mx.array(tries, mx.float32)))
        share = np.bincount(found, minlength=4) / len(tries)
        assert np.allclose(share, longest_law(np.array([chance]))[0], atol=1e-12)


def expected_accepted(pair, k: int, rule: Rule) -> float:
    laws = a_round(pair, np.ones(1), 0, k, rule, np.full(1, k, np.int32))
    return sum((length - 1) * float(said.sum()) for length, said in laws.items())


def test_the_example_of_the_paper() -> None:
    """arXiv:2403.10444, section 2: token by token accepts 10/9 drafts of 2, as a block 11/9."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])

    def table(row: Array, length: int) -> Array:
        return np.tile(row, (2**length, 1))

    pair = Pair(2, [table(p, n) for n in range(6)], {(0, n): table(q, n) for n in range(2)})
    assert expected_accepted(pair, 2, by_token) == pytest.approx(10 / 9, abs=1e-12)
    assert expected_accepted(pair, 2, by_block) == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("name", PARAMS)
def test_a_block_accepts_at_least_as_much_as_token_by_token(name: str) -> None:
    for k in (1, 2, 3):
        pair = make_pair(PARAMS[name], 3, 2 * (k + 1), seed=11)
        together, one_by_one = (expected_accepted(pair, k, rule) for rule in (by_block, by_token))
        assert together >= one_by_one - 1e-12
        if k == 1:
            assert together == pytest.approx(one_by_one, abs=1e-12)


def test_the_optimistic_rule_is_not_the_target() -> None:
    pair = make_pair(PARAMS["temperature"], 3, 6)
    assert total_variation(law(pair, 2, by_optimism, full(2)), pair.law()) > 0.05


@pytest.mark.parametrize("rule", ["block_acceptance", "token-wise"])
def test_a_grammar_that_forbids_a_draft_rejects_it(rule: str) -> None:
    """The target's mask does it: the draft has no chance, and the window stays as long as it was."""
    pair = make_pair(PARAMS["temperature"], 3, 6, forbidden=lambda n: n % 3)
    for depths in (full(2), ragged(2)):
        assert total_variation(law(pair, 2, EXACT[rule], depths), pair.law()) < 1e-12


XTC = SamplingParams(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.2)


def test_coins_of_xtc_may_be_tossed_again_each_round() -> None:
    """A position drafted again gets another coin under `ratio`. That is exact because how likely i drafts are to
    stand does not depend on the target after them, although the single chances of a block do."""
    k, length = 2, 6
    pairs = [make_pair(XTC, 3, length, seed=5, coins=coins) for coins in itertools.product((0.0, 1.0), repeat=length)]
    mean = Pair(3, [np.mean([pair.target[n] for pair in pairs], axis=0) for n in range(length)], {})

    def tossed(start: Array, at: int) -> dict[int, Array]:
        every = [a_round(pair, start, at, k, by_block, np.full(len(start), k, np.int32)) for pair in pairs]
        return {end: np.mean([laws[end] for laws in every], axis=0) for end in every[0]}

    total = np.zeros(3**length)
    for at, start in tossed(np.ones(1), 0).items():
        for end, said in tossed(start, at).items():
            total += mean.finish(said, end)
    assert total_variation(total, mean.law()) < 1e-12
    assert total_variation(pairs[0].law(), mean.law()) > 0.05, "the coins do nothing here"


def test_shared_noise_generates_the_targets_own_sequence() -> None:
    """Coupling with its noise: one number a position, for drafts and target, in both rounds. For each of them."""
    k, points, V = 2, 4, 3
    pair = on_grid(make_pair(SamplingParams(temperature=1.0), V, 2 * (k + 1)), points)
    grid = (np.arange(points) + 0.5) / points
    numbers = np.array(list(itertools.product(grid, repeat=2 * (k + 1))))
    N = len(numbers)

    alone, lines = [], np.zeros(N, int)
    for n in range(2 * (k + 1)):
        alone.append(drawn(pair.target[n][lines], numbers[:, n]))
        lines = lines * V + alone[-1]
    assert np.allclose(np.bincount(lines, minlength=V ** len(alone)) / N, pair.law(), atol=1e-12)
    alone = np.stack(alone, 1)  # [N, 6]

    said = np.zeros(N, int)  # how many tokens each has said
    for _ in range(2):
        longer = said.copy()
        for start in np.unique(said):
            at = np.flatnonzero(said == start)
            line = (alone[at, :start] * V ** np.arange(start)[::-1]).sum(axis=1)
            drafts, choices = [], [drawn(pair.target[start][line], numbers[at, start])]
            for i in range(k):
                drafts.append(drawn(pair.drafter[start, start + i][line], numbers[at, start + i]))
                line = line * V + drafts[-1]
                choices.append(drawn(pair.target[start + i + 1][line], numbers[at, start + i + 1]))
            verdict = accept_coupled(
                mx.array(np.stack(choices, 1)), mx.array(np.stack(drafts, 1)), mx.full((len(at),), k)
            )
            count, tokens = np.array(verdict.accepted) + 1, np.array(verdict.tokens)
            own = alone[at][:, start : start + k + 1]
            assert (tokens == own)[np.arange(k + 1) < count[:, None]].all()
            longer[at] = start + count
        said = longer
    assert said.max() == 2 * (k + 1)
    assert said.min() == 2
