"""What choosing the depth costs the host, beside a step of the built-in model at k = 0.

    python bench/depth.py [MODEL] [--rows 1 4 16]

One choice and one observation of a controller that has seen some of everything. Both are measured in turns, and
their ratio is taken within a turn.
"""

import argparse
import random
import statistics
import time

from step import ours

from headstart import load
from headstart.cards import MAX_K
from headstart.engine import Depth
from headstart.engine.depth import Drafter

ROUNDS, TURNS = 1000, 5


def controller(rows: int) -> float:
    """Seconds a round, the median of many."""
    rng, depth, drafters, times = random.Random(0), Depth(), [Drafter(MAX_K) for _ in range(rows)], []
    for round in range(ROUNDS):
        running = drafters[: rng.choice((rows, rows, rows, max(rows // 2, 1)))]
        begun = time.perf_counter()
        k = depth.choose(running)
        spent = time.perf_counter() - begun
        outcomes = [(rng.randint(0, k), k) for _ in running]
        seconds = (1 + 0.2 * k + 0.1 * len(running)) * rng.lognormvariate(0, 0.1)
        begun = time.perf_counter()
        depth.observe(running, k, outcomes, seconds)
        if round >= ROUNDS // 4:
            times.append(spent + time.perf_counter() - begun)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    arguments = parser.parse_args()
    model, _ = load(arguments.model)
    print("| rows | µs a round | share of a step |\n| --- | --- | --- |")
    for rows in arguments.rows:
        turns = [(controller(rows), ours(model, rows, 0)[0] / 1e3) for _ in range(TURNS)]
        spent, share = statistics.median(c for c, _ in turns), statistics.median(c / step for c, step in turns)
        print(f"| {rows} | {spent * 1e6:.0f} | {share:.2%} |")


if __name__ == "__main__":
    main()
