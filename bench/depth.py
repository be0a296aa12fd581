"""Time the depth controller on the host, relative to a step of the built-in model at k = 0.

    python bench/depth.py [MODEL] [--rows 1 4 16]

One choice and one observation per round, of a controller that has run with every batch size up to 16. The controller
and the step are measured in turns, and their ratio is taken within a turn.
"""

import argparse
import random
import statistics
import time

from step import ours

from headstart import load
from headstart.engine import DepthController
from headstart.engine.depth import DraftHistory
from headstart.limits import MAX_HEAD_K

ROUNDS, TURNS, MOST_ROWS = 1000, 5, 16
VISITS = 20  # rounds with each batch size before


def controller(rows: int) -> tuple[float, float]:
    """Return the mean and median seconds of a round with `rows` sequences."""
    rng, depth, times = random.Random(0), DepthController(), []
    histories = [DraftHistory(MAX_HEAD_K) for _ in range(max(rows, MOST_ROWS))]
    visits = [count for count in range(1, MOST_ROWS + 1) for _ in range(VISITS)]
    for round, count in enumerate(visits + [rows] * ROUNDS):
        running = histories[:count]
        started = time.perf_counter()
        k = depth.choose(running).k
        spent = time.perf_counter() - started
        outcomes = [(rng.randint(0, k), k) for _ in running]
        seconds = (1 + 0.2 * k + 0.1 * len(running)) * rng.lognormvariate(0, 0.1)
        started = time.perf_counter()
        depth.observe(running, k, outcomes, seconds)
        if round >= len(visits):
            times.append(spent + time.perf_counter() - started)
    return statistics.mean(times), statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    arguments = parser.parse_args()
    model, _ = load(arguments.model)
    print("| sequences | µs per round, mean | median | share of a step, mean |\n| --- | --- | --- | --- |")
    for rows in arguments.rows:
        turns = [(*controller(rows), ours(model, rows, 0)[0] / 1e3) for _ in range(TURNS)]
        mean, middle = (statistics.median(turn[i] for turn in turns) for i in (0, 1))
        share = statistics.median(mean / step for mean, _, step in turns)
        print(f"| {rows} | {mean * 1e6:.0f} | {middle * 1e6:.0f} | {share:.2%} |")


if __name__ == "__main__":
    main()
