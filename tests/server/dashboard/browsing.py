"""Where a Chromium is, and how it is started."""

import shutil
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, Playwright

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--lang=en-US",
]  # fmt: skip
# The first has no window to draw, and takes half the time of the others.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ABSENT = "no Chromium here: `.venv/bin/playwright install --with-deps chromium` brings one"

Visit = Callable[..., Page]  # of the fixture in conftest.py


def chromium(playwright: Playwright) -> str | None:
    """The system's, else Playwright's own where it has been installed."""
    own = playwright.chromium.executable_path
    return next(filter(None, map(shutil.which, NAMES)), own if Path(own).exists() else None)
