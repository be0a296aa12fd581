"""Time a step with the full and with the reduced head, and without one.

    python bench/draft_vocabulary.py [MODEL | 27b | 35b] [--size 32768] [--k 2 3] [--steps 24] [--turns 5]

27b and 35b are shapes with random 4-bit weights (gpu.py), which cost what trained ones do. Variants take turns, and
ratios are taken within a turn. A draft costs (a step with the head − a step of copies) / k.
"""

import argparse
import itertools
import time
from statistics import median

import mlx.core as mx

from headstart import load
from headstart.checkpoint.draft_vocabulary import LOWEST, choose_draft_tokens
from headstart.engine.batch import Batch
from headstart.engine.draft import Source
from headstart.engine.step import prefill_prompts, step
from headstart.models import Model

PROMPT = [3, 5, 7, 11, 13, 17, 19, 23]


def model_of(name: str | None) -> Model:
    if name not in ("27b", "35b"):
        return load(name)[0]
    from gpu import SHAPES, random_model

    return random_model(SHAPES[name])[0]


def seconds(model: Model, batch: Batch, k: int, source: Source, steps: int) -> float:
    """Return the median seconds of a step, launched ahead as the engine does on a GPU.

    Not the mean: a step after which the cache has grown has its graph described anew.
    """

    def run() -> mx.array:
        tokens = step(model, batch, k, source=source, distances=() if source else [1]).tokens
        mx.async_eval(tokens, *batch.arrays())
        return tokens

    mx.eval(run(), run())
    pending, times = run(), [time.perf_counter()]
    for _ in range(steps):
        following = run()
        pending.tolist()
        pending = following
        times.append(time.perf_counter())
    mx.eval(pending)
    return median(after - before for before, after in itertools.pairwise(times))


def compare_heads(model: Model, size: int, depths: list[int], steps: int, turns: int) -> None:
    ids = choose_draft_tokens({}, min(size, model.vocabulary // 2), model.vocabulary)
    model = model.with_draft_vocabulary(ids, LOWEST)
    print(f"{len(ids)} of {model.vocabulary} tokens\n")
    print("| k | ms a step: full | reduced | copies alone | draft, reduced ÷ full | step, full ÷ reduced |")
    print("| --- | --- | --- | --- | --- | --- |")
    for k in depths:
        batch = prefill_prompts(model, [PROMPT], max_k=k)
        measured = []
        for turn in range(turns + 1):
            used = (Source.NONE, Source.HEAD, Source.REDUCED)
            found = {each: seconds(model, batch, k, each, steps) for each in used}
            if turn:  # the first warms up
                measured.append((found[Source.HEAD], found[Source.REDUCED], found[Source.NONE]))
        times = [f"{1e3 * median(column):.2f}" for column in zip(*measured, strict=True)]
        drafts = median((some - none) / (full - none) for full, some, none in measured)
        ratio = median(full / some for full, some, _ in measured)
        print(f"| {k} | {' | '.join(times)} | {drafts:.2f} | {ratio:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--size", type=int, default=32768)
    parser.add_argument("--k", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    compare_heads(model_of(given.model), given.size, given.k, given.steps, given.turns)


if __name__ == "__main__":
    main()
