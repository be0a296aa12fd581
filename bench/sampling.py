"""Measure what sampling costs: distributions, noise and acceptance of one window, without the model.

    python bench/sampling.py [--rows 1 8 32] [--k 0 3] [--vocabulary 248320] [--repeats 3] [--only TEXT] [--slow]

`window` is k calls of `propose` and one of `accept_window` on random logits, as a step makes them. `step` is the rest
of a step of the built-in model (trunk, head, logits, commit) with as many sequences: a model of a few million
parameters, so the shares are an upper bound. `lm_head` is what the last product alone of a 27B model (hidden 5120,
bfloat16) costs here. Settings are measured one after the other in every repeat, and medians taken.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from headstart.checkpoint import load_model
from headstart.engine.batch import Batch
from headstart.engine.step import prefill, step
from headstart.kernels.greedy import join_columns
from headstart.models import Model
from headstart.sampling import (
    BatchContext,
    Proposal,
    SamplingParams,
    SequenceParams,
    accept_window,
    controls,
    draw_window,
    propose,
)

P = SamplingParams
SETTINGS = {
    "greedy": P(),
    "greedy, penalised": P(repetition_penalty=1.1, presence_penalty=0.5),
    "temperature, ratio": P(temperature=0.7),
    "temperature, coupled": P(temperature=0.7, seed=1),
    "top_k 20 + top_p .95, ratio": P(temperature=0.7, top_k=20, top_p=0.95),
    "top_k 20 + top_p .95, coupled": P(temperature=0.7, top_k=20, top_p=0.95, seed=1),
    "the same, penalised, ratio": P(temperature=0.7, top_k=20, top_p=0.95, presence_penalty=1.5),
    "top_p .95 alone, ratio": P(temperature=0.7, top_p=0.95),
    "top_p .95 alone, coupled": P(temperature=0.7, top_p=0.95, seed=1),
}
SLOW = "top_p .95 alone"  # it sorts the vocabulary
PROMPT = [5, 900, 31, 7]


Run = Callable[[], list[mx.array]]


def window(params: SamplingParams, sequences: int, k: int, target: mx.array, head: mx.array) -> Run:
    """Return a function that samples one window."""
    each = [SequenceParams(params, key, 0, 10**6) for key in range(sequences)]
    batch_controls = controls(each, target.shape[-1])
    size = params.context_size
    tokens = np.random.default_rng(0).integers(0, 1000, (sequences, size)).astype(np.int32)
    recent = mx.array(tokens).reshape(sequences, size)
    counts = mx.arange(sequences, dtype=mx.int32)
    context = BatchContext(batch_controls, counts + 100, counts, recent, mx.full((sequences,), 10**6))
    allowed = mx.full((sequences,), k, mx.int32)

    def run() -> list[mx.array]:
        proposal = Proposal(mx.zeros((sequences, 0), mx.int32), [])
        for j in range(k):
            proposal = propose(head[:sequences, j : j + 1], proposal, context)
        logits, drafts = target[:sequences, : k + 1], join_columns([counts[:, None], proposal.tokens])
        drawn = draw_window(logits, proposal, drafts, allowed, context)
        return [drawn.tokens] if drawn is not None else list(accept_window(logits, proposal, allowed, context))

    return run


def rest_of_a_step(model: Model, sequences: int, k: int) -> Run:
    """Return a function that runs a greedy step of the built-in model, whose sampling is an argmax."""
    greedy = SequenceParams(P(), 0, 0, 10**6)
    running = Batch.of_one(model, PROMPT, greedy, max_k=k)
    prefill(model, running, mx.array([PROMPT[:-1]]), mx.array(PROMPT[-1:]))
    running.keep([0] * sequences, model)

    def run() -> list[mx.array]:
        return [step(model, running, k).tokens, *running.arrays()]

    return run


def milliseconds(run: Run) -> float:
    start = time.perf_counter()
    mx.eval(run())
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", dest="sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--k", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--vocabulary", type=int, default=248_320)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="settings whose name holds this")
    parser.add_argument(
        "--slow", action="store_true", help="also sort the vocabulary in windows of over 32 positions"
    )
    args = parser.parse_args()

    model = load_model("tiny-qwen3.5")
    most, deep = max(args.sequences), max(args.k)
    rng = np.random.default_rng(0)
    target = mx.array((rng.standard_normal((most, deep + 1, args.vocabulary)) * 2.5).astype(np.float32))
    near = 0.8 * target[:, :deep] + 0.5 * mx.random.normal((most, deep, args.vocabulary))
    mx.eval(target, near)

    print(f"Vocabulary {args.vocabulary:,}, {mx.default_device()}, medians of {args.repeats}, in ms.\n")
    shapes = [(sequences, k) for sequences in args.sequences for k in args.k]
    print("| setting | " + " | ".join(f"{sequences} sequences, k = {k}" for sequences, k in shapes) + " |")
    print("| --- |" + " ---: |" * len(shapes))
    names = [name for name in SETTINGS if args.only in name]
    table: dict[tuple[str, int, int], float] = {}
    for sequences, k in shapes:
        runs = {"step": rest_of_a_step(model, sequences, k)}
        for name in names:
            if args.slow or not (name.startswith(SLOW) and sequences * (2 * k + 1) > 8):
                runs[name] = window(SETTINGS[name], sequences, k, target, near)
        times: dict[str, list[float]] = {name: [] for name in runs}
        large = sequences * (k + 1) > 31  # seconds a window on a CPU: run it once
        for run in runs.values():
            if not large:
                milliseconds(run)
        for _ in range(1 if large else args.repeats):
            for name, run in runs.items():
                times[name].append(milliseconds(run))
        table |= {(name, sequences, k): statistics.median(values) for name, values in times.items()}
    print(
        "| *rest of a step, built-in model* | " + " | ".join(f"{table['step', r, k]:.1f}" for r, k in shapes) + " |"
    )
    for name in names:
        cells = []
        for sequences, k in shapes:
            cost, rest = table.get((name, sequences, k)), table["step", sequences, k]
            cells.append("–" if cost is None else f"{cost:.1f} ({cost / (cost + rest):.0%})")
        print(f"| {name} | " + " | ".join(cells) + " |")

    hidden, weights = mx.ones((4, 5120), mx.bfloat16), mx.ones((args.vocabulary, 5120), mx.bfloat16)
    mx.eval(hidden, weights)
    for positions in (1, 4):
        product = [milliseconds(lambda n=positions: [hidden[:n] @ weights.T]) for _ in range(args.repeats)]
        print(f"\nlm_head of a 27B model (5120 × {args.vocabulary:,}, bfloat16), {positions} positions: ", end="")
        print(f"{statistics.median(product):.0f} ms")


if __name__ == "__main__":
    main()
