"""Headstart beside llama.cpp on one CPU: prompts and decoding, by turns, in two processes pinned to the same cores.

Run by `bench/cpu.py --beside llama.cpp`. Each process loads its model once and answers the same token ids, one after
the other, so that a busy machine slows both alike. Seconds of CPU time are those of all of a process's threads.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIDES = ("Headstart", "llama.cpp")
Clock = tuple[float, float]  # seconds of the wall and of the CPU
Rates = dict[str, dict[str, list[float]]]  # by side and measurement


def compare(args: argparse.Namespace) -> None:
    """Print a table of tokens per second, medians of all rounds, and of the ratios of each round."""
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    workers = {}
    for side, python, model in (
        ("Headstart", sys.executable, args.model), ("llama.cpp", args.python, args.gguf)
    ):  # fmt: skip
        command = [python, __file__, side, str(model), ",".join(map(str, cores))]
        workers[side] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    made = {side: ask(worker) for side, worker in workers.items()}
    rates: Rates = {side: defaultdict(list) for side in SIDES}
    for turn, length in ((turn, length) for turn in range(args.repeats) for length in args.contexts):
        prompt = random.Random(turn * 100_000 + length).choices(range(100, 8000), k=length)
        for side in SIDES if turn % 2 else SIDES[::-1]:
            done = ask(workers[side], {"prompt": prompt, "tokens": args.tokens, "k": args.k})
            for kind, tokens in (("read", length), ("decode", args.tokens - 1)):
                for unit, seconds in zip(("wall", "CPU"), done[kind], strict=True):
                    rates[side][f"{kind} {length} {unit}"].append(tokens / seconds)
    for worker in workers.values():
        worker.communicate()
    report(args, made, rates)


def report(args: argparse.Namespace, made: dict[str, Any], rates: Rates) -> None:
    for side in SIDES:
        print(f"{side}: {made[side]['what']}, {made[side]['bytes'] / 1e6:.1f} MB of weights")
    print(f"{args.threads} thread(s), {args.repeats} rounds, k = {args.k}\n")
    print("| tokens | per | Headstart | llama.cpp | ratio |\n| --- | --- | ---: | ---: | ---: |")
    for name in rates["Headstart"]:
        kind, length, unit = name.split()
        ours, theirs = rates["Headstart"][name], rates["llama.cpp"][name]
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        what = f"reading {length}" if kind == "read" else f"decoding after {length}"
        mine, other = statistics.median(ours), statistics.median(theirs)
        print(f"| {what} | {unit} second | {mine:.1f} | {other:.1f} | {ratio:.2f} |")


def ask(worker: "subprocess.Popen[str]", question: Any = None) -> Any:
    """Return a worker's next answer."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    if question is not None:
        print(json.dumps(question), file=worker.stdin, flush=True)
    for line in worker.stdout:
        if line.startswith("{"):  # libraries print too
            return json.loads(line)
    raise SystemExit(f"{worker.args} ended")


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
        print(json.dumps({"read": since(begin, ticks[0]), "decode": since(ticks[0], ticks[-1])}), flush=True)


Worker = tuple[dict[str, Any], Callable[[list[int], int, Any], Iterator[Clock]]]


def headstart_worker(path: str, threads: int) -> Worker:
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


def llama_worker(path: str, threads: int) -> Worker:
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
