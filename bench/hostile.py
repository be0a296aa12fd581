"""How long does a small request take beside an attack? `python bench/hostile.py [--count N] [--only NAME]`

A server process gets a completion request of one token, alone and during each attack, which is repeated for as long
as the small requests last. Prints a Markdown table of medians; the attacks are those of the tests.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

from harness import ROOT, line, options, seconds_of, table

sys.path[:0] = [str(ROOT / "tests" / "server"), str(ROOT / "tests")]  # before this folder, which has a hostile.py too

from attacks import CHAT, GRAMMARS, PROMPTS, TEXT, lark, rules, shaped, wide  # noqa: E402
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


def main() -> None:
    given = options(__doc__, count=10, only=list(ATTACKS))
    with target() as server:
        for _ in range(5):
            server.small()
        table("beside", "alone, s", "beside, s", "ratio")
        for name in given.only:
            alone = median(seconds_of(server.small) for _ in range(given.count))
            with under(ATTACKS[name], server):
                beside = median(seconds_of(server.small) for _ in range(given.count))
            line(name, alone, beside, beside / alone)


if __name__ == "__main__":
    main()
