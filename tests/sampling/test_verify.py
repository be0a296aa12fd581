"""The rules of acceptance by themselves: what a law over many windows cannot show, or not where it went wrong."""

import mlx.core as mx

from headstart.sampling.accept import (
    AcceptResult,
    accept_coupled,
    accept_first,
    block_acceptance,
    longest_accepted,
    residual_distribution,
)


def said(verdict: AcceptResult) -> list[list[int]]:
    """What each sequence generates, the correction or bonus token last."""
    assert verdict.accepted.dtype == mx.int32
    pairs = zip(verdict.tokens.tolist(), verdict.accepted.tolist(), strict=True)
    tokens = [tokens[: n + 1] for tokens, n in pairs]
    assert verdict.next.tolist() == [row[-1] for row in tokens]
    return tokens


def test_the_drafts_that_stand_come_first_and_then_the_token_that_follows() -> None:
    drafts, following = mx.array([[1, 2, 3]] * 4), mx.array([9, 8, 7, 6])
    verdict = accept_first(drafts, mx.arange(4), following)
    assert said(verdict) == [[9], [1, 8], [1, 2, 7], [1, 2, 3, 6]]
    assert said(accept_first(drafts[:, :0], mx.zeros((4,), mx.int32), following)) == [[9], [8], [7], [6]]


def test_coupled_drafts_stand_up_to_the_first_that_the_target_would_not_say() -> None:
    choices = mx.array([[1, 2, 3, 4]] * 4)
    drafts = mx.array([[1, 2, 3], [1, 0, 3], [0, 2, 3], [1, 2, 3]])
    assert said(accept_coupled(choices, drafts, mx.array([3, 3, 3, 1]))) == [[1, 2, 3, 4], [1, 2], [1], [1, 2]]


def test_the_longest_accepted_prefix_counts_whatever_came_before_it() -> None:
    chance = mx.array([[0.5, 0.5, 0.5]] * 4)
    tried = mx.array([[0.9, 0.9, 0.9], [0.1, 0.9, 0.9], [0.9, 0.1, 0.9], [0.9, 0.9, 0.1]])
    accepted = longest_accepted(chance, tried)
    assert accepted.tolist() == [0, 1, 2, 3]
    assert accepted.dtype == mx.int32
    assert longest_accepted(chance, chance).tolist() == [0] * 4  # a number that equals its chance is not below it


def test_every_draft_is_accepted_where_drafter_and_target_agree() -> None:
    """Then nothing else could follow, and the share of nothing in nothing counts as all."""
    p = mx.softmax(mx.random.normal((5, 4, 6), key=mx.random.key(0)), axis=-1)
    allowed = mx.array([0, 1, 2, 3, 3])
    found = block_acceptance(p, p[:, :3], p[:, :3, 1], p[:, :3, 1], allowed)
    assert found.probability.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert found.weight.tolist() == [[1] * 4] * 5


def test_a_target_that_broke_down_lets_nothing_stand() -> None:
    nan, q = mx.full((2, 4, 6), float("nan")), mx.full((2, 3, 6), 1 / 6)
    found = block_acceptance(nan, q, nan[:, :3, 0], q[:, :, 0], mx.array([3, 2]))
    assert longest_accepted(found.probability, mx.full((2, 3), 1e-9)).tolist() == [0, 0]


def test_after_a_rejection_comes_the_residual_and_after_a_full_accept_the_target() -> None:
    """In a single sequence, with fewer tokens than drafts: no axis is taken for another."""
    p = mx.array([[[0.75, 0.25], [0.25, 0.75], [0.5, 0.5], [0.25, 0.75]]])
    q = mx.array([[[0.5, 0.5], [0.5, 0.5], [0.125, 0.875]]])
    carry = mx.array([[1, 1, 0.5, 1]])
    found = [residual_distribution(p, q, carry, mx.array([n]), mx.array([3])).tolist() for n in range(4)]
    assert found == [[[0.25, 0]], [[0, 0.25]], [[0.125, 0]], [[0.25, 0.75]]]
