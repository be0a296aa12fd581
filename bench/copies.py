"""Time the index of copies on the host, relative to a step of the built-in model at k = 0, and count its memory.

    python bench/copies.py [MODEL] [--prompt 100000]

A round takes in four tokens of a text that repeats itself, and asks what a copy would earn. The index and the step
are measured in turns, and their ratio is taken within a turn. The device keeps 4 bytes per token besides.
"""

import argparse
import random
import statistics
import time
import tracemalloc

from step import ours

from headstart import load
from headstart.engine.copies import CopyIndex
from headstart.engine.draft_history import DraftHistory

ROUND, ROUNDS, TURNS = 4, 1000, 5  # tokens per round, rounds per turn, turns


def text(length: int) -> list[int]:
    """Return tokens of which every other hundred is a copy of an earlier hundred."""
    rng, tokens = random.Random(0), list[int]()
    while len(tokens) < length:
        tokens += rng.choices(range(50_000), k=100)
        start = rng.randrange(len(tokens) - 99)
        tokens += tokens[start : start + 100]
    return tokens[:length]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--prompt", type=int, default=100_000)
    arguments = parser.parse_args()
    model, _ = load(arguments.model)
    tokens, pool = text(arguments.prompt + ROUND * ROUNDS), DraftHistory(memory=0.997)
    rounds, prompts, shares = [], [], []
    for _ in range(TURNS):
        index, said = CopyIndex(), tokens[: arguments.prompt]
        started = time.perf_counter()
        index.update(said, pool)
        prompts.append(time.perf_counter() - started)
        started = time.perf_counter()
        for number in range(ROUNDS):
            first = arguments.prompt + ROUND * number
            said += tokens[first : first + ROUND]
            index.update(said, pool)
            index.survival(pool)
        rounds.append((time.perf_counter() - started) / ROUNDS)
        shares.append(rounds[-1] / (ours(model, 1, 0)[0] / 1e3))
    print(f"{statistics.median(rounds) * 1e6:.0f} µs per round of {ROUND} tokens, ", end="")
    print(f"{statistics.median(shares):.2%} of a step; a prompt of {arguments.prompt} tokens ", end="")
    print(f"{statistics.median(prompts) * 1e3:.0f} ms once")
    for length in (arguments.prompt // 10, arguments.prompt):
        different = random.Random(0).choices(range(50_000), k=length)
        tracemalloc.start()
        index = CopyIndex()
        index.update(different, pool)
        print(f"{tracemalloc.get_traced_memory()[0] / length:.0f} bytes per token of {length} that do not repeat")
        tracemalloc.stop()


if __name__ == "__main__":
    main()
