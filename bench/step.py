"""Time a step by batch size and depth, beside mlx-lm's own step over the same weights in the same run.

    python bench/step.py [MODEL] [--rows 1 4] [--k 0 1 2 3] [--repeats 7]

Runs are interleaved and medians taken, so that a noisy machine shifts all columns alike; the ratios are what counts.
`host` is the time that Python needs to build a step's graph, most of it while the device works on the step before.
mlx-lm's column is its `generate_step` for one sequence, its forward and an argmax for more.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import islice

import mlx.core as mx
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
    mx.eval(step(model, batch, k).tokens, *batch.arrays())
    host, start, last = 0.0, time.perf_counter(), None
    for _ in range(STEPS):
        started = time.perf_counter()
        result = step(model, batch, k)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--k", type=int, nargs="+", default=[0, 1, 2, 3, 5, 8])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    globals()["STEPS"] = arguments.steps
    model = load_model(arguments.model)

    runs: dict[tuple[int, int | str], Callable[[], tuple[float, float]]] = {}
    for rows in arguments.rows:
        runs[rows, "mlx-lm"] = lambda rows=rows: (mlx_lm(model, rows), float("nan"))
        for k in arguments.k:
            runs[rows, k] = lambda rows=rows, k=k: ours(model, rows, k)
    times: dict[tuple[int, int | str], list[tuple[float, float]]] = {name: [] for name in runs}
    for repeat in range(arguments.repeats + 1):  # the first warms up
        for name, run in runs.items():
            measured = run()
            if repeat:
                times[name].append(measured)
        print(f"run {repeat} of {arguments.repeats}", end="\r", flush=True)

    print("| sequences | k | ms per step | to mlx-lm's | to k = 0 | host ms |\n| --- | --- | --- | --- | --- | --- |")
    for (rows, k), measured in times.items():
        # Ratios are taken within a repeat, where the machine was the same, and then their median.
        def ratio(to: int | str, rows: int = rows, measured: list[tuple[float, float]] = measured) -> str:
            other = times.get((rows, to))
            pairs = zip(measured, other or [], strict=bool(other))
            return f"{statistics.median(a[0] / b[0] for a, b in pairs):.2f}" if other else ""

        step_ms = statistics.median(m[0] for m in measured)
        host = f"{statistics.median(m[1] for m in measured):.2f}" if k != "mlx-lm" else ""
        print(f"| {rows} | {k} | {step_ms:.2f} | {ratio('mlx-lm')} | {ratio(0)} | {host} |")


if __name__ == "__main__":
    main()
