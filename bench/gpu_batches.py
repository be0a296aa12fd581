"""Batches with an imposed acceptance: the part of gpu.py that is about many sequences.

The head drafts at its full cost, and its drafts are replaced on the device by what the model is known to say next,
right as often as the pattern says. So the engine, its depth controller included, decodes a random model as it would
a trained one, and what it says must be what was recorded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import mlx.core as mx
from harness import line, note, ratio, table, turns
from imposed_acceptance import GOLDEN, Recording, replace_drafts

from headstart.bench.local import K, decode_batch
from headstart.bench.measurement import Trial
from headstart.engine.batch import Batch
from headstart.engine.draft import SOURCES, Source
from headstart.models import Model
from headstart.sampling import Proposal

SIZES = (1, 4, 16, 64)
CONTEXT, TOKENS, TURNS = 1000, 160, 2
MARGIN = 24  # tokens recorded beyond those that are decoded: what is drafted after the end


@contextmanager
def imposed(recording: Recording, pattern: Sequence[float]) -> Iterator[None]:
    """Have the head's drafts replaced. Every prompt begins with a token of its own, by which it is known."""
    firsts = [prompt[0] for prompt in recording.prompts]
    assert len(set(firsts)) == len(firsts)
    texts, starts = mx.array(recording.texts, mx.int32), mx.array([len(p) for p in recording.prompts], mx.int32)
    own, chances = SOURCES[Source.HEAD], mx.array(list(pattern))

    def source(model: Model, batch: Batch, k: int, certain: mx.array | None) -> Proposal:
        drafted = own(model, batch, k, certain)
        if not k:
            return drafted
        row = (batch.history[:, :1] == mx.array(firsts, mx.int32)).argmax(axis=1)  # [B]
        first = batch.trunk_state.lengths + 1 - starts[row]  # of the recorded text
        places = mx.clip(first[:, None] + mx.arange(k), 0, texts.shape[1] - 1)  # [B, k]
        right = mx.take_along_axis(texts[row], places, axis=1)
        chance = ((batch.rounds + 1) * GOLDEN + row * GOLDEN**2) % 1  # evenly over 0..1
        accepted = (chance[:, None] < chances[:k]).sum(axis=1, keepdims=True)
        wrong = (mx.arange(k) >= accepted).astype(mx.int32)
        return replace_drafts(drafted, (right + wrong) % model.vocabulary)

    SOURCES[Source.HEAD] = source
    try:
        yield
    finally:
        SOURCES[Source.HEAD] = own


def batches(
    name: str,
    model: Model,
    pattern: Sequence[float],
    prompts: Callable[[int, int], list[list[int]]],
    step_seconds: Callable[..., float],
) -> None:
    """Print a step at k = 0 and 3, and tokens/s of `auto` beside k = 0, by the number of sequences."""
    table("sequences", "k", "ms a step", "to k = 0", "tokens/s", "to k = 0", "tokens a round", "same text")
    for size in SIZES:
        asked = prompts(size, min(CONTEXT, model.context_length // 60))
        steps = turns({k: partial(step_seconds, model, asked, k) for k in (0, 3)}, TURNS) if size < 64 else {}
        whole = decode_batch(model, asked, 0, TOKENS + MARGIN)
        with imposed(Recording(asked, whole.sequences), pattern):
            runs: dict[K, Callable[[], Trial]] = {
                k: partial(decode_batch, model, asked, k, TOKENS) for k in (0, 3, "auto")
            }
            found = turns(runs, TURNS)
        for k, trials in found.items():
            seconds = steps.get(k) if isinstance(k, int) else None
            rates = [each.rate for each in trials]
            same = all(
                text == known[: len(text)]
                for each in trials
                for text, known in zip(each.sequences, whole.sequences, strict=True)
            )
            line(
                size,
                k,
                1e3 * median(seconds) if seconds else None,
                ratio(seconds, steps[0]) if seconds else None,
                median(rates),
                ratio(rates, [each.rate for each in found[0]]),
                trials[-1].tokens_per_round,
                same,
            )
            note(f"{name} batch {size} {k}", [seconds, rates, same])
