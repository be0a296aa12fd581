"""Headstart beside llama.cpp on one CPU: prompts and decoding, by turns, in two processes pinned to the same cores.

Run by `bench/cpu.py --beside llama.cpp`. Each process loads its model once and answers the same token ids, one after
the other, so that a busy machine slows both alike. Seconds of CPU time are those of all of a process's threads.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Clock = tuple[float, float]  # seconds of the wall and of the CPU


def compare(args: argparse.Namespace) -> None:
    """Print a table of tokens per second, medians of all rounds, and of the ratios of each round."""
    from harness import Worker, line, median, ratio, table

    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: args.threads]))
    sides = {"Headstart": (sys.executable, args.model), "llama.cpp": (args.python, args.gguf)}
    workers = {side: Worker(python, __file__, side, model, cores) for side, (python, model) in sides.items()}
    rates: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: {side: [] for side in sides})
    for turn, length in ((turn, length) for turn in range(args.repeats) for length in args.contexts):
        prompt = random.Random(turn * 100_000 + length).choices(range(100, 8000), k=length)
        for side in sorted(sides, reverse=bool(turn % 2)):
            done = workers[side].ask({"prompt": prompt, "tokens": args.tokens, "k": args.k})
            for name, tokens in ((f"reading {length}", length), (f"decoding after {length}", args.tokens - 1)):
                for unit, seconds in zip(("wall", "CPU"), done[name.split()[0]], strict=True):
                    rates[name, unit][side].append(tokens / seconds)
    for side, worker in workers.items():
        print(f"{side}: {worker.what['what']}, {worker.what['bytes'] / 1e6:.1f} MB of weights")
        worker.end()
    print(f"{args.threads} thread(s), {args.repeats} rounds, k = {args.k}")
    table("tokens", "per second", *sides, "ratio")
    for (name, unit), each in rates.items():
        line(name, unit, *map(median, each.values()), ratio(*each.values()))


def clock() -> Clock:
    return time.perf_counter(), time.process_time()


def since(begin: Clock, end: Clock) -> Clock:
    return end[0] - begin[0], end[1] - begin[1]


def work(side: str, model: str, cores: str) -> None:
    """Answer questions from stdin: how long did the prompt take, and how long the tokens after the first one?"""
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    what, run = (headstart_worker if side == "Headstart" else llama_worker)(model, cores.count(",") + 1)
    list(run([*range(100, 120)], 4, 0))
    print(json.dumps(what), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        begin = clock()
        ticks = list(run(asked["prompt"], asked["tokens"], asked["k"]))
        print(json.dumps({"reading": since(begin, ticks[0]), "decoding": since(ticks[0], ticks[-1])}), flush=True)


Side = tuple[dict[str, Any], Callable[[list[int], int, Any], Iterator[Clock]]]


def headstart_worker(path: str, threads: int) -> Side:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    import headstart
    from headstart.engine import Engine, Request
    from headstart.sampling import SamplingParams
    from headstart.state import PrefixCache

    mx.set_default_device(mx.cpu)
    model, _ = headstart.load(path)
    engine = Engine(model, prefix=PrefixCache(0))
    size = sum(array.nbytes for _, array in tree_flatten(model.weights.parameters()))

    def run(prompt: list[int], tokens: int, k: Any) -> Iterator[Clock]:
        params = SamplingParams(max_tokens=tokens, k=k)
        for event in engine.submit(Request(prompt, params)):
            if event.tokens:
                yield clock()

    return {"what": model.backend.description, "bytes": size}, run


def llama_worker(path: str, threads: int) -> Side:
    os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0")
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = 8448, 1, 0, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(prompt: list[int], tokens: int, k: Any) -> Iterator[Clock]:
        ticks: list[Clock] = []
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False, "stream": True}
        server.handle_completions(json.dumps(asked | {"ignore_eos": True}), lambda _: ticks.append(clock()))
        return iter(ticks)

    return {"what": f"xllamacpp {xllamacpp.__version__}", "bytes": Path(path).stat().st_size}, run


if __name__ == "__main__":
    work(*sys.argv[1:])
