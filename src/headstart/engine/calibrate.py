"""Time a few steps of a model before its first answer.

Measured while a user waits, the same would cost a short answer more than drafts can save it.
"""

import time

import mlx.core as mx

from ..models import Model
from .batch import Batch
from .step import prefill_prompts, step

PROMPT = [3, 5, 7, 11, 13, 17, 19, 23]
DEEPER = (3, 7)  # depths timed besides 0 and 1
CALIBRATION_BATCH = 4  # sequences timed besides 1; the linear model gives any other number
STEPS = 3  # timed together
BUDGET = 0.5  # seconds after which no further depth is timed, other than k = 0 and 1 of one sequence
WARM_UP_BUDGET = 4.0  # the same for a server that has no request yet: enough to time everything twice


def step_times(
    model: Model, most: int, max_sequences: int, budget: float = BUDGET
) -> dict[tuple[int, int], list[float]]:
    """Return seconds per step by (n, k), one entry for each time it was measured, within about `budget` seconds."""
    begun, times = time.perf_counter(), dict[tuple[int, int], list[float]]()
    batches: dict[int, Batch] = {}
    tokens = [token % model.vocabulary for token in PROMPT]
    prompts = [
        tokens[i:] + tokens[:i] for i in range(CALIBRATION_BATCH)
    ]  # different, so MoE models load more experts

    def measure(n: int, k: int) -> None:
        if n not in batches:
            batches[n] = prefill_prompts(model, prompts[:n], most, model.context_length)
        times.setdefault((n, k), []).append(_seconds_per_step(model, batches[n], k))

    first = [(1, k) for k in (0, 1) if k <= most]
    batched = [(min(CALIBRATION_BATCH, max_sequences), k) for _, k in first] if max_sequences > 1 else []
    deeper = [(1, k) for k in DEEPER if k <= most]
    for pair in first:
        measure(*pair)
    for pair in [*batched, *deeper, *first, *batched, *deeper]:  # twice: the machine may be busy for a while
        if time.perf_counter() - begun < budget:
            measure(*pair)
    return times


def _seconds_per_step(model: Model, batch: Batch, k: int) -> float:
    """Run steps as the engine does, each described while the device works on the one before."""
    for _ in range(2):  # the first clears up after the depth before; both may compile kernels
        mx.eval(step(model, batch, k).tokens, *batch.arrays())
    begun, running = time.perf_counter(), None
    for _ in range(STEPS):  # timed as one: where the host sees a step late, the next only seems short
        tokens = step(model, batch, k).tokens
        mx.async_eval(tokens, *batch.arrays())
        if running is not None:
            running.tolist()
        running = tokens
    mx.eval(tokens, *batch.arrays())
    return (time.perf_counter() - begun) / STEPS
