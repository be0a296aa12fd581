"""The page without a mouse, on a narrow screen, in the light and in the dark."""

from collections.abc import Iterator
from itertools import pairwise
from threading import Semaphore

import pytest
from browsing import Visit
from paced import PacedRoom
from playwright.sync_api import Page, expect
from running import Running, running

from headstart.state import PrefixCache

PARTS = ("live", "chat", "models", "settings")
WIDE = f"```\n{'x = 1; ' * 60}\n```\n\n| {' | '.join('column' for _ in range(12))} |\n|{' --- |' * 12}\n\n{'w' * 300}"


@pytest.fixture(scope="module")
def here() -> Iterator[tuple[Running, PacedRoom]]:
    with running(room_type=PacedRoom, burst=3, prefix=PrefixCache(10**8)) as server:
        assert isinstance(server.room, PacedRoom)
        yield server, server.room


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


def test_everything_can_be_done_with_the_keyboard(here: tuple[Running, PacedRoom], visit: Visit) -> None:
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
    expect(page.locator(".verdict")).to_contain_text("Both texts are identical")
    tab_to(page, "New chat")
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_label("Message")).to_be_focused()

    page.reload()
    tab_to(page, "Theme: auto")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Theme: light")).to_be_focused()
    tab_to(page, "Settings")
    page.keyboard.press("Enter")
    tab_to(page, "Speculative decoding")
    page.keyboard.press("Space")
    expect(page.get_by_role("status")).to_have_text("Applied.")
    assert not server.room.settings.speculation
    server.room.configure(speculation=True)
    tab_to(page, "Clear cache")
    with page.expect_response(lambda told: told.request.method == "DELETE") as told:
        page.keyboard.press("Enter")
    assert told.value.json()["entries"] == 0


@pytest.mark.parametrize("way", ["Escape", pytest.param("Stop", marks=pytest.mark.slow)])
def test_an_answer_is_stopped_with_the_keyboard_however_it_was_sent(
    here: tuple[Running, PacedRoom], visit: Visit, way: str
) -> None:
    server, room = here
    room.turns = Semaphore(3)
    room.scripts.append("word " * 50)
    page = visit(server, "chat")
    page.get_by_label("Message").focus()
    page.keyboard.type("Go on")
    tab_to(page, "Send")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .markdown").last).to_contain_text("word")
    expect(page.get_by_label("Message")).to_be_focused()  # the button that was pressed is out of use
    if way == "Stop":
        tab_to(page, "Stop")
    page.keyboard.press("Escape" if way == "Escape" else "Enter")
    expect(page.get_by_role("alert")).to_have_text("Stopped.")
    room.turns.release(100)
    room.turns = None
    expect(page.get_by_label("Message")).to_be_focused()


def test_no_level_of_headings_is_left_out(here: tuple[Running, PacedRoom], visit: Visit) -> None:
    """As those who listen go from heading to heading."""
    server, room = here
    page = visit(server, "chat")
    room.scripts.extend(["One.", "One."])
    page.get_by_label("Message").fill("Go!")
    page.get_by_role("button", name="Race").click()
    expect(page.locator(".verdict")).to_be_visible()
    for part in PARTS:
        page.get_by_role("link", name=part.title(), exact=True).click()
        expect(page.get_by_role("heading", name=part.title(), exact=True)).to_be_visible()
        if part == "models":
            expect(page.locator("article.card").first).to_be_visible()
        headings = page.locator("h1, h2, h3, h4").filter(visible=True)
        levels = headings.evaluate_all("found => found.map((each) => Number(each.localName[1]))")
        assert levels[0] == 1
        assert all(level <= above + 1 for above, level in pairwise(levels)), (part, levels)
        assert len(levels) > 1 or part == "live"


def test_the_focus_can_be_seen(here: tuple[Running, PacedRoom], visit: Visit) -> None:
    page = visit(here[0], "settings")
    tab_to(page, "Live")
    assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize("width", [320, *(pytest.param(width, marks=pytest.mark.slow) for width in (390, 768))])
def test_nothing_is_wider_than_the_screen(here: tuple[Running, PacedRoom], visit: Visit, width: int) -> None:
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
            expect(page.locator("#loaded article").first).to_be_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width, part


def test_what_is_pressed_is_large_enough_for_a_finger(here: tuple[Running, PacedRoom], visit: Visit) -> None:
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


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted(map(luminance, (one, other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(here: tuple[Running, PacedRoom], visit: Visit, scheme: str) -> None:
    page = visit(here[0], color_scheme=scheme)
    read = """names => names.map(name => {
        const probe = document.body.appendChild(document.createElement("i"));
        probe.style.color = `var(--${name})`;
        return getComputedStyle(probe).color;
    })"""
    names = ["ground", "panel", "draft", "correction", "bonus", "plain", "ink", "quiet", "accent", "red"]
    values = dict(zip(names, page.evaluate(read, names), strict=True))
    assert (luminance(values["ground"]) < 0.5) == (scheme == "dark")
    for text in ("ink", "quiet", "accent", "red"):
        for ground in names[:6] if text == "ink" else names[:2]:
            assert contrast(values[text], values[ground]) >= 4.5, (text, ground)


@pytest.mark.parametrize(
    ("scheme", "on"),
    [
        ("light", True),
        ("dark", False),
        pytest.param("light", False, marks=pytest.mark.slow),
        pytest.param("dark", True, marks=pytest.mark.slow),
    ],
)
def test_switches_stand_out_from_their_ground(
    here: tuple[Running, PacedRoom], visit: Visit, scheme: str, on: bool
) -> None:
    page = visit(here[0], "settings", color_scheme=scheme, reduced_motion="reduce")
    switch = page.get_by_role("switch")
    expect(switch).to_be_enabled()
    switch.evaluate("(it, on) => { it.checked = on }", on)
    track = switch.evaluate("it => getComputedStyle(it).backgroundColor")
    knob = switch.evaluate("it => getComputedStyle(it, '::after').backgroundColor")
    panel = page.locator("#preferences").evaluate("it => getComputedStyle(it).backgroundColor")
    assert contrast(track, panel) >= 3
    assert contrast(knob, track) >= 3


def test_nothing_is_shown_by_colours_alone(here: tuple[Running, PacedRoom], visit: Visit) -> None:
    """As it is where the system has its own colours, and grounds are all one."""
    page = visit(here[0], "settings", forced_colors="active")
    expect(page.get_by_role("switch")).to_be_enabled()
    assert page.get_by_role("switch").evaluate("it => getComputedStyle(it).appearance") == "auto"
    line = """kind => {
        const token = document.getElementById("thread").appendChild(document.createElement("span"));
        token.className = `token ${kind}`;
        const style = getComputedStyle(token);
        return `${style.textDecorationLine} ${style.textDecorationStyle}`;
    }"""
    lines = {page.evaluate(line, kind) for kind in ("draft", "correction", "bonus", "plain")}
    assert len(lines) == 4


def test_the_light_can_be_chosen_and_is_kept(here: tuple[Running, PacedRoom], visit: Visit) -> None:
    counted = """
        globalThis.watching = 0;
        ResizeObserver = class extends ResizeObserver {
            observe(...what) { super.observe(...what); watching += 1; }
            disconnect() { super.disconnect(); watching -= 1; }
        };
    """
    page = visit(here[0], color_scheme="light", before=counted)
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light, watching = page.evaluate(ground), page.evaluate("watching")
    assert watching > 0
    for theme in ("light", "dark"):
        page.locator("#theme").click()
        expect(page.get_by_role("button", name=f"Theme: {theme}")).to_be_visible()
    assert page.evaluate(ground) != light
    assert page.evaluate("watching") == watching, "charts in another light are other charts, and the old ones go"
    page.reload()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert page.evaluate(ground) != light
