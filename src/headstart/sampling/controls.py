"""Sampling parameters of a batch as arrays, one entry per sequence."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import mlx.core as mx

from ..sampling_params import MAX_INT32, SamplingParams
from .noise import Keys, Purpose, fold, keys_of_step, split


class SequenceParams(NamedTuple):
    """Sampling parameters of one sequence, and what keys its noise."""

    params: SamplingParams
    key: int  # the seed, or a random number of the request's own
    choice: int  # which of the request's n answers
    limit: int  # most tokens to generate


class Bias(NamedTuple):
    ids: mx.array  # [B, 1, M]
    values: mx.array  # [B, 1, M]


class Penalty(NamedTuple):
    """A penalty on the last `context_size` tokens, as mlx-lm defines it."""

    kind: Literal["repetition", "presence", "frequency"]
    strength: mx.array  # [B, 1, 1]
    context_size: mx.array  # [B, 1, 1]


class CountPenalty(NamedTuple):
    """Penalties on all generated tokens, as OpenAI defines them; 0 for sequences without."""

    presence: mx.array  # [B, 1, 1], for a token that was generated at all
    frequency: mx.array  # [B, 1, 1], for each time that it was


class MinTokens(NamedTuple):
    """Stop ids are forbidden while more than `free_at` tokens may still be generated."""

    stop_ids: mx.array  # [B, 1, S]
    free_at: mx.array  # [B, 1]


class Changes(NamedTuple):
    """What changes logits, as kernels take it; None what no sequence uses."""

    penalties: mx.array | None = None  # [B, 8]: strength and context size of each `Penalty`, then a `CountPenalty`'s
    bias_ids: mx.array | None = None  # [B, M]
    bias: mx.array | None = None  # [B, M]
    stop_ids: mx.array | None = None  # [B, S]
    free_at: mx.array | None = None  # [B, 1]


class Xtc(NamedTuple):
    probability: mx.array  # [B, 1, 1]
    threshold: mx.array  # [B, 1, 1]
    special: mx.array  # [B, 1, 1, S]


@dataclass(frozen=True)
class Controls:
    """Sampling parameters of a batch. What no sequence uses is None or False, and costs nothing."""

    any_sampled: bool
    any_greedy: bool
    temperature: mx.array  # [B, 1, 1], 0 for greedy sequences
    truncates: bool  # a sequence uses top_p, min_p, XTC or top_k
    support: int | None  # number of best tokens that are looked at; None: all
    top_p: mx.array  # [B, 1, 1], like the next three
    min_p: mx.array
    min_keep: mx.array
    top_k: mx.array
    xtc: Xtc | None
    bias: Bias | None
    penalties: list[Penalty]
    count_penalty: CountPenalty | None
    min_tokens: MinTokens | None
    top_n_sigma: mx.array | None  # [B, 1, 1], 0 for sequences without
    keys: Keys  # [B]
    packed: tuple[mx.array, mx.array]  # temperature, truncation without XTC, and keys, as a `Sampler` has them
    rules: frozenset[str]  # acceptance rules in use
    ratio: mx.array  # [B], sequences verified by speculative sampling
    purposes: mx.array  # [B, P], the word in a sequence's keys for every purpose of noise
    optimistic: mx.array  # [B], sequences that accept every draft
    top_logprobs: int | None  # alternatives to report beside each token's log-probability, if a sequence wants any

    @property
    def adjusts(self) -> bool:
        """Return whether a sequence changes its logits before sampling."""
        penalties = bool(self.penalties) or self.count_penalty is not None
        removes = self.min_tokens is not None or self.top_n_sigma is not None
        return self.bias is not None or penalties or removes

    @cached_property
    def changes(self) -> Changes:
        """Return what changes logits, as kernels take it."""
        penalties = None
        if self.penalties or self.count_penalty is not None:
            zero = mx.zeros_like(self.temperature)
            each = {"repetition": (zero + 1, zero), "presence": (zero, zero), "frequency": (zero, zero)}
            each |= {penalty.kind: (penalty.strength, penalty.context_size) for penalty in self.penalties}
            columns = [*(array for pair in each.values() for array in pair), *(self.count_penalty or (zero, zero))]
            penalties = mx.concatenate(columns, axis=1).squeeze(2)
        bias = (None, None) if self.bias is None else (self.bias.ids.squeeze(1), self.bias.values.squeeze(1))
        stops = (
            (None, None)
            if self.min_tokens is None
            else (self.min_tokens.stop_ids.squeeze(1), self.min_tokens.free_at)
        )
        return Changes(penalties, *bias, *stops)

    @property
    def argmax_only(self) -> bool:
        """Return whether every sequence takes the argmax of the model's own logits."""
        return not self.any_sampled and not self.adjusts and "optimistic" not in self.rules

    def noise_keys(self, rounds: mx.array, positions: mx.array) -> dict[Purpose, Keys]:
        """Return keys [B, W] for every purpose at positions [B, W], all in as many operations as for one.

        Under the ratio rule no key is used twice. Under the coupled rule drafting and choosing share their keys,
        which do not depend on the round: that is the coupling.
        """
        words = mx.where(self.ratio, rounds + 1, 0)
        first, second = keys_of_step(self.keys, words, self.purposes, positions)
        return {purpose: (first[:, purpose], second[:, purpose]) for purpose in Purpose}


def controls(sequences: Sequence[SequenceParams], vocabulary: int) -> Controls:
    """Return the sampling parameters of a batch of sequences as arrays."""
    params = [sequence.params for sequence in sequences]
    sampled = [p for p in params if p.sampled]
    words = [split(sequence.key) for sequence in sequences]
    keys = (mx.array([first for first, _ in words], mx.uint32), mx.array([second for _, second in words], mx.uint32))
    rules = [p.rule for p in params]
    keys = fold(keys, mx.array([sequence.choice for sequence in sequences]))
    return Controls(
        any_sampled=bool(sampled),
        any_greedy=len(sampled) < len(params),
        temperature=_column([p.temperature for p in params]),
        truncates=any(p.top_p < 1 or p.min_p > 0 or p.xtc_probability > 0 or p.top_k > 0 for p in sampled),
        support=_support(sampled),
        top_p=_column([p.top_p if p.top_p < 1 else 2.0 for p in params]),  # a cumulative sum may round to above 1
        min_p=_column([p.min_p for p in params]),
        min_keep=_column([float(p.min_tokens_to_keep) for p in params]),
        top_k=_column([float(p.top_k or vocabulary) for p in params]),
        xtc=_xtc(params),
        bias=_bias(params),
        penalties=_penalties(params),
        count_penalty=_count_penalty(params),
        min_tokens=_min_tokens(sequences),
        top_n_sigma=_top_n_sigma(params),
        keys=keys,
        packed=_packed(params, keys, vocabulary),
        rules=frozenset(rules),
        ratio=mx.array([rule == "ratio" for rule in rules]),
        purposes=mx.array([[_word(rule, purpose) for purpose in Purpose] for rule in rules], mx.int32),
        optimistic=mx.array([rule == "optimistic" for rule in rules]),
        top_logprobs=max((p.top_logprobs for p in params if p.logprobs), default=None),
    )


def _word(rule: str, purpose: Purpose) -> Purpose:
    """Return what a purpose is in the keys of a rule: for all but the ratio rule drafting and choosing are one."""
    chooses = purpose in (Purpose.DRAFT, Purpose.NEXT) and rule != "ratio"
    return Purpose.CHOICE if chooses else purpose


def _packed(params: list[SamplingParams], keys: Keys, vocabulary: int) -> tuple[mx.array, mx.array]:
    numbers = []
    for p in params:
        least = math.log(p.min_p) if p.min_p else -math.inf
        numbers.append([p.temperature, p.top_k or vocabulary, p.top_p, least, p.min_tokens_to_keep])
    purposes = (Purpose.DRAFT, Purpose.ACCEPT, Purpose.NEXT)
    noise = [[p.rule == "ratio", *(_word(p.rule, purpose) for purpose in purposes)] for p in params]
    words = mx.concatenate([mx.stack(list(keys), axis=1), mx.array(noise, mx.uint32)], axis=1)
    return mx.array(numbers, mx.float32), words


def _column(values: list[float]) -> mx.array:
    return mx.array(values, mx.float32)[:, None, None]


def _padded(lists: Sequence[Collection[int]], empty: int) -> mx.array:
    """Return [B, 1, M]: shorter lists repeat their last element, empty ones hold `empty`."""
    filled = [list(each) or [empty] for each in lists]
    width = max(map(len, filled))
    return mx.array([each + each[-1:] * (width - len(each)) for each in filled], mx.int32)[:, None]


def _support(sampled: list[SamplingParams]) -> int | None:
    """Return how many of the best tokens must be sorted: the largest top_k, 1 if all are greedy, None for all.

    A filter that compares with or sums over all tokens left (XTC) needs None, or its last bit would depend on the
    other sequences' top_k.
    """
    if any(p.xtc_probability > 0 or not p.top_k for p in sampled):
        return None
    return max((p.top_k for p in sampled), default=1)


def _bias(params: list[SamplingParams]) -> Bias | None:
    width = max(len(p.logit_bias) for p in params)
    if not width:
        return None
    values = [[*p.logit_bias.values(), *[0.0] * (width - len(p.logit_bias))] for p in params]
    return Bias(_padded([p.logit_bias for p in params], 0), mx.array(values, mx.float32)[:, None])


def _penalties(params: list[SamplingParams]) -> list[Penalty]:
    neutral: dict[Literal["repetition", "presence", "frequency"], float]
    neutral = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    penalties = []
    for kind, without in neutral.items():
        sizes = [getattr(p, f"{kind}_context_size") or 0 for p in params]  # 0: counted over all generated tokens
        strengths = [getattr(p, f"{kind}_penalty") if n else without for p, n in zip(params, sizes, strict=True)]
        if any(strength != without for strength in strengths):
            penalties.append(Penalty(kind, _column(strengths), _column(sizes)))
    return penalties


def _count_penalty(params: list[SamplingParams]) -> CountPenalty | None:
    if not any(p.counts_generated for p in params):
        return None
    presence = [p.presence_penalty if p.presence_context_size is None else 0.0 for p in params]
    frequency = [p.frequency_penalty if p.frequency_context_size is None else 0.0 for p in params]
    return CountPenalty(_column(presence), _column(frequency))


def _min_tokens(sequences: Sequence[SequenceParams]) -> MinTokens | None:
    if not any(s.params.min_tokens and s.params.stop_ids for s in sequences):
        return None
    free_at = [s.limit - s.params.min_tokens if s.params.stop_ids else MAX_INT32 for s in sequences]
    stop_ids = _padded([s.params.stop_ids for s in sequences], 0)
    return MinTokens(stop_ids, mx.array(free_at, mx.int32)[:, None])


def _top_n_sigma(params: list[SamplingParams]) -> mx.array | None:
    numbers = [p.top_n_sigma if p.sampled else 0.0 for p in params]
    return _column(numbers) if any(numbers) else None


def _xtc(params: list[SamplingParams]) -> Xtc | None:
    if not any(p.sampled and p.xtc_probability > 0 for p in params):
        return None
    probability = [p.xtc_probability if p.sampled else 0.0 for p in params]
    special = _padded([p.xtc_special_tokens for p in params], -1)
    return Xtc(_column(probability), _column([p.xtc_threshold for p in params]), special[:, :, None])
