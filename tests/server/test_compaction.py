"""Compaction of conversations, with OpenAI's client: what is kept, what the summary replaces, and refusals."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running import Running, tokenizer
from scripted import ScriptedRoom, scripted

Here = tuple[Running, ScriptedRoom]
SUMMARY = "The launch is on Tuesday."
TALK: Any = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "When is the launch?"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Tuesday?"}]},
    {"role": "assistant", "content": "On Tuesday."},
]


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with scripted(burst=3) as server:
        yield server


def prompt(here: Here) -> str:
    return str(tokenizer().decode(list(here[1].requests[-1].prompt)))


def test_a_summary_takes_the_place_of_what_was_said(here: Here) -> None:
    client = here[0].openai()
    here[1].scripts.extend([SUMMARY, "As agreed."])
    compacted = client.responses.compact(model="tiny", input=TALK, instructions="You plan.")
    assert compacted.object == "response.compaction"
    assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
    asked = prompt(here)
    places = [asked.index(part) for part in ("You plan.", "Be brief.", "launch?", "On Tuesday.", "Write a summary")]
    assert places == sorted(places)
    assert compacted.usage.input_tokens == len(here[1].requests[-1].prompt)
    items: Any = [*(item.to_dict() for item in compacted.output), {"role": "user", "content": "So?"}]
    assert client.responses.create(model="tiny", input=items).output_text == "As agreed."
    text = prompt(here)
    assert [part for part in ("Be brief.", "launch?", SUMMARY, "So?") if part not in text] == []
    assert "On Tuesday.\n" not in text


def test_a_stored_conversation_is_compacted(here: Here) -> None:
    client = here[0].openai()
    here[1].scripts.extend(["On Tuesday.", SUMMARY])
    first = client.responses.create(model="tiny", input="When is the launch?")
    compacted = client.responses.compact(model="tiny", previous_response_id=first.id)
    assert "On Tuesday." in prompt(here)
    assert [item.type for item in compacted.output] == ["message", "compaction"]


def test_what_is_kept_of_a_long_conversation_leaves_most_of_the_context(here: Here) -> None:
    turns: Any = [{"role": "user", "content": f"turn {i} " + "word " * 400} for i in range(20)]
    here[1].scripts.append(SUMMARY)
    output = here[0].openai().responses.compact(model="tiny", input=[TALK[0], *turns]).output
    said = [item.content[0].text for item in output if item.type == "message"]  # type: ignore[union-attr]
    assert said[0] == "Be brief."
    assert [text.split()[1] for text in said[1:]] == ["19"], "the latest, of what is a quarter of the context"


def test_what_cannot_be_compacted_is_refused_by_name(here: Here) -> None:
    client = here[0].openai()
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.compact(model="tiny", input=[])
    assert refused.value.param == "input"
    with here[0].http() as http:
        response = http.post("/v1/responses/compact", json={"input": "Hello"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    here[1].scripts.append("")
    with pytest.raises(openai.BadRequestError, match="no summary"):
        client.responses.compact(model="tiny", input="Hello")


def test_a_summary_of_another_server_is_left_out(here: Here) -> None:
    here[1].scripts.append("Yes.")
    items: Any = [{"type": "compaction_summary", "encrypted_content": "gAAAA"}, {"role": "user", "content": "Hello"}]
    assert here[0].openai().responses.create(model="tiny", input=items).output_text == "Yes."
    assert prompt(here).count("<|im_start|>") == 2
