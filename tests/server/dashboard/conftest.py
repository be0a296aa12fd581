import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from browsing import ABSENT, FLAGS, Visit, chromium
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from running import Running

expect.set_options(timeout=60_000)  # a model's first answer compiles

VIEWPORT = {"width": 1280, "height": 800}
MEDIA = ("color_scheme", "reduced_motion", "forced_colors")


_running = ExitStack()


@cache
def launch() -> tuple[Browser, Page] | None:
    """Start the browser of all files here, with a tab, if there is one."""
    playwright = _running.enter_context(sync_playwright())
    if (path := chromium(playwright)) is None:
        return None
    browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
    return browser, browser.new_context(viewport=VIEWPORT, locale="en-US").new_page()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close it after the last file here: Playwright's event loop is in the way of other modules' own."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _running.close()
        launch.cache_clear()


@pytest.fixture
def browser_and_tab() -> tuple[Browser, Page]:
    """Most visits take place in this tab, one after the other: a new tab is a new process."""
    if (launched := launch()) is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(ABSENT)
    return launched


def leave(tab: Page, server: Running) -> None:
    """Forget all that a visit has left in the tab."""
    tab.unroute_all(behavior="ignoreErrors")
    if tab.url.startswith(server.url):
        tab.evaluate("try { sessionStorage.clear() } catch {}")  # a page that may not use it has left nothing
    tab.goto("about:blank")
    session = tab.context.new_cdp_session(tab)
    session.send("Storage.clearDataForOrigin", {"origin": server.url, "storageTypes": "all"})
    session.detach()
    tab.set_viewport_size(VIEWPORT)
    tab.emulate_media(**dict.fromkeys(MEDIA, "null"))


@pytest.fixture
def visit(browser_and_tab: tuple[Browser, Page]) -> Iterator[Visit]:
    """Open a part of the page. Whatever it is used for, the browser has nothing to complain of, the content security
    policy included, and nobody but the server is asked for anything."""
    browser, tab = browser_and_tab
    contexts: list[BrowserContext] = []
    visited: list[Running] = []
    listeners: list[tuple[str, Any]] = []
    problems: list[str] = []
    injected = ExitStack()

    def open_page(server: Running, part: str = "live", *, expect: str = "", before: str = "", **options: Any) -> Page:
        """`expect`: words of complaints that the test means to cause. `before`: a script to run before the page."""

        def complain(problem: str) -> None:
            # A test's server may be closed before its page, which goes on asking.
            if not (expect and expect in problem) and "ERR_CONNECTION_REFUSED" not in problem:
                problems.append(problem)

        hear = [
            ("console", lambda said: complain(said.text) if said.type in ("error", "warning") else None),
            ("pageerror", lambda error: complain(str(error))),
            ("request", lambda asked: None if asked.url.startswith(server.url) else complain(asked.url)),
        ]
        if visited or not set(options) <= {"viewport", *MEDIA}:
            contexts.append(browser.new_context(**{"viewport": VIEWPORT, "locale": "en-US"} | options))
            page = contexts[-1].new_page()
            if before:
                page.add_init_script(before)
        else:
            page = tab
            visited.append(server)
            listeners.extend(hear)
            page.set_viewport_size(options.pop("viewport", VIEWPORT))
            page.emulate_media(**options)
            if before:  # a script of Playwright's own would stay
                session = tab.context.new_cdp_session(tab)
                session.send("Page.enable")
                script = session.send("Page.addScriptToEvaluateOnNewDocument", {"source": before})
                injected.callback(session.detach)
                injected.callback(session.send, "Page.removeScriptToEvaluateOnNewDocument", script)
        for event, listener in hear:
            page.on(event, listener)  # type: ignore[call-overload]
        page.goto(f"{server.url}/#{part}")
        return page

    yield open_page
    injected.close()
    for event, listener in listeners:
        tab.remove_listener(event, listener)
    for server in visited:
        leave(tab, server)
    for context in contexts:
        context.close()
    assert problems == []
