"""How a model's tokens are sampled, and what may do that: see `tune.py`."""

from collections.abc import Mapping
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from ...sampling import BatchContext, Controls, Proposal, SamplingParams, SequenceParams, controls
from ..backend import Backend
from ..weights import matrix_weights
from .choice import MOST_ROWS, Operation, Run, Runs
from .steps import SAMPLING, MetalSampling, sampling_shape
from .tune import STOCK, _random

DRAFTS = 2
# Every way to truncate a row, of sequences side by side. None lies where rounding decides what is kept.
WAYS = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20),
    SamplingParams(temperature=0.9, min_p=0.05, seed=1),
    SamplingParams(temperature=0.8, xtc_probability=1.0, xtc_threshold=0.05),
    SamplingParams(temperature=0.8, xtc_probability=1.0, xtc_threshold=0.05, top_k=9, accept="optimistic"),
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=0.6, seed=2),
    SamplingParams(temperature=0.6, top_k=5),
)
CHANGED = SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3, frequency_context_size=None)


class AllMetal(MetalSampling):
    """Sampling by our kernels, which are not chosen yet."""

    def draws(self, vocabulary: int) -> bool:
        return True


def sampling_operations(weights: nn.Module, dtype: mx.Dtype) -> list[Operation]:
    """Return what samples from a model's logits."""
    if "lm_head" not in weights and "embed_tokens" not in weights:
        return []
    V = matrix_weights(weights["lm_head" if "lm_head" in weights else "embed_tokens"]).outputs

    def candidates() -> Mapping[str, Runs | str]:
        logits = 3 * _random(MOST_ROWS, 1 + DRAFTS, V, dtype=mx.float32)
        rows = logits.astype(dtype), (logits + _random(MOST_ROWS, 1 + DRAFTS, V, dtype=mx.float32)).astype(dtype)

        @cache
        def parameters(changed: bool) -> list[SequenceParams]:
            ways = [CHANGED if changed and n % 2 else WAYS[n % len(WAYS)] for n in range(MOST_ROWS)]
            return [SequenceParams(params, 7 + n, 0, 99) for n, params in enumerate(ways)]

        def run_by(backend: Backend, changed: bool) -> Run:
            def run(b: slice, w: slice) -> mx.array:
                target, drafter = (each[b] for each in rows)
                return sample(backend, target, drafter, controls(parameters(changed)[b], V))

            return run

        def both(backend: Backend) -> Run:
            """The same bits with and without a neighbour that changes its logits."""
            plain, changed = run_by(backend, False), run_by(backend, True)
            return lambda b, w: mx.concatenate([plain(b, w), changed(b, w)], axis=-1)

        return {"stock": (both(STOCK),), "metal": (both(AllMetal()),)}

    return [Operation(SAMPLING, sampling_shape(V), candidates)]


def sample(backend: Backend, target: mx.array, drafter: mx.array, rows: Controls) -> mx.array:
    """Draft tokens from rows [B, W, V] of a drafter's logits, and accept them by the target's. Returns the drafts,
    the tokens that count, how many drafts those are, and their log-probabilities, [B, 1, n]."""
    B, W, V = target.shape
    counts = mx.zeros((B, V)) if rows.count_penalty is not None else None
    seen = mx.arange(20 if rows.penalties else 0, dtype=mx.int32) % V
    recent = mx.broadcast_to(seen, (B, seen.size))
    numbers = mx.full((B,), 40, mx.int32)
    context, proposal = BatchContext(rows, numbers, numbers, recent, numbers, counts), Proposal.none(B)
    for i in range(W - 1):
        proposal = backend.propose(drafter[:, i : i + 1], proposal, context)
    window = mx.concatenate([mx.zeros((B, 1), mx.int32), proposal.tokens], axis=1)
    choice = backend.choose(target, window, proposal, numbers, context)
    accepted = Backend.accept(backend, choice, window, numbers, context).accepted[:, None]
    tokens = mx.where(mx.arange(W) <= accepted, choice.tokens, 0)
    scores = backend.logprobs(target, tokens, 2)
    made = [
        proposal.tokens,
        tokens,
        accepted,
        scores.top_ids.reshape(B, -1),
        scores.chosen,
        scores.top.reshape(B, -1),
    ]
    return mx.concatenate([each.astype(mx.float32) for each in made], axis=-1)[:, None]
