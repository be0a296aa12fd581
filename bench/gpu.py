"""What our CUDA kernels earn whole models on this card.

    python bench/gpu.py 27b [PART ...]         models of these shapes with random 4-bit weights
    python bench/gpu.py 35b [PART ...]
        start      seconds until the first token of a prompt of 600, and of the next one
        prompts    prompts of 512 to 32,768 tokens, histories of an agent, a turn, sixteen at once; beside mlx-lm
        cuts       a prompt read whole and in passes that end elsewhere: how many arrays differ
        beside     the longest gap of four streams while a long prompt is read
        paths      a layer in one launch beside separate kernels and mlx-lm
        decode     decoding at k = 0..5 with an imposed acceptance, beside mlx-lm
        steps      a step by rows and k
        sampled    a sampled step beside a greedy one
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
from itertools import islice, pairwise
from statistics import median

import mlx.core as mx
import mlx.nn as nn
from gpu_products import line, note, table
from imposed_acceptance import Recording, decode_imposed, record
from invariance import TASKS
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from random_model import SHAPES, random_model

from headstart.bench.local import K, decode_batch
from headstart.checkpoint import load_model, load_tokenizer, resolve
from headstart.engine import Engine, Request
from headstart.engine.batch import Batch
from headstart.engine.memory import memory_for_sequences
from headstart.engine.step import StepResult, prefill_prompts, step, verify
from headstart.engine.turns import TurnMarker
from headstart.kernels.graph import OFTEN
from headstart.kernels.report import Report
from headstart.models import Model
from headstart.sampling import Proposal, SamplingParams
from headstart.state import KV, PrefixCache

TURNS = 4
KS: tuple[K, K] = (0, "auto")
ACCEPTANCE = {"27b": [0.88, 0.75, 0.62, 0.51, 0.42], "35b": [0.81, 0.58, 0.41, 0.29, 0.2]}
LENGTHS = (512, 2048, 8192, 32768)
TURN = 7  # the token that begins a turn of an agent's history


def prompts(count: int, length: int = 9, vocabulary: int = 200000) -> list[list[int]]:
    return [[(7919 * row + 104729 * i) % (vocabulary - 9) + 8 for i in range(length)] for row in range(count)]


def text(model: Model, length: int, row: int = 0) -> list[int]:
    return prompts(row + 1, length, model.vocabulary)[row]


# Prompts


def first_token(engine: Engine, *texts: Sequence[int]) -> float:
    """Seconds until each of these prompts has its first token."""
    heard: list[float] = []
    begun = time.perf_counter()
    for each in texts:
        params = SamplingParams(max_tokens=1, k=0)
        engine.submit(
            Request(each, params), listener=lambda event: heard.extend([time.perf_counter()][: len(event.tokens)])
        )
    while engine.run_once():
        pass
    return max(heard) - begun


def engine_of(model: Model, bytes_of_prefixes: int = 0) -> Engine:
    engine = Engine(model, prefix=PrefixCache(bytes_of_prefixes))
    engine.reader.marker = TurnMarker([TURN])
    return engine


def history(model: Model, length: int, row: int = 0) -> list[int]:
    """A prompt in which turns begin 100 to 1,500 tokens apart."""
    tokens, at, n = text(model, length, row), 0, row
    while at < length:
        tokens[at] = TURN
        at, n = at + 100 + (n * 617 + 251) % 1400, n + 1
    return tokens


def start(model: Model) -> None:
    engine = engine_of(model)
    begun = time.perf_counter()
    engine.warm_up()
    warm = time.perf_counter() - begun
    times = [first_token(engine, text(model, 600, row)) for row in range(3)]
    print(f"warm up {warm:.2f} s; prompts of 600 tokens: {', '.join(f'{each:.2f}' for each in times)} s", flush=True)
    note("start", [warm, *times])


def read_prompts(model: Model, theirs: nn.Module) -> None:
    table("prompt", "tokens/s", "lowest", "highest", "mlx-lm", "peak GB")
    for length in [each for each in LENGTHS if each < model.context_length]:
        mx.reset_peak_memory()
        ours = [length / first_token(engine_of(model), text(model, length, turn)) for turn in range(TURNS)][1:]
        peak = mx.get_peak_memory() / 1e9
        stock = length / stock_prompt(theirs, text(model, length)) if mx.default_device() == mx.gpu else 0.0
        line(length, median(ours), min(ours), max(ours), stock, peak)
        note(f"prompt {length}", ours)
    lots = min(60_000_000_000, memory_for_sequences() // 3)
    long = min(32768, model.context_length // 2)
    agent = [long / first_token(engine_of(model, lots), history(model, long, turn)) for turn in range(TURNS)][1:]
    many = [
        first_token(engine_of(model), *[text(model, 512, row + 16 * turn) for row in range(16)]) for turn in range(3)
    ]
    engine, turns = engine_of(model, lots), []
    tokens = history(model, long)
    first_token(engine, tokens)
    for turn in range(5):
        tokens = [*tokens, TURN, *text(model, 50, turn)]
        turns.append(first_token(engine, tokens))
    print(f"history of {long} tokens in turns, with a prefix cache: {median(agent):.0f} tokens/s")
    print(f"sixteen prompts of 512 at once: {median(many[1:]):.2f} s to the last first token")
    print(
        f"turns of 50 after it: {', '.join(f'{1e3 * each:.0f}' for each in turns)} ms to the first token", flush=True
    )
    note("agent, many, turns", [agent, many, turns])


def stock_prompt(lm: nn.Module, tokens: Sequence[int]) -> float:
    """Seconds of mlx-lm's forward over a prompt, in its chunks of 2,048."""
    cache, begun = make_prompt_cache(lm), time.perf_counter()
    for at in range(0, len(tokens), 2048):
        mx.eval(lm(mx.array([tokens[at : at + 2048]]), cache)[:, -1:])
    return time.perf_counter() - begun


def cuts(model: Model) -> None:
    """Read one prompt in passes that end at several places; all must leave the same bits."""
    reading, cut = model.reading, model.reading.backend.cut or 512
    length = min(4075, model.context_length - 1)
    ways = {"whole": list[int](), **{str(w): list(range(w, length, w)) for w in (max(cut, 64), 512, 2048)}}
    ways["mixed"] = [at for at in (cut, 9 * cut, 10 * cut, 35 * cut) if at < length]
    expected: list[mx.array] = []
    for name, ends in ways.items():
        made = states_after(reading, text(model, length), ends)
        expected = expected or made
        different = sum(not mx.array_equal(a, b) for a, b in zip(made, expected, strict=True))
        print(f"{name}: {different} of {len(made)} arrays differ", flush=True)
        note(f"cuts {name}", different)


def states_after(model: Model, tokens: Sequence[int], ends: Sequence[int]) -> list[mx.array]:
    """The hidden states of a prompt, and what layers hold after it."""
    state, hidden = model.make_state(1), []
    for begin, end in pairwise([0, *ends, len(tokens)]):
        hidden.append(model.trunk(mx.array([tokens[begin:end]]), state, end - begin))
        state.commit(mx.full((1,), end - begin, mx.int32), most=end - begin)
        mx.eval(hidden[-1], state.arrays())
    held = [a[:, :, : len(tokens)] if isinstance(m, KV) else a for m in state.layers for a in m.arrays()]
    return [mx.concatenate(hidden, axis=1), *held]


def beside_streams(model: Model) -> None:
    length = min(100_000, model.context_length // 2)
    alone = first_token(engine_of(model), text(model, length, 9))
    engine, times = engine_of(model), [list[float]() for _ in range(5)]

    def begin(row: int, tokens: Sequence[int], most: int) -> None:
        params = SamplingParams(max_tokens=most, k=0)
        engine.submit(Request(tokens, params), listener=lambda event: times[row].append(time.perf_counter()))

    for row in range(4):
        begin(row, text(model, 1000, row), 20_000)
    while not all(len(each) > 20 for each in times[:4]):
        engine.run_once()
    begun = time.perf_counter()
    begin(4, text(model, length, 9), 1)
    while not any(at > begun for at in times[4]) or engine.scheduler.prefilling:
        engine.run_once()
    ended = time.perf_counter()
    gaps = sorted(b - a for each in times[:4] for a, b in pairwise(each) if begun < b and a < ended)
    plain = median(b - a for a, b in pairwise(times[0]) if b < begun)
    engine.cancel_all()
    while engine.run_once():
        pass
    cells = [1e3 * each for each in (plain, median(gaps), gaps[-1])]
    print(
        f"prompt of {length}: {alone:.1f} s alone, {ended - begun:.1f} s beside four streams, whose step is", end=" "
    )
    print(f"{cells[0]:.1f} ms; their gaps {cells[1]:.1f} ms in the median, {cells[2]:.1f} at most", flush=True)
    note("beside", [alone, ended - begun, *cells])


# Steps


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
        verdict = advance(model, batch, k).verdict
        report = model.backend.report([verdict.accepted[:, None], verdict.finite[:, None]])
        mx.async_eval(*report.arrays, verdict.tokens, *batch.arrays())
        if running is not None:
            accepted = [count for count, _ in running.read()]
            finished.append(time.perf_counter())
            bounds = zip(batch.trunk_state.bounds, accepted, strict=True)
            batch.trunk_state.bounds = [bound - (k - count) for bound, count in bounds]
        running = report
    mx.eval(batch.arrays())
    return median(after - before for before, after in pairwise(finished[-9:]))


def host_seconds(model: Model, k: int, count: int = 16) -> tuple[float, float, float]:
    """Seconds of a step that nothing overlaps: until it is described, then handed over, and in all."""
    batch, times = prefill_prompts(model, prompts(1, vocabulary=model.vocabulary), max_k=k), []
    for _ in range(count):
        begun = time.perf_counter()
        verdict = step(model, batch, k).verdict
        described = time.perf_counter()
        mx.async_eval(verdict.tokens, verdict.accepted, verdict.finite, *batch.arrays())
        handed_over = time.perf_counter()
        mx.eval(verdict.tokens)
        times.append((described - begun, handed_over - described, time.perf_counter() - begun))
    described, handed_over, whole = (median(column) for column in zip(*times[count // 2 + 1 :], strict=True))
    return described, handed_over, whole


def stock_rate(lm: nn.Module, tokens: Sequence[int], count: int = 48) -> float:
    """mlx-lm's tokens a second, one sequence."""
    said = generate_step(mx.array(tokens), lm, max_tokens=2 * count)
    list(islice(said, 8))
    begun = time.perf_counter()
    list(islice(said, count))
    return count / (time.perf_counter() - begun)


def decode(name: str, model: Model, theirs: nn.Module) -> None:
    asked = prompts(1, vocabulary=model.vocabulary)
    recording, stock = record(model, asked, 200), list[float]()
    rates: dict[int, list[float]] = {}
    rounds: dict[int, float] = {}
    for turn in range(TURNS):
        stock += [stock_rate(theirs, asked[0])] * bool(turn)
        for k in range(6):
            done = decode_imposed(model, recording, k, ACCEPTANCE.get(name, ACCEPTANCE["27b"]))  # it checks the text
            rates.setdefault(k, []).extend([done.rate] * bool(turn))
            rounds[k] = done.tokens_per_round
    table("k", "tokens/s", "lowest", "highest", "to k = 0", "to mlx-lm", "tokens a round", "ms a round")
    for k, each in rates.items():
        rate = median(each)
        ratio = median(mine / zero for mine, zero in zip(each, rates[0], strict=True))
        cells = (ratio, rate / median(stock), rounds[k], 1e3 * rounds[k] / rate)
        line(k, rate, min(each), max(each), *[f"{cell:.2f}" for cell in cells])
    note(f"{name} imposed", [stock, rates])


def paths(name: str, model: Model, theirs: nn.Module) -> None:
    """A layer in one launch beside separate kernels and mlx-lm, in turns, without drafts, with 2 and with 3. Both
    paths must say the same text."""
    asked = prompts(1, vocabulary=model.vocabulary)
    recording = Recording(asked, decode_batch(model, asked, 0, 280).sequences)
    table("turn", "path", "k", "ms a step", "described", "handed over", "alone", "tokens/s", "to k = 0")
    for turn in range(TURNS):
        line(turn, "mlx-lm", *[""] * 5, stock_rate(theirs, asked[0]))
        for path, one in (("separate kernels", separately(model)), ("one launch a layer", model)):
            plain = 0.0
            for k in (0, 2, 3):
                seconds, host = step_seconds(one, asked, k), host_seconds(one, k)
                rate = decode_imposed(one, recording, k, ACCEPTANCE.get(name, ACCEPTANCE["27b"])).rate
                plain = plain or rate
                line(turn, path, k, *[f"{1e3 * each:.2f}" for each in (seconds, *host)], rate, f"{rate / plain:.2f}")
                note(f"{name} {path} k = {k}", [seconds, *host, rate])


def separately(model: Model) -> Model:
    """The model with a backend whose layers are several kernels."""
    backend = type(model.backend)(model.backend.description)
    if (persistent := getattr(backend, "persistent", None)) is not None:
        persistent.refusal = "this benchmark"
    return replace(model, backend=backend)


def steps(name: str, model: Model) -> None:
    table("rows", "k", "ms a step", "to k = 0", "window to a window of 1", "a draft")
    for rows, k in ((1, 3), (4, 3), (16, 3)):
        turns, asked = [], prompts(rows, vocabulary=model.vocabulary)
        for turn in range(TURNS + 1):
            plain = step_seconds(model, asked, 0)
            window = step_seconds(model, asked, k, advance=verify_only)
            whole = step_seconds(model, asked, k)
            turns += [(plain, window, whole)] * bool(turn)
        plain, window, whole = (median(times) for times in zip(*turns, strict=True))
        line(rows, 0, f"{1e3 * plain:.2f}", "1.00", "1.00", "")
        ratios = (whole / plain, window / plain)
        line(
            rows,
            k,
            f"{1e3 * whole:.2f}",
            *[f"{ratio:.2f}" for ratio in ratios],
            f"{(whole - window) / plain / k:.3f}",
        )
        note(f"{name} step {rows} {k}", turns)


def sampled(name: str, model: Model) -> None:
    """A step of one sequence by how it samples, in turns."""
    ways = {
        "greedy": SamplingParams(),
        "temperature 0.7": SamplingParams(temperature=0.7),
        "temperature 0.7, top_k 20, top_p 0.95": SamplingParams(temperature=0.7, top_k=20, top_p=0.95),
        "temperature 0.7, top_p 0.95": SamplingParams(temperature=0.7, top_p=0.95),
        "temperature 0.7, min_p 0.05": SamplingParams(temperature=0.7, min_p=0.05),
    }
    asked = prompts(1, vocabulary=model.vocabulary)
    table("sampling", "k", "ms a step", "to greedy")
    for k in (0, 3):
        turns = [
            {way: step_seconds(model, asked, k, sampling=params) for way, params in ways.items()}
            for _ in range(TURNS)
        ][1:]
        for way in ways:
            ratio = median(turn[way] / turn["greedy"] for turn in turns)
            line(way, k, f"{1e3 * median(turn[way] for turn in turns):.2f}", f"{ratio:.2f}")
        note(f"{name} sampled {k}", turns)


def verify_only(model: Model, batch: Batch, k: int) -> StepResult:
    """Verify drafts that cost nothing. They differ, as those of a text do: a mixture of experts cares."""
    drafts = [[(7919 * row + 31 * j + 1) % model.vocabulary for j in range(k)] for row in range(batch.size)]
    return verify(model, batch, Proposal(mx.array(drafts, mx.int32)))


def rows(name: str | None) -> None:
    folder = resolve(name)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    asked = []
    for task in TASKS[:16]:
        chat = [{"role": "user", "content": task}]
        asked.append(list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, enable_thinking=False)))
    table("rows", "k = 0, tokens/s", "auto, tokens/s", "auto to k = 0", "lowest", "highest", "tokens a round")
    for count in (1, 4, 16):
        turns = []
        for turn in range(2 * TURNS):
            zero, auto = (decode_batch(model, asked[:count], k, 256) for k in KS)
            turns += [(zero.rate, auto.rate)] * (turn > 1)  # by then auto knows what depths cost
        ratios = [auto / zero for zero, auto in turns]
        rates = [median(rates) for rates in zip(*turns, strict=True)]
        each = auto.tokens_per_round
        line(count, *rates, *[f"{value:.2f}" for value in (median(ratios), min(ratios), max(ratios), each)])
        note(f"aggregate {count}", turns)


def shape(name: str, parts: Sequence[str]) -> None:
    model, theirs = random_model(SHAPES[name])
    print(f"{name}: {mx.get_active_memory() / 1e9:.1f} GB", flush=True)
    runs: dict[str, Callable[[], None]] = {
        "start": lambda: start(model),
        "prompts": lambda: read_prompts(model, theirs),
        "cuts": lambda: cuts(model),
        "beside": lambda: beside_streams(model),
        "paths": lambda: paths(name, model, theirs),
        "decode": lambda: decode(name, model, theirs),
        "steps": lambda: steps(name, model),
        "sampled": lambda: sampled(name, model),
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
