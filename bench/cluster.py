"""Measure what speculation saves between machines, and predict it for clusters that cannot be run here.

    mlx.launch -n 2 bench/cluster.py measure [MODEL] [--split pipeline] [--tokens 64]
    mlx.launch -n 2 bench/cluster.py compare [MODEL] [--split pipeline] [--tokens 64] [--float32]
    python bench/cluster.py predict

`measure`: latency and bandwidth of a message, and rounds, messages and time of an answer by depth. `compare`: greedy
answers beside those of one process, and where they differ, by how much the two tokens' logits differ. `predict`: the
time of a round is its computation, divided by the machines if they split every layer, plus its messages one after
another. More drafts add computation and bytes, but no messages.
"""

import argparse
import time
from dataclasses import dataclass

import mlx.core as mx

from headstart.checkpoint import load_model as load_whole
from headstart.cluster import follow, join_machines, lead, load_part
from headstart.cluster.communicator import Communicator
from headstart.engine import Engine, Request
from headstart.sampling import SamplingParams

DEPTHS = (0, 1, 2, 3, 4)
PROMPT = "Write a Python function that merges two sorted lists."

REPEATS = 8  # messages of a size that are timed together
POSITIONS = 64  # of the larger message that is timed


@dataclass(frozen=True)
class MessageCost:
    latency: float  # seconds
    bandwidth: float  # bytes per second

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth


LINKS = {
    "RDMA over Thunderbolt 5": MessageCost(latency=50e-6, bandwidth=6e9),
    "TCP over Thunderbolt": MessageCost(latency=300e-6, bandwidth=5e9),
    "10 Gb Ethernet": MessageCost(latency=200e-6, bandwidth=1.1e9),
    "Wi-Fi": MessageCost(latency=8e-3, bandwidth=50e6),
}


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    hidden: int
    seconds: float  # a step of one sequence without drafts on one machine, were there room
    tokens: tuple[float, ...]  # a round, by k
    step: tuple[float, ...]  # its time to that of k = 0, by k


# The 27B: cumulative acceptance .88 .75 .62 and a gain of 2.69 at k = 3 were reported together for one machine, so a
# step of k = 3 took 1.21 of one without drafts. Experts are dearer: drafts choose others. The 35B-A3B's 1.54 at k = 2
# with 2.63 tokens makes 1.71, taken for the 397B too, of which only the tokens a round were reported.
SHAPES = (
    Shape("27B, 4 bits, 500 GB/s", 64, 5120, 14.5e9 / 500e9, (1, 1.88, 2.63, 3.25), (1, 1.07, 1.14, 1.21)),
    Shape("397B-A17B, 4 bits, 800 GB/s", 60, 4096, 9.6e9 / 800e9, (1, 1.93, 2.73, 3.39), (1, 1.36, 1.71, 2.07)),
)


def round_seconds(shape: Shape, k: int, ranks: int, split: str, link: MessageCost) -> float:
    """Return the time of one sequence's round with k drafts. A gather in a ring of n machines takes n - 1 hops."""
    computing, message = shape.seconds * shape.step[k], 2 * shape.hidden * (k + 1)
    if split == "tensor":
        return computing / ranks + 2 * shape.layers * (ranks - 1) * link.seconds(message)
    return computing + 2 * (ranks - 1) * link.seconds(message)


def predict() -> None:
    print("| model | machines | link | ms per token, k = 0 | at the best k | k | gain |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        cases = [(1, "tensor", "", MessageCost(0, 1e12))]
        cases += [(n, split, *link) for split in ("tensor", "pipeline") for n in (2, 4) for link in LINKS.items()]
        for ranks, split, name, link in cases:
            times = [1e3 * round_seconds(shape, k, ranks, split, link) / shape.tokens[k] for k in range(4)]
            best = min(times)
            machines = f"{ranks}, {split}" if ranks > 1 else "1"
            print(
                f"| {shape.name} | {machines} | {name} | {times[0]:.1f} | {best:.1f} | {times.index(best)} "
                f"| {times[0] / best:.2f} |"
            )


def message_cost(comm: Communicator, hidden: int, dtype: mx.Dtype) -> MessageCost:
    """Time messages of one position and of many. All ranks must call it at once."""
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
    return MessageCost(short, (large.nbytes - small.nbytes) / max(long - short, 1e-9))


def measure(path: str | None, split: str, tokens: int) -> None:
    with join_machines() as machines:
        model, tokenizer = load_part(path, machines.comm, split)  # type: ignore[arg-type]
        if machines.rank:
            follower = follow(machines, model, tokenizer)
            message_cost(machines.comm, int(model.config["hidden_size"]), model.dtype)
            follower.run()
            return
        engine, comm = lead(machines, model, tokenizer, max_sequences=1), machines.comm
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
        speed = message_cost(comm, int(model.config["hidden_size"]), model.dtype)
        print(f"a message: {speed.latency * 1e6:.0f} µs, {speed.bandwidth / 1e6:.0f} MB/s more\n")
        print(
            "| k | rounds | tokens per round | messages per token | ms per token |\n| --- | --- | --- | --- | --- |"
        )
        for k in (0, *DEPTHS):  # the first warms up
            request = Request(prompt, SamplingParams(max_tokens=tokens, k=k))
            before, started, generated = 0, 0.0, 0
            for event in engine.submit(request):
                if not generated:  # the prompt is in, and the first round with it
                    before, started = comm.operations, time.perf_counter()
                generated += len(event.tokens)
            seconds, stats = (time.perf_counter() - started) / generated, event.stats
            messages = (comm.operations - before) / generated
            print(
                f"| {k} | {stats.rounds} | {stats.tokens_per_round:.2f} | {messages:.1f} | {1e3 * seconds:.1f} |",
                flush=True,
            )


def compare(path: str | None, split: str, tokens: int, dtype: mx.Dtype | None) -> None:
    with join_machines() as machines:
        model, tokenizer = load_part(path, machines.comm, split, dtype=dtype)  # type: ignore[arg-type]
        if machines.rank:
            follow(machines, model, tokenizer).run()
            return
        several, alone = (
            lead(machines, model, tokenizer, max_sequences=1),
            Engine(load_whole(path, dtype=dtype), tokenizer),
        )
        same, gaps = 0, []
        for what in ("merges two sorted lists", "counts words", "parses a date", "finds a path", "adds two numbers"):
            chat = [{"role": "user", "content": f"Write a Python function that {what}."}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
            request = Request(prompt, SamplingParams(max_tokens=tokens, k=2), keep_logits=True)
            generated = [token for event in several.submit(request) for token in event.tokens]
            events = list(alone.submit(request))
            expected = [token for event in events for token in event.tokens]
            at = next((i for i, (a, b) in enumerate(zip(generated, expected, strict=False)) if a != b), None)
            if at is None:
                same += 1
                continue
            logits = mx.concatenate([event.logits for event in events if event.logits is not None])[at]
            gaps.append((at, float(logits[expected[at]] - logits[generated[at]]), float(abs(logits).max())))
        print(f"{same} of {same + len(gaps)} answers of {tokens} tokens are the same")
        for at, gap, largest in gaps:
            print(f"token {at} differs: their logits by {gap:.4g}, the largest being {largest:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("predict")
    for name in ("measure", "compare"):
        command = commands.add_parser(name)
        command.add_argument("model", nargs="?")
        command.add_argument("--split", default="tensor", choices=["tensor", "pipeline"])
        command.add_argument("--tokens", type=int, default=64)
    command.add_argument("--float32", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "predict":
        predict()
    elif arguments.command == "measure":
        measure(arguments.model, arguments.split, arguments.tokens)
    else:
        compare(arguments.model, arguments.split, arguments.tokens, mx.float32 if arguments.float32 else None)


if __name__ == "__main__":
    main()
