"""The distribution of what an acceptance rule generates, by adding up every case. In float64, over two rounds.

A `Pair` holds what the target and the drafter would do after every prefix of a small vocabulary. A `Rule` takes
windows and returns how likely each outcome of one is: how many drafts are accepted, and which token follows. `law`
adds up two rounds and lets the target finish; `Pair.law` is the target alone. Both are arrays over all sequences.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from headstart.sampling import SamplingParams, SequenceParams, controls
from headstart.sampling.accept import accept_coupled, block_acceptance, residual_distribution
from headstart.sampling.distribution import process_logits, sampling_distribution

Array = np.ndarray
# p [N, k+1, V], q [N, k, V], drafts [N, k], allowed [N] → [N, k+1, V]: n drafts are accepted, and this token follows.
Rule = Callable[[Array, Array, Array, Array], Array]


@dataclass(frozen=True)
class Pair:
    """Tables over prefixes: the one of length L with tokens t0, t1, … is in line t0·V^(L-1) + t1·V^(L-2) + …"""

    vocabulary: int
    target: list[Array]  # by length: [V^L, V]
    drafter: dict[tuple[int, int], Array]  # by the length at which its window began, and by length

    @property
    def length(self) -> int:
        return len(self.target)

    def finish(self, law: Array, length: int) -> Array:
        """Let the target generate the rest: the law of `length` tokens → that of all."""
        for table in self.target[length:]:
            law = (law[:, None] * table).reshape(-1)
        return law

    def law(self) -> Array:
        return self.finish(np.ones(1), 0)


def make_pair(
    params: SamplingParams,
    vocabulary: int,
    length: int,
    seed: int = 0,
    *,
    closeness: float = 0.6,
    coins: Sequence[float] | None = None,
    forbidden: Callable[[int], int] | None = None,
    block: bool = False,
) -> Pair:
    """Random logits after every prefix, through process_logits and sampling_distribution.

    `coins`: XTC's, by position.
    `forbidden`: a token that a grammar does not permit after a prefix of that length; the drafter does not know.
    `block`: the drafter's logits do not depend on the drafts before, as those of a block drafter.
    """
    rng = np.random.default_rng(seed)
    logits = [rng.normal(0, 1.5, (vocabulary**n, vocabulary)) for n in range(length)]
    coins = coins if coins is not None else [0.0] * length

    def table(values: Array, n: int, masked: bool) -> Array:
        values = values.copy()
        if forbidden is not None and masked:
            values[:, forbidden(n)] = -np.inf
        return probabilities(values, params, n, vocabulary, coins[n])

    target = [table(values, n, masked=True) for n, values in enumerate(logits)]
    # What a head knows depends on where its window began, so a position drafted again is drafted differently.
    drafter = {}
    for start in range(length // 2 + 1):
        for n in range(start, min(start + length // 2, length)):
            mixed = closeness * logits[n] + (1 - closeness) * rng.normal(0, 2, logits[n].shape)
            if block:  # that of the first continuation, for all
                mixed = np.repeat(mixed[:: vocabulary ** (n - start)], vocabulary ** (n - start), axis=0)
            drafter[start, n] = table(mixed, n, masked=False)
    return Pair(vocabulary, target, drafter)


def probabilities(logits: Array, params: SamplingParams, length: int, vocabulary: int, coin: float) -> Array:
    """[V^L, V] of the request's distribution: every prefix is a position of one window of one row."""
    ruled = controls([SequenceParams(params, 0, 0, params.max_tokens)], vocabulary)
    size = max(params.context_size, 1)
    prefixes = np.array(list(itertools.product(range(vocabulary), repeat=length)), np.int32).reshape(
        vocabulary**length, length
    )
    prompt = np.tile(np.array([[-1] * size + [0]], np.int32), (len(prefixes), 1))  # a prompt of one token
    seen = np.concatenate([prompt, prefixes], axis=1)[:, -size:]
    window = process_logits(
        mx.array(logits[None], mx.float32),
        ruled,
        mx.array(seen[None]),
        mx.full((1, len(prefixes)), params.max_tokens - length),
        mx.array((prefixes[..., None] == np.arange(vocabulary)).sum(axis=1)[None], mx.float32),  # not the prompt's
    )
    dense = sampling_distribution(window, ruled, mx.full((1, len(prefixes)), coin)).dense(vocabulary)
    p = np.array(dense[0], np.float64)
    return p / p.sum(axis=-1, keepdims=True)


def a_round(pair: Pair, start: Array, length: int, k: int, rule: Rule, allowed: Array) -> dict[int, Array]:
    """One round from the law `start` of prefixes of that length, `allowed` [V^length] → laws by length."""
    V = pair.vocabulary
    drafts = np.array(list(itertools.product(range(V), repeat=k)), np.int32).reshape(V**k, k)
    lines = np.arange(len(start)).repeat(V**k)  # where each prefix of each window is in its table
    drafts = np.tile(drafts, (len(start), 1))
    p, q, weight = [pair.target[length][lines]], [], start.repeat(V**k)
    for i in range(k):
        q.append(pair.drafter[length, length + i][lines])
        weight = weight * np.take_along_axis(q[-1], drafts[:, i : i + 1], axis=1)[:, 0]
        lines = lines * V + drafts[:, i]
        p.append(pair.target[length + i + 1][lines])
    drafted = weight > 0  # what the drafter cannot propose need not be verified
    outcome = np.zeros((len(weight), k + 1, V))
    outcome[drafted] = rule(
        np.stack(p, 1)[drafted],
        np.stack(q, 1)[drafted] if k else np.zeros((drafted.sum(), 0, V)),
        drafts[drafted],
        allowed.repeat(V**k)[drafted],
    )
    outcome = (outcome * weight[:, None, None]).reshape(len(start), *[V] * k, k + 1, V)
    laws = {}
    for n in range(k + 1):
        generated = outcome[..., n, :].sum(axis=tuple(range(1 + n, 1 + k)))  # whatever was drafted after it
        laws[length + n + 1] = generated.reshape(-1)
    return laws


def law(pair: Pair, k: int, rule: Rule, depths: Callable[[Array], Array]) -> Array:
    """Two rounds and then the target. `depths`: the lines of prefixes → how many drafts may be accepted there."""
    assert pair.length == 2 * (k + 1)
    total = np.zeros(pair.vocabulary**pair.length)
    for length, start in a_round(pair, np.ones(1), 0, k, rule, depths(np.zeros(1, np.int32))).items():
        allowed = depths(np.arange(len(start), dtype=np.int32) + 1)
        for end, generated in a_round(pair, start, length, k, rule, allowed).items():
            total += pair.finish(generated, end)
    return total


def total_variation(a: Array, b: Array) -> float:
    return float(np.abs(a - b).sum() / 2)


# The rules as they are: the functions of accept.py, with the chances of their independent trials multiplied out.


def by_block(p: Array, q: Array, drafts: Array, allowed: Array) -> Array:
    chance, weight = chances_of_block(p, q, drafts, allowed)
    return outcomes(longest_law(chance), p, q, weight, allowed)


def by_token(p: Array, q: Array, drafts: Array, allowed: Array) -> Array:
    chance = chances_of_tokens(p, q, drafts, allowed)
    return outcomes(first_failure_law(chance), p, q, np.ones((len(p), p.shape[1])), allowed)


def by_coupling(p: Array, q: Array, drafts: Array, allowed: Array) -> Array:
    """Every sequence of choices, each with the chance that the target makes it."""
    N, W, V = p.shape
    outcome = np.zeros((N, W, V))
    for choices in itertools.product(range(V), repeat=W):
        result = accept_coupled(mx.array(np.tile(choices, (N, 1))), mx.array(drafts), mx.array(allowed))
        n = np.array(result.accepted)
        weight = np.prod([p[:, i, c] for i, c in enumerate(choices)], axis=0)
        np.add.at(outcome, (np.arange(N), n, np.array(result.next)), weight)
    return outcome


def by_optimism(p: Array, q: Array, drafts: Array, allowed: Array) -> Array:
    outcome = np.zeros_like(p)
    lines = np.arange(len(p))
    outcome[lines, allowed] = p[lines, allowed]
    return outcome


def chances_of_block(p: Array, q: Array, drafts: Array, allowed: Array) -> tuple[Array, Array]:
    if not drafts.shape[1]:
        return np.zeros(drafts.shape), np.ones((len(p), 1))
    found = block_acceptance(float64(p), float64(q), *of_drafts(p, q, drafts), mx.array(allowed))
    return np.array(found.probability), np.array(found.weight)


def chances_of_tokens(p: Array, q: Array, drafts: Array, allowed: Array) -> Array:
    if not drafts.shape[1]:
        return np.zeros(drafts.shape)
    return np.array(token_wise(*of_drafts(p, q, drafts), mx.array(allowed)))


def token_wise(p_drafts: mx.array, q_drafts: mx.array, allowed: mx.array) -> mx.array:
    """[B, k]: the chance that each draft is accepted if those before it are (Leviathan et al. 2023), which
    block_acceptance must beat. Its residual is that of weight 1."""
    within_limit = mx.arange(p_drafts.shape[1]) < allowed[:, None]
    return mx.where(within_limit, mx.minimum(p_drafts / q_drafts, 1), 0)


def of_drafts(p: Array, q: Array, drafts: Array) -> tuple[mx.array, mx.array]:
    at, k = drafts[..., None], drafts.shape[1]
    return tuple(float64(np.take_along_axis(x[:, :k], at, axis=-1)[..., 0]) for x in (p, q))  # type: ignore[return-value]


def longest_law(chance: Array) -> Array:
    """[N, k+1]: what `accept.longest_accepted` comes to when every prefix is tried with a number of its own."""
    k = chance.shape[1]
    none_after = np.cumprod(np.concatenate([np.ones((len(chance), 1)), 1 - chance[:, ::-1]], axis=1), axis=1)[:, ::-1]
    return np.concatenate([np.ones((len(chance), 1)), chance], axis=1) * none_after[:, : k + 1]


def first_failure_law(chance: Array) -> Array:
    """[N, k+1]: drafts are tried one after the other until one fails."""
    ones = np.ones((len(chance), 1))
    return np.cumprod(np.concatenate([ones, chance], axis=1), axis=1) * np.concatenate([1 - chance, ones], axis=1)


def outcomes(accepted_law: Array, p: Array, q: Array, weight: Array, allowed: Array) -> Array:
    return np.stack(
        [accepted_law[:, n : n + 1] * following(p, q, weight, n, allowed) for n in range(accepted_law.shape[1])],
        axis=1,
    )


def following(p: Array, q: Array, weight: Array, n: int, allowed: Array) -> Array:
    """[N, V]: what is drawn from after n drafts."""
    if not q.shape[1]:
        return p[:, 0]
    accepted = mx.full((len(p),), n, mx.int32)
    left = np.array(residual_distribution(float64(p), float64(q), float64(weight), accepted, mx.array(allowed)))
    return left / left.sum(axis=-1, keepdims=True)


def float64(x: Array) -> mx.array:
    return mx.array(x.astype(np.float64), mx.float64)


# Rounds that share noise: every number on a grid is tried for every one that is drawn.


def on_grid(pair: Pair, points: int) -> Pair:
    """The same pair with probabilities that are multiples of 1/points: numbers on a grid draw from them exactly."""

    def rounded(table: Array) -> Array:
        shares = np.floor(np.maximum(table * points, 1e-9)).astype(int)
        for _ in range(points):  # hand out what is left, to the largest remainders first
            short = shares.sum(axis=1) < points
            shares[short, np.argmax((table * points - shares)[short], axis=1)] += 1
        return shares / points

    drafter = {at: rounded(table) for at, table in pair.drafter.items()}
    return Pair(pair.vocabulary, [rounded(t) for t in pair.target], drafter)


def drawn(table: Array, numbers: Array) -> Array:
    """[N]: the token whose share of (0, 1) holds the number."""
    return (numbers[:, None] > table.cumsum(axis=1) + 1e-9).sum(axis=1)


def law_by_noise(pair: Pair, k: int, rule: Rule, points: int, column: Callable[[int, int, int], int]) -> Array:
    """Two rounds at full depth whose drafts come from enumerated numbers.

    `column(round, i, position)`: which number serves the i-th draft of a round, at that position of the sequence.
    Fresh numbers for every round are what `ratio` must have; one a position is the mistake.
    """
    V = pair.vocabulary
    columns = 1 + max(column(r, i, n + i) for r in (0, 1) for i in range(k) for n in range((k + 1) * r + 1))
    grid = (np.arange(points) + 0.5) / points
    numbers = np.array(list(itertools.product(grid, repeat=columns)))
    N = len(numbers)
    total = np.zeros(V**pair.length)

    def window(lines: Array, length: int, round: int) -> tuple[Array, list[Array]]:
        """One round → its outcomes [N, k+1, V], and the lines after 0, 1, … drafts."""
        reached, p, q, drafts = [lines], [pair.target[length][lines]], [], []
        for i in range(k):
            q.append(pair.drafter[length, length + i][reached[-1]])
            drafts.append(drawn(q[-1], numbers[:, column(round, i, length + i)]))
            reached.append(reached[-1] * V + drafts[-1])
            p.append(pair.target[length + i + 1][reached[-1]])
        allowed = np.full(N, k, np.int32)
        return rule(np.stack(p, 1), np.stack(q, 1), np.stack(drafts, 1).astype(np.int32), allowed), reached

    first, after = window(np.zeros(N, int), 0, 0)
    for n, y in itertools.product(range(k + 1), range(V)):
        second, later = window(after[n] * V + y, n + 1, 1)
        for m, z in itertools.product(range(k + 1), range(V)):
            end = n + m + 2
            generated = np.zeros(V**end)
            np.add.at(generated, later[m] * V + z, first[:, n, y] * second[:, m, z] / N)
            total += pair.finish(generated, end)
    return total
