"""The sampling parameters of a batch's rows as arrays, and what of it all any row needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import mlx.core as mx

from .noise import Keys, Purpose, fold, split, uniform
from .params import SamplingParams


class Bias(NamedTuple):
    ids: mx.array  # [B, 1, M]
    values: mx.array  # [B, 1, M]


class Penalty(NamedTuple):
    kind: Literal["repetition", "presence", "frequency"]
    strength: mx.array  # [B, 1, 1]
    context_size: mx.array  # [B, 1, 1]


class CountPenalty(NamedTuple):
    """Penalties on all generated tokens, as OpenAI defines them; 0 for rows without."""

    presence: mx.array  # [B, 1, 1], for a token that was generated at all
    frequency: mx.array  # [B, 1, 1], for each time that it was


class Early(NamedTuple):
    """Stops that are forbidden while a row may still say more than `free_at` tokens."""

    stop_ids: mx.array  # [B, 1, S]
    free_at: mx.array  # [B, 1]


class Xtc(NamedTuple):
    probability: mx.array  # [B, 1, 1]
    threshold: mx.array  # [B, 1, 1]
    special: mx.array  # [B, 1, 1, S]


class SequenceParams(NamedTuple):
    """What one row asked for, and the words that key its noise."""

    params: SamplingParams
    key: int  # the seed, or a number of the request's own
    choice: int  # which of the n answers to one prompt
    limit: int  # tokens it may say in all


@dataclass(frozen=True)
class Controls:
    plain: bool  # every row takes the argmax of its logits as they are
    temperature: mx.array  # [B, 1, 1], 0 for greedy rows
    any_greedy: bool
    truncates: bool  # a row uses top_p, min_p, XTC or top_k
    support: int | None  # at most so many tokens can be drawn, or no bound
    top_p: mx.array  # [B, 1, 1], and so on
    min_p: mx.array
    min_keep: mx.array
    top_k: mx.array
    xtc: Xtc | None
    bias: Bias | None
    penalties: list[Penalty]
    count_penalty: CountPenalty | None
    early: Early | None
    keys: Keys  # [B]
    ratio: mx.array  # [B], rows judged by the ratio rule
    optimistic: mx.array  # [B]
    rules: frozenset[str]
    top_logprobs: int | None  # alternatives wanted beside each token's log-probability; None: no row wants any

    @property
    def adjusts(self) -> bool:
        penalties = bool(self.penalties) or self.count_penalty is not None
        return self.bias is not None or penalties or self.early is not None

    def keyed(self, purpose: Purpose, rounds: mx.array, positions: mx.array) -> Keys:
        """Keys [B, W] for one purpose at positions [B, W]. Rows of the ratio rule never use one twice; to coupled
        rows, drafting and choosing are one purpose, and rounds do not matter."""
        drawn = purpose in (Purpose.DRAFT, Purpose.RESIDUAL)
        keys = fold(self.keys, mx.where(self.ratio, rounds + 1, 0))
        keys = fold(keys, mx.where(self.ratio, int(purpose), int(Purpose.CHOICE if drawn else purpose)))
        return fold((keys[0][:, None], keys[1][:, None]), positions)

    def coins(self, rounds: mx.array, positions: mx.array) -> mx.array | None:
        return None if self.xtc is None else uniform(self.keyed(Purpose.XTC, rounds, positions))


def controls(rows: Sequence[SequenceParams], vocabulary: int) -> Controls:
    params = [row.params for row in rows]
    sampled = [p for p in params if p.sampled]
    words = [split(row.key) for row in rows]
    keys = (mx.array([w[0] for w in words], mx.uint32), mx.array([w[1] for w in words], mx.uint32))
    rules = [p.rule for p in params]
    wanted = [p.top_logprobs for p in params if p.logprobs]
    bias, penalties, early = _bias(params), _penalties(params), _early(rows)
    count_penalty = _count_penalty(params)
    adjusts = bias is not None or penalties or count_penalty is not None or early is not None
    return Controls(
        plain=not sampled and not adjusts and "optimistic" not in rules,
        temperature=_column([p.temperature for p in params]),
        any_greedy=len(sampled) < len(params),
        truncates=any(p.top_p < 1 or p.min_p > 0 or p.xtc_probability > 0 or p.top_k > 0 for p in sampled),
        support=_support(sampled),
        top_p=_column([p.top_p if p.top_p < 1 else 2.0 for p in params]),
        min_p=_column([p.min_p for p in params]),
        min_keep=_column([float(p.min_tokens_to_keep) for p in params]),
        top_k=_column([float(p.top_k or vocabulary) for p in params]),
        xtc=_xtc(params),
        bias=bias,
        penalties=penalties,
        count_penalty=count_penalty,
        early=early,
        keys=fold(keys, mx.array([row.choice for row in rows])),
        ratio=mx.array([rule == "ratio" for rule in rules]),
        optimistic=mx.array([rule == "optimistic" for rule in rules]),
        rules=frozenset(rules),
        top_logprobs=max(wanted) if wanted else None,
    )


def _column(values: list[float]) -> mx.array:
    return mx.array(values, mx.float32)[:, None, None]


def _support(sampled: list[SamplingParams]) -> int | None:
    """top_k bounds what can be drawn. XTC comes before it and compares shares of all that is left.

    Greedy rows need no more than 1, said only where there is nobody else: then nothing is sorted or drawn."""
    if any(p.xtc_probability > 0 or not p.top_k for p in sampled):
        return None
    return max((p.top_k for p in sampled), default=1)


def _padded(lists: list[list[int]], fill: int) -> mx.array:
    """[B, 1, M]"""
    width = max(map(len, lists))
    return mx.array([row + [fill] * (width - len(row)) for row in lists], mx.int32)[:, None]


def _bias(params: list[SamplingParams]) -> Bias | None:
    if not any(p.logit_bias for p in params):
        return None
    width = max(len(p.logit_bias) for p in params)
    values = [[*map(float, p.logit_bias.values()), *[0.0] * (width - len(p.logit_bias))] for p in params]
    return Bias(_padded([list(p.logit_bias) for p in params], 0), mx.array(values, mx.float32)[:, None])


def _penalties(params: list[SamplingParams]) -> list[Penalty]:
    neutral: dict[Literal["repetition", "presence", "frequency"], float]
    neutral = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    penalties = []
    for kind, nothing in neutral.items():
        sizes = [getattr(p, f"{kind}_context_size") for p in params]
        strengths = [
            float(getattr(p, f"{kind}_penalty")) if size is not None else nothing
            for p, size in zip(params, sizes, strict=True)
        ]
        if any(s != nothing for s in strengths):
            penalties.append(Penalty(kind, _column(strengths), _column([float(size or 0) for size in sizes])))
    return penalties


def _count_penalty(params: list[SamplingParams]) -> CountPenalty | None:
    if not any(p.counts_generated for p in params):
        return None
    presence = [p.presence_penalty if p.presence_context_size is None else 0.0 for p in params]
    frequency = [p.frequency_penalty if p.frequency_context_size is None else 0.0 for p in params]
    return CountPenalty(_column(presence), _column(frequency))


def _early(rows: Sequence[SequenceParams]) -> Early | None:
    if not any(row.params.min_tokens and row.params.stop_ids for row in rows):
        return None
    lists = [list(row.params.stop_ids) or [0] for row in rows]
    width = max(map(len, lists))
    ids = mx.array([row + row[-1:] * (width - len(row)) for row in lists], mx.int32)[:, None]
    never = 2**31 - 1
    free = [row.limit - row.params.min_tokens if row.params.stop_ids else never for row in rows]
    return Early(ids, mx.array(free, mx.int32)[:, None])


def _xtc(params: list[SamplingParams]) -> Xtc | None:
    if not any(p.sampled and p.xtc_probability > 0 for p in params):
        return None
    special = _padded([list(p.xtc_special_tokens) or [-1] for p in params], -1)
    probability = [p.xtc_probability if p.sampled else 0.0 for p in params]
    return Xtc(_column(probability), _column([p.xtc_threshold for p in params]), special[:, :, None])
