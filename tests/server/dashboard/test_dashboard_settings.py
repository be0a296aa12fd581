"""Settings, keys and models on the page."""

from pathlib import Path

from browsing import Visit
from playwright.sync_api import expect
from running import Running, running, wait_until

from headstart.state import Prefix


def chat(server: Running) -> dict[str, object]:
    with server.http() as http:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "num_draft_tokens": 5}
        stats: dict[str, object] = http.post("/v1/chat/completions", json=body).json()["generation_stats"]
    return stats


def test_settings_take_effect_and_survive_a_restart(tmp_path: Path, visit: Visit) -> None:
    file = tmp_path / "headstart" / "settings.json"
    with running(settings_file=file) as server:
        page = visit(server, "settings")
        expect(page.get_by_role("switch")).to_be_checked()
        page.get_by_label("Greatest depth").select_option("2")
        expect(page.get_by_role("status")).to_have_text("Saved.")
        assert chat(server)["num_draft_tokens_clamped_to"] == 2
        page.get_by_role("switch").uncheck()
        wait_until(lambda: not server.room.settings.speculation)
        assert chat(server)["bypass_reason"] == "speculation is switched off"
        page.close()
    with running(settings_file=file) as again:
        page = visit(again, "settings")
        expect(page.get_by_label("Greatest depth")).to_have_value("2")
        expect(page.get_by_role("switch")).not_to_be_checked()
        assert chat(again)["bypass_reason"] == "speculation is switched off"
        page.get_by_role("switch").check()
        wait_until(lambda: again.room.settings.speculation)
        assert chat(again)["num_draft_tokens_clamped_to"] == 2


def test_settings_that_cannot_be_kept_are_told(tmp_path: Path, visit: Visit) -> None:
    (tmp_path / "file").write_text("")
    with running(settings_file=tmp_path / "file" / "settings.json") as server:
        page = visit(server, "settings")
        page.get_by_label("Greatest depth").select_option("2")
        expect(page.get_by_role("status")).to_contain_text("settings.json cannot be written")
        assert server.room.settings.max_k == 2


def test_a_model_without_a_head_has_nothing_to_set(visit: Visit) -> None:
    with running(head=False) as server:
        page = visit(server, "settings")
        expect(page.get_by_text("This model cannot draft: ")).to_be_visible()
        expect(page.get_by_role("switch")).to_be_disabled()
        page.get_by_role("link", name="Chat").click()
        expect(page.get_by_role("button", name="Race")).to_be_disabled()
        page.get_by_label("Most tokens").fill("5")
        page.get_by_label("Message").fill("Hi")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".stats")).to_contain_text("no drafts: ")
        page.get_by_role("link", name="Models").click()
        expect(page.locator("#loaded .badge")).to_have_text("no MTP")


def test_the_prefix_cache_can_be_emptied(visit: Visit) -> None:
    with running(prefix=Prefix(10**8)) as server:
        with server.http() as http:
            http.post("/v1/completions", json={"prompt": "word " * 600, "max_tokens": 2})
        page = visit(server, "settings")
        expect(page.locator("#prefix-state")).to_contain_text("1 chunks of prompts in")
        page.get_by_role("button", name="Empty it").click()
        expect(page.locator("#prefix-state")).to_contain_text("0 chunks of prompts in 0.0 MB of")


def test_a_key_is_asked_for_and_kept_by_the_tab(visit: Visit) -> None:
    with running(key="sesame") as server:
        page = visit(server, "settings", expect="401")
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Key").fill("sesam")
        dialog.get_by_role("button", name="Open").click()
        expect(dialog.get_by_text("That was not one of them.")).to_be_visible()
        dialog.get_by_label("Key").fill("sesame")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#served")).to_have_text("tiny")
        page.reload()
        expect(page.locator("#served")).to_have_text("tiny")
        page.get_by_label("Greatest depth").select_option("3")
        expect(page.get_by_role("status")).to_have_text("Saved.")
        assert server.room.settings.max_k == 3
        page.get_by_role("button", name="Forget it now").click()
        expect(page.get_by_role("dialog")).to_be_visible()


def test_models_have_badges_and_what_is_known_of_them(visit: Visit) -> None:
    with running() as server:
        page = visit(server, "models")
        loaded = page.locator("#loaded")
        expect(loaded.get_by_role("heading", name="tiny")).to_be_visible()
        expect(loaded.locator(".badge")).to_have_text(f"MTP · k = {server.served.model.default_k}, up to 8")
        expect(loaded).to_contain_text("4,096 tokens")
        builtin = page.locator("#on-disk article").filter(has=page.get_by_role("heading", name="tiny-qwen3.5-moe"))
        expect(builtin.locator(".badge")).to_contain_text("MTP · k = ")
        expect(builtin).to_contain_text(" MB")
        expect(page.locator("#known")).to_contain_text("Qwen/Qwen3.6-27B")
