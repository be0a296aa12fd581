"""Pictures in the chat: dropped or pasted, shown, removed, and sent along with the question."""

from base64 import b64encode
from collections.abc import Iterator

import pytest
from browsing import Visit
from playwright.sync_api import Page, expect
from running import Running
from seeing import running_with_tower

from reference.pictures import picture
from vision_models import encoded

GIVE = """
([id, kind, data]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], "cat.png", { type: "image/png" }));
  const transfer = kind === "drop" ? { dataTransfer: given } : { clipboardData: given };
  const Kind = kind === "drop" ? DragEvent : ClipboardEvent;
  document.getElementById(id).dispatchEvent(new Kind(kind, { bubbles: true, cancelable: true, ...transfer }));
}
"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_with_tower(tmp_path_factory.mktemp("seeing")) as here:
        yield here


def give(page: Page, kind: str, place: str, data: bytes | None = None) -> None:
    page.evaluate(GIVE, [place, kind, b64encode(encoded(picture(40, 30)) if data is None else data).decode()])


def test_a_dropped_picture_is_sent(seeing: Running, visit: Visit) -> None:
    page = visit(seeing, "chat")
    expect(page.get_by_label("Message")).to_be_enabled()
    expect(page.get_by_placeholder("Ask tiny")).to_be_visible()
    give(page, "drop", "thread")
    give(page, "paste", "question")
    pictures = page.get_by_role("group", name="Pictures").get_by_role("button")
    expect(pictures).to_have_count(2)
    pictures.first.click()
    expect(pictures).to_have_count(1)
    page.locator("#options").evaluate("each => each.open = true")
    page.get_by_label("Max tokens").fill("8")
    page.get_by_label("Message").fill("What is it?")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_label("Message").press("Enter")
    body = sent.value.post_data_json
    assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url", "text"]
    expect(page.locator(".answer").last.locator(".stats")).to_contain_text("tokens per round")
    expect(page.get_by_label("Question").locator("canvas")).to_have_count(1)
    expect(page.get_by_role("group", name="Pictures")).to_be_hidden()
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_label("Regenerate the answer").click()
    assert sent.value.post_data_json["messages"] == body["messages"]
    expect(page.get_by_label("Question").locator("canvas")).to_have_count(1)
    page.get_by_label("Edit the question").click()
    page.get_by_label("Message").fill("And now?")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_label("Message").press("Enter")
    assert [part["type"] for part in sent.value.post_data_json["messages"][0]["content"]] == ["image_url", "text"]


def test_what_is_no_picture_is_said(seeing: Running, visit: Visit) -> None:
    page = visit(seeing, "chat")
    expect(page.get_by_placeholder("Ask tiny")).to_be_visible()
    give(page, "drop", "ask", b"not a picture")
    expect(page.get_by_role("status")).to_contain_text("cat.png: not a picture")


def test_a_model_that_cannot_see_leaves_pictures_alone(server: Running, visit: Visit) -> None:
    page = visit(server, "chat")
    expect(page.get_by_placeholder("Ask tiny")).to_be_visible()
    give(page, "drop", "thread")
    expect(page.get_by_role("group", name="Pictures")).to_be_hidden()
