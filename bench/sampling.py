"""Measure what sampling costs: whole steps with each parameter, beside greedy ones.

    python bench/sampling.py [MODEL] [--k 0 3] [--sequences 1] [--repeats 9] [--stock]
    python bench/sampling.py [MODEL] --rounds 32 [--k 1 3 5]

Settings take turns, a few steps each; figures are medians over the turns, and of ratios within a turn. `--stock` also
measures each with MLX's operations for drawing and accepting, on the same kernels for the layers. `--rounds` counts
tokens a round in so many answers of 256 tokens instead, by temperature and acceptance rule.
"""

import time
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median

import mlx.core as mx
from harness import line, options, ratio, table, turns
from invariance import TASKS

from headstart.bench.local import decode_batch
from headstart.bench.prompts import BenchPrompt
from headstart.checkpoint import load_model, load_tokenizer, resolve
from headstart.engine.step import prefill_prompts, step
from headstart.kernels.cpu.backend import CpuBackend
from headstart.kernels.sampling import SamplingSteps
from headstart.models import Model
from headstart.sampling import SamplingParams

PROMPT = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41]
TEMPERATURES, RULES = (0.0, 0.6, 0.8, 1.0), ("ratio", "coupled")
TOKENS, AT_ONCE = 256, 16  # of an answer, answers at once
STEPS = 4  # of a turn, after one that is not timed
SETTINGS = {
    "greedy": SamplingParams(),
    "temperature .8": SamplingParams(temperature=0.8),
    "with a seed": SamplingParams(temperature=0.8, seed=1),
    "with top_p .95, top_k 20": SamplingParams(temperature=0.8, top_p=0.95, top_k=20),
    "with top_p .95": SamplingParams(temperature=0.8, top_p=0.95),
    "with min_p .05": SamplingParams(temperature=0.8, min_p=0.05),
    "with XTC": SamplingParams(temperature=0.8, xtc_probability=0.5, xtc_threshold=0.1),
    "with penalties": SamplingParams(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.5),
    "greedy, repetition penalty 1.1": SamplingParams(repetition_penalty=1.1),
    "greedy, five log-probabilities": SamplingParams(logprobs=True, top_logprobs=5),
}


class StockSampling(CpuBackend):
    """The kernels of a CPU, but for sampling."""

    propose, propose_given = SamplingSteps.propose, SamplingSteps.propose_given
    choose, draw = SamplingSteps.choose, SamplingSteps.draw


def step_ms(model: Model, params: SamplingParams, k: int, sequences: int) -> float:
    prompts = [PROMPT[i % 5 :] + PROMPT[: i % 5] for i in range(sequences)]
    batch = prefill_prompts(model, prompts, k, sampling=params)
    for n in range(STEPS + 1):
        if n == 1:
            started = time.perf_counter()
        result = step(model, batch, k)
        mx.eval(result.verdict, result.logprobs or [], *batch.arrays())
    return (time.perf_counter() - started) / STEPS * 1e3


def count_rounds(model: Model, prompts: list[list[int]], k: list[int]) -> None:
    """Tokens a round by temperature, of the ratio rule with block verification beside Gumbel coupling."""
    table("temperature", *[f"{rule}, k = {each}" for each in k for rule in RULES])
    for temperature in TEMPERATURES:
        cells = []
        for each, rule in product(k, RULES):
            params = SamplingParams(temperature=temperature, accept=rule)
            parts = [decode_batch(model, part, each, TOKENS, params) for part in batched(prompts, AT_ONCE)]
            rounds = sum(part.tokens / part.tokens_per_round for part in parts)
            cells.append(sum(part.tokens for part in parts) / rounds)
        line(temperature, *cells)


def batched(prompts: list[list[int]], count: int) -> list[list[list[int]]]:
    return [prompts[i : i + count] for i in range(0, len(prompts), count)]


def main() -> None:
    given = options(__doc__, "model", k=[], sequences=1, repeats=9, stock=False, rounds=0)
    models = {"": load_model(given.model)}
    if given.rounds:
        tokenizer = load_tokenizer(resolve(given.model))
        tasks = [TASKS[n % len(TASKS)] for n in range(given.rounds)]
        asked = [BenchPrompt(messages=({"role": "user", "content": task},)).tokens(tokenizer) for task in tasks]
        count_rounds(models[""], asked, given.k or [1, 3, 5])
        return
    given.k = given.k or [0, 3]
    if given.stock:
        models[", MLX's operations"] = replace(models[""], backend=StockSampling(models[""].backend.native))
    runs = {
        (name, how, k): partial(step_ms, models[how], SETTINGS[name], k, given.sequences)
        for name, how, k in product(SETTINGS, models, given.k)
    }
    times = turns(runs, given.repeats)
    table("", *[head for k in given.k for head in (f"k = {k}, ms", "to greedy")])
    for name, how in product(SETTINGS, models):
        mine = [(times[name, how, k], times["greedy", "", k]) for k in given.k]
        line(name + how, *[cell for own, greedy in mine for cell in (median(own), ratio(own, greedy))])


if __name__ == "__main__":
    main()
