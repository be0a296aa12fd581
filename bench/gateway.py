"""Tokens per second of CPU time: servers behind a gateway, each on a core of its own, beside one alone.

    python bench/gateway.py --smg smg [--rounds 3]

CPU time is that of the server processes; the gateway's is told apart. The runs take turns. For Linux.
"""

import argparse
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "suites"))

from servers import Process, ask, free_port, headstart, running

TICKS = os.sysconf("SC_CLK_TCK")
REQUESTS, TOKENS = 8, 64  # of each server in a run


def cpu_seconds(process: Process) -> float:
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def generate(url: str, name: str) -> int:
    body = {"prompt": f"def {name}(values):", "max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0}
    return int(ask(f"{url}/v1/completions", {"model": "tiny-qwen3.5", **body})["usage"]["completion_tokens"])


def measure(urls: list[str], servers: list[Process], number: int) -> float:
    """Return the tokens per second of CPU time of the servers. Requests go to the URLs in turn."""
    before = sum(map(cpu_seconds, servers))
    with ThreadPoolExecutor(4 * len(servers)) as threads:
        jobs = [(urls[i % len(urls)], f"run_{number}_{i}") for i in range(REQUESTS * len(servers))]
        tokens = sum(threads.map(lambda job: generate(*job), jobs))
    return tokens / (sum(map(cpu_seconds, servers)) - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smg", default="smg", help="the gateway's command")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with ExitStack() as stack:
        servers = [stack.enter_context(headstart()) for _ in range(2)]
        for core, server in enumerate(servers):
            for thread in Path(f"/proc/{server.process.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})
        port = free_port()
        command = [options.smg, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
        gateway = stack.enter_context(
            running([*command, "--worker-urls", *(server.url for server in servers)], port, "/v1/models")
        )
        both = [server.url for server in servers]
        ways = {"one alone": (both[:1], servers[:1]), "two": (both, servers), "behind": ([gateway.url], servers)}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            measure(*way, 100)  # the first compiles and learns
        busy = cpu_seconds(gateway)
        for number in range(200, 200 + options.rounds):
            for i, (name, way) in enumerate(ways.items()):
                found[name].append(measure(*way, 100 * i + number))
        busy = (cpu_seconds(gateway) - busy) / (options.rounds * REQUESTS * 2)
    for name, other in (("two", "one alone"), ("behind", "one alone"), ("behind", "two")):
        ratios = [a / b for a, b in zip(found[name], found[other], strict=True)]
        print(f"{name} / {other}: {statistics.median(ratios):.2f} ({', '.join(f'{each:.2f}' for each in ratios)})")
    print(f"the gateway: {1000 * busy:.1f} ms of CPU time per request of {TOKENS} tokens")


if __name__ == "__main__":
    main()
