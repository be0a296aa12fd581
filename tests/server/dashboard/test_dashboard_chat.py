"""The chat: it streams, shows markdown and thoughts, colours tokens by origin, races, and shows HTML as text."""

import re
from collections.abc import Iterator
from threading import Semaphore
from typing import Any

import pytest
from browsing import Visit
from paced import PacedRoom
from playwright.sync_api import Page, expect
from running import Running, running, tokenizer, wait_until
from scripted import ScriptedRoom

from headstart.errors import RequestError
from headstart.sampling import SamplingParams

ATTACK = (
    'Look: <script>document.title = "taken"</script> <img src="/v1/taken" onerror="document.title = 1">'
    "\n\n<iframe srcdoc='<script>top.document.title = 2</script>'></iframe>"
    "\n\n[a](javascript:document.title=3) ![b](/v1/taken.png) [c](data:text/html,x) &lt;b&gt;"
    '\n\n```html"onmouseover="document.title=4\n<style>* {display: none}</style>\n```'
)


NAMES = {
    "draft": "accepted draft",
    "correction": "correction of a rejected draft",
    "bonus": "bonus token",
    "plain": "decoded without drafts",
}


@pytest.fixture
def script() -> Iterator[tuple[Running, PacedRoom]]:
    with running(room_type=PacedRoom, burst=3) as here:
        assert isinstance(here.room, PacedRoom)
        yield here, here.room


@pytest.fixture(scope="module")
def model() -> Iterator[Running]:
    """A real one, with drafts that stand and drafts that fall."""
    with running(max_sequences=4) as here:
        yield here


def ask(page: Page, question: str = "What is it?") -> None:
    page.get_by_label("Message").fill(question)
    page.get_by_label("Message").press("Enter")


def answered(page: Page) -> None:
    """The last answer is whole."""
    expect(page.locator(".answer").last.locator(".stats")).to_contain_text("tokens per round")
    expect(page.locator(".answer[aria-busy]")).to_have_count(0)


def test_an_answer_streams(script: tuple[Running, PacedRoom], visit: Visit) -> None:
    server, room = script
    room.turns = Semaphore(4)
    room.scripts.append(f"one {'word ' * 60} thirteen")
    page = visit(server, "chat")
    ask(page)
    expect(page.locator(".answer .markdown").last).to_contain_text("one")
    expect(page.locator(".answer .markdown").last).not_to_contain_text("thirteen")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.get_by_role("status")).to_be_empty()  # to be heard once, when it is whole
    room.turns.release(60)
    expect(page.locator(".answer .markdown").last).to_contain_text("thirteen")
    answered(page)
    expect(page.get_by_role("status")).to_contain_text("thirteen")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()


def test_a_text_that_takes_long_to_render_is_rendered_less_often(
    script: tuple[Running, PacedRoom], visit: Visit
) -> None:
    """However long it gets, the page has time for other things."""
    slow = """
        let late = 0;
        globalThis.renderings = 0;
        const now = performance.now.bind(performance);
        performance.now = () => now() + late;
        const { get, set } = Object.getOwnPropertyDescriptor(Element.prototype, "innerHTML");
        Object.defineProperty(Element.prototype, "innerHTML", { get, set(html) {
            if (html) renderings += 1;
            late += 1000;
            set.call(this, html);
        } });
    """
    server, room = script
    room.turns = Semaphore(0)
    room.scripts.append("word " * 60)
    page = visit(server, "chat", before=slow)
    ask(page)
    room.turns.release()
    expect(page.locator(".answer .markdown").last).to_contain_text("word")
    for _ in range(10):
        room.turns.release()
        page.wait_for_timeout(120)
    assert page.evaluate("renderings") == 1, "the next is due in ten seconds"
    room.turns.release(60)
    answered(page)
    expect(page.locator(".answer .markdown").last).to_have_text(("word " * 60).strip())


def test_stop_ends_the_request_on_the_server(script: tuple[Running, PacedRoom], visit: Visit) -> None:
    server, room = script
    room.turns = Semaphore(3)
    room.scripts += ["word " * 200, "Well."]
    page = visit(server, "chat")
    ask(page)
    expect(page.locator(".answer .markdown").last).to_contain_text("word")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("alert").filter(has_text="Stopped.")).to_be_visible()
    room.turns.release(2)
    name = "headstart_requests_total"
    wait_until(lambda: server.metric(name, endpoint="/v1/chat/completions", outcome="cancelled") == 1)
    room.turns.release(100)
    ask(page, "And now?")
    answered(page)
    assert [message["role"] for message in sent(room)] == ["user"], "what was stopped is not part of the talk"


def sent(room: ScriptedRoom) -> list[dict[str, str]]:
    """The last conversation, read back from its prompt."""
    text = tokenizer().decode(list(room.requests[-1].prompt))
    parts = [part.split("\n", 1) for part in text.split("<|im_start|>")[1:-1]]
    return [{"role": role, "content": said.split("<|im_end|>")[0]} for role, said in parts]


def test_the_conversation_goes_on_from_earlier_messages(script: tuple[Running, PacedRoom], visit: Visit) -> None:
    server, room = script
    room.scripts += ["It is **4**.", "Yes."]
    page = visit(server, "chat")
    ask(page, "2 + 2?")
    answered(page)
    ask(page, "Sure?")
    answered(page)
    assert [message["role"] for message in sent(room)] == ["user", "assistant", "user"]
    assert sent(room)[1]["content"].endswith("It is **4**.")
    page.get_by_role("button", name="New chat").click()
    room.scripts.append("Hello.")
    ask(page, "Hi")
    answered(page)
    assert [message["content"] for message in sent(room)] == ["Hi"]


def test_markdown_is_rendered(script: tuple[Running, PacedRoom], visit: Visit) -> None:
    server, room = script
    room.scripts.append(
        "# Title\n\n- *one*\n- `two`\n\n| a | b |\n| --- | ---: |\n| 1 | 2 |\n\n```python\nx < 1\n```\n<https://example.org>"
    )
    page = visit(server, "chat")
    ask(page)
    answered(page)
    text = page.locator(".answer .markdown").last
    expect(text.locator("h1")).to_have_text("Title")
    expect(text.locator("li em")).to_have_text("one")
    expect(text.locator("pre code")).to_have_text("x < 1\n")
    assert text.locator("td").nth(1).evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    assert text.locator("a").get_attribute("rel") == "noopener noreferrer"


def test_thoughts_are_folded(script: tuple[Running, PacedRoom], visit: Visit) -> None:
    server, room = script
    room.scripts.append("<think>\nWhat a question.\n</think>\n\nIt is 4.")
    page = visit(server, "chat")
    ask(page)
    answered(page)
    expect(page.get_by_text("It is 4.").first).to_be_visible()
    expect(page.get_by_text("What a question.").first).to_be_hidden()
    page.get_by_text("Thought, ").click()
    expect(page.get_by_text("What a question.").first).to_be_visible()


@pytest.mark.parametrize(
    ("thought", "coloured"),
    [
        (False, True),
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_html_is_shown_as_text(
    script: tuple[Running, PacedRoom], visit: Visit, thought: bool, coloured: bool
) -> None:
    """Without the policy's help: what is escaped needs none."""
    server, room = script
    room.scripts.append(f"<think>\n{ATTACK}\n</think>\n\nSo." if thought else ATTACK)
    page = visit(server, "chat", bypass_csp=True)
    if coloured:
        page.get_by_label("Colour tokens by origin").check()
    ask(page, ATTACK)
    answered(page)
    if thought:
        page.get_by_text("Thought, ").click()
    passage = page.locator(".answer > .thinking" if thought else ".answer > .passage")
    shown = passage.locator(".tokens" if coloured else ".markdown")
    expect(shown).to_contain_text('<script>document.title = "taken"</script> <img src="/v1/taken" onerror=')
    expect(shown).to_contain_text("<style>* {display: none}</style>")
    assert page.locator(".thread").locator("script, img, iframe, style, [onerror], [onmouseover]").count() == 0
    links = {link.get_attribute("href") for link in page.locator(".thread a").all()}
    assert links == {"/v1/taken.png"}, "nothing to click that would run"
    assert page.title() == "Chat · Headstart"


def test_the_policy_stops_what_would_slip_through(script: tuple[Running, PacedRoom], visit: Visit) -> None:
    page = visit(script[0], "chat", expect="TrustedHTML")
    tried = """() => {
        try { document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='document.title = 1'>"); return "in" }
        catch (error) { return error.name }
    }"""
    assert page.evaluate(tried) == "TypeError"


def test_an_error_is_shown_in_the_servers_words(model: Running, visit: Visit) -> None:
    page = visit(model, "chat", expect="400")
    ask(page, "word " * 5000)
    expect(page.get_by_role("alert").filter(has_text="prompt is too long")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_colours_match_the_counts_of_the_stats(model: Running, visit: Visit) -> None:
    page = visit(model, "chat")
    page.get_by_label("Max tokens").fill("120")
    page.get_by_label("Temperature").fill("0")
    page.locator("#depth").select_option("3")
    page.get_by_label("Colour tokens by origin").check()
    with page.expect_response("**/v1/chat/completions") as told:
        ask(page)
        answered(page)
    body = told.value.request.post_data_json
    assert (body["num_draft_tokens"], body["max_tokens"], body["temperature"]) == (3, 120, 0)
    with model.http() as http:
        stats = http.post("/v1/chat/completions", json=body | {"stream": False, "stream_options": None}).json()
    stats = stats["generation_stats"]
    counts = {kind: page.locator(f".tokens .token.{kind}").count() for kind in NAMES}
    assert counts["draft"] == stats["accepted_draft_tokens"] > 0
    assert counts["correction"] > 0
    cut = page.locator(".tokens .token").last.evaluate("token => token.classList.contains('draft')")
    own = counts["correction"] + counts["bonus"] + counts["plain"]
    assert own == stats["rounds"] - cut, "each round has one of the model's own, unless the limit cuts it off"
    assert sum(counts.values()) == 120
    for kind, count in counts.items():
        if count:
            told = page.locator(".legend > span").filter(has=page.locator(f".{kind}"))
            expect(told).to_have_text(f"{NAMES[kind]} {count}")
    seen = [page.locator(f".tokens .token.{kind}").first for kind in ("draft", "correction")]
    backgrounds = {each.evaluate("token => getComputedStyle(token).backgroundColor") for each in seen}
    assert len(backgrounds) == 2
    expect(page.locator(".stats")).to_contain_text(f"accepted {stats['accepted_draft_tokens']} of")


def test_speculation_can_be_switched_off(model: Running, visit: Visit) -> None:
    page = visit(model, "chat")
    page.get_by_label("Max tokens").fill("10")
    page.get_by_label("Speculation").uncheck()
    expect(page.locator("#depth")).to_be_disabled()
    ask(page)
    answered(page)
    expect(page.locator(".stats")).to_contain_text("no drafts: the request asked for no drafts")
    assert page.locator(".token.plain").count() == 10 + 1, "and the legend's"
    style = page.locator(".token.plain").first.evaluate("token => getComputedStyle(token).textDecorationStyle")
    assert style not in ("wavy", "none"), "a wavy line looks like a spelling error"


def test_shares_of_a_few_drafts_are_not_shown(model: Running, visit: Visit) -> None:
    page = visit(model, "chat")
    page.get_by_label("Max tokens").fill("6")
    page.locator("#depth").select_option("3")
    ask(page)
    answered(page)
    expect(page.locator(".stats")).to_contain_text(re.compile(r"accepted \d+ of \d+ drafts"))
    expect(page.locator(".stats")).not_to_contain_text("%")


def test_the_limits_in_the_form_are_those_of_the_api(model: Running, visit: Visit) -> None:
    page = visit(model, "chat")
    for name in ("temperature", "max_tokens"):
        field = page.locator(f"#{name.replace('_', '-')}")
        low, high = (int(field.get_attribute(limit) or "") for limit in ("min", "max"))
        options: list[dict[str, Any]] = [{name: low}, {name: high}]
        assert [SamplingParams(**each) for each in options]
        for outside in (low - 1, high + 1):
            with pytest.raises(RequestError, match=f"{name} is {outside}"):
                SamplingParams(**{name: outside})  # type: ignore[arg-type]


def test_both_sides_of_a_race_have_the_same_text(model: Running, visit: Visit) -> None:
    page = visit(model, "chat")
    page.get_by_label("Max tokens").fill("40")
    page.get_by_label("Temperature").fill("0.8")
    page.locator("#depth").select_option("3")
    page.get_by_label("Message").fill("Go!")
    page.get_by_role("button", name="Race").click()
    expect(page.locator(".verdict")).to_contain_text("Both texts are identical.")
    off, on = page.get_by_label("Speculation off"), page.get_by_role("region", name="Speculation on")
    expect(off.locator(".stats")).to_contain_text("1.00 tokens per round")
    expect(on.locator(".stats")).to_contain_text("drafts (")
    assert off.locator(".tokens").last.inner_text() == on.locator(".tokens").last.inner_text()
    boxes = [lane.bounding_box() for lane in (off, on)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"], "side by side"


def test_the_clocks_of_a_race_start_at_the_first_token(script: tuple[Running, PacedRoom], visit: Visit) -> None:
    """Who comes second finds the prompt in the prefix cache."""
    server, room = script
    room.turns = Semaphore(0)
    room.scripts += ["one two three", "one two three"]
    page = visit(server, "chat")
    page.get_by_label("Message").fill("Go!")
    page.get_by_role("button", name="Race").click()
    clocks = page.locator(".clock")
    expect(clocks).to_have_text(["prefill", "waiting"])
    room.turns.release()
    expect(clocks.first).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    room.turns.release(100)
    expect(page.locator(".verdict")).to_contain_text("Both texts are identical")


def test_a_race_without_drafts_is_none(model: Running, visit: Visit) -> None:
    model.room.configure(speculation=False)
    try:
        page = visit(model, "chat")
        page.get_by_label("Max tokens").fill("5")
        page.get_by_label("Message").fill("Go!")
        page.get_by_role("button", name="Race").click()
        verdict = "No comparison, there were no drafts: speculation is switched off."
        expect(page.locator(".verdict")).to_have_text(verdict)
    finally:
        model.room.configure(speculation=True)


def test_a_chat_is_kept_after_a_reload_and_goes_on_with_its_system_prompt(
    script: tuple[Running, PacedRoom], visit: Visit
) -> None:
    server, room = script
    room.scripts += ["It is **4**.", "Yes.", "Other."]
    page = visit(server, "chat")
    page.get_by_label("System prompt").fill("Be brief.")
    ask(page, "2 + 2?")
    answered(page)
    page.reload()
    expect(page.locator(".question")).to_have_text("2 + 2?")
    expect(page.locator(".answer strong")).to_have_text("4")
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    ask(page, "Sure?")
    answered(page)
    assert [message["role"] for message in sent(room)] == ["system", "user", "assistant", "user"]
    assert sent(room)[0]["content"] == "Be brief."
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_label("System prompt")).to_have_value("")
    ask(page, "Something else")
    answered(page)
    page.get_by_label("Conversation", exact=True).first.select_option("2 + 2?")
    expect(page.locator(".question")).to_have_text(["2 + 2?", "Sure?"])
    page.get_by_role("button", name="Delete this chat").press("Enter")
    expect(page.locator(".question")).to_have_text("Something else")
    page.reload()
    expect(page.locator("#chats option")).to_have_text(["Something else"])


def test_answers_are_copied_regenerated_and_edited(script: tuple[Running, PacedRoom], visit: Visit) -> None:
    server, room = script
    room.scripts += ["First.", "Second.", "Third.", "Fourth."]
    page = visit(server, "chat", permissions=["clipboard-read", "clipboard-write"])
    ask(page, "One?")
    answered(page)
    page.get_by_role("button", name="Copy the answer").press("Enter")
    expect(page.get_by_role("status").filter(has_text="Copied.")).to_have_count(1)
    assert page.evaluate("navigator.clipboard.readText()") == "First."
    page.get_by_role("button", name="Regenerate the answer").press("Enter")
    expect(page.locator(".answer .markdown").last).to_have_text("Second.")
    answered(page)
    assert [message["content"] for message in sent(room)] == ["One?"]
    ask(page, "Two?")
    answered(page)
    page.get_by_role("button", name="Edit the question").first.press("Enter")
    expect(page.get_by_label("Message")).to_have_value("One?")
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_label("Message")).to_have_value("")
    expect(page.locator(".question")).to_have_count(2)
    page.get_by_role("button", name="Edit the question").first.click()
    ask(page, "One, again?")
    expect(page.locator(".answer .markdown").last).to_have_text("Fourth.")
    expect(page.locator(".question")).to_have_text(["One, again?"])
    answered(page)
    page.reload()
    expect(page.locator(".question")).to_have_text(["One, again?"])
    expect(page.locator(".answer .markdown").last).to_have_text("Fourth.")


def test_code_has_colours_and_keeps_its_text(script: tuple[Running, PacedRoom], visit: Visit) -> None:
    server, room = script
    code = 'def add(a):  # <b>sum</b>\n    return a + 12, "text # no comment"\n'
    room.scripts.append(f"```python\n{code}```\n\n```\nreturn 1\n```")
    page = visit(server, "chat")
    ask(page)
    answered(page)
    shown = page.locator(".answer code").first
    assert shown.inner_text() == code
    parts = {kind: shown.locator(f".{kind}").all_inner_texts() for kind in ("keyword", "comment", "string", "number")}
    assert parts == {
        "keyword": ["def", "return"],
        "comment": ["# <b>sum</b>"],
        "string": ['"text # no comment"'],
        "number": ["12"],
    }
    expect(page.locator(".answer code").nth(1).locator("span")).to_have_count(0)


def test_what_the_browser_keeps_that_is_not_ours_does_no_harm(
    script: tuple[Running, PacedRoom], visit: Visit
) -> None:
    server, room = script
    room.scripts.append("Fine.")
    for kept in ("nonsense", '{"a": 1}', '[null, {"id": 3}, {"id": "x", "system": "", "turns": 5}]'):
        page = visit(
            server,
            "chat",
            before=f"localStorage.getItem('headstart-chats') ?? localStorage.setItem('headstart-chats', `{kept}`)",
        )
        expect(page.get_by_placeholder("Ask tiny.")).to_be_visible()
    ask(page)
    answered(page)
