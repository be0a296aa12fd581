"""Malformed calls come back: what an answer holds is accepted in the history of the next request, on every API."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from running import Running, tokenizer
from scripted import ScriptedRoom, scripted

Here = tuple[Running, ScriptedRoom]
Body = dict[str, Any]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WRITTEN = {
    "no quotes": '{"city": Oslo}',
    "a trailing comma": '{"city": "Oslo",}',
    "single quotes": "{'city': 'Oslo'}",
    "a line break": '{"city": "Os\nlo"}',
    "not a number": '{"city": NaN}',
    "a leading zero": '{"city": 01}',
    "too deep": '{"city": ' + "[" * 120 + "]" * 120 + "}",
}
QUESTION = {"role": "user", "content": "Oslo?"}
# As Qwen3.5's: it writes arguments one by one, and fails where they are text.
ONE_BY_ONE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls %}<tool_call>"
    "{{ call.function.name }}{% for name, value in call.function.arguments|items %}"
    "<{{ name }}>{{ value if value is string else value|tojson }}{% endfor %}</tool_call>{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with scripted(burst=3) as server:
        yield server


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


def post(here: Here, path: str, script: str, **body: Any) -> Any:
    """The answer, or the events of a stream."""
    here[1].scripts.append(script)
    with here[0].http() as http:
        answer = http.post(f"/v1/{path}", json={"model": "tiny", **body})
    if answer.status_code != 200:
        here[1].scripts.clear()
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def prompt(here: Here) -> str:
    return str(tokenizer().decode(list(here[1].requests[-1].prompt)))


def chat(here: Here, script: str, *history: Body, **body: Any) -> Any:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    return post(here, "chat/completions", script, messages=[QUESTION, *history], tools=tools, **body)


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("quoted", [False, True], ids=["as it came", "as a JSON string"])
def test_chat_completions_take_back_a_malformed_call(here: Here, written: str, quoted: bool) -> None:
    said = chat(here, call(written))["choices"][0]["message"]
    function = said["tool_calls"][0]["function"]
    assert function["arguments"] == written
    if quoted:  # as clients send it that keep the text in place of an object, and write that as JSON
        function["arguments"] = json.dumps(written)
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "not JSON"}
    answer = chat(here, "Sorry.", said, result)
    assert answer["choices"][0]["message"]["content"] == "Sorry."
    assert call(written) in prompt(here)


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("stream", [False, True])
def test_responses_take_back_a_malformed_call(here: Here, written: str, stream: bool) -> None:
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    asked = post(here, "responses", call(written), input=[QUESTION], tools=tools, store=False, stream=stream)
    output = (asked[-1]["response"] if stream else asked)["output"]
    assert output[-1]["arguments"] == written
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "not JSON"}
    answer = post(here, "responses", "Sorry.", input=[QUESTION, *output, result], tools=tools, store=False)
    assert answer["output"][-1]["content"][0]["text"] == "Sorry."
    assert call(written) in prompt(here)


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("stream", [False, True])
def test_responses_keep_a_malformed_call(here: Here, written: str, stream: bool) -> None:
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    asked = post(here, "responses", call(written), input=[QUESTION], tools=tools, stream=stream)
    assert not stream or asked[-1]["type"] == "response.completed"
    said = asked[-1]["response"] if stream else asked
    with here[0].http() as http:
        assert http.get(f"/v1/responses/{said['id']}").json() == said
    assert said["output"][-1]["arguments"] == written
    result = {"type": "function_call_output", "call_id": said["output"][-1]["call_id"], "output": "not JSON"}
    previous = said["id"]
    for _ in range(2):  # what was continued can be continued
        answer = post(here, "responses", "Sorry.", input=[result], tools=tools, previous_response_id=previous)
        previous = answer["id"]
        assert answer["output"][-1]["content"][0]["text"] == "Sorry."
        assert call(written) in prompt(here)


def messages(here: Here, script: str, *history: Body, **body: Any) -> Any:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    return post(here, "messages", script, messages=[QUESTION, *history], tools=tools, max_tokens=999, **body)


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_messages_take_back_a_malformed_call(here: Here, written: str) -> None:
    """A whole answer has it as text, and a stream as pieces, of which clients make what they can."""
    said = {"role": "assistant", "content": messages(here, call(written))["content"]}
    messages(here, "Sorry.", said, QUESTION)
    events = messages(here, call(written), stream=True)
    block = next(event["content_block"] for event in events if event["type"] == "content_block_start")
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    block["input"] = "".join(delta["partial_json"] for delta in deltas)
    assert block["input"] == written
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "not JSON"}
    said = {"role": "assistant", "content": [block]}
    answer = messages(here, "Sorry.", said, {"role": "user", "content": [result]})
    assert answer["content"] == [{"type": "text", "text": "Sorry."}]
    assert call(written) in prompt(here)


def test_messages_take_back_an_object_that_is_too_deep(here: Here) -> None:
    """Clients parse it from the stream."""
    block = {"type": "tool_use", "id": "1", "name": "weather", "input": json.loads(WRITTEN["too deep"])}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "too deep"}
    messages(here, "Sorry.", {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]})
    assert call(WRITTEN["too deep"]) in prompt(here)


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_a_completion_continues_a_malformed_call(here: Here, written: str) -> None:
    text = post(here, "completions", call(written), prompt="Oslo?", max_tokens=999)["choices"][0]["text"]
    assert text == call(written)
    assert post(here, "completions", "Sorry.", prompt=f"Oslo?{text}")["choices"][0]["text"] == "Sorry."
    assert prompt(here) == f"Oslo?{text}"


def test_a_template_that_needs_an_object_gets_the_text_as_its_one_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer()._tokenizer, "chat_template", ONE_BY_ONE)
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for arguments in ('{"city": Oslo}', '{"city": "Bergen"}')
    ]
    with scripted() as here:
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        post(here, "chat/completions", "Sorry.", messages=[QUESTION, said, QUESTION])
        assert '<tool_call>weather<arguments>{"city": Oslo}</tool_call>' in prompt(here)
        assert "<tool_call>weather<city>Bergen</tool_call>" in prompt(here)
