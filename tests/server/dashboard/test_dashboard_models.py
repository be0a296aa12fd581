"""The cards on the page: badges and reasons, and what is known of each model."""

from browsing import Visit
from playwright.sync_api import Locator, Page, expect
from running import running


def card(page: Page, part: str, name: str) -> Locator:
    heading = page.get_by_role("heading", name=name, exact=True)
    return page.locator(f"#{part} article").filter(has=heading)


def fact(card: Locator, name: str) -> Locator:
    return card.locator(f"dt:text-is('{name}') + dd")


def test_a_model_has_a_badge_and_what_is_known_of_it(visit: Visit) -> None:
    with running() as server:
        page = visit(server, "models")
        loaded = card(page, "loaded", "tiny")
        expect(loaded.locator(".badge")).to_have_text(f"MTP · k = {server.served.model.default_k}, up to 8")
        expect(fact(loaded, "Context")).to_have_text("4,096 tokens")
        expect(fact(loaded, "Quantisation")).to_have_text("none")


def test_a_model_without_a_head_shows_the_reason(visit: Visit) -> None:
    with running(head=False) as server:
        page = visit(server, "models")
        loaded = card(page, "loaded", "tiny")
        expect(loaded.locator(".badge")).to_have_text("no MTP")
        expect(loaded).to_contain_text("no file holds it. `headstart graft tiny ")
