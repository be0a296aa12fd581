"""The cards on the page: badges and reasons, and what is known of each model."""

from pathlib import Path

from browsing import Visit
from playwright.sync_api import Locator, Page, expect
from running import running, serving

from checkpoints import write
from headstart.engine import DeviceThread
from headstart.server import ModelPool, PooledModel


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


def test_models_are_loaded_and_unloaded_from_the_page_and_the_header_chooses_one(
    visit: Visit, tmp_path: Path
) -> None:
    models = [PooledModel.of(write(tmp_path / name, "dense", vocab_size=8192)) for name in ("red", "green")]
    pool = ModelPool(DeviceThread(), models)
    with serving(pool) as server:
        page = visit(server, "models")
        green = card(page, "loaded", "green")
        expect(fact(green, "State")).to_have_text("unloaded")
        green.get_by_role("button", name="Load green").press("Enter")
        expect(fact(green, "State")).to_have_text("loaded")
        expect(fact(card(page, "loaded", "red"), "State")).to_have_text("unloaded")
        page.get_by_label("Model", exact=True).select_option("green")
        page.get_by_role("link", name="Settings").click()
        page.get_by_label("Max depth").select_option("3")
        expect(page.get_by_role("status")).to_have_text("Applied.")
        assert (models[0].current_settings.max_k, models[1].current_settings.max_k) == (8, 3)
        page.get_by_role("link", name="Chat").click()
        page.get_by_label("Max tokens").fill("5")
        page.get_by_label("Message").fill("Hi")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".stats")).to_contain_text("5 tokens")
        assert models[1].counters.generation_tokens == 5
        page.get_by_role("link", name="Models").click()
        green.get_by_role("button", name="Unload green").click()
        expect(fact(green, "State")).to_have_text("unloaded")
