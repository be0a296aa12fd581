"""Time the depth controller and the index of copies on the host, relative to a step of the model at k = 0.

    python bench/host.py [MODEL] [--rows 1 4 16] [--prompt 100000]

A round of the controller is a choice and an observation, after it has run with every batch size up to 16; one of the
index takes in four tokens of a text that repeats itself, and asks what a copy would earn. They and the step take
turns, and ratios are taken within a turn. The index also has 4 bytes per token on the device.
"""

import random
import time
import tracemalloc
from functools import partial
from statistics import mean, median

from harness import line, medians, options, seconds_of, table, turns
from step import ours

from headstart import load
from headstart.engine import DepthController
from headstart.engine.copies import CopyIndex
from headstart.engine.draft_history import DraftHistory
from headstart.limits import MAX_HEAD_K

ROUNDS, TURNS, MOST_ROWS = 1000, 5, 16
VISITS = 20  # rounds with each batch size before
ROUND = 4  # tokens


def controller(rows: int) -> list[float]:
    """Return the seconds of rounds with `rows` sequences."""
    rng, depth, times = random.Random(0), DepthController(), []
    histories = [DraftHistory(MAX_HEAD_K) for _ in range(max(rows, MOST_ROWS))]
    visits = [count for count in range(1, MOST_ROWS + 1) for _ in range(VISITS)]
    for count in visits + [rows] * ROUNDS:
        running = histories[:count]
        started = time.perf_counter()
        k = depth.choose(running).k
        spent = time.perf_counter() - started
        outcomes = [(rng.randint(0, k), k) for _ in running]
        step = (1 + 0.2 * k + 0.1 * len(running)) * rng.lognormvariate(0, 0.1)
        times.append(spent + seconds_of(lambda o=(running, k, outcomes, step): depth.observe(*o)))
    return times[len(visits) :]


def repeating(length: int) -> list[int]:
    """Return tokens of which every other hundred is a copy of an earlier hundred."""
    rng, tokens = random.Random(0), list[int]()
    while len(tokens) < length:
        tokens += rng.choices(range(50_000), k=100)
        start = rng.randrange(len(tokens) - 99)
        tokens += tokens[start : start + 100]
    return tokens[:length]


def index_seconds(tokens: list[int], prompt: int) -> tuple[float, float]:
    """Return the seconds of a prompt, and of a round after it."""
    index, pool, said = CopyIndex(), DraftHistory(memory=0.997), tokens[:prompt]
    whole = seconds_of(lambda: index.update(said, pool))

    def rounds() -> None:
        for first in range(prompt, len(tokens), ROUND):
            said.extend(tokens[first : first + ROUND])
            index.update(said, pool)
            index.survival(pool)

    return whole, seconds_of(rounds) / ROUNDS


def index_bytes(length: int) -> float:
    """Return the bytes per token of a text that does not repeat itself."""
    different, index = random.Random(0).choices(range(50_000), k=length), CopyIndex()
    tracemalloc.start()
    index.update(different, DraftHistory(memory=0.997))
    held = tracemalloc.get_traced_memory()[0] / length
    tracemalloc.stop()
    return held


def step_seconds(found: dict[str, list]) -> list[float]:
    return [ms / 1e3 for ms, _ in found["step"]]


def main() -> None:
    given = options(__doc__, "model", rows=[1, 4, 16], prompt=100_000)
    model, _ = load(given.model)
    table("sequences", "controller, µs a round, mean", "median", "share of a step, mean")
    for rows in given.rows:
        runs = {"round": partial(controller, rows), "step": partial(ours, model, rows, 0)}
        found = turns(runs, TURNS)
        shares = [mean(each) / step for each, step in zip(found["round"], step_seconds(found), strict=True)]
        mid = medians([(mean(each), median(each)) for each in found["round"]])
        line(rows, *[1e6 * each for each in mid], f"{median(shares):.2%}")
    text = repeating(given.prompt + ROUND * ROUNDS)
    found = turns({"index": partial(index_seconds, text, given.prompt), "step": partial(ours, model, 1, 0)}, TURNS)
    whole, round = medians(found["index"])
    share = median(each[1] / step for each, step in zip(found["index"], step_seconds(found), strict=True))
    table("copies: µs a round", "share of a step", "ms for a prompt", "bytes a token")
    line(1e6 * round, f"{share:.2%}", 1e3 * whole, index_bytes(given.prompt))


if __name__ == "__main__":
    main()
