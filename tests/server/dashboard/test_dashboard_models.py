"""The cards on the page: badges and reasons, and what is known of each model."""

import re
from pathlib import Path

import pytest
from browsing import Visit
from playwright.sync_api import Locator, Page, expect
from running import running, serving, wait_until

from adapters import write_adapter
from checkpoints import write
from headstart.engine import DeviceThread
from headstart.server.model_pool import ModelPool
from headstart.server.pooled_model import PooledModel
from loopback_hub import running_hub


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


def test_the_choice_of_a_model_leaves_room_on_a_phone(visit: Visit, tmp_path: Path) -> None:
    names = ("a-model-with-a-name-that-is-as-long-as-names-are-4bit", "green")
    pool = ModelPool(
        DeviceThread(), [PooledModel.of(write(tmp_path / name, "dense", vocab_size=8192)) for name in names]
    )
    with serving(pool) as server:
        page = visit(server, viewport={"width": 320, "height": 700})
        expect(page.get_by_label("Model", exact=True)).to_be_visible()
        tops = [page.locator(part).evaluate("each => each.getBoundingClientRect().top") for part in ("#theme", "nav")]
        assert tops[0] < 20 < tops[1], "the first row of the header has the theme, the second the pages"
        expect(page.get_by_role("heading", name="Live")).to_be_in_viewport(ratio=1)
        bottom = page.locator("header").evaluate("header => header.getBoundingClientRect().bottom")
        assert page.locator("#live-title").evaluate("title => title.getBoundingClientRect().top") >= bottom


def test_a_model_is_downloaded_from_the_page_with_progress_and_then_chatted_with(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ModelPool(DeviceThread(), [PooledModel.of(write(tmp_path / "red", "dense", vocab_size=8192))])
    with running_hub(monkeypatch, tmp_path / "cache") as hub, serving(pool, allow_download=True) as server:
        hub.models["org/green"] = write(tmp_path / "green", "dense", seed=1, vocab_size=8192)
        hub.held = "model-00002-of-00002.safetensors"
        page = visit(server, "models")
        page.get_by_label("Hub id").fill("org/grey")
        page.get_by_role("button", name="Download").click()
        listed = page.get_by_role("list", name="Downloads")
        expect(listed).to_contain_text(re.compile("^org/grey: could not be read from http://127.0.0.1"))
        page.get_by_label("Hub id").fill("org/green")
        page.keyboard.press("Enter")
        progress = page.get_by_role("progressbar", name="Download of org/green")
        expect(progress).to_be_visible()
        wait_until(lambda: float(progress.get_attribute("value") or 0) > 0)
        with server.http() as http:  # a request for it waits for nothing, and says how far it is
            waiting = http.post("/v1/completions", json={"model": "org/green", "prompt": "hi"})
        assert (waiting.status_code, waiting.json()["error"]["code"]) == (503, "model_downloading")
        assert waiting.headers["Retry-After"] == "30"
        hub.gate.set()
        expect(listed).to_contain_text("org/green: complete")
        green = card(page, "loaded", "org/green")
        green.get_by_role("button", name="Load org/green").click()
        expect(fact(green, "State")).to_have_text("loaded")


def test_a_server_downloads_nothing_unless_it_was_told_so(visit: Visit) -> None:
    with running() as server, server.http() as http:
        refused = http.post("/v1/models/pull", json={"model": "org/green"})
        assert "--allow-download" in refused.json()["error"]["message"]
        assert http.post("/v1/completions", json={"model": "org/green", "prompt": "hi"}).status_code == 404
        page = visit(server, "models")
        expect(card(page, "loaded", "tiny")).to_be_visible()
        expect(page.get_by_label("Hub id")).to_be_hidden()


def test_a_downloaded_model_is_removed_from_the_page_once_that_is_confirmed(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ModelPool(DeviceThread(), [PooledModel.of(write(tmp_path / "red", "dense", vocab_size=8192))])
    with running_hub(monkeypatch, tmp_path / "cache") as hub, serving(pool, allow_download=True) as server:
        hub.models["org/green"] = write(tmp_path / "green", "dense", seed=1, vocab_size=8192)
        hub.gate.set()
        page = visit(server, "models")
        page.get_by_label("Hub id").fill("org/green")
        page.keyboard.press("Enter")
        green = card(page, "loaded", "org/green")
        button = green.get_by_role("button", name="Remove org/green")
        asked: list[str] = []
        page.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
        button.click()
        expect(green).to_be_visible()
        expect(card(page, "loaded", "red").get_by_role("button", name="Remove")).to_have_count(0)
        page.once("dialog", lambda dialog: dialog.accept())
        button.press("Enter")
        expect(green).to_have_count(0)
        assert asked == ["Delete the files of org/green from the server's disk?"]
        assert not list((tmp_path / "cache").rglob("*.safetensors"))
        with server.http() as http:
            assert http.get("/v1/models/org/green").status_code == 404
            kept = http.delete("/v1/models/red")
            assert (kept.status_code, kept.json()["error"]["code"]) == (400, "unsupported")
            assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["red"]


def test_an_adapter_is_chosen_in_the_header_and_chatted_with(visit: Visit, tmp_path: Path) -> None:
    folder = write(tmp_path / "red", "dense", vocab_size=8192)
    tune = write_adapter(tmp_path / "tune", folder)
    pool = ModelPool(DeviceThread(), [model := PooledModel.of(folder, adapters={"tune": tune})])
    with serving(pool) as server:
        with server.http() as http:
            assert http.post("/v1/models/load", json={"model": "red"}).status_code == 200
        page = visit(server, "models")
        expect(fact(card(page, "loaded", "red"), "Adapters")).to_have_text("tune")
        expect(page.locator("#loaded article")).to_have_count(1)
        page.get_by_label("Model", exact=True).select_option("red:tune")
        page.get_by_role("link", name="Chat").click()
        expect(page.get_by_label("Message")).to_have_attribute("placeholder", re.compile("^Ask red:tune"))
        page.get_by_label("Max tokens").fill("5")
        page.get_by_label("Message").fill("Hi")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".stats")).to_contain_text("5 tokens")
        assert model.counters.adapters["tune"].generation_tokens == model.counters.generation_tokens == 5
        page.get_by_role("link", name="Live").click()  # of the model, whatever its adapter
        expect(page.get_by_label("Model", exact=True)).to_have_value("red:tune")
