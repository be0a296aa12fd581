"""What an open dashboard costs the server: `python bench/dashboard.py [CHROMIUM]`

Two measures, each with the page closed and open in turn, both of processor time, which other programs on the machine
hardly touch. *Idle*: what the server takes when nothing is asked of it, as a share of one core. *Round*: what it
takes for a round of the built-in model at a fixed depth, all included.
"""

import argparse
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import httpx
from playwright.sync_api import Browser, expect, sync_playwright

from headstart.checkpoint import read_layout, resolve
from headstart.engine import Room
from headstart.library import load
from headstart.server import Served, Server, bind, create_app

BODY = {
    "messages": [{"role": "user", "content": "Write a Python function that sorts a list."}],
    "max_tokens": 400,
    "min_tokens": 400,
    "num_draft_tokens": 3,
    "temperature": 0,
}


@contextmanager
def serving() -> Iterator[str]:
    """In this process, whose other threads sleep meanwhile."""
    folder = resolve(None)
    model, tokenizer = load(folder)
    room = Room(model, tokenizer)
    room.engine.warm_up()
    with bind("127.0.0.1", 0) as place:
        server = Server(create_app(room, Served.of(read_layout(folder), model, tokenizer)), room)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
        thread.start()
        while not server.started:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{place.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@contextmanager
def page(browser: Browser, address: str) -> Iterator[None]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.goto(address)
    expect(opened.locator("#tiles")).to_contain_text("Memory", timeout=60_000)
    yield
    context.close()


def idle(seconds: float) -> float:
    began = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - began) / seconds


def round_seconds(address: str) -> float:
    began = time.process_time()
    stats = httpx.post(f"{address}/v1/chat/completions", json=BODY, timeout=600).json()["generation_stats"]
    return (time.process_time() - began) / float(stats["rounds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chromium", nargs="?", default=shutil.which("chromium"))
    parser.add_argument("--seconds", type=float, default=20.0, help="of one look at an idle server")
    parser.add_argument("--repeats", type=int, default=8)
    asked = parser.parse_args()
    with serving() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=asked.chromium, args=["--no-sandbox"])
        round_seconds(address)  # what the first one compiles is nobody's cost
        shares: dict[bool, list[float]] = {False: [], True: []}
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(asked.repeats):
            shares[False].append(idle(asked.seconds))
            times[False].append(round_seconds(address))
            with page(browser, address):
                shares[True].append(idle(asked.seconds))
                times[True].append(round_seconds(address))
    ratios = sorted(opened / closed for closed, opened in zip(times[False], times[True], strict=True))
    for name, opened in (("closed", False), ("open", True)):
        print(
            f"{name:6}  idle {median(shares[opened]):.3%} of a core ({min(shares[opened]):.3%} to "
            f"{max(shares[opened]):.3%})  round {median(times[opened]) * 1e3:.3f} ms"
        )
    print(f"the page adds {median(shares[True]) - median(shares[False]):.3%} of a core;", end=" ")
    print(f"rounds: open to closed {median(ratios):.4f}, {ratios[0]:.4f} to {ratios[-1]:.4f}")


if __name__ == "__main__":
    main()
