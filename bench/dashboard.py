"""What an open dashboard costs the server: `python bench/dashboard.py [CHROMIUM] [--seconds 10] [--repeats 8]`

Measurements with the page closed and open take turns, so that drift affects both. *Idle*: the server's CPU time
without requests, as a share of one core. *Round*: CPU and wall time of a round of a tiny model at a fixed depth.
The CPU time is the server's own, not the browser's, which adds to the wall time on shared cores.
"""

import shutil
import sys
import time
from functools import partial
from statistics import median

import httpx
from harness import ROOT, line, medians, options, ratio, table, turns
from playwright.sync_api import Browser, expect, sync_playwright

sys.path.insert(0, str(ROOT / "tests" / "server"))
from running import running

PROMPT = {"role": "user", "content": "Write a Python function that sorts a list."}
BODY = {"messages": [PROMPT], "max_tokens": 400, "min_tokens": 400, "num_draft_tokens": 3, "temperature": 0}


def measure(browser: Browser, url: str, seconds: float, opened: bool) -> tuple[float, float, float]:
    """Return the share of a core when idle, and CPU and wall seconds of a round. The page polls every two seconds."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    if opened:
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#tiles")).to_contain_text("Memory", timeout=60_000)
    cpu = time.process_time()
    time.sleep(seconds)
    idle = (time.process_time() - cpu) / seconds
    cpu, began, rounds = time.process_time(), time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        stats = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=600).json()["generation_stats"]
        rounds += stats["rounds"]
    found = idle, (time.process_time() - cpu) / rounds, (time.perf_counter() - began) / rounds
    context.close()
    return found


def main() -> None:
    given = options(__doc__, "chromium", seconds=10.0, repeats=8)
    with running(context=1000) as server, sync_playwright() as playwright:
        path = given.chromium or shutil.which("chromium-headless-shell") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        runs = {opened: partial(measure, browser, server.url, given.seconds, opened) for opened in (False, True)}
        found = turns(runs, given.repeats)
    table("page", "idle, share of a core", "CPU ms a round", "wall ms a round", "CPU to closed", "wall to closed")
    columns = {opened: list(zip(*rows, strict=True)) for opened, rows in found.items()}
    for opened, name in ((False, "closed"), (True, "open")):
        idle, cpu, wall = medians(found[opened])
        line(
            name,
            f"{idle:.3%}",
            1e3 * cpu,
            1e3 * wall,
            *[ratio(columns[opened][i], columns[False][i]) for i in (1, 2)],
        )
    added = median(a - b for a, b in zip(columns[True][0], columns[False][0], strict=True))
    print(f"\nThe page adds {added:.3%} of a core.")


if __name__ == "__main__":
    main()
