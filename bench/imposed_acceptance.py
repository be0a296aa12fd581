"""Impose an acceptance on a model, to study what depth would gain if its own head cannot show it.

Random weights of a large model cost what trained ones do, but none of their drafts is accepted. So the greedy text is
recorded first and then decoded again: the source drafts at its full cost, and its drafts are replaced by recorded
tokens and wrong ones, as the pattern says. The trunk verifies as always, so the text must come out as it was
recorded; where it does not, the figures would mean nothing, and an error says so. Used by gpu.py.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from headstart.bench.local import decode_batch
from headstart.bench.measurement import Trial
from headstart.engine.batch import Batch
from headstart.engine.draft import SOURCES, Source
from headstart.engine.step import prefill_prompts, verify
from headstart.errors import HeadstartError, RequestError
from headstart.kernels.report import Report
from headstart.models import Model
from headstart.sampling import Proposal

GOLDEN = 0.6180339887498949  # its multiples spread evenly: few rounds suffice to follow the pattern


@dataclass(frozen=True)
class Recording:
    """What a model generates greedily after some prompts, without drafts."""

    prompts: Sequence[Sequence[int]]
    texts: list[list[int]]


def record(model: Model, prompts: Sequence[Sequence[int]], tokens: int) -> Recording:
    return Recording(prompts, decode_batch(model, prompts, 0, tokens).sequences)


def check_pattern(pattern: Sequence[float], k: int) -> None:
    """Refuse a pattern that is not cumulative: the share of rounds that accept at least one draft, two, and so on."""
    falling = all(a >= b for a, b in zip([1.0, *pattern], [*pattern, 0.0], strict=True))
    if len(pattern) < max(k, 1) or not falling:
        shares = ", ".join(f"{share:g}" for share in pattern)
        raise RequestError(f"acceptance {shares}: give {k} shares from 1 to 0, never rising, such as .88, .75, .62")


def decode_imposed(
    model: Model, recording: Recording, k: int, pattern: Sequence[float], source: int = Source.HEAD
) -> Trial:
    """Decode the recording again with k drafts per step, accepted by the pattern. Timed as in `decode_batch`."""
    check_pattern(pattern, k)
    limit = len(recording.texts[0])
    batch = prefill_prompts(model, recording.prompts, max_k=k, limit=limit)
    rounds = iter(_script(recording, k, pattern, model.vocabulary))
    sequences: list[list[int]] = [[] for _ in recording.prompts]
    outcomes: list[tuple[int, int]] = []  # of each round: drafts accepted, drafts proposed
    started, first = 0.0, 0
    pending = _launch(model, batch, k, next(rounds), source)
    while not any(len(sequence) >= limit for sequence in sequences):
        following = _launch(model, batch, k, next(rounds), source)  # the host is one step ahead, as in the engine
        for index, (*tokens, accepted, proposed) in enumerate(pending.read()):
            batch.trunk_state.bounds[index] -= k - accepted
            sequences[index] += tokens[: accepted + 1]
            outcomes.append((accepted, proposed))
        now = time.perf_counter()
        if not started:
            started, first = now, sum(map(len, sequences))
            outcomes.clear()
        pending = following
    mx.eval(pending.arrays)
    for index, (text, expected) in enumerate(zip(sequences, recording.texts, strict=True)):
        _check_same(text, expected[: len(text)], index, k)
    generated = sum(map(len, sequences)) - first
    return Trial(
        tokens=generated,
        seconds=now - started,
        tokens_per_round=generated / len(outcomes),
        proposed=[sum(proposed > j for _, proposed in outcomes) for j in range(k)],
        accepted=[sum(accepted > j for accepted, _ in outcomes) for j in range(k)],
        sequences=sequences,
    )


def _launch(model: Model, batch: Batch, k: int, drafts: mx.array, source: int) -> Report:
    """Launch a step and return its report [B, k+3]: tokens, accepted, proposed."""
    drafted = SOURCES[source](model, batch, k, None)
    verdict = verify(model, batch, replace_drafts(drafted, drafts)).verdict
    report = model.backend.report([verdict.tokens, verdict.accepted[:, None], verdict.proposed[:, None]])
    mx.async_eval(*report.arrays, *batch.arrays())
    return report


def replace_drafts(drafted: Proposal, drafts: mx.array) -> Proposal:
    """Return other drafts [B, k], which are there once the source's own are."""
    return Proposal(_after(drafted.tokens, drafts) if drafts.size else drafts)


@mx.compile
def _after(drafted: mx.array, drafts: mx.array) -> mx.array:
    """Return `drafts`. On CUDA `mx.depends` is not enough: kernels in one launch wait only for what they read."""
    return mx.where(drafted < 0, drafted, drafts)


def _script(recording: Recording, k: int, pattern: Sequence[float], vocabulary: int) -> list[mx.array]:
    """Return the drafts [B, k] of every round. What a round accepts is known beforehand, and so where the next
    begins: at the token after its drafts."""
    length = len(recording.texts[0])
    padded = [[*text, *[0] * (k + 1)] for text in recording.texts]
    at, rounds = [0] * len(padded), []
    for n in range(length + 2):  # the last rounds are launched before it is known that nobody needs them
        drafts = []
        for row, text in enumerate(padded):
            chance = ((n + 1) * GOLDEN + row * GOLDEN**2) % 1  # evenly over 0..1
            accepted = sum(chance < share for share in pattern[:k])
            right = text[min(at[row], length) :][:k]
            drafts.append([(token + (j >= accepted)) % vocabulary for j, token in enumerate(right)])
            at[row] += accepted + 1
        rounds.append(drafts)
    # Of an array that the device has made: from one of the host's, a kernel would first wait for a page.
    whole = mx.array(rounds, mx.int32).reshape(len(rounds), len(padded), k) + 0
    made = [whole[n] for n in range(len(rounds))]
    mx.eval(made)
    return made


def _check_same(text: list[int], expected: list[int], index: int, k: int) -> None:
    if text != expected:
        at = next(i for i, (a, b) in enumerate(zip(text, expected, strict=True)) if a != b)
        raise HeadstartError(
            f"at k = {k}, sequence {index} has token {text[at]} at position {at} where {expected[at]} was recorded: "
            "this device computes a window otherwise than a single token, so no acceptance can be imposed"
        )
