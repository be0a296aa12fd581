"""Time a step by batch size and depth, beside mlx-lm's own step over the same weights in the same run.

    python bench/step.py [MODEL] [--rows 1 4] [--k 0 1 2 3] [--repeats 7]
    python bench/step.py --describe metal [--k 0 3] [--repeats 30]

`--describe` times what the host needs to describe a step, on any machine: see `describe.py`.

Runs are interleaved and medians taken, so that a noisy machine shifts all columns alike; the ratios are what counts.
`host` is the time that Python needs to build a step's graph, most of it while the device works on the step before.
mlx-lm's column is its `generate_step` for one sequence, its forward and an argmax for more.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from statistics import median

import mlx.core as mx
from harness import line, options, ratio, table, turns
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from headstart.checkpoint import load_model
from headstart.engine.step import prefill_prompts, step
from headstart.models import Model

PROMPT = [(7 * i) % 97 + 1 for i in range(64)]
STEPS = 12  # between two looks at the clock; fewer interleave more finely


def ours(model: Model, rows: int, k: int) -> tuple[float, float]:
    """Return ms per step and ms of it in Python, with the engine's one step of overlap."""
    batch = prefill_prompts(model, [PROMPT] * rows, k)
    mx.eval(step(model, batch, k).verdict.tokens, *batch.arrays())
    host, start, last = 0.0, time.perf_counter(), None
    for _ in range(STEPS):
        started = time.perf_counter()
        result = step(model, batch, k).verdict
        host += time.perf_counter() - started
        mx.async_eval(result.tokens, result.accepted, result.finite, *batch.arrays())
        if last is not None:
            last.tolist()
        last = result.tokens
    assert last is not None
    last.tolist()
    return (time.perf_counter() - start) / STEPS * 1e3, host / STEPS * 1e3


def mlx_lm(model: Model, rows: int) -> float:
    """Return ms per step of mlx-lm."""
    if rows == 1:
        tokens = generate_step(mx.array(PROMPT), model.lm, max_tokens=STEPS + 1)
        next(tokens)
        start = time.perf_counter()
        list(islice(tokens, STEPS))
        return (time.perf_counter() - start) / STEPS * 1e3
    cache = make_prompt_cache(model.lm)
    token = mx.argmax(model.lm(mx.array([PROMPT] * rows), cache=cache)[:, -1:], axis=-1)
    mx.eval(token)
    start, last = time.perf_counter(), token
    for _ in range(STEPS):
        token = mx.argmax(model.lm(token, cache=cache), axis=-1)
        mx.async_eval(token)
        last.tolist()
        last = token
    last.tolist()
    return (time.perf_counter() - start) / STEPS * 1e3


def main() -> None:
    given = options(__doc__, "model", rows=[1, 4], k=[0, 1, 2, 3, 5, 8], repeats=7, steps=STEPS, describe="")
    if given.describe:
        from describe import describe  # needs the tests' tools

        describe([given.model] if given.model else ["27b", "35b"], given.k, given.repeats)
        return
    globals()["STEPS"] = given.steps
    model = load_model(given.model)
    runs: dict[tuple[int, int | str], Callable[[], tuple[float, float | None]]] = {}
    for rows in given.rows:
        runs[rows, "mlx-lm"] = lambda rows=rows: (mlx_lm(model, rows), None)
        runs |= {(rows, k): partial(ours, model, rows, k) for k in given.k}
    found = turns(runs, given.repeats)
    times = {name: [ms for ms, _ in each] for name, each in found.items()}
    table("sequences", "k", "ms per step", "to mlx-lm's", "to k = 0", "host ms")
    for (rows, k), own in times.items():
        others = times[rows, "mlx-lm"], times.get((rows, 0))
        host = median(ms for _, ms in found[rows, k]) if k != "mlx-lm" else None
        line(rows, k, median(own), *[other and ratio(own, other) for other in others], host)


if __name__ == "__main__":
    main()
