"""Pictures in requests of every API, with real clients; and what is wrong with pictures is answered by name."""

import asyncio
import io
import json
import threading
from base64 import b64encode
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from running import Running

from headstart.images import QwenRules
from headstart.library import generate
from headstart.server.image_urls import Fetched
from headstart.server.images import MAX_IMAGES, _decode, parse_image_url
from headstart.server.settings import Limits
from reference.pictures import picture
from vision_models import encoded, giant_png

QUESTION = "What is in it?"
IMAGE = {"type": "image"}
PNG = encoded(picture(40, 30))
OTHER = encoded(picture(24, 60, 3), "JPEG")
GIF = encoded(picture(24, 60, 3), "GIF")


def base64(data: bytes) -> str:
    return b64encode(data).decode()


def url(data: bytes = PNG, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64(data)}"


def openai_part(data: bytes = PNG, kind: str = "image/png", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data, kind), **more}}


def anthropic_part(data: bytes = PNG, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": base64(data)}}


def chat(*parts: dict[str, Any], **options: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": QUESTION}]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 12, **options}


def expected(seeing: Running, messages: list[dict[str, Any]], *images: bytes) -> str:
    """Return the library's answer."""
    tokenizer = seeing.served.tokenizer
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=None)
    return generate(seeing.served.model, tokenizer, prompt, max_tokens=12, images=images)


def test_openai_client(each_seeing: Running) -> None:
    client = each_seeing.openai()
    parts = [openai_part(), {"type": "text", "text": "and"}, openai_part(OTHER, "image/jpeg", detail="high")]
    answer = client.chat.completions.create(**chat(*parts))
    content = [
        {"type": "image"},
        {"type": "text", "text": "and"},
        {"type": "image"},
        {"type": "text", "text": QUESTION},
    ]
    wanted = expected(each_seeing, [{"role": "user", "content": content}], PNG, OTHER)
    assert answer.choices[0].message.content == wanted
    streamed = client.chat.completions.create(**chat(*parts), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == wanted
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 2 * 16


def test_anthropic_client_and_tool_results(each_seeing: Running) -> None:
    client = each_seeing.anthropic()
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [anthropic_part(OTHER, "image/jpeg")]}
    messages: Any = [
        {"role": "user", "content": [anthropic_part(), {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    asked: Any = {"model": "tiny", "max_tokens": 12, "messages": messages, "tools": tools}
    answer = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_text() == answer.content[0].text
    counted = client.messages.count_tokens(**{k: v for k, v in asked.items() if k != "max_tokens"})
    assert counted.input_tokens == answer.usage.input_tokens
    without = {**asked, "messages": messages[:1]}
    assert answer.usage.input_tokens > client.messages.create(**without).usage.input_tokens + 16


def test_responses_keep_pictures(each_seeing: Running) -> None:
    client = each_seeing.openai()
    content: Any = [{"type": "input_image", "image_url": url()}, {"type": "input_text", "text": QUESTION}]
    answer = client.responses.create(model="tiny", input=[{"role": "user", "content": content}], max_output_tokens=12)
    wanted = expected(
        each_seeing, [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}], PNG
    )
    assert answer.output_text == wanted
    again = client.responses.create(model="tiny", input="Sure?", previous_response_id=answer.id, max_output_tokens=12)
    assert again.usage is not None
    assert answer.usage is not None
    assert again.usage.input_tokens > answer.usage.input_tokens


def test_low_detail_takes_fewer_tokens(seeing: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.server.images.LOW_DETAIL", 1024)
    client, large = seeing.openai(), encoded(picture(64, 64))
    used = [client.chat.completions.create(**chat(openai_part(large, detail=each))).usage for each in ("low", "high")]
    assert used[0].prompt_tokens == used[1].prompt_tokens - 48  # type: ignore[union-attr]


def animated() -> bytes:
    file = io.BytesIO()
    frames = [Image.fromarray(picture(16, 16, n)) for n in range(3)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def wide() -> bytes:
    return encoded(np.zeros((8000, 9000, 3), np.uint8), "PNG", compress_level=1)


BAD: list[tuple[dict[str, Any], str]] = [
    (openai_part(PNG[:200]), "cannot be read"),
    (openai_part(OTHER[: len(OTHER) // 2], "image/jpeg"), "cannot be read"),
    (openai_part(b"", "image/png"), "cannot be read"),
    (openai_part(b"GIF89a" + bytes(50), "image/gif"), "cannot be read"),
    (openai_part(giant_png(30_000, 40_000)), "cannot be read (Image size (1200000000 pixels)"),
    (openai_part(animated(), "image/gif"), "animated"),
    (openai_part(PNG, "image/jpeg"), "is image/png and was sent as image/jpeg"),
    (openai_part(PNG, "text/html"), "was sent as text/html"),
    (openai_part(encoded(picture(16, 16), "BMP"), "image/bmp"), "cannot be read"),
    (
        openai_part(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
        "cannot be read (cannot identify image file)",
    ),
    (openai_part(encoded(np.zeros((2, 900, 3), np.uint8))), "200 times"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@@"}}, "not valid base64"),
    ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "not a data URL of base64"),
    ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}, "not public"),
    ({"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}, "an address that is not public"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "not at an http or https URL"),
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "video input is not supported"),
]


@pytest.mark.parametrize(("part", "problem"), BAD, ids=[problem for _, problem in BAD])
def test_bad_pictures_are_named(seeing: Running, part: dict[str, Any], problem: str) -> None:
    with seeing.http() as client:
        answer = client.post("/v1/chat/completions", json=chat(openai_part(GIF, "image/gif"), part))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("messages[0].content[1]")
    assert problem in answer.json()["error"]["message"]
    assert "object at 0x" not in answer.text


@pytest.mark.parametrize(
    ("part", "problem"), [BAD[0], BAD[4], BAD[6], BAD[10]], ids=["broken", "large", "type", "long"]
)
def test_bad_pictures_are_named_by_other_models(seeing_gemma: Running, part: dict[str, Any], problem: str) -> None:
    test_bad_pictures_are_named(seeing_gemma, part, problem)


def test_bad_pictures_of_other_apis_are_named(seeing: Running) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [anthropic_part(PNG, "image/webp")]}
    items = [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "file_id": "x"}]}]
    cases = (
        ("/v1/messages", {"messages": [{"role": "user", "content": [result]}], "max_tokens": 5},
         "messages[0].content[0].content[0]: the image is image/png and was sent as image/webp"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "system": [IMAGE]},
         "system[0]"),
        ("/v1/responses", {"input": items}, "input[0].output[0]: the image has no image_url"),
    )  # fmt: skip
    with seeing.http() as client:
        for path, body, problem in cases:
            answer = client.post(path, json=body)
            assert answer.status_code == 400
            assert problem in answer.json()["error"]["message"]


def test_urls_are_fetched_only_where_that_is_allowed(seeing: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    work: Any = SimpleNamespace(preparer=SimpleNamespace(limits=Limits()))
    with pytest.raises(ValueError, match="fetches no others"):
        asyncio.run(_decode(parse_image_url("http://example.com/x.png"), QwenRules(), work))

    async def fetched(url: str) -> Fetched:
        assert url == "http://example.com/x.png"
        return Fetched(PNG, "image/png")

    monkeypatch.setattr("headstart.server.images.fetch_image", fetched)
    client, remote = seeing.openai(), {"type": "image_url", "image_url": {"url": "http://example.com/x.png"}}
    answers = [client.chat.completions.create(**chat(part)).choices[0].message for part in (remote, openai_part())]
    assert answers[0].content == answers[1].content


def test_too_many_pictures(each_seeing: Running) -> None:
    tiny = encoded(picture(8, 8))
    with each_seeing.http() as client:
        answer = client.post("/v1/chat/completions", json=chat(*[openai_part(tiny)] * 100))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"messages[0].content[{MAX_IMAGES}]"
        long = client.post("/v1/chat/completions", json=chat(*[openai_part(encoded(picture(64, 64)))] * MAX_IMAGES))
        assert long.status_code == 400
        assert long.json()["error"]["code"] == "context_length_exceeded"


def test_neighbours_are_unharmed_and_memory_is_bounded(seeing: Running) -> None:
    """A worker process that takes too much memory or time is killed; an answer beside it is not disturbed."""
    client = seeing.openai()
    asked = chat(openai_part())
    wanted = client.chat.completions.create(**asked).choices[0].message.content
    answers: list[int] = []

    def attack() -> None:
        with seeing.http() as http:
            answers.append(http.post("/v1/chat/completions", json=chat(openai_part(wide()))).status_code)

    attacker = threading.Thread(target=attack)
    attacker.start()
    assert client.chat.completions.create(**asked).choices[0].message.content == wanted
    attacker.join()
    assert answers == [400]  # 72 million pixels
    assert client.chat.completions.create(**asked).choices[0].message.content == wanted


def test_slow_pictures_time_out(seeing: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.server.images.DECODE_SECONDS", 0.05)
    slow = encoded(np.zeros((6000, 8000, 3), np.uint8), "PNG", compress_level=1)
    with seeing.http() as client:
        answer = client.post("/v1/chat/completions", json=chat(openai_part(slow)))
        assert answer.status_code == 400
        assert "could not be decoded within" in answer.json()["error"]["message"]
        monkeypatch.undo()
        assert client.post("/v1/chat/completions", json=chat(openai_part())).status_code == 200


def test_a_model_that_cannot_see_says_so(server: Running) -> None:
    with server.http() as client:
        answer = client.post("/v1/chat/completions", json=chat(openai_part()))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("messages[0].content[0]", "unsupported")
        assert "image input is not supported by this model" in error["message"]
        assert "config.json has no vision_config" in error["message"]


def test_placeholders_in_a_text_are_text(seeing: Running) -> None:
    text = {"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|>"}
    answer = seeing.openai().chat.completions.create(**chat(text, openai_part()))
    assert answer.choices[0].message.content


def test_bodies_have_a_limit_of_their_own(seeing: Running) -> None:
    large = json.dumps(chat(openai_part(PNG + bytes(Limits.body_bytes))))
    with seeing.http() as client:
        answer = client.post("/v1/chat/completions", content=large, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
