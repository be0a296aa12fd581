"""Take the pictures of docs/guides/dashboard.md: `python docs/images/take.py [CHROMIUM]`

Starts a server with the built-in model, sends some load so that the charts move, and takes screenshots in Chromium.
"""

import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

HERE = Path(__file__).parent
QUESTION = "Write a Python function that reads a JSON file and returns its contents."
TASKS = ("sorts a list of numbers", "counts the words of a text", "parses a date", "merges two dictionaries")


@contextmanager
def serving() -> Iterator[str]:
    command = [Path(sysconfig.get_path("scripts")) / "headstart", "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = dict(process.stdout.readline().split(":", 1) for _ in range(5))
        yield lines["Dashboard"].strip()
    finally:
        process.terminate()
        process.wait()


def load(address: str, done: threading.Event) -> None:
    """Now one request, now several, until told to stop."""

    def ask(task: str) -> None:
        messages = [
            {"role": "system", "content": "You write Python, and nothing but Python. " * 12},
            {"role": "user", "content": f"Write a Python function that {task}."},
        ]
        body = {"messages": messages, "max_tokens": 150, "min_tokens": 40}
        httpx.post(f"{address}v1/chat/completions", json=body, timeout=300)

    rounds = 0
    while not done.is_set():
        rounds += 1
        threads = [threading.Thread(target=ask, args=(task,)) for task in TASKS[: 1 + rounds % len(TASKS)]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.wait(3)


def look(browser: Browser, address: str, part: str, scheme: str = "light", phone: bool = False) -> Page:
    size = {"width": 390, "height": 844} if phone else {"width": 1280, "height": 860}
    page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    page.goto(f"{address}#{part}")
    expect(page.locator("#served")).not_to_be_empty()
    return page


def talk(page: Page, button: str) -> None:
    if page.get_by_text("Options").is_visible():
        page.get_by_text("Options").click()
    page.get_by_label("Temperature").fill("0")
    page.locator("#depth").select_option("3")
    page.get_by_label("Message").fill(QUESTION)
    page.get_by_role("button", name=button).click()
    expect(page.locator(".answer").last.locator(".stats")).to_contain_text("tokens per round", timeout=120_000)


def keep(page: Page, name: str) -> None:
    """In few colours: there are not many."""
    page.wait_for_timeout(3000)  # a sample or two, and the last transition
    path = HERE / f"{name}.png"
    page.screenshot(path=path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(48).save(path, optimize=True)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else shutil.which("chromium")
    with serving() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        done = threading.Event()
        loading = threading.Thread(target=load, args=(address, done))
        loading.start()
        done.wait(150)
        for name in ("live", "live-dark", "live-phone"):
            keep(look(browser, address, "live", "dark" if "dark" in name else "light", phone="phone" in name), name)
        done.set()
        loading.join()
        for name in ("chat", "chat-phone"):
            page = look(browser, address, "chat", phone="phone" in name)
            talk(page, "Send")
            page.get_by_label("Colour tokens by origin").check()
            keep(page, name)
        page = look(browser, address, "chat", "dark")
        talk(page, "Race")
        expect(page.locator(".verdict")).not_to_be_empty(timeout=120_000)
        keep(page, "race-dark")
        for part in ("models", "settings"):
            keep(look(browser, address, part), part)


if __name__ == "__main__":
    main()
