"""What our CUDA kernels earn whole models on this card.

    python bench/gpu.py 27b [PART ...]         models of these shapes with random 4-bit weights
    python bench/gpu.py 35b [PART ...]
        start      seconds until the first token of a prompt of 600, and of the next one
        prompts    prompts of 512 to 32,768 tokens, one of them beside mlx-lm
        history    an agent's history of 32,768 tokens, a turn after it, and sixteen prompts at once
        cuts       a prompt read whole and in passes that end elsewhere: how many arrays differ
        beside     the longest gap of four streams while a long prompt is read
        paths      a layer in one launch beside separate kernels and mlx-lm
        decode     decoding at k = 0..5 with an imposed acceptance, beside mlx-lm
        steps      a step by rows and k
        batches    1 to 64 sequences: a step, and tokens/s of auto beside k = 0, with an imposed acceptance
        sampled    a step by how it samples beside a greedy one, of one row and of 16
        reduced    drafts from a head of 32,768 tokens beside those of the whole one
        kernels    our kernels beside MLX's operations, as in `headstart report`
        modes      nvfp4, mxfp4, mxfp8, 3 and 6 bits and a mixture beside affine 4 bits (gpu_modes.py)
    python bench/gpu.py rows [MODEL]           the built-in model: tokens/s of 1, 4 and 16 rows, k = 0 beside auto

Weights are drawn on the card, so nothing is downloaded. What is compared takes turns; the first turn warms up, of the
others the median counts. With $OUT set, everything is also written to $OUT/gpu.json. That kernels are right is shown
by `pytest tests/kernels`, which runs them on the card where there is one. `tiny` instead of a shape tries this script
on any device.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from statistics import median

import mlx.core as mx
import mlx.nn as nn
from gpu_batches import batches
from gpu_modes import modes
from gpu_prompts import beside, cuts, read_history, read_prompts, start
from harness import line, medians, note, ratio, table, turns
from imposed_acceptance import Recording, decode_imposed, record
from invariance import TASKS
from mlx_lm.generate import generate_step
from random_model import SHAPES, random_model

from headstart.bench.kernel_times import kernel_times
from headstart.bench.local import K, decode_batch
from headstart.bench.prompts import BenchPrompt
from headstart.checkpoint import load_model, load_tokenizer, resolve
from headstart.checkpoint.draft_vocabulary import LOWEST, choose_draft_tokens
from headstart.engine import Engine
from headstart.engine.batch import Batch, UnseenPairs
from headstart.engine.draft import Source
from headstart.engine.step import StepResult, prefill_prompts, step, verify
from headstart.kernels.graph import OFTEN
from headstart.kernels.report import Report
from headstart.models import Model
from headstart.sampling import Proposal, SamplingParams

TURNS = 3
KS: tuple[K, K] = (0, "auto")
ACCEPTANCE = {"27b": [0.88, 0.75, 0.62, 0.51, 0.42], "35b": [0.81, 0.58, 0.41, 0.29, 0.2]}
REDUCED = 32768  # tokens of the reduced head


def prompts(count: int, length: int = 9, vocabulary: int = 200000) -> list[list[int]]:
    return [[(7919 * row + 104729 * i) % (vocabulary - 9) + 8 for i in range(length)] for row in range(count)]


def pattern(name: str) -> list[float]:
    return ACCEPTANCE.get(name, ACCEPTANCE["27b"])


def step_seconds(
    model: Model,
    texts: Sequence[Sequence[int]],
    k: int,
    advance: Callable[[Model, Batch, int], StepResult] = step,
    sampling: SamplingParams | None = None,
) -> float:
    """Return the median seconds of 8 steps, with the next step queued while one is computed, as in the engine.

    They follow as many as it takes to remember the pass, at one capacity: bounds are corrected as in the engine.
    """
    batch = prefill_prompts(model, texts, max_k=k, sampling=sampling)
    finished: list[float] = []
    running: Report | None = None
    for _ in range(OFTEN + 2 + 9):
        result = advance(model, batch, k)
        verdict = result.verdict
        report = model.backend.report([verdict.accepted[:, None], verdict.finite[:, None]])
        mx.async_eval(*report.arrays, verdict.tokens, *(result.logprobs or ()), *batch.arrays())
        if running is not None:
            accepted = [count for count, _ in running.read()]
            finished.append(time.perf_counter())
            bounds = zip(batch.trunk_state.bounds, accepted, strict=True)
            batch.trunk_state.bounds = [bound - (k - count) for bound, count in bounds]
        running = report
    mx.eval(batch.arrays())
    return median(after - before for before, after in pairwise(finished[-9:]))


def host_seconds(model: Model, k: int, count: int = 16) -> list[float]:
    """Return the seconds of a step that nothing overlaps: until it is described, then handed over, and in all."""
    batch, times = prefill_prompts(model, prompts(1, vocabulary=model.vocabulary), max_k=k), []
    for _ in range(count):
        begun = time.perf_counter()
        verdict = step(model, batch, k).verdict
        described = time.perf_counter()
        mx.async_eval(verdict.tokens, verdict.accepted, verdict.finite, *batch.arrays())
        handed_over = time.perf_counter()
        mx.eval(verdict.tokens)
        times.append((described - begun, handed_over - described, time.perf_counter() - begun))
    return medians(times[count // 2 + 1 :])


def stock_rate(lm: nn.Module, tokens: Sequence[int], count: int = 48) -> float:
    """Return mlx-lm's tokens a second, one sequence."""
    said = generate_step(mx.array(tokens), lm, max_tokens=2 * count)
    list(islice(said, 8))
    begun = time.perf_counter()
    list(islice(said, count))
    return count / (time.perf_counter() - begun)


def decode(name: str, model: Model, theirs: nn.Module) -> None:
    asked = prompts(1, vocabulary=model.vocabulary)
    recording = record(model, asked, 200)
    stock = turns({"mlx-lm": lambda: stock_rate(theirs, asked[0])}, TURNS)["mlx-lm"]
    found = turns({k: partial(decode_imposed, model, recording, k, pattern(name)) for k in range(6)}, TURNS)
    rates = {k: [done.rate for done in each] for k, each in found.items()}  # the text was checked
    table("k", "tokens/s", "lowest", "highest", "to k = 0", "to mlx-lm", "tokens a round", "ms a round")
    for k, each in rates.items():
        rate, round = median(each), found[k][-1].tokens_per_round
        line(k, rate, min(each), max(each), ratio(each, rates[0]), rate / median(stock), round, 1e3 * round / rate)
    note(f"{name} imposed", [stock, rates])


def paths(name: str, model: Model, theirs: nn.Module) -> None:
    """A layer in one launch beside separate kernels and mlx-lm, in turns, without drafts, with 2 and with 3. Both
    paths must say the same text."""
    asked = prompts(1, vocabulary=model.vocabulary)
    recording = Recording(asked, decode_batch(model, asked, 0, 280).sequences)
    table("turn", "path", "k", "ms a step", "described", "handed over", "alone", "tokens/s", "to k = 0")
    for turn in range(TURNS + 1):
        line(turn, "mlx-lm", *[""] * 5, stock_rate(theirs, asked[0]), "")
        for path, one in (("separate kernels", separately(model)), ("one launch a layer", model)):
            plain = 0.0
            for k in (0, 2, 3):
                seconds = [step_seconds(one, asked, k), *host_seconds(one, k)]
                rate = decode_imposed(one, recording, k, pattern(name)).rate
                plain = plain or rate
                line(turn, path, k, *[1e3 * each for each in seconds], rate, rate / plain)
                note(f"{name} {path} k = {k}", [*seconds, rate])


def separately(model: Model) -> Model:
    """Return the model with a backend whose layers are several kernels, as those of other devices are anyway."""
    if not hasattr(model.backend, "persistent"):
        return model
    backend = type(model.backend)(model.backend.description)
    backend.persistent.refusal = "this benchmark"
    return replace(model, backend=backend)


def steps(name: str, model: Model) -> None:
    table("rows", "k", "ms a step", "to k = 0", "window to a window of 1", "a draft")
    for rows, k in ((1, 3), (4, 3), (16, 3)):
        time_of = partial(step_seconds, model, prompts(rows, vocabulary=model.vocabulary))
        runs = {"plain": lambda: time_of(0), "window": lambda: time_of(k, verify_only), "whole": lambda: time_of(k)}  # noqa: B023
        found = turns(runs, TURNS + 1)
        plain, window, whole = (median(times) for times in found.values())
        line(rows, 0, 1e3 * plain, 1.0, 1.0, "")
        line(rows, k, 1e3 * whole, whole / plain, window / plain, (whole - window) / plain / k)
        note(f"{name} step {rows} {k}", found)


def sampled(name: str, model: Model) -> None:
    """A step by how it samples, in turns, of one sequence and of 16."""
    warm = partial(SamplingParams, temperature=0.7)
    ways = {
        "greedy": SamplingParams(),
        "temperature 0.7": warm(),
        "and top_k 20, top_p 0.95": warm(top_k=20, top_p=0.95),
        "and top_p 0.95": warm(top_p=0.95),
        "and min_p 0.05": warm(min_p=0.05),
        "and XTC": warm(xtc_probability=0.5, xtc_threshold=0.1),
        "and presence and frequency penalties": warm(presence_penalty=0.5, frequency_penalty=0.5),
        "greedy, repetition penalty 1.1": SamplingParams(repetition_penalty=1.1),
        "greedy, five log-probabilities": SamplingParams(logprobs=True, top_logprobs=5),
    }
    table("sampling", "rows", "k", "ms a step", "to greedy")
    for rows in (1, 16):
        asked = prompts(rows, vocabulary=model.vocabulary)
        for k in (0, 3):
            runs = {way: partial(step_seconds, model, asked, k, sampling=params) for way, params in ways.items()}
            found = turns(runs, TURNS)
            for way, times in found.items():
                line(way, rows, k, 1e3 * median(times), ratio(times, found["greedy"]))
            note(f"{name} sampled {rows} {k}", found)


def verify_only(model: Model, batch: Batch, k: int) -> StepResult:
    """Verify drafts that cost nothing. They differ, as those of a text do: a mixture of experts cares."""
    drafts = [[(7919 * row + 31 * j + 1) % model.vocabulary for j in range(k)] for row in range(batch.size)]
    return verify(model, batch, Proposal(mx.array(drafts, mx.int32)))


def without_head(model: Model, batch: Batch, k: int) -> StepResult:
    """Verify as above, what a head would have seen forgotten."""
    batch.unseen = UnseenPairs.empty(batch.size, model.config["hidden_size"], model.dtype)
    return verify_only(model, batch, k)


def reduced(name: str, whole: Model) -> None:
    """Drafts from either head, and tokens/s if both are right as often. A draft costs (step − verification) / k."""
    ids = choose_draft_tokens({}, min(REDUCED, whole.vocabulary // 2), whole.vocabulary)
    model, asked = whole.with_draft_vocabulary(ids, LOWEST), prompts(1, vocabulary=whole.vocabulary)
    recording = record(model, asked, 200)
    table(
        "k",
        "ms: whole head",
        f"{len(ids)} tokens",
        "no head",
        "a draft to the whole's",
        "tokens/s",
        "reduced",
        "ratio",
    )
    for k in (2, 3):
        heads = {"whole": Source.HEAD, "reduced": Source.REDUCED}
        runs = {
            each: partial(step_seconds, model, asked, k, partial(step, source=source))
            for each, source in heads.items()
        }
        times = turns(runs | {"no head": partial(step_seconds, model, asked, k, without_head)}, TURNS)
        imposed = {
            each: partial(decode_imposed, model, recording, k, pattern(name), source)
            for each, source in heads.items()
        }
        rates = {each: [done.rate for done in several] for each, several in turns(imposed, TURNS).items()}
        draft = median((b - c) / (a - c) for a, b, c in zip(*times.values(), strict=True))
        cells = [*[1e3 * median(each) for each in times.values()], draft, *map(median, rates.values())]
        line(k, *cells, ratio(rates["reduced"], rates["whole"]))
        note(f"{name} reduced {k}", [times, rates])


def kernels(name: str, model: Model) -> None:
    table("operation", "shape", "kernel", "rows alike", "µs by rows", "MLX's", "distance")
    for each in kernel_times(model):
        ours, stock = (
            " / ".join(f"{1e6 * seconds:.0f}" for seconds in times.values())
            for times in (each.seconds, each.stock_seconds)
        )
        line(each.operation, each.shape, each.used, each.exact, ours, stock, each.distance)
        note(f"{name} {each.operation} {each.shape}", [each.exact, each.seconds, each.stock_seconds, each.distance])


def rows(name: str | None) -> None:
    folder = resolve(name)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    asked = [BenchPrompt(messages=({"role": "user", "content": task},)).tokens(tokenizer) for task in TASKS[:16]]
    table("rows", "k = 0, tokens/s", "auto, tokens/s", "auto to k = 0", "lowest", "highest", "tokens a round")
    for count in (1, 4, 16):
        found = turns({k: partial(decode_batch, model, asked[:count], k, 256) for k in KS}, 2 * TURNS)
        zero, auto = ([done.rate for done in found[k]][1:] for k in KS)  # by then auto knows what depths cost
        ratios = [a / b for a, b in zip(auto, zero, strict=True)]
        each = found["auto"][-1].tokens_per_round
        line(count, median(zero), median(auto), median(ratios), min(ratios), max(ratios), each)
        note(f"aggregate {count}", [zero, auto])


def one_step(model: Model, k: int) -> float:
    return step_seconds(model, prompts(1, vocabulary=model.vocabulary), k)


def shape(name: str, parts: Sequence[str]) -> None:
    model, theirs = random_model(SHAPES[name])
    print(f"{name}: {mx.get_active_memory() / 1e9:.1f} GB", flush=True)
    runs: dict[str, Callable[[], None]] = {
        "start": lambda: start(model),
        "prompts": lambda: read_prompts(model, theirs),
        "history": lambda: read_history(model),
        "cuts": lambda: cuts(model),
        "beside": lambda: beside(model),
        "paths": lambda: paths(name, model, theirs),
        "decode": lambda: decode(name, model, theirs),
        "steps": lambda: steps(name, model),
        "batches": lambda: batches(
            name, model, pattern(name), partial(prompts, vocabulary=model.vocabulary), step_seconds
        ),
        "sampled": lambda: sampled(name, model),
        "reduced": lambda: reduced(name, model),
        "kernels": lambda: kernels(name, model),
        "modes": lambda: modes(name, model, prompts(1, vocabulary=model.vocabulary), one_step),
    }
    if "start" not in parts:
        Engine(model).warm_up()  # kernels are compiled side by side, where first steps would take one after another
    for part in parts or runs:
        runs[part]()


def main() -> None:
    what, *rest = sys.argv[1:] or ["27b"]
    if what != "tiny":
        mx.set_default_device(mx.gpu)
    if what == "rows":
        rows(rest[0] if rest else None)
    else:
        shape(what, rest)


if __name__ == "__main__":
    main()
