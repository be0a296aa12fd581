"""OpenAI's penalties: every generated token counts, however long ago, and no token of the prompt."""

from collections import Counter

import mlx.core as mx
import pytest

from fixtures import builtin_model, collect, generate, submit
from headstart.engine import Engine, Request
from headstart.sampling import SamplingParams

PROMPT = [5, 900, 31, 7]
ALL = {"presence_context_size": None, "frequency_context_size": None}


@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-0.5, 0.4)])
def test_greedy_output_follows_the_definition(presence: float, frequency: float, k: int) -> None:
    """Beyond 20 tokens, mlx-lm's context, and with the prompt's own tokens left alone."""
    engine = Engine(builtin_model())
    params = SamplingParams(max_tokens=30, k=k, presence_penalty=presence, frequency_penalty=frequency, **ALL)
    counts: Counter[int] = Counter()
    for event in engine.submit(Request(PROMPT, params, keep_logits=True)):
        for i, token in enumerate(event.tokens):
            assert event.logits is not None
            logits = event.logits[i].astype(mx.float32)
            for seen, count in counts.items():
                logits = logits.at[seen].add(-presence - frequency * count)
            assert token == int(mx.argmax(logits))
            counts[token] += 1
    assert counts.total() == 30


def test_a_sequence_that_lost_its_memory_goes_on_with_its_counts() -> None:
    params = {"max_tokens": 24, "temperature": 1.0, "seed": 11, "frequency_penalty": 1.2, "k": 1, **ALL}
    alone = generate(builtin_model(), PROMPT, **params).tokens
    engine = Engine(builtin_model())
    handle = submit(engine, PROMPT, **params)
    for _ in range(8):
        engine.run_once()
    engine._finish_pending()
    assert 0 < engine.scheduler.running.sequences[0].num_generated < 24
    engine.recovery.recompute_all()
    assert collect(handle).tokens == alone


def test_neighbours_without_counts_join_and_leave() -> None:
    params = {"max_tokens": 16, "presence_penalty": 2.0, **ALL}
    alone = generate(builtin_model(), PROMPT, **params).tokens
    plain = generate(builtin_model(), [77, 78], max_tokens=6).tokens
    assert alone != generate(builtin_model(), PROMPT, max_tokens=16).tokens
    engine = Engine(builtin_model())
    before, handle = submit(engine, [77, 78], max_tokens=6), submit(engine, PROMPT, **params)
    for _ in range(4):
        engine.run_once()
    after = submit(engine, [77, 78], max_tokens=6)
    assert collect(handle).tokens == alone
    assert collect(before).tokens == collect(after).tokens == plain
