"""What a step of this model costs on this machine, from a few that nobody reads.

Found out on a user's answer, it would cost a short one more than drafts can save it.
"""

import time

import mlx.core as mx

from ..models import Model
from .batch import Batch
from .cost import Cell
from .step import step, take_in

TEXT = [3, 5, 7, 11, 13, 17, 19, 23]
DEEPER = (3, 7)  # between and beyond them lies a line
SEVERAL = 4  # rows: how much longer a step takes then, with and without a draft, says it of any number of them
STEPS = 3  # of a depth in a row
ENOUGH = 0.5  # seconds; then nothing more is begun, but for depth 1 where there is depth 0
AT_EASE = 4.0  # seconds at most, where nobody waits for an answer yet: enough to look at all of it twice


def step_times(model: Model, most: int, max_rows: int, enough: float = ENOUGH) -> dict[Cell, list[float]]:
    """Seconds a step by rows and k, each time it was looked at, for about `enough` of them. The rows are thrown
    away."""
    begun, times = time.perf_counter(), dict[Cell, list[float]]()
    batches: dict[int, Batch] = {}
    tokens = [token % model.vocabulary for token in TEXT]
    texts = [tokens[i:] + tokens[:i] for i in range(SEVERAL)]  # where there are experts, each takes its own

    def measure(rows: int, k: int) -> None:
        if rows not in batches:
            batches[rows] = take_in(model, texts[:rows], most, model.context_length)
        times.setdefault((rows, k), []).append(_one_depth(model, batches[rows], k))

    both = sorted({0, min(1, most)})
    for rows in sorted({1, min(SEVERAL, max_rows)}):
        if rows == 1 or time.perf_counter() - begun < enough:
            for k in both:
                measure(rows, k)
    # A machine is busy for a while and then is not, so all of it twice.
    for cell in [*((1, k) for k in DEEPER if k <= most), *times, *((1, k) for k in DEEPER if k <= most)]:
        if time.perf_counter() - begun < enough:
            measure(*cell)
    return times


def _one_depth(model: Model, batch: Batch, k: int) -> float:
    """As the engine does it: a step is described while the device works on the one before. All of them are timed as
    one: where the host is late to see a step land, the next one only seems short."""
    for _ in range(2):  # the first makes up for what the depth before left; kernels are made for either of them
        mx.eval(step(model, batch, k).tokens, *batch.arrays())
    begun, flying = time.perf_counter(), None
    for _ in range(STEPS):
        said = step(model, batch, k).tokens
        mx.async_eval(said, *batch.arrays())
        if flying is not None:
            flying.tolist()
        flying = said
    mx.eval(said, *batch.arrays())
    return (time.perf_counter() - begun) / STEPS
