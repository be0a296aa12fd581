"""Tokens per second of CPU time: servers behind a gateway, each on a core of its own, beside one alone.

    python bench/gateway.py --smg smg [--rounds 3] [--policy round_robin] [--requests 8]

CPU time is that of the server processes; the gateway's is told apart. The runs take turns. For Linux.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import count
from pathlib import Path

from harness import line, options, ratio, table, turns

from suites.servers import Process, ask, free_port, headstart, running

COMPARED = (
    ("one behind", "one alone"), ("two", "one alone"), ("two behind", "one alone"), ("two behind", "two"),
)  # fmt: skip
TICKS = os.sysconf("SC_CLK_TCK")
BATCH, TOKENS = 4, 64  # sequences at a time of each server, tokens of a request


def cpu_seconds(process: Process) -> float:
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def generate(url: str, name: str) -> int:
    body = {"prompt": f"def {name}(values):", "max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0}
    body["num_draft_tokens"] = 2  # the automatic depth depends on how busy the machine is
    return int(ask(f"{url}/v1/completions", {"model": "tiny-qwen3.5", **body})["usage"]["completion_tokens"])


def measure(urls: list[str], servers: list[Process], number: int, requests: int) -> float:
    """Return the tokens per second of CPU time of the servers."""
    before = sum(map(cpu_seconds, servers))
    each = len(servers) // len(urls)  # a URL has a client for every sequence of its servers' batches
    with ExitStack() as stack:
        clients = [stack.enter_context(ThreadPoolExecutor(BATCH * each)) for _ in urls]
        answers = [
            client.map(partial(generate, url), [f"run_{number}_{i}_{j}" for j in range(requests * each)])
            for i, (client, url) in enumerate(zip(clients, urls, strict=True))
        ]
        tokens = sum(map(sum, answers))
    return tokens / (sum(map(cpu_seconds, servers)) - before)


def gateway(smg: str, policy: str, urls: list[str]) -> AbstractContextManager[Process]:
    port = free_port()
    command = [smg, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--worker-urls", *urls]
    command += ["--prometheus-port", str(free_port())]
    return running(command, port, "/v1/models")


def main() -> None:
    given = options(__doc__, smg="smg", rounds=3, policy="round_robin", requests=8)
    with ExitStack() as stack:
        servers = [stack.enter_context(headstart()) for _ in range(2)]
        for core, server in enumerate(servers):
            for thread in Path(f"/proc/{server.process.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})
        both, number = [server.url for server in servers], count(100)
        gateways = [stack.enter_context(gateway(given.smg, given.policy, urls)) for urls in (both[:1], both)]
        ways = {
            "one alone": (both[:1], servers[:1]),
            "one behind": ([gateways[0].url], servers[:1]),
            "two": (both, servers),
            "two behind": ([gateways[1].url], servers),
        }
        runs = {
            name: partial(lambda way: measure(*way, next(number), given.requests), way) for name, way in ways.items()
        }
        found = turns(runs, given.rounds)
        busy = sum(map(cpu_seconds, gateways)) / ((given.rounds + 1) * given.requests * 3)
    table("tokens per CPU second of the servers", "to", "ratio", "of each round")
    for name, other in COMPARED:
        each = ", ".join(f"{a / b:.2f}" for a, b in zip(found[name], found[other], strict=True))
        line(name, other, ratio(found[name], found[other]), each)
    print(f"\nThe gateway: {1000 * busy:.1f} ms of CPU time per request of {TOKENS} tokens")


if __name__ == "__main__":
    main()
