"""The live page: charts and numbers follow what the server does, and trouble is shown."""

import re
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import openai
import pytest
import uvicorn
from browsing import Visit
from playwright.sync_api import Page, Route, expect
from running import Running, running, tokenizer, wait_until

import headstart.engine.pending_step
from headstart.server.server import Server
from headstart.state import PrefixCache
from metal_errors import IGNORED

CHARTS = ("speed", "yield", "acceptance", "depth-chart", "gains", "sequences", "first", "prefix-chart", "memory")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(max_sequences=2, prefix=PrefixCache(10**8)) as here:
        yield here


def tile(page: Page, label: str) -> str:
    return page.locator("#tiles > div").filter(has=page.get_by_text(label, exact=True)).locator("dd").inner_text()


def picture(page: Page, chart: str) -> str:
    return str(page.locator(f"#{chart} canvas").evaluate("canvas => canvas.toDataURL()"))


def words(page: Page, chart: str) -> str:
    """What a chart shows, as it is read to those who cannot see it."""
    return page.locator(f"#{chart} canvas").get_attribute("aria-label") or ""


def load(server: Running, requests: int) -> None:
    """More at a time than there is room for, with a prefix in common. The first drafts for certain."""
    prompt = list(tokenizer().encode("word " * 600))
    create: Any = server.openai().completions.create

    def ask(depth: int | str) -> None:
        create(model="tiny", prompt=prompt, max_tokens=60, extra_body={"min_tokens": 60, "num_draft_tokens": depth})

    first, other = (3, "auto") if server.served.model.has_head else (0, 0)  # "auto" would copy from the prompt
    threads = [threading.Thread(target=ask, args=(other if i else first,)) for i in range(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_charts_and_numbers_move_under_load(server: Running, visit: Visit) -> None:
    page = visit(server)
    expect(page.locator("#served")).to_have_text("tiny")
    wait_until(lambda: tile(page, "Tokens/s").startswith("0.0"))
    before = {chart: (picture(page, chart), words(page, chart)) for chart in CHARTS}
    assert before["speed"][1] == "Tokens per second: tokens/s 0.0, at most 0.0"

    def moved(chart: str) -> bool:
        load(server, 1)  # again and again: a browser that gets little time may miss all of a short load
        return picture(page, chart) != before[chart][0] and words(page, chart) != before[chart][1]

    load(server, 4)
    for chart in set(CHARTS) - {"sequences"}:  # short answers may run between two samples
        wait_until(lambda chart=chart: moved(chart))
    wait_until(lambda: moved("speed") and float(tile(page, "Tokens/s").split()[0]) > 0)
    wait_until(lambda: not tile(page, "Prefix hits").startswith(("0%", "–")))
    assert float(tile(page, "Tokens/round").split()[0]) >= 1
    assert tile(page, "Accepted")[0].isdigit()
    assert tile(page, "First token")[0].isdigit()
    assert page.locator("#sequences .u-legend").inner_text().count("–") == 0, (
        "the last values are shown without a cursor"
    )


def test_numbers_are_those_of_the_server(server: Running, visit: Visit) -> None:
    def stats() -> dict[str, Any]:
        with server.http() as http:
            told: dict[str, Any] = http.get("/v1/mtp/stats").json()["models"]["tiny"]
        return told

    page = visit(server)
    wait_until(lambda: tile(page, "Tokens/s").startswith("0.0"))
    before = stats()
    load(server, 2)
    gained = {name: stats()[name] - before[name] for name in before if isinstance(before[name], int)}
    per_round = gained["generation_tokens"] / gained["rounds"]
    wait_until(lambda: tile(page, "Tokens/round")[0].isdigit())
    wait_until(lambda: abs(float(tile(page, "Tokens/round").split()[0]) - per_round) < 0.0051)
    percent = 100 * gained["accepted_draft_tokens"] / gained["proposed_draft_tokens"]
    # Rounded: a half goes up in the page, to even here.
    wait_until(lambda: abs(float(tile(page, "Accepted").split()[0].rstrip("%")) - percent) <= 0.5)


def test_accepted_drafts_are_shown_by_source(server: Running, visit: Visit) -> None:
    samples = count()

    def told(route: Route) -> None:
        number, body = next(samples), route.fetch().json()
        stats = body["models"]["tiny"]
        stats["rounds"] += 20 * number
        for source, accepted in (("head", 30), ("copy", 10)):
            stats["accepted_by_source"][source] += accepted * number
        route.fulfill(json=body)

    page = visit(server)
    page.route("**/v1/mtp/stats", told)
    wait_until(lambda: "head 1.50, at most 1.50; copies 0.50, at most 0.50" in words(page, "yield"))


def test_a_longer_range_shows_more_of_the_past(server: Running, visit: Visit) -> None:
    page = visit(server)
    wait_until(lambda: tile(page, "Tokens/round").split("\n")[-1] == "5 min")
    before = picture(page, "memory")
    page.get_by_label("1 hour").check(force=True)
    wait_until(lambda: tile(page, "Tokens/round").split("\n")[-1] == "1 hour")
    assert picture(page, "memory") != before


def test_a_model_without_a_head_is_shown_too(visit: Visit) -> None:
    with running(head=False, max_sequences=2) as server:
        page = visit(server)
        load(server, 2)
        wait_until(lambda: tile(page, "Tokens/round").split()[0] == "1.00")
        assert tile(page, "Accepted").split()[0] == "–"
        assert tile(page, "Depth").split()[0] == "0.0"
        assert words(page, "acceptance") == "Acceptance by position: no data yet"
        assert words(page, "depth-chart") == "Depth: depth 0.00, at most 0.00"
        assert not words(page, "speed").endswith("at most 0.0")


def test_a_model_that_could_not_be_asked_for_is_asked_for_again(server: Running, visit: Visit) -> None:
    lost = """
        const ask = fetch;
        let asked = 0;
        fetch = (path, ...rest) => ask(path === "/v1/models" && asked++ === 0 ? "/assets/nothing" : path, ...rest);
    """
    page = visit(server, "chat", expect="404", before=lost)
    expect(page.locator("#served")).to_have_text("tiny")
    expect(page.locator("#depth option")).to_have_count(1 + server.served.model.max_k)


def test_another_model_in_its_place_begins_anew(server: Running, visit: Visit) -> None:
    page = visit(server)
    expect(page.locator("#served")).to_have_text("tiny")
    told: dict[str, Any] = {"models": {"other": {}}}
    with page.expect_event("load"):
        page.route("**/v1/mtp/stats", lambda route: route.fulfill(json=told), times=1)
    expect(page.locator("#served")).to_have_text("tiny")


def test_a_server_that_hangs_is_reported(server: Running, visit: Visit) -> None:
    hasty = """
        const timeout = AbortSignal.timeout.bind(AbortSignal);
        AbortSignal.timeout = (milliseconds) => timeout(milliseconds / 20);
    """
    page = visit(server, before=hasty)
    expect(page.locator("#served")).to_have_text("tiny")
    page.route("**/health", lambda route: None, times=1)
    expect(page.get_by_role("alert")).to_have_text("The server does not respond.")
    expect(page.locator("#trouble")).to_be_hidden()


def test_an_address_that_leads_nowhere_shows_the_live_page(server: Running, visit: Visit) -> None:
    page = visit(server, "constructor")
    expect(page.locator("#served")).to_have_text("tiny")
    expect(page.get_by_role("heading", name="Live")).to_be_visible()


def test_a_server_that_is_gone_is_reported(visit: Visit) -> None:
    with running() as server:
        page = visit(server, expect="ERR_")
        expect(page.locator("#served")).to_have_text("tiny")
        expect(page.locator("#trouble")).to_be_hidden()
    expect(page.get_by_role("alert")).to_have_text("The server does not respond.", timeout=30_000)


def test_a_server_that_stops_is_reported(visit: Visit) -> None:
    with running() as server:
        server.room.close(0)
        page = visit(server, expect="503")
        expect(page.get_by_role("alert")).to_have_text("The server is stopping: the server was told to stop.")


def test_an_engine_that_is_down_is_reported(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(IGNORED)

    with monkeypatch.context() as patch, running() as server:
        patch.setattr(Server, "on_tick", uvicorn.Server.on_tick)  # it would stop by itself
        patch.setattr(headstart.engine.pending_step, "step", fail)
        with pytest.raises(openai.APIStatusError):
            server.openai().completions.create(model="tiny", prompt="Hello", max_tokens=3)
        page = visit(server, expect="503")
        expect(page.get_by_role("alert")).to_have_text(re.compile("^The engine is down: .*SubmissionsIgnored"))
        patch.undo()
