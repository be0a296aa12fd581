"""Prompts and steps of a model on one core and on all of them, by turns, and whether they say the same.

    python bench/cores.py [MODEL] [--rows 1,4,8] [--k 0,1,2] [--repeats 5]

Only products go to several cores (`kernels/cores.py`), so no prediction is the number of cores: on a two-core Xeon
three quarters of a prompt and two thirds of a step are products.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import mlx.core as mx

import headstart
import headstart.kernels.cores
from headstart.engine.step import prefill_prompts, step

PROMPT = "The history of computing is long. In the beginning there were "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--k", default="0,1,2")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    model, tokenizer = headstart.load(args.model)
    prompt = list(tokenizer.encode(PROMPT * 12))[:98]
    all_cores = headstart.kernels.cores.cores()
    headstart.kernels.cores.others()

    def read(ceiling: int) -> list[int]:
        prefill_prompts(model, [prompt], ceiling)
        return []

    def decode(k: int, rows: int, steps: int = 8) -> list[int]:
        said, batch = [], prefill_prompts(model, [prompt[: 30 + row] for row in range(rows)], 8)
        begin = time.perf_counter()
        for _ in range(steps):
            round = step(model, batch, k)
            mx.eval(round.tokens, batch.arrays())
            said += round.tokens.flatten().tolist()
        spent.append((time.perf_counter() - begin) / steps)
        return said

    cases: dict[str, Callable[[], list[int]]] = {
        f"prompt of {len(prompt) - 1} tokens": lambda: read(0),
        "… and the head's part of it": lambda: read(8),
    }
    for rows in map(int, args.rows.split(",")):
        for k in map(int, args.k.split(",")):
            cases[f"step of {rows} rows, k = {k}"] = lambda k=k, rows=rows: decode(k, rows)  # type: ignore[misc]

    print(f"| ms | one core | {all_cores} cores | ratio |\n| --- | --- | --- | --- |")
    for name, run in cases.items():
        times: dict[int, list[float]] = {1: [], all_cores: []}
        said = set()
        for repeat in range(args.repeats + 1):  # the first warms up
            for count in times:
                headstart.kernels.cores.cores = lambda count=count: count  # type: ignore[assignment,misc]
                spent: list[float] = []
                begin = time.perf_counter()
                said.add(tuple(run()))
                if repeat:
                    times[count].append(spent[0] if spent else time.perf_counter() - begin)
        assert len(said) == 1, f"{name}: the number of cores changes what is said"
        one, many = times[1], times[all_cores]
        ratio = statistics.median(a / b for a, b in zip(one, many, strict=True))
        print(f"| {name} | {statistics.median(one) * 1e3:.1f} | {statistics.median(many) * 1e3:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
