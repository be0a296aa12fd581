import os
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import ABSENT, FLAGS, Visit, chromium
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from running import Running

expect.set_options(timeout=60_000)  # a model's first answer compiles


@pytest.fixture(scope="module")  # Playwright's event loop is in the way of other modules' own
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        path = chromium(playwright)
        if path is None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(ABSENT)
        yield playwright.chromium.launch(executable_path=path, args=FLAGS)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Open a part of the page. Whatever it is used for, the browser has nothing to complain of, the content security
    policy included, and nobody but the server is asked for anything."""
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    def open_page(server: Running, part: str = "live", *, expect: str = "", before: str = "", **options: Any) -> Page:
        """`expect`: words of complaints that the test means to cause. `before`: a script to run before the page."""
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
        contexts.append(context)
        page = context.new_page()
        if before:
            page.add_init_script(before)

        def complain(problem: str) -> None:
            # A test's server may be closed before its page, which goes on asking.
            if not (expect and expect in problem) and "ERR_CONNECTION_REFUSED" not in problem:
                problems.append(problem)

        page.on("console", lambda said: complain(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complain(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(server.url) else complain(asked.url))
        page.goto(f"{server.url}/#{part}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
