"""Rows that decode with no engine around them, for what must be measured or imposed step by step."""

from collections.abc import Sequence
from itertools import cycle, islice

import mlx.core as mx

from ..engine.batch import Batch
from ..engine.step import prefill
from ..models import Model
from ..sampling import Asked, SamplingParams
from ..state import CHUNK


def take_in(model: Model, prompts: Sequence[Sequence[int]], ceiling: int, limit: int = 10**6) -> Batch:
    """A row for each prompt, greedy, all of it but its last token taken in. With a ceiling of 0 there is no head."""
    running: Batch | None = None
    for prompt in prompts:
        row = Batch.of_one(model, prompt, Asked(SamplingParams(), key=0, choice=0, limit=limit), ceiling)
        for start in range(0, len(prompt) - 1, CHUNK):
            end = min(start + CHUNK, len(prompt) - 1)
            prefill(model, row, mx.array([prompt[start:end]], mx.int32), mx.array([prompt[end]], mx.int32))
            mx.eval(row.arrays())
        if running is None:
            running = row
        else:
            running.join(row, model)
    assert running is not None
    mx.eval(running.arrays())
    return running


def spread(prompts: Sequence[Sequence[int]], rows: int) -> list[Sequence[int]]:
    """A prompt for each row; where there are too few, some have the same."""
    return list(islice(cycle(prompts), rows))
