"""Measure what sampling costs: whole steps with each parameter, beside greedy ones.

    python bench/sampling.py [MODEL] [--k 0 3] [--sequences 1] [--repeats 9] [--stock]

Settings take turns, a few steps each; figures are medians over the turns. `--stock` also measures each with MLX's
operations for drawing and accepting, on the same kernels for the layers.
"""

import argparse
import statistics
import time
from dataclasses import replace

import mlx.core as mx

from headstart.checkpoint import load_model
from headstart.engine.step import prefill_prompts, step
from headstart.kernels.cpu.backend import CpuBackend
from headstart.kernels.sampling import SamplingSteps
from headstart.models import Model
from headstart.sampling import SamplingParams

PROMPT = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41]
STEPS = 4  # of a turn, after one that is not timed
SETTINGS = {
    "greedy": SamplingParams(),
    "temperature .8": SamplingParams(temperature=0.8),
    "with a seed": SamplingParams(temperature=0.8, seed=1),
    "with top_p .95, top_k 20": SamplingParams(temperature=0.8, top_p=0.95, top_k=20),
    "with top_p .95": SamplingParams(temperature=0.8, top_p=0.95),
    "with min_p .05": SamplingParams(temperature=0.8, min_p=0.05),
    "with XTC": SamplingParams(temperature=0.8, xtc_probability=0.5, xtc_threshold=0.1),
    "with presence and frequency penalties": SamplingParams(
        temperature=0.8, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "greedy, repetition penalty 1.1": SamplingParams(repetition_penalty=1.1),
    "greedy, five log-probabilities": SamplingParams(logprobs=True, top_logprobs=5),
}


class StockSampling(CpuBackend):
    """The kernels of a CPU, but for sampling."""

    propose, propose_certain = SamplingSteps.propose, SamplingSteps.propose_certain
    choose, draw = SamplingSteps.choose, SamplingSteps.draw


def turn(model: Model, params: SamplingParams, k: int, sequences: int) -> float:
    """Return the milliseconds of a step."""
    prompts = [PROMPT[i % 5 :] + PROMPT[: i % 5] for i in range(sequences)]
    batch = prefill_prompts(model, prompts, k, sampling=params)
    for n in range(STEPS + 1):
        if n == 1:
            started = time.perf_counter()
        result = step(model, batch, k)
        mx.eval(result.verdict, result.logprobs or [], *batch.arrays())
    return (time.perf_counter() - started) / STEPS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny-qwen3.5")
    parser.add_argument("--k", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--stock", action="store_true")
    given = parser.parse_args()
    models = {"": load_model(given.model)}
    if given.stock:
        models[", MLX's operations"] = replace(models[""], backend=StockSampling(models[""].backend.native))
    cells = [(name, made, k) for name in SETTINGS for made in models for k in given.k]
    times: dict[tuple[str, str, int], list[float]] = {cell: [] for cell in cells}
    for _ in range(given.repeats):
        for name, made, k in cells:
            times[name, made, k].append(turn(models[made], SETTINGS[name], k, given.sequences))
    print("| | " + " | ".join(f"k = {k} | to greedy" for k in given.k) + " |")
    print("| --- |" + " ---: |" * 2 * len(given.k))
    for name in SETTINGS:
        for made in models:
            each = [statistics.median(times[name, made, k]) for k in given.k]
            to = [ms / statistics.median(times["greedy", "", k]) for ms, k in zip(each, given.k, strict=True)]
            print(
                f"| {name}{made} | " + " | ".join(f"{a:.2f} | {b:.2f}" for a, b in zip(each, to, strict=True)) + " |"
            )


if __name__ == "__main__":
    main()
