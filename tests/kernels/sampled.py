"""Batches that sample in every way, from logits of every kind: what kernels draw is compared with the reference."""

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from fixtures import batch_of, random_prompt
from headstart.engine.step import step
from headstart.kernels import Backend
from headstart.kernels.sampling import adjust
from headstart.models import Model
from headstart.sampling import BatchContext, Controls, Proposal, SamplingParams, SequenceParams, controls

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
CONTEXT = 9  # most tokens that a penalty looks at


def some_params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": rng.choice([0.0, 0.1, 0.6, 0.8, 1.0, 1.5])}
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
    return params


def some_changes(rng: random.Random) -> dict[str, Any]:
    """Parameters that change logits; ids of stops are low, as those of a text that `contexts` makes are."""
    changes: dict[str, Any] = {}
    if rng.random() < 0.3:
        changes["logit_bias"] = {rng.randrange(16): rng.choice([-100.0, -1.5, 2.25]) for _ in range(3)}
    if rng.random() < 0.5:
        size = rng.choice([1, 4, CONTEXT])
        changes |= {"repetition_penalty": rng.choice([0.8, 1.3]), "repetition_context_size": size}
    for kind in ("presence", "frequency"):
        if rng.random() < 0.4:
            size = rng.choice([None, 2, CONTEXT])
            changes |= {f"{kind}_penalty": rng.choice([-0.7, 0.3]), f"{kind}_context_size": size}
    if rng.random() < 0.3:
        changes |= {"min_tokens": rng.choice([7, 250]), "stop_ids": (2, 5)}
    return changes


def context_of(params: list[dict[str, Any]], vocabulary: int, rng: random.Random) -> BatchContext:
    """Where sequences with these parameters are, which have a text that repeats itself."""
    sequences = [SequenceParams(SamplingParams(**each), rng.getrandbits(64), 0, 1000) for each in params]
    numbers = [mx.array([rng.randrange(50) for _ in params], mx.int32) for _ in range(2)]
    left = mx.array([rng.choice([1, 3, 100, 995]) for _ in params], mx.int32)
    size = max(each.params.context_size for each in sequences)
    text = np.array([[rng.randrange(-1, 12) for _ in range(size)] for _ in params], np.int32)
    counts = None
    if any(each.params.counts_generated for each in sequences):
        counts = mx.array([[float(rng.randrange(3)) for _ in range(vocabulary)] for _ in params])
    recent = mx.array(text).reshape(len(params), size)
    if size:
        recent[:, -1] = mx.maximum(recent[:, -1], 0)  # a sequence has a token
    return BatchContext(controls(sequences, vocabulary), *numbers, recent, left, counts)


def some_logits(rng: random.Random, *shape: int) -> mx.array:
    """Logits [B, W, V], every sequence's of another kind."""
    noise = np.random.default_rng(rng.getrandbits(32))
    return mx.array(np.stack([KINDS[rng.choice([*KINDS])](noise, shape[1:]) for _ in range(shape[0])]), mx.float32)


def some_batch(
    rng: random.Random, vocabulary: int, *, changed: bool = False, shape: tuple[int, int] | None = None
) -> tuple[BatchContext, mx.array, int]:
    """The context of a batch, logits [B, W, V] of either type, and W; with a `shape` these, in bfloat16."""
    sequences, width = shape or (rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4, 6]))
    dtype = mx.bfloat16 if shape else rng.choice([mx.float32, mx.bfloat16])
    params = [some_params(rng) | (some_changes(rng) if changed else {}) for _ in range(sequences)]
    logits = some_logits(rng, sequences, width, vocabulary).astype(dtype)
    return context_of(params, vocabulary, rng), logits, width


def some_drafters(rng: random.Random, logits: mx.array) -> tuple[list[mx.array], mx.array, mx.array]:
    """Logits [B, 1, V] of drafts that the target [B, W, V] often accepts, drafts [B, W] that are certain or -1, and
    how many may be accepted, [B]."""
    B, width, V = logits.shape
    noise = mx.random.normal((B, width - 1, V), key=mx.random.key(rng.getrandbits(30)))
    near = mx.where(mx.isfinite(logits[:, :-1]), logits[:, :-1] + noise / 4, -20).astype(logits.dtype)
    forced = np.random.default_rng(rng.getrandbits(32)).random((B, width)) < rng.choice([0, 0.4])
    max_k = mx.array([rng.randrange(width + 1) for _ in range(B)], mx.int32)
    return [near[:, i : i + 1] for i in range(width - 1)], mx.array(np.where(forced, 5, -1), mx.int32), max_k


def windows(
    backend: Backend,
    logits: mx.array,
    drafters: list[mx.array],
    certain: mx.array,
    max_k: mx.array,
    context: BatchContext,
    permitted: mx.array | None = None,
) -> list[list[Any]]:
    """What a window drafts and generates, by sequence; None where logits are not finite."""
    proposal = Proposal.none(logits.shape[0])
    for i, drafter in enumerate(drafters):
        proposal = backend.propose(drafter, proposal, context, certain[:, i : i + 1])
    window = mx.concatenate([mx.zeros_like(max_k)[:, None], proposal.tokens], axis=1)
    choice = backend.choose(logits, window, proposal, max_k, context, permitted)
    verdict = backend.accept(choice, window, max_k, context)
    mx.eval(*verdict, proposal.tokens)
    accepted, drafts = np.array(verdict.accepted), proposal.tokens.tolist()
    return [
        [drafts[b], verdict.tokens[b, : n + 1].tolist() if verdict.finite[b].item() else None]  # type: ignore[index]
        for b, n in enumerate(accepted.tolist())
    ]


def on_edge(
    logits: mx.array, context: BatchContext, drafts: mx.array, first: int = 0, permitted: mx.array | None = None
) -> np.ndarray:
    """Whether rows [B, W] keep or drop a token by less than rounding may change, where sums have another order: its
    share of the mass before it is top_p's, or its probability XTC's threshold, to about a millionth."""
    x = np.array(adjust(logits, context, drafts, first, permitted).astype(mx.float32), np.float64)
    with np.errstate(invalid="ignore"):
        best = x.max(axis=-1, keepdims=True)
        p = np.where(np.isfinite(x), np.exp(x - best), 0)
    p = -np.sort(-p / np.maximum(p.sum(axis=-1, keepdims=True), 1e-300), axis=-1)
    near = 3e-6 + 2.0**-21 * np.abs(best)
    rows: Controls = context.controls
    before = np.cumsum(p, axis=-1) - p
    found = (np.abs(before - np.array(rows.top_p)) < near).any(axis=-1)
    if rows.xtc is not None:
        before = np.where(before < np.array(rows.top_p), p, 0)
        for kept in (before, np.where(p >= p[..., :1] * np.array(rows.min_p), before, 0)):
            share = kept / np.maximum(kept.sum(axis=-1, keepdims=True), 1e-300)
            apart = np.abs(share / np.array(rows.xtc.threshold) - 1)
            found |= (apart < 10 * near).any(axis=-1)
    return found


def steps_of(model: Model, params: list[dict[str, Any]], ks: list[int]) -> list[list[list[int]]]:
    """What steps with these numbers of drafts generate."""
    batch = batch_of(model, *[random_prompt(model, 5 + 3 * row, row) for row in range(len(params))], k=3)
    batch._set_params([SequenceParams(SamplingParams(**each), 7, 0, 100) for each in params], model)
    batch.counts = mx.zeros((len(params), model.vocabulary))
    made = []
    for k in ks:
        done = step(model, batch, k)
        assert done.verdict.finite.tolist() == [1] * len(params)
        pairs = zip(done.verdict.tokens.tolist(), done.verdict.accepted.tolist(), strict=True)
        made.append([tokens[: n + 1] for tokens, n in pairs])
    return made
