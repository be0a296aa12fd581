"""Chats and completions through the real openai client: each test is a promise that some client relies on."""

import json
from collections import Counter
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from running import CONTEXT, HUB_ID, Running, alone, chat_tokens, folder, tokenizer

from headstart.limits import MAX_HEAD_K

HI = [{"role": "user", "content": "hi"}]


def chat(client: OpenAI, **fields: Any) -> Any:
    """Fields that the client does not know go into the body all the same."""
    known = {"model": "tiny", "messages": HI, "max_tokens": 24}
    extra = fields.pop("extra_body", {})
    return client.chat.completions.create(**{**known, **fields}, extra_body=extra)


def streamed(client: OpenAI, **fields: Any) -> list[Any]:
    return list(chat(client, stream=True, **fields))


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_an_answer_is_what_the_engine_generates_alone(client: OpenAI) -> None:
    answer, expected = chat(client), alone(chat_tokens("hi"), max_tokens=24)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", expected.finish_reason)
    assert choice.message.content == expected.text


def test_a_stream_has_the_same_text_in_chunks(client: OpenAI) -> None:
    chunks = streamed(client)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert text_of(chunks) == chat(client).choices[0].message.content
    assert len(chunks) > 4, "a chunk a round"


def test_a_stream_is_sent_as_events_and_ends_with_done(server: Running) -> None:
    body = {"messages": HI, "max_tokens": 5, "stream": True}
    with server.http() as http:
        response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-1])


def test_usage_comes_in_a_last_chunk_of_its_own_when_asked(client: OpenAI) -> None:
    drafts = {"num_draft_tokens": 3}
    *chunks, last = streamed(client, stream_options={"include_usage": True}, extra_body=drafts)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    whole = chat(client).usage
    assert last.usage.prompt_tokens == whole.prompt_tokens == len(chat_tokens("hi"))
    assert last.usage.completion_tokens == whole.completion_tokens == 24
    assert last.usage.total_tokens == whole.prompt_tokens + 24
    assert whole.prompt_tokens_details.cached_tokens == 0
    assert whole.completion_tokens_details.reasoning_tokens == 0
    stats = last.generation_stats
    details = last.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == stats["accepted_draft_tokens"] > 0
    assert details.rejected_prediction_tokens == stats["proposed_draft_tokens"] - stats["accepted_draft_tokens"] > 0


def test_no_usage_in_a_stream_that_did_not_ask(client: OpenAI) -> None:
    assert all(chunk.usage is None for chunk in streamed(client))


# Every field but the last few changes the answer.
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.1, "seed": 7, "top_p": 0.3},
    {"temperature": 1.0, "seed": 3, "top_k": 2},
    {"temperature": 1.0, "seed": 3, "min_p": 0.3},
    {"temperature": 1.0, "seed": 3, "top_n_sigma": 1},
    {"temperature": 1.0, "seed": 4, "xtc_probability": 0.9, "xtc_threshold": 0.01},
    {"temperature": 1.0, "seed": 8, "presence_penalty": 2},
    {"temperature": 1.0, "seed": 8, "frequency_penalty": 2},
    {"logit_bias": {"100": 90}, "repetition_penalty": 90},
    {"temperature": 0.9, "seed": 1, "acceptance": "coupled"},
    {"num_draft_tokens": 3, "min_tokens": 24},
    {"num_draft_tokens": 0},
    {"num_draft_tokens": "auto"},
]
WITHOUT_EFFECT = {"num_draft_tokens", "min_tokens", "acceptance"}
ALL_GENERATED = {"presence_context_size": None, "frequency_context_size": None}  # OpenAI's penalties
NAMES = {"num_draft_tokens": "k", "acceptance": "accept"}


def said_with(fields: dict[str, Any]) -> str:
    params = {NAMES.get(name, name): value for name, value in fields.items()} | ALL_GENERATED
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    return alone(chat_tokens("hi"), max_tokens=24, **params).text


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(fields))
def test_every_field_reaches_the_engine(client: OpenAI, fields: dict[str, Any]) -> None:
    answer = chat(client, extra_body=fields)
    assert answer.choices[0].message.content == said_with(fields)
    assert answer.generation_stats["ignored_fields"] == []


@pytest.mark.slow  # of the table alone
@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(fields))
def test_every_field_that_is_sent_makes_a_difference(fields: dict[str, Any]) -> None:
    for name in fields.keys() - WITHOUT_EFFECT:
        without = {other: value for other, value in fields.items() if other != name}
        if name != "seed":  # without one the text is another every time
            assert said_with(without) != said_with(fields), f"{name} makes no difference: choose another value"


def test_max_completion_tokens_is_max_tokens(client: OpenAI) -> None:
    extra = {"max_completion_tokens": 7, "max_tokens": None}
    answer = client.chat.completions.create(model="tiny", messages=HI, extra_body=extra)  # type: ignore[call-overload]
    assert answer.usage.completion_tokens == 7
    both = chat(client, max_tokens=5, extra_body={"max_completion_tokens": 6})
    assert both.usage.completion_tokens == 6


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 6, 7])
def test_nothing_is_generated_past_max_tokens(client: OpenAI, most: int) -> None:
    expected = alone(chat_tokens("hi"), max_tokens=most)
    *chunks, last = streamed(client, max_tokens=most, stream_options={"include_usage": True})
    assert text_of(chunks) == expected.text
    assert last.usage.completion_tokens == most
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("limit", [{}, {"max_tokens": -1}], ids=str)
def test_without_a_limit_a_chat_may_go_on_to_the_end_of_the_context(client: OpenAI, limit: dict[str, int]) -> None:
    stop = alone(chat_tokens("hi"), max_tokens=60).text[-8:]
    answer = client.chat.completions.create(model="tiny", messages=HI, stop=stop, **limit)  # type: ignore[call-overload]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 24


def stops_of(text: str) -> list[str]:
    """Pieces of an answer that do not respect the borders of tokens, each its first occurrence."""
    pieces = [text[at : at + size] for at in range(10, 60, 7) for size in (1, 3, 9)]
    return [piece for piece in dict.fromkeys(pieces) if text.find(piece) > 0]


@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_a_stop_string_is_cut_wherever_it_falls(client: OpenAI, k: int) -> None:
    text = alone(chat_tokens("hi"), max_tokens=24).text
    for stop in stops_of(text):
        chunks = streamed(client, stop=stop, extra_body={"num_draft_tokens": k})
        assert text_of(chunks) == text[: text.find(stop)], stop
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_first_of_several_stop_strings_ends_the_answer(client: OpenAI) -> None:
    text = alone(chat_tokens("hi"), max_tokens=24).text
    stops = [text[40:44], "never said", text[20:24]]
    answer = chat(client, stop=stops)
    assert answer.choices[0].message.content == text[: min(text.find(stop) for stop in (stops[0], stops[2]))]


def test_roles_and_contents_become_what_the_template_reads(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": parts},
    ]
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "hi"},
    ]
    prompt = list(tokenizer().apply_chat_template(plain, add_generation_prompt=True, enable_thinking=None))
    answer = chat(client, messages=messages)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].message.content == alone(prompt, max_tokens=24).text


def test_stats_report_what_ran(client: OpenAI) -> None:
    stats = chat(client, extra_body={"num_draft_tokens": 2}).generation_stats
    assert stats["drafter_kind"] == "native_mtp"
    assert stats["accepted_draft_tokens"] <= stats["proposed_draft_tokens"]
    assert len(stats["acceptance_by_position"]) == 2
    assert stats["tokens_per_round"] == pytest.approx(24 / stats["rounds"])
    assert stats["exact"] is True
    assert stats["bypass_reason"] is None
    expected = {
        "drafter_kind", "num_draft_tokens", "proposed_draft_tokens", "accepted_draft_tokens", "acceptance_rate",
        "acceptance_by_position", "rounds", "tokens_per_round", "prompt_tps", "generation_tps", "prefix_cache_hit",
        "bypass_reason", "ignored_fields", "exact", "dtype",
    }  # fmt: skip
    assert expected <= stats.keys()


def test_stats_report_why_nothing_was_drafted(client: OpenAI) -> None:
    stats = chat(client, extra_body={"num_draft_tokens": 0}).generation_stats
    assert (stats["drafter_kind"], stats["bypass_reason"]) == (None, "the request asked for no drafts")


def test_stats_are_on_the_last_chunk_alone(client: OpenAI) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        *chunks, last = streamed(client, **options)
        assert last.generation_stats["rounds"] > 0
        assert not any(hasattr(chunk, "generation_stats") for chunk in chunks)


def test_unknown_fields_are_ignored_and_named(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "hi", "name": "me"}]
    extra = {"frobnicate": {"deep": 1}, "store": True}
    answer = chat(client, messages=messages, user="me", extra_body=extra)
    assert answer.generation_stats["ignored_fields"] == ["frobnicate", "messages[].name", "store", "user"]
    assert answer.choices[0].message.content == chat(client).choices[0].message.content


def test_of_many_unknown_fields_some_are_named(client: OpenAI) -> None:
    extra = {f"{i:03}": 1 for i in range(250)} | {"0" + "x" * 10**5: 1}
    named = chat(client, extra_body=extra).generation_stats["ignored_fields"]
    assert (len(named), named[0], named[-1]) == (101, "000", "and 151 more")
    assert all(len(name) <= 100 for name in named)


def test_more_drafts_than_the_model_has_are_clamped_and_reported(client: OpenAI) -> None:
    for asked, told in ((MAX_HEAD_K, None), (MAX_HEAD_K + 1, MAX_HEAD_K), (10**30, MAX_HEAD_K)):
        answer = chat(client, extra_body={"num_draft_tokens": asked})
        assert answer.generation_stats["num_draft_tokens_clamped_to"] == told


def test_origins_stand_beside_every_token(client: OpenAI) -> None:
    fields = {"include_origins": True, "num_draft_tokens": 3}
    chunks = [chunk for chunk in streamed(client, extra_body=fields)[1:] if not chunk.choices[0].finish_reason]
    whole = chat(client, extra_body=fields)
    assert not hasattr(streamed(client, extra_body=fields)[0].choices[0], "origins"), "it adds no token"
    origins = [origin for chunk in chunks for origin in chunk.choices[0].origins]
    assert origins == whole.choices[0].origins
    assert len(origins) == len(chunks) == 24
    assert {"draft", "correction"} <= set(origins) <= {"draft", "correction", "bonus", "plain"}
    assert origins.count("draft") == whole.generation_stats["accepted_draft_tokens"]
    assert text_of(chunks) == whole.choices[0].message.content
    assert not hasattr(chat(client).choices[0], "origins")


@pytest.mark.parametrize("stream", [False, True])
def test_completions_go_on_from_text_or_tokens(client: OpenAI, stream: bool) -> None:
    text = "def add(a, b):"
    tokens = list(tokenizer().encode(text))
    expected = alone(tokens, max_tokens=16)
    for prompt in (text, [text], tokens, [tokens]):
        if stream:
            chunks = list(client.completions.create(model="tiny", prompt=prompt, stream=True))
            assert {chunk.object for chunk in chunks} == {"text_completion"}
            assert len({chunk.id for chunk in chunks}) == 1
            assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
            assert chunks[-1].choices[0].finish_reason == "length"
        else:
            answer = client.completions.create(model="tiny", prompt=prompt)
            assert answer.object == "text_completion"
            assert answer.choices[0].text == expected.text
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(tokens)
            assert answer.generation_stats["rounds"] > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_prompts_has_the_answers_of_each(server: Running, client: OpenAI, stream: bool) -> None:
    texts = ["def add(a, b):", "class Cat:", "import os"]
    prompts = [list(tokenizer().encode(text)) for text in texts]
    expected = [alone(prompt, max_tokens=16).text for prompt in prompts]
    asked, before = sum(map(len, prompts)), server.metric("headstart_prompt_tokens_total")
    for given in (texts, prompts):
        if stream:
            options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = list(client.completions.create(model="tiny", prompt=given, n=2, temperature=0, **options))
            said = Counter[int]()
            found = [""] * 6
            for chunk in chunks[:-1]:
                (choice,) = chunk.choices
                found[choice.index] += choice.text
                said[choice.index] += choice.finish_reason is not None
            assert said == dict.fromkeys(range(6), 1)
            usage = chunks[-1].usage
        else:
            answer = client.completions.create(model="tiny", prompt=given, n=2, temperature=0)
            assert [choice.index for choice in answer.choices] == list(range(6))
            found, usage = [choice.text for choice in answer.choices], answer.usage
        assert found == [text for text in expected for _ in range(2)]
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (asked, 6 * 16)
    assert server.metric("headstart_prompt_tokens_total") - before == 2 * asked


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (["a"] * 129, "at most 128"),
        (["a", ""], "empty"),
        ([[5], []], "no tokens"),
        ([], "no tokens"),
        ([[5], [99999]], "99999"),
    ],
)
def test_a_list_with_a_prompt_that_cannot_be_answered_is_refused(client: OpenAI, prompt: Any, problem: str) -> None:
    with pytest.raises(BadRequestError, match=problem) as error:
        client.completions.create(model="tiny", prompt=prompt)
    assert error.value.param == "prompt"


def test_a_model_is_addressed_by_any_of_its_names(server: Running, client: OpenAI) -> None:
    path = folder(True, CONTEXT)
    for name in ("tiny", str(path), f"{path}/", path.name, HUB_ID):
        assert chat(client, model=name, max_tokens=1).model == "tiny"
        assert client.models.retrieve(name).id == "tiny"
    with server.http() as http:
        assert http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("name", ["gpt-4o", "", "someone/else", "~nobody", "/", "tiny\x00"])
def test_any_other_model_is_not_found(client: OpenAI, name: str) -> None:
    with pytest.raises(NotFoundError) as error:
        chat(client, model=name)
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


def test_models_carry_the_card(client: OpenAI) -> None:
    (model,) = client.models.list().data
    told = model.model_dump()
    assert (told["id"], told["object"], told["owned_by"]) == ("tiny", "model", "headstart")
    assert (told["context_length"], told["family"], told["quantization"]) == (4096, "qwen3_5", None)
    assert told["kernels"].startswith(("native (", "stock ("))
    assert told["capabilities"] == ["text"]
    assert told["native_mtp"] == {"available": True, "default_k": 2, "max_k": 8, "reason": None}
