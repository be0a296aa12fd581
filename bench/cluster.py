"""Measure what speculation saves between machines: messages, rounds and time of an answer by depth.

    mlx.launch -n 2 -- python bench/cluster.py [MODEL] [--split pipeline] [--tokens 64]

More drafts add computation and bytes, but no messages.
"""

import time

import mlx.core as mx
from harness import line, options, table

from headstart.bench.prompts import BenchPrompt
from headstart.cluster import follow, join_machines, lead, load_part
from headstart.cluster.communicator import Communicator
from headstart.engine import Request
from headstart.sampling import SamplingParams

DEPTHS = (0, 1, 2, 3, 4)
PROMPT = BenchPrompt(messages=({"role": "user", "content": "Write a Python function that merges two sorted lists."},))
REPEATS = 8  # messages of a size that are timed together
POSITIONS = 64  # of the larger message that is timed


def message_cost(comm: Communicator, hidden: int, dtype: mx.Dtype) -> tuple[float, float]:
    """Return the latency and the bandwidth of messages, in seconds and bytes. All ranks must call it at once."""
    small, large = mx.zeros((1, hidden), dtype), mx.zeros((POSITIONS, hidden), dtype)
    times = []
    for message in (small, small, large):  # the first warms up
        mx.eval(message)
        started = time.perf_counter()
        for _ in range(REPEATS):
            message = comm.gather(message)[0]
        mx.eval(message)
        times.append((time.perf_counter() - started) / REPEATS)
    _, short, long = times
    return short, (large.nbytes - small.nbytes) / max(long - short, 1e-9)


def main() -> None:
    given = options(__doc__, "model", split="tensor", tokens=64)
    with join_machines() as machines:
        comm = machines.comm
        model, tokenizer = load_part(given.model, comm, given.split)
        hidden = int(model.config["hidden_size"])
        if machines.rank:
            follower = follow(machines, model, tokenizer)
            message_cost(comm, hidden, model.dtype)
            follower.run()
            return
        engine = lead(machines, model, tokenizer, max_sequences=1)
        latency, bandwidth = message_cost(comm, hidden, model.dtype)
        print(f"a message: {latency * 1e6:.0f} µs, {bandwidth / 1e6:.0f} MB/s more")
        table("k", "rounds", "tokens per round", "messages per token", "ms per token")
        for k in (0, *DEPTHS):  # the first warms up
            before, started, generated = 0, 0.0, 0
            for event in engine.submit(
                Request(PROMPT.tokens(tokenizer), SamplingParams(max_tokens=given.tokens, k=k))
            ):
                if not generated:  # the prompt is in, and the first round with it
                    before, started = comm.operations, time.perf_counter()
                generated += len(event.tokens)
            ms, stats = 1e3 * (time.perf_counter() - started) / generated, event.stats
            line(k, stats.rounds, stats.tokens_per_round, (comm.operations - before) / generated, ms)


if __name__ == "__main__":
    main()
