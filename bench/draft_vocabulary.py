"""Time a step with the full and with the reduced head, and without one.

    python bench/draft_vocabulary.py [MODEL | 27b | 35b] [--size 32768] [--k 2 3] [--steps 24] [--turns 5]

27b and 35b are shapes with random 4-bit weights (gpu.py), which cost what trained ones do. Variants take turns, and
ratios are taken within a turn. A draft costs (a step with the head − a step of copies) / k. Of the shapes also
tokens/s with one imposed acceptance for both heads.
"""

import argparse
import itertools
import time
from collections.abc import Sequence
from statistics import median

import mlx.core as mx
from imposed_acceptance import Recording, decode_imposed

from headstart import load
from headstart.checkpoint.draft_vocabulary import LOWEST, choose_draft_tokens
from headstart.engine.batch import Batch, UnseenPairs
from headstart.engine.draft import Source
from headstart.engine.step import prefill_prompts, step, verify
from headstart.kernels.report import Report
from headstart.models import Model
from headstart.sampling import Proposal

PROMPT = [3, 5, 7, 11, 13, 17, 19, 23]


def seconds(model: Model, batch: Batch, k: int, source: Source, steps: int) -> float:
    """Return the median seconds of a step, launched ahead as the engine does on a GPU; without a source, of drafts
    that are there already. They differ, as those of a text do: a mixture of experts cares.

    Not the mean: a step after which the cache has grown has its graph described anew.
    """
    drafts = mx.array([[(7919 * j + 1) % model.vocabulary for j in range(k)]], mx.int32)

    def run() -> Report:
        if source:
            made = step(model, batch, k, source=source)
        else:
            # A head would have seen them.
            batch.unseen = UnseenPairs.empty(batch.size, model.config["hidden_size"], model.dtype)
            made = verify(model, batch, Proposal(drafts))
        report = model.backend.report([made.verdict.tokens])
        mx.async_eval(*report.arrays, *batch.arrays())
        return report

    mx.eval(run().arrays, run().arrays)
    pending, times = run(), [time.perf_counter()]
    for _ in range(steps):
        following = run()
        pending.read()
        pending = following
        times.append(time.perf_counter())
    mx.eval(pending.arrays)
    return median(after - before for before, after in itertools.pairwise(times))


def with_reduced_head(model: Model, size: int) -> Model:
    ids = choose_draft_tokens({}, min(size, model.vocabulary // 2), model.vocabulary)
    print(f"{len(ids)} of {model.vocabulary} tokens\n")
    return model.with_draft_vocabulary(ids, LOWEST)


def compare_heads(model: Model, depths: list[int], steps: int, turns: int) -> None:
    """Print what steps and drafts of a model take with either head."""
    print("| k | ms a step: full | reduced | verification alone | draft, reduced ÷ full | step, full ÷ reduced |")
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


def compare_rates(
    model: Model, recording: Recording, pattern: Sequence[float], depths: list[int], turns: int
) -> None:
    """Print tokens/s with either head, if both were right as often as the pattern says."""
    print("\n| k | tokens/s: full | reduced | reduced ÷ full, median and all |\n| --- | --- | --- | --- |")
    for k in depths:
        measured = []
        for turn in range(turns + 1):
            used = (Source.HEAD, Source.REDUCED)
            rates = [decode_imposed(model, recording, k, pattern, source).rate for source in used]
            measured += [rates] * bool(turn)
        full, some = (f"{median(column):.1f}" for column in zip(*measured, strict=True))
        ratios = sorted(b / a for a, b in measured)
        found = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"| {k} | {full} | {some} | {median(ratios):.3f} ({found}) |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--size", type=int, default=32768)
    parser.add_argument("--k", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    if given.model not in ("27b", "35b"):
        compare_heads(with_reduced_head(load(given.model)[0], given.size), given.k, given.steps, given.turns)
        return
    import gpu

    mx.set_default_device(mx.gpu)
    model = with_reduced_head(gpu.warm_model(gpu.SHAPES[given.model])[0], given.size)
    compare_heads(model, given.k, given.steps, given.turns)
    recording = Recording(gpu.prompts(1), [gpu.greedy(model, 280)])
    compare_rates(model, recording, gpu.ACCEPTANCE[given.model], given.k, given.turns)


if __name__ == "__main__":
    main()
