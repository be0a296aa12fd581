"""How long does a small request take beside an attack? `python bench/hostile.py [--count N] [--against SRC]`

A server process gets a completion request of one token, alone and during each attack, which is repeated for as long
as the small requests last. Prints a Markdown table of medians; the attacks are those of the tests.

`--against SRC` instead compares ordinary requests with another version of the sources: small chats, with and without
a schema, to both servers in turn, up to the first token.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "server"), str(ROOT / "tests")]  # before this folder, which has a hostile.py too

from attacks import CHAT, GRAMMARS, HI, PROMPTS, TEXT, lark, rules, shaped, wide  # noqa: E402
from hostile import Case, Target, connect, target  # noqa: E402

EXTRA = [
    Case("3,000 rules", TEXT, lark(rules(3_000)), 200, None),
    Case("an object of too many properties", CHAT, shaped(wide(4_900)), 400, None),
]
Attack = Callable[[Target, threading.Event], None]  # until the event is set


def sending(case: Case) -> Attack:
    """Return an attack that sends a case repeatedly."""

    def attack(server: Target, finished: threading.Event) -> None:
        with server.http(timeout=600) as http:
            while not finished.is_set():
                case.send(http)

    return attack


def holding(count: int, data: bytes) -> Attack:
    """Return an attack of `count` connections that send `data` and then neither send nor read."""

    def attack(server: Target, finished: threading.Event) -> None:
        with ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(connect(server.url, receive_buffer=4096)).sendall(data)
            finished.wait()

    return attack


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
BODY = b'{"prompt": "a", "max_tokens": 2000, "stream": true}'
ATTACKS: dict[str, Attack] = {
    **{case.name: sending(case) for case in [*GRAMMARS, *PROMPTS, *EXTRA]},
    "1,000 idle connections": holding(1_000, b""),
    "200 requests without the end of their headers": holding(200, b"GET /health HTTP/1.1\r\n"),
    "200 requests without the end of their body": holding(200, POST + b"100000\r\n\r\n{"),
    "8 streams that are not read": holding(8, POST + b"%d\r\n\r\n" % len(BODY) + BODY),
}


@contextmanager
def under(attack: Attack, server: Target) -> Iterator[None]:
    finished = threading.Event()
    thread = threading.Thread(target=attack, args=(server, finished))
    thread.start()
    time.sleep(0.2)  # it has begun
    try:
        yield
    finally:
        finished.set()
        thread.join()


def seconds(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def beside_attacks(count: int, only: list[str]) -> None:
    with target() as server:
        for _ in range(5):
            server.small()
        print("| beside | alone, s | beside, s | ratio |\n| --- | ---: | ---: | ---: |")
        for name, attack in ATTACKS.items():
            if only and name not in only:
                continue
            alone = median(seconds(server.small) for _ in range(count))
            with under(attack, server):
                beside = median(seconds(server.small) for _ in range(count))
            print(f"| {name} | {alone:.3f} | {beside:.3f} | {beside / alone:.1f} |", flush=True)


def first_token(server: Target, body: dict[str, Any]) -> float:
    """Return the seconds to the first chunk with content."""
    with server.http() as http:
        begun = time.perf_counter()
        with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            next(line for line in response.iter_lines() if '"content"' in line)
            return time.perf_counter() - begun


def ordinary(i: int) -> dict[str, dict[str, Any]]:
    old = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    new = {"type": "object", "properties": {f"a{i}": {"type": "integer"}}, "required": [f"a{i}"]}
    return {"chat": HI, "chat with a schema": shaped(old), "chat with a new schema": shaped(new)}


def compare(count: int, other: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(target(PYTHONPATH=str(each))) for each in (other, ROOT / "src")]
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ordinary(0)}
        for i in range(count):
            for name, body in ordinary(i).items():
                for server, found in zip(servers, times[name], strict=True):
                    found.append(first_token(server, body))
        print("| first token of a | before, ms | after, ms | ratio |\n| --- | ---: | ---: | ---: |")
        for name, (before, after) in times.items():
            a, b = median(before[1:]), median(after[1:])
            print(f"| {name} | {a * 1e3:.1f} | {b * 1e3:.1f} | {b / a:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--only", action="append", default=[], help="names of attacks")
    parser.add_argument("--against", type=Path, metavar="SRC")
    arguments = parser.parse_args()
    if arguments.against is not None:
        compare(arguments.count, arguments.against)
    else:
        beside_attacks(arguments.count, arguments.only)


if __name__ == "__main__":
    main()
