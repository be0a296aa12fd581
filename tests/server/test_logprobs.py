"""Log-probabilities through the real openai client: the target's own, of every token, drafted or not."""

from typing import Any

import mlx.core as mx
import openai
import pytest
from running import CONTEXT, Running, alone, chat_tokens, tiny, tokenizer

HI = [{"role": "user", "content": "hi"}]


def ask(server: Running, **fields: Any) -> Any:
    extra = fields.pop("extra_body", {})
    known = {"model": "tiny", "messages": HI, "max_tokens": 20, "logprobs": True}
    return server.openai().chat.completions.create(**known | fields, extra_body=extra)


def expected(prompt: list[int], tokens: list[int]) -> mx.array:
    """[len(tokens), V]: mlx-lm's own forward over all of it."""
    logits = tiny(True, CONTEXT).lm(mx.array([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 2}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("k", [0, 4])
def test_every_token_has_the_models_own_log_probability(server: Running, fields: dict[str, Any], k: int) -> None:
    answer = ask(server, top_logprobs=3, extra_body={"num_draft_tokens": k}, **fields)
    tokens = alone(chat_tokens("hi"), max_tokens=20, **fields).tokens
    table = expected(chat_tokens("hi"), tokens)
    told = answer.choices[0].logprobs.content
    assert len(told) == answer.usage.completion_tokens == len(tokens)
    for at, (entry, token) in enumerate(zip(told, tokens, strict=True)):
        assert entry.logprob == pytest.approx(table[at, token].item(), abs=1e-3)
        best = mx.sort(table[at])[-3:][::-1].tolist()
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx(best, abs=1e-3)
    assert b"".join(bytes(entry.bytes) for entry in told).decode(errors="replace") == tokenizer().decode(tokens)


def test_a_stream_tells_of_every_token_once(server: Running) -> None:
    whole = ask(server, top_logprobs=2).choices[0].logprobs.content
    chunks = ask(server, top_logprobs=2, stream=True)
    told = [each for chunk in chunks if (found := chunk.choices[0].logprobs) for each in found.content]
    assert told == whole


def test_parts_of_characters_have_bytes_of_their_own(server: Running) -> None:
    e = tokenizer().encode("é", add_special_tokens=False)
    assert len(e) == 2
    fields = {"max_tokens": 2, "extra_body": {"guided_regex": "é"}}
    told = ask(server, **fields).choices[0].logprobs.content
    assert [each.bytes for each in told] == [[0xC3], [0xA9]]


def test_log_probabilities_come_only_on_request(server: Running) -> None:
    assert ask(server, logprobs=False).choices[0].logprobs is None
    assert all(not entry.top_logprobs for entry in ask(server).choices[0].logprobs.content)


@pytest.mark.parametrize(
    "fields", [{"logprobs": False, "top_logprobs": 2}, {"top_logprobs": 21}, {"top_logprobs": -1}], ids=str
)
def test_log_probabilities_that_are_not_available_are_refused(server: Running, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(server, **fields)
    assert error.value.param == "top_logprobs"


@pytest.mark.parametrize("logprobs", [-1, 21, True])
def test_log_probabilities_that_a_completion_does_not_have_are_refused(server: Running, logprobs: Any) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        server.openai().completions.create(model="tiny", prompt="hi", logprobs=logprobs)
    assert error.value.param == "logprobs"


@pytest.mark.parametrize("stream", [False, True])
def test_completions_have_a_shape_of_their_own(server: Running, stream: bool) -> None:
    client, prompt = server.openai(), "def add(a, b):"
    fields: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "logprobs": 2}
    tokens = alone(list(tokenizer().encode(prompt)), max_tokens=16).tokens
    table = expected(list(tokenizer().encode(prompt)), tokens)
    if stream:
        choices = [chunk.choices[0] for chunk in client.completions.create(**fields, stream=True)]
    else:
        choices = client.completions.create(**fields).choices
    text = "".join(choice.text for choice in choices)
    told = [choice.logprobs for choice in choices if choice.logprobs is not None]
    logprobs = [each for one in told for each in one.token_logprobs]
    assert logprobs == pytest.approx([table[i, t].item() for i, t in enumerate(tokens)], abs=1e-3)
    names = [each for one in told for each in one.tokens]
    offsets = [each for one in told for each in one.text_offset]
    assert len(names) == len(offsets) == 16
    assert offsets[0] == 0
    for name, offset in zip(names, offsets, strict=True):
        if "\\x" not in name:  # it is not part of a character
            assert text[offset:].lstrip("\ufffd").startswith(name)  # what is left of a character before it
    assert all(len(best) == 2 for one in told for best in one.top_logprobs)
