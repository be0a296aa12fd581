"""Settings and keys on the page."""

from browsing import Visit
from playwright.sync_api import Route, expect
from running import Running, running, wait_until

from headstart.engine import Settings
from headstart.state import PrefixCache


def chat(server: Running) -> dict[str, object]:
    with server.http() as http:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "num_draft_tokens": 5}
        stats: dict[str, object] = http.post("/v1/chat/completions", json=body).json()["generation_stats"]
    return stats


def test_settings_take_effect(visit: Visit) -> None:
    with running() as server:
        page = visit(server, "settings")
        expect(page.get_by_role("switch")).to_be_checked()
        page.get_by_label("Max depth").select_option("2")
        expect(page.get_by_role("status")).to_have_text("Applied.")
        assert chat(server)["num_draft_tokens_clamped_to"] == 2
        page.get_by_role("switch").uncheck()
        wait_until(lambda: not server.room.settings.speculation)
        assert chat(server)["bypass_reason"] == "speculation is switched off"


def test_what_was_pressed_last_holds_however_slow_the_first_was(visit: Visit) -> None:
    with running() as server:
        page = visit(server, "settings")
        sent: list[Route] = []

        def hold(route: Route) -> None:
            if route.request.method == "PATCH" and not sent:
                sent.append(route)
            else:
                route.continue_()

        page.route("**/v1/settings", hold)
        page.get_by_label("Max depth").select_option("2")
        page.get_by_label("Max depth").select_option("5")
        page.get_by_role("switch").uncheck()
        page.wait_for_timeout(300)
        assert server.room.settings == Settings(max_k=8), "they wait for the first"
        sent[0].continue_()
        expect(page.get_by_role("status")).to_have_text("Applied.")
        assert (server.room.settings.max_k, server.room.settings.speculation) == (5, False)
        expect(page.get_by_label("Max depth")).to_have_value("5")


def test_a_max_depth_of_none_is_shown_as_such(visit: Visit) -> None:
    with running() as server:
        server.room.configure(max_k=0)
        page = visit(server, "settings")
        expect(page.get_by_role("switch")).to_be_enabled()
        expect(page.get_by_label("Max depth")).to_have_value("0")
        page.get_by_label("Max depth").select_option("3")
        expect(page.get_by_role("status")).to_have_text("Applied.")
        assert server.room.settings.max_k == 3


def test_settings_that_cannot_be_fetched_are_reported(visit: Visit) -> None:
    with running() as server:
        page = visit(server, expect="404")
        expect(page.locator("#served")).to_have_text("tiny")
        page.route("**/v1/settings", lambda route: route.continue_(url=f"{server.url}/assets/nothing"))
        page.get_by_role("link", name="Settings").click()
        expect(page.get_by_role("status")).to_contain_text("no such endpoint")
        expect(page.get_by_role("status")).to_have_class("bad")


def test_a_model_without_a_head_has_nothing_to_set(visit: Visit) -> None:
    with running(head=False) as server:
        page = visit(server, "settings")
        expect(page.get_by_text("This model cannot draft: ")).to_be_visible()
        expect(page.get_by_role("switch")).to_be_disabled()
        page.get_by_role("link", name="Chat").click()
        expect(page.get_by_role("button", name="Race")).to_be_disabled()
        page.get_by_label("Max tokens").fill("5")
        page.get_by_label("Message").fill("Hi")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".stats")).to_contain_text("no drafts of the head: ")


def test_the_prefix_cache_can_be_emptied(visit: Visit) -> None:
    with running(prefix=PrefixCache(10**8)) as server:
        with server.http() as http:
            http.post("/v1/completions", json={"prompt": "word " * 600, "max_tokens": 2})
        page = visit(server, "settings")
        expect(page.locator("#prefix-state")).to_contain_text("1 chunk in")
        page.get_by_role("button", name="Clear cache").click()
        expect(page.locator("#prefix-state")).to_contain_text("0 chunks in 0.0 MB of")


def test_a_key_is_asked_for_and_kept_by_the_tab(visit: Visit) -> None:
    with running(key="sesame") as server:
        page = visit(server, "settings", expect="401")
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Key").fill("half a k€y")
        page.keyboard.press("Escape")
        expect(dialog.get_by_label("Key")).to_be_empty()
        expect(dialog.get_by_text("Invalid key.")).to_be_hidden()
        dialog.get_by_label("Key").fill("sesam")
        dialog.get_by_role("button", name="Open").click()
        expect(dialog.get_by_text("Invalid key.")).to_be_visible()
        dialog.get_by_label("Key").fill("sesame")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#served")).to_have_text("tiny")
        page.reload()
        expect(page.locator("#served")).to_have_text("tiny")
        page.get_by_label("Max depth").select_option("3")
        expect(page.get_by_role("status")).to_have_text("Applied.")
        assert server.room.settings.max_k == 3
        page.get_by_role("button", name="Forget key").click()
        expect(page.get_by_role("dialog")).to_be_visible()


def test_where_the_browser_keeps_nothing_the_page_does_while_it_is_open(visit: Visit) -> None:
    blocked = """
        for (const kind of ["localStorage", "sessionStorage"])
            Object.defineProperty(globalThis, kind, { get() { throw new DOMException("no", "SecurityError"); } });
    """
    with running(key="sesame") as server:
        page = visit(server, "settings", expect="401", before=blocked)
        page.get_by_role("dialog").get_by_label("Key").fill("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#served")).to_have_text("tiny")
        page.locator("#theme").click()
        expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
