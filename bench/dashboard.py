"""What an open dashboard costs the server: `python bench/dashboard.py [CHROMIUM]`

Measurements with the page closed and open take turns, and the order changes every time, so that drift affects both.
*Idle*: the server's CPU time without requests, as a share of one core. *Round*: CPU time and wall time for a round of
the built-in model at a fixed depth. *Visit*: the cost of opening the page. The CPU time is the server's own; the
browser's is not included, but it adds to the wall time where the two share cores.
"""

import argparse
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median

import httpx
from playwright.sync_api import Browser, expect, sync_playwright

from headstart.checkpoint import read_layout, resolve
from headstart.engine import Engine, EngineThread
from headstart.library import load
from headstart.server.app import create_app
from headstart.server.listen import bind
from headstart.server.model_pool import ModelPool
from headstart.server.routes import open_app
from headstart.server.served_model import ModelInfo, ServedModel
from headstart.server.server import Server
from headstart.server.states import ServerState

BODY = {
    "messages": [{"role": "user", "content": "Write a Python function that sorts a list."}],
    "max_tokens": 400,
    "min_tokens": 400,
    "num_draft_tokens": 3,
    "temperature": 0,
}


@contextmanager
def serving() -> Iterator[str]:
    """Run a server in this process, whose other threads sleep meanwhile."""
    folder = resolve(None)
    model, tokenizer = load(folder)
    engine_thread = EngineThread(Engine(model, tokenizer))
    engine_thread.warm_up()
    served = ServedModel.of(ModelInfo.of(read_layout(folder)), model, tokenizer)
    pool = ModelPool.of_one(engine_thread, served)
    state = ServerState()
    app = create_app(state)
    server = Server(app, state)
    with bind("127.0.0.1", 0) as bound, server.running(bound):
        server.call(open_app(app, state, pool)).result()
        state.doing = None
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def page(browser: Browser, address: str, visits: list[float]) -> Iterator[None]:
    began = time.process_time()
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.goto(address)
    expect(opened.locator("#tiles")).to_contain_text("Memory", timeout=60_000)
    visits.append(time.process_time() - began)
    yield
    context.close()


def idle(seconds: float) -> float:
    began = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - began) / seconds


def round_seconds(address: str, seconds: float) -> tuple[float, float]:
    """Return CPU and wall seconds per round, over requests for `seconds`: the page polls every two seconds."""
    cpu, began, rounds = time.process_time(), time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        stats = httpx.post(f"{address}/v1/chat/completions", json=BODY, timeout=600).json()["generation_stats"]
        rounds += stats["rounds"]
    return (time.process_time() - cpu) / rounds, (time.perf_counter() - began) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chromium", nargs="?", default=shutil.which("chromium"))
    parser.add_argument("--seconds", type=float, default=10.0, help="per measurement, idle and again under load")
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args()
    measured: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}  # idle, CPU, wall
    visits: list[float] = []
    with serving() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        round_seconds(address, 2)  # the first ones compile kernels
        for n in range(args.repeats):
            for opened in (True, False) if n % 2 else (False, True):
                with page(browser, address, visits) if opened else nullcontext():
                    measured[opened].append((idle(args.seconds), *round_seconds(address, args.seconds)))
    for name, opened in (("closed", False), ("open", True)):
        shares, processor, clock = zip(*measured[opened], strict=True)
        print(
            f"{name:6}  idle {median(shares):.3%} of a core ({min(shares):.3%} to {max(shares):.3%})  "
            f"round {median(processor) * 1e3:.3f} ms of processor, {median(clock) * 1e3:.3f} ms on the clock"
        )
    idle_added = [one[0] - other[0] for one, other in zip(measured[True], measured[False], strict=True)]
    print(f"the page adds {median(idle_added):.3%} of a core; a visit takes {median(visits) * 1e3:.0f} ms")
    for name, i in (("processor", 1), ("clock", 2)):
        ratios = sorted(one[i] / other[i] for one, other in zip(measured[True], measured[False], strict=True))
        print(f"round, open to closed, {name}: {median(ratios):.4f}, {ratios[0]:.4f} to {ratios[-1]:.4f}")


if __name__ == "__main__":
    main()
