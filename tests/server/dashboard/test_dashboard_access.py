"""The page without a mouse, on a narrow screen, in the light and in the dark."""

from collections.abc import Iterator

import pytest
from browsing import Visit
from playwright.sync_api import Page, expect
from running import Running
from scripted import ScriptedRoom, scripted

PARTS = ("live", "chat", "models", "settings")
WIDE = f"```\n{'x = 1; ' * 60}\n```\n\n| {' | '.join('column' for _ in range(12))} |\n|{' --- |' * 12}\n\n{'w' * 300}"


@pytest.fixture(scope="module")
def here() -> Iterator[tuple[Running, ScriptedRoom]]:
    with scripted(burst=3) as server:
        yield server


def tab_to(page: Page, name: str) -> None:
    """Press Tab until the focus is on what has that name."""
    focused = "() => { const e = document.activeElement; return e.ariaLabel ?? (e.labels?.[0] ?? e).innerText }"
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append((page.evaluate(focused) or "").strip())
        if seen[-1].startswith(name):
            return
    raise AssertionError(f"no Tab leads to {name!r}, only to {seen}")


def test_everything_can_be_done_with_the_keyboard(here: tuple[Running, ScriptedRoom], visit: Visit) -> None:
    server, room = here
    page = visit(server)
    expect(page.locator("#served")).to_have_text("tiny")
    tab_to(page, "Skip to the content")
    page.keyboard.press("Enter")
    tab_to(page, "5 min")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_label("15 min")).to_be_checked()

    page.reload()
    tab_to(page, "Chat")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message")).to_be_focused()
    room.scripts += ["First.", "Second.", "Second."]
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(page.locator(".question")).to_have_text("One\ntwo")
    expect(page.locator(".answer .markdown").last).to_have_text("First.")
    tab_to(page, "Colour tokens by origin")
    page.keyboard.press("Space")
    expect(page.locator(".tokens").last).to_be_visible()

    page.get_by_label("Message").focus()
    page.keyboard.type("Again")
    tab_to(page, "Race")
    page.keyboard.press("Enter")
    expect(page.locator(".verdict")).to_contain_text("Both said the same")

    page.reload()
    tab_to(page, "Settings")
    page.keyboard.press("Enter")
    tab_to(page, "Let the head draft")
    page.keyboard.press("Space")
    expect(page.get_by_role("status")).to_have_text("Saved.")
    assert not server.room.settings.speculation
    server.room.configure(speculation=True)


def test_the_focus_can_be_seen(here: tuple[Running, ScriptedRoom], visit: Visit) -> None:
    page = visit(here[0], "settings")
    tab_to(page, "Live")
    assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_is_wider_than_the_screen(here: tuple[Running, ScriptedRoom], visit: Visit, width: int) -> None:
    server, room = here
    page = visit(server, "chat", viewport={"width": width, "height": 700})
    room.scripts.append(WIDE)
    page.get_by_label("Message").fill("w" * 200)
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".answer .stats")).to_contain_text("tokens per round")
    for coloured in (False, True):
        page.get_by_label("Colour tokens by origin").set_checked(coloured)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        assert page.locator("#thread").evaluate("thread => thread.scrollWidth - thread.clientWidth") == 0
    for part in PARTS:
        page.get_by_role("navigation").get_by_role("link", name=part.title()).click()
        expect(page.locator(f"#{part}")).to_be_visible()
        if part == "models":
            expect(page.locator("#known article").first).to_be_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width, part


def test_what_is_pressed_is_large_enough_for_a_finger(here: tuple[Running, ScriptedRoom], visit: Visit) -> None:
    page = visit(here[0], "chat", viewport={"width": 390, "height": 800}, has_touch=True)
    expect(page.locator("#served")).to_have_text("tiny")
    for each in page.locator("nav a, button:visible").all():
        box = each.bounding_box()
        assert box is not None
        assert min(box["height"], box["width"]) >= 24, each.inner_text()


def luminance(colour: str) -> float:
    """Of `rgb(…)`, as WCAG has it."""
    parts = [float(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(", ")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(here: tuple[Running, ScriptedRoom], visit: Visit, scheme: str) -> None:
    page = visit(here[0], color_scheme=scheme)
    read = """names => names.map(name => {
        const probe = document.body.appendChild(document.createElement("i"));
        probe.style.color = `var(--${name})`;
        return getComputedStyle(probe).color;
    })"""
    names = ["ground", "panel", "draft", "correction", "bonus", "plain", "ink", "quiet", "accent", "red"]
    values = dict(zip(names, map(luminance, page.evaluate(read, names)), strict=True))
    assert (values["ground"] < 0.5) == (scheme == "dark")
    for text in ("ink", "quiet", "accent", "red"):
        for ground in names[:6] if text == "ink" else names[:2]:
            lighter, darker = max(values[text], values[ground]), min(values[text], values[ground])
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (text, ground)


def test_the_light_can_be_chosen_and_is_kept(here: tuple[Running, ScriptedRoom], visit: Visit) -> None:
    page = visit(here[0], color_scheme="light")
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    for theme in ("light", "dark"):
        page.locator("#theme").click()
        expect(page.get_by_role("button", name=f"Theme: {theme}")).to_be_visible()
    assert page.evaluate(ground) != light
    page.reload()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert page.evaluate(ground) != light
