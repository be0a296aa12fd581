"""What a step of this model costs on this machine, from a few that nobody reads.

Found out on a user's answer, it would cost a short one more than drafts can save it.
"""

import time

import mlx.core as mx

from ..models import Model
from ..sampling import Asked, SamplingParams
from .batch import Batch
from .cost import Cell
from .step import prefill, step

TEXT = [3, 5, 7, 11, 13, 17, 19, 23]
DEPTHS = (0, 1, 3, 7)  # between and beyond them lies a line
STEPS = 3  # of a depth in a row
SWEEPS = 2  # over all depths: a machine is busy for a while and then is not
ENOUGH = 0.5  # seconds; then only what is missing of depths 0 and 1 is measured


def step_times(model: Model, most: int) -> dict[Cell, list[float]]:
    """Seconds a step of one row by k, each time it was looked at. The row is thrown away."""
    text = [token % model.vocabulary for token in TEXT]
    row = Batch.of_one(model, text, Asked(SamplingParams(), key=0, choice=0, limit=model.context_length), most)
    prefill(model, row, mx.array([text[:-1]], mx.int32), mx.array(text[-1:], mx.int32))
    mx.eval(row.arrays())
    begun, times = time.perf_counter(), dict[Cell, list[float]]()
    for k in [k for _ in range(SWEEPS) for k in DEPTHS if k <= most]:
        if time.perf_counter() - begun > ENOUGH and {(1, 0), (1, min(1, most))} <= times.keys():
            break
        times.setdefault((1, k), []).append(_one_depth(model, row, k))
    return times


def _one_depth(model: Model, row: Batch, k: int) -> float:
    """As the engine does it: a step is described while the device works on the one before. All of them are timed as
    one: where the host is late to see a step land, the next one only seems short."""
    mx.eval(step(model, row, k).tokens, *row.arrays())  # makes up for what the depth before left
    begun, flying = time.perf_counter(), None
    for _ in range(STEPS):
        said = step(model, row, k).tokens
        mx.async_eval(said, *row.arrays())
        if flying is not None:
            flying.tolist()
        flying = said
    mx.eval(said, *row.arrays())
    return (time.perf_counter() - begun) / STEPS
