"""Several choices for one request, and the recommended sampling parameters where a request gives none."""

from collections import Counter
from typing import Any

import openai
import pytest
from running import Running, alone, chat_tokens, running

import headstart.engine.prefill
from headstart.cards import Card

HI = [{"role": "user", "content": "hi"}]
SEEDED = {"temperature": 1.0, "seed": 5}


def ask(server: Running, **fields: Any) -> Any:
    extra = fields.pop("extra_body", {})
    known = {"model": "tiny", "messages": HI, "max_tokens": 12}
    return server.openai().chat.completions.create(**known | fields, extra_body=extra)


def test_answers_differ_and_the_first_is_that_of_one(server: Running) -> None:
    answer = ask(server, n=3, **SEEDED)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert texts[0] == ask(server, **SEEDED).choices[0].message.content


def test_a_stream_of_several_is_the_same_by_index(server: Running) -> None:
    whole = ask(server, n=3, **SEEDED)
    texts, roles, ends = Counter[int](), Counter[int](), Counter[int]()
    said = {0: "", 1: "", 2: ""}
    *chunks, last = list(ask(server, n=3, stream=True, stream_options={"include_usage": True}, **SEEDED))
    for chunk in chunks:
        (choice,) = chunk.choices
        roles[choice.index] += choice.delta.role is not None
        ends[choice.index] += choice.finish_reason is not None
        texts[choice.index] += 1
        said[choice.index] += choice.delta.content or ""
    assert [said[i] for i in range(3)] == [choice.message.content for choice in whole.choices]
    assert set(roles.values()) == set(ends.values()) == {1}
    assert last.usage.completion_tokens == 36
    assert last.generation_stats["rounds"] > 0


def test_the_prompt_is_read_and_counted_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    prefill = headstart.engine.prefill.prefill_by_layers
    monkeypatch.setattr(
        headstart.engine.prefill, "prefill_by_layers", lambda *a: (read.append(a[2].size), prefill(*a))[1]
    )
    usage = ask(server, n=4, **SEEDED).usage
    assert sum(read) == len(chat_tokens("hi")) - 1
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(chat_tokens("hi")), 48)


def test_completions_may_be_several_too(server: Running) -> None:
    answer = server.openai().completions.create(model="tiny", prompt="def", n=2, max_tokens=8, **SEEDED)  # type: ignore[call-overload]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text != answer.choices[1].text


@pytest.mark.parametrize("n", [0, 17, 5, True])
def test_more_answers_than_there_are_places_are_refused(server: Running, n: Any) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(server, n=n)
    assert error.value.param == "n"


THINKING = {"temperature": 1.0, "top_p": 0.5, "top_k": 9}
NOT_THINKING = {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 1.5}


def test_the_card_recommends_and_the_request_decides() -> None:
    with running() as server:
        defaults = {"thinking": THINKING, "not_thinking": NOT_THINKING}
        card = Card.model_validate({"name": "t", "family": "qwen3_5", "sampling_defaults": defaults})
        server.known.card = card
        object.__setattr__(server.served, "sampling", card.sampling_defaults)
        with server.http() as http:
            assert http.get("/v1/models").json()["data"][0]["sampling_defaults"] == defaults
        plain = ask(server, seed=3).choices[0].message.content
        assert (
            plain == alone(chat_tokens("hi"), max_tokens=12, seed=3, presence_context_size=None, **NOT_THINKING).text
        )
        overridden = ask(server, seed=3, temperature=1.2, presence_penalty=0).choices[0].message.content
        params = {**NOT_THINKING, "temperature": 1.2, "presence_penalty": 0.0}
        assert overridden == alone(chat_tokens("hi"), max_tokens=12, seed=3, **params).text
        prompt = list(
            server.served.tokenizer.apply_chat_template(HI, add_generation_prompt=True, enable_thinking=True)
        )
        thought = ask(server, seed=3, extra_body={"enable_thinking": True}).choices[0].message
        said = getattr(thought, "reasoning_content", "") + (thought.content or "")
        assert said == alone(prompt, max_tokens=12, seed=3, **THINKING).text
        greedy = ask(server, temperature=0, presence_penalty=0).choices[0].message.content
        assert greedy == alone(chat_tokens("hi"), max_tokens=12).text


def test_a_model_without_a_card_is_greedy(server: Running) -> None:
    with server.http() as http:
        told = http.get("/v1/models").json()["data"][0]["sampling_defaults"]
    assert told == {"thinking": {}, "not_thinking": {}}
    assert ask(server).choices[0].message.content == alone(chat_tokens("hi"), max_tokens=12).text
