"""How fast a card reads prompts: the parts of gpu.py that are about them."""

import gc
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import mlx.core as mx
import mlx.nn as nn
from harness import answers, line, note, seconds_of, table
from mlx_lm.models.cache import make_prompt_cache
from prompt_gaps import read_beside

from headstart.engine import Engine
from headstart.engine.memory import memory_for_sequences
from headstart.engine.turns import TurnMarker
from headstart.models import Model
from headstart.state import KV, PrefixCache

REPEATS = 3  # after one that warms up
LENGTHS = (512, 2048, 8192, 32768)
STOCK = 2048  # tokens of the prompt that mlx-lm reads as well: it takes minutes for the longer ones
TURN = 7  # the token that begins a turn of an agent's history


def text(model: Model, length: int, row: int = 0) -> list[int]:
    return [(7919 * row + 104729 * i) % (model.vocabulary - 9) + 8 for i in range(length)]


def first_token(engine: Engine, *texts: Sequence[int]) -> float:
    """Return the seconds until each of these prompts has its first token."""
    return max(each.times[0] for each in answers(engine, texts, max_tokens=1, k=0))


def engine_of(model: Model, bytes_of_prefixes: int = 0) -> Engine:
    gc.collect()  # of the engines before, what they cache
    engine = Engine(model, prefix=PrefixCache(bytes_of_prefixes))
    engine.reader.marker = TurnMarker([TURN])
    return engine


def start(model: Model) -> None:
    engine = engine_of(model)
    warm = seconds_of(engine.warm_up)
    times = [first_token(engine, text(model, 600, row)) for row in range(3)]
    print(f"warm up {warm:.2f} s; prompts of 600 tokens: {', '.join(f'{each:.2f}' for each in times)} s", flush=True)
    note("start", [warm, *times])


def read_prompts(model: Model, theirs: nn.Module) -> None:
    table("prompt", "tokens/s", "lowest", "highest", "mlx-lm", "peak GB")
    for length in [each for each in LENGTHS if each < model.context_length]:
        mx.reset_peak_memory()
        ours = [length / first_token(engine_of(model), text(model, length, row)) for row in range(REPEATS + 1)][1:]
        peak = mx.get_peak_memory() / 1e9
        stock = length / stock_prompt(theirs, text(model, length)) if length == STOCK else None
        line(length, median(ours), min(ours), max(ours), stock, peak)
        note(f"prompt {length}", ours)


def history(model: Model, length: int, row: int = 0) -> list[int]:
    """Return a prompt in which turns begin 100 to 1,500 tokens apart."""
    tokens, at, n = text(model, length, row), 0, row
    while at < length:
        tokens[at] = TURN
        at, n = at + 100 + (n * 617 + 251) % 1400, n + 1
    return tokens


def read_history(model: Model) -> None:
    lots = min(16_000_000_000, memory_for_sequences() // 3)
    long = min(32768, model.context_length // 2)
    agent = [long / first_token(engine_of(model, lots), history(model, long, row)) for row in range(REPEATS + 1)][1:]
    many = [
        first_token(engine_of(model), *[text(model, 512, row + 16 * turn) for row in range(16)]) for turn in range(3)
    ]
    engine, turns = engine_of(model, lots), []
    tokens = history(model, long)
    first_token(engine, tokens)
    for turn in range(5):
        tokens = [*tokens, TURN, *text(model, 50, turn)]
        turns.append(1e3 * first_token(engine, tokens))
    print(f"history of {long} tokens in turns, with a prefix cache: {median(agent):.0f} tokens/s")
    print(f"sixteen prompts of 512 at once: {median(many[1:]):.2f} s to the last first token")
    print(f"turns of 50 after it: {', '.join(f'{each:.0f}' for each in turns)} ms to the first token", flush=True)
    note("agent, many, turns", [agent, many, turns])


def stock_prompt(lm: nn.Module, tokens: Sequence[int]) -> float:
    """Return the seconds of mlx-lm's forward over a prompt, in its chunks of 2,048."""
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
    """Return the hidden states of a prompt, and what layers hold after it."""
    state, hidden = model.make_state(1), []
    for begin, end in pairwise([0, *ends, len(tokens)]):
        hidden.append(model.trunk(mx.array([tokens[begin:end]]), state, end - begin))
        state.commit(mx.full((1,), end - begin, mx.int32), most=end - begin)
        mx.eval(hidden[-1], state.arrays())
    held = [a[:, :, : len(tokens)] if isinstance(m, KV) else a for m in state.layers for a in m.arrays()]
    return [mx.concatenate(hidden, axis=1), *held]


def beside(model: Model) -> None:
    length = min(100_000, model.context_length // 2)
    alone, found = read_beside(model, length, 0), read_beside(model, length, 4)
    table("prompt", "alone, s", "beside four streams", "their step, ms", "their gaps, median", "longest")
    cells = [alone.first, found.first, *[1e3 * each for each in (found.alone, found.gap(0.5), found.gap(1.0))]]
    line(length, *cells)
    note("beside", cells)
