"""The chat while a prompt is read: how far it is."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browsing import Visit
from playwright.sync_api import expect
from running import running

import headstart.engine.prefill
from headstart.state import PrefixCache


@pytest.fixture
def let_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Prompts are read as many chunks at a time as this is called with."""
    chunks, prefill = threading.Semaphore(0), headstart.engine.prefill.prefill_by_layers

    def waiting(*arguments: Any) -> Any:
        chunks.acquire(timeout=60)
        return prefill(*arguments)

    monkeypatch.setattr(headstart.engine.prefill, "prefill_by_layers", waiting)
    yield chunks.release
    chunks.release(100)


def test_the_chat_shows_how_much_of_the_prompt_is_read(visit: Visit, let_read: Callable[[int], None]) -> None:
    with running(prefix=PrefixCache(10**8)) as server:
        page = visit(server, "chat")
        page.get_by_label("Max tokens").fill("5")
        page.get_by_label("Colour tokens by origin").check()
        page.get_by_label("Message").fill("word " * 1500)
        page.get_by_label("Message").press("Enter")
        shown = page.locator(".answer .stats")
        for processed in ("512", "1,024"):
            let_read(1)
            expect(shown).to_have_text(re.compile(f"^Reading the prompt: {processed} of 1,5.. tokens$"))
            expect(shown).to_be_in_viewport(ratio=1)
        let_read(100)
        expect(shown).to_contain_text("tokens per round")
        expect(shown).not_to_contain_text("Reading")
        expect(page.get_by_role("button", name="Copy the answer")).to_be_in_viewport()


def test_comments_in_a_stream_are_left_out(visit: Visit) -> None:
    """A server says how far it is with a prompt to clients that did not ask, too."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "Hello."}, "finish_reason": None}]}
    told = [": prompt 5 of 39", f"data: {json.dumps(chunk)}", ": prompt 39 of 39", "data: [DONE]", ""]
    with running() as server:
        page = visit(server, "chat")
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(content_type="text/event-stream", body="\n\n".join(told)),
        )
        page.get_by_label("Message").fill("Hi")
        page.get_by_label("Message").press("Enter")
        expect(page.locator(".answer").last).to_contain_text("Hello.")
        expect(page.get_by_role("alert")).to_have_count(0)
