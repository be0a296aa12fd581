"""The cards on the page: badges and reasons, and what is known of each model."""

from pathlib import Path

from browsing import Visit
from playwright.sync_api import Locator, Page, expect
from running import HUB_ID, running


def card(page: Page, part: str, name: str) -> Locator:
    heading = page.get_by_role("heading", name=name, exact=True)
    return page.locator(f"#{part} article").filter(has=heading)


def fact(card: Locator, name: str) -> Locator:
    return card.locator(f"dt:text-is('{name}') + dd")


def test_models_have_badges_and_what_is_known_of_them(cache: Path, visit: Visit) -> None:
    with running() as server:
        page = visit(server, "models")
        loaded = card(page, "loaded", "tiny")
        expect(loaded.locator(".badge")).to_have_text(f"MTP · k = {server.served.model.default_k}, up to 8")
        expect(fact(loaded, "Context")).to_have_text("4,096 tokens")

        builtin = card(page, "on-disk", "tiny-qwen3.5-moe")
        expect(builtin.locator(".badge")).to_contain_text("MTP · k = ")
        expect(fact(builtin, "Size")).to_contain_text(" MB")
        expect(fact(builtin, "Quantisation")).to_have_text("none")

        lost = card(page, "on-disk", "mlx-community/Qwen3.5-0.8B-4bit")
        expect(lost.locator(".badge")).to_have_text("no MTP")
        expect(lost).to_contain_text("config.json promises an MTP head but no file holds it. `headstart graft mlx-")
        expect(fact(lost, "Quantisation")).to_have_text("4 bits, groups of 64")
        expect(fact(lost, "Context")).to_have_text("262,144 tokens")
        expect(fact(lost, "Capabilities")).to_have_text("text, vision, thinking, tools")

        torn = card(page, "on-disk", "someone/torn")
        expect(torn.locator(".badge")).to_have_text("cannot be loaded")
        expect(torn).to_contain_text("model-00001-of-00002.safetensors: is missing")

        known = card(page, "known", "Qwen/Qwen3.6-35B-A3B")
        expect(known.locator(".badge")).to_have_text("MTP · k = 2, up to 5")
        expect(fact(known, "Parameters")).to_have_text("35B, 3B active")
        expect(page.locator("article").filter(has_text=HUB_ID)).to_have_count(0)  # it is loaded, as tiny


def test_a_model_without_a_head_says_why(visit: Visit) -> None:
    with running(head=False) as server:
        page = visit(server, "models")
        loaded = card(page, "loaded", "tiny")
        expect(loaded.locator(".badge")).to_have_text("no MTP")
        expect(loaded).to_contain_text("no file holds it. `headstart graft tiny ")
