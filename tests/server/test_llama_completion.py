"""Completions in llama.cpp's own shape: its prompts, its fields and its answers, by the same engine."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running import CONTEXT, Running, alone, running, tokenizer

PROMPT = "Write a function"
PLAIN = {"prompt": PROMPT, "n_predict": 12, "temperature": 0}
LONG = PLAIN | {"n_predict": -1, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def complete(http: httpx.Client, **body: Any) -> Any:
    response = http.post("/completion", json=PLAIN | body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(http: httpx.Client, **body: Any) -> list[Any]:
    text = http.post("/completion", json=PLAIN | body | {"stream": True}).text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def test_an_answer_is_the_engines_in_llama_cpps_words(http: httpx.Client) -> None:
    answer, expected = complete(http, return_tokens=True), alone(encode(PROMPT), max_tokens=12)
    assert (answer["content"], answer["tokens"]) == (expected.text, expected.tokens)
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert (answer["prompt"], answer["truncated"], answer["index"]) == (PROMPT, False, 0)
    assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (len(encode(PROMPT)), 12)
    assert answer["timings"]["predicted_n"] == 12
    assert answer["has_new_line"] == ("\n" in expected.text)
    assert answer["generation_settings"]["n_predict"] == 12
    assert answer["generation_stats"]["ignored_fields"] == []
    assert complete(http)["tokens"] == []


def test_a_stream_says_the_same_and_ends_with_the_rest(http: httpx.Client) -> None:
    *chunks, end = streamed(http)
    whole = complete(http, return_tokens=True)
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [token for chunk in chunks for token in chunk["tokens"]] == whole["tokens"]
    assert not any(chunk["stop"] for chunk in chunks)
    assert end.keys() == whole.keys()
    assert (end["content"], end["tokens"], end["stop"]) == ("", [], True)


def test_the_end_has_its_reason(http: httpx.Client) -> None:
    text = complete(http)["content"]
    answer = complete(http, stop=[text[3:6]])
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == (text[:3], "word", text[3:6])
    assert complete(http, n_predict=-1, grammar='root ::= "yes"')["stop_type"] == "eos"
    ends = {"logit_bias": {str(tokenizer().eos_token_id): 100}}
    assert [complete(http, **ends, ignore_eos=ignored)["tokens_predicted"] for ignored in (False, True)] == [1, 12]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        (encode(PROMPT), encode(PROMPT)),
        ({"prompt_string": PROMPT}, encode(PROMPT)),
        ([5, PROMPT, 7], [5, *encode(PROMPT), 7]),
        (["<|im_end|>", 7, "<|im_end|>"], [*encode("<|im_end|>"), 7, *encode("<|im_end|>")]),
    ],
)
def test_a_prompt_is_text_or_tokens_or_both(http: httpx.Client, prompt: Any, tokens: list[int]) -> None:
    assert complete(http, prompt=prompt)["content"] == alone(tokens, max_tokens=12).text


def test_several_prompts_have_a_list_of_answers(http: httpx.Client) -> None:
    prompts = [PROMPT, encode(PROMPT), {"prompt_string": "Hello"}]
    answers = complete(http, prompt=prompts)
    assert [each["index"] for each in answers] == [0, 1, 2]
    assert answers[0]["content"] == answers[1]["content"] == complete(http)["content"]
    assert answers[2]["content"] == complete(http, prompt="Hello")["content"]
    assert {chunk["index"] for chunk in streamed(http, prompt=prompts)} == {0, 1, 2}
    assert complete(http, prompt=[PROMPT])[0]["content"] == answers[0]["content"]


def test_the_fields_that_are_wanted(http: httpx.Client) -> None:
    paths = ["content", "generation_settings/n_predict", "timings/predicted_n"]
    answer = complete(http, response_fields=paths)
    assert answer == dict(zip(paths, (complete(http)["content"], 12, 12), strict=True))


def test_probabilities_of_every_token(http: httpx.Client) -> None:
    answer = complete(http, n_probs=3, return_tokens=True)
    found = answer["completion_probabilities"]
    assert [each["id"] for each in found] == answer["tokens"]
    assert all(each["top_logprobs"][0]["id"] == each["id"] for each in found), "it is greedy"
    assert all(len(each["top_logprobs"]) == 3 and each["logprob"] <= 0 for each in found)
    *chunks, _ = streamed(http, n_probs=3)
    assert [chunk["completion_probabilities"] for chunk in chunks] == [[each] for each in found]


def test_tokens_and_texts_have_biases(http: httpx.Client) -> None:
    first = complete(http, return_tokens=True)["tokens"][0]
    text = tokenizer().decode([first])
    pairs: list[Any] = [[[first, -100]], [[first, False]], {str(first): -100}]
    pairs += [[[text, False]], {text: False}] if encode(text) == [first] else []
    without = [complete(http, logit_bias=bias, return_tokens=True)["tokens"] for bias in pairs]
    assert first not in without[0]
    assert without == [without[0]] * len(pairs)


def test_sampling_fields_are_llama_cpps(http: httpx.Client) -> None:
    seeded = {"temperature": 1, "seed": 3, "top_k": 40, "min_p": 0.01}
    expected = alone(encode(PROMPT), max_tokens=12, temperature=1, seed=3, top_k=40, min_p=0.01)
    assert complete(http, **seeded)["content"] == expected.text
    sigma = {"temperature": 1, "seed": 3, "top_n_sigma": 1}
    expected = alone(encode(PROMPT), max_tokens=12, temperature=1, seed=3, top_n_sigma=1)
    assert complete(http, **sigma)["content"] == expected.text
    penalty = {"repetition_penalty": 1.5, "repetition_context_size": 64}
    assert complete(http, repeat_penalty=1.5)["content"] == alone(encode(PROMPT), max_tokens=12, **penalty).text
    assert complete(http, repeat_penalty=1.5, repeat_last_n=0)["content"] == complete(http)["content"]
    settings = complete(http, seed=-1)["generation_settings"]
    assert (settings["seed"], settings["repeat_penalty"]) == (None, 1)


def test_an_answer_without_a_limit_ends_with_the_context(http: httpx.Client) -> None:
    prompt = [5] * (CONTEXT - 20)
    answer = complete(http, prompt=prompt, n_predict=None, ignore_eos=True)
    assert (answer["tokens_predicted"], answer["stop_type"]) == (20, "limit")


def test_neutral_values_are_accepted_and_unknown_fields_named(http: httpx.Client) -> None:
    neutral = {"mirostat": 0, "typical_p": 1.0, "top_n_sigma": -1, "dry_multiplier": 0.0, "cache_prompt": False}
    answer = complete(http, **neutral, id_slot=-1, samplers=["top_k"])
    assert answer["generation_stats"]["ignored_fields"] == ["id_slot", "samplers"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"prompt_string": "<__media__>", "multimodal_data": ["AA=="]}}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [5, 10**6]}, "prompt"),
        ({"n_predict": 0}, "n_predict"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"mirostat": 2}, "mirostat"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"logit_bias": [[5, True]]}, "logit_bias"),
        ({"logit_bias": [[10**6, 1]]}, "logit_bias"),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, "grammar"),
        ({"repeat_last_n": -1}, "repeat_last_n"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(http: httpx.Client, body: Any, param: str) -> None:
    response = http.post("/completion", json=PLAIN | body)
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["param"] or "").startswith(param)


def test_slots_say_how_many_are_busy(server: Running, http: httpx.Client) -> None:
    slots = http.get("/slots").json()
    assert len(slots) == 16
    assert [slot["id"] for slot in slots if slot["is_processing"]] == []
    with http.stream("POST", "/completion", json=LONG) as it:
        next(lines := it.iter_lines())
        with server.http() as other:
            busy = [slot["id"] for slot in other.get("/slots").json() if slot["is_processing"]]
        lines.close()
    assert busy == [0]
