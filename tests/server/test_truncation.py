"""A conversation past the context: its oldest turns are left out, and the next turns find the rest in the cache."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from running import CONTEXT, Running, running, tokenizer

from headstart.server.responses_items import InputImage, Messages
from headstart.server.shorter import starts_of_shorter
from headstart.server.worker import Encoder
from headstart.state import PrefixCache

WORDS = ["the", "stone", "river", "lamp", "12", "seven", "naïve", "löwe", "狐", "cat;", "f(x)", "=", "{1,", "2}"]
TURNS, MORE = 40, 20  # that fill the context, and past it
ANSWER = 16  # tokens


@pytest.fixture(scope="module")
def caching() -> Iterator[Running]:
    with running(prefix=PrefixCache(2**30)) as server:
        yield server


def turn(number: int) -> dict[str, Any]:
    """About a fortieth of the context."""
    rng = random.Random(number)
    return {"role": "user", "content": f"turn {number}: {' '.join(rng.choices(WORDS, k=rng.randrange(8, 20)))}"}


def converse(server: Running, *, stored: bool) -> list[tuple[int, int]]:
    """Return the tokens of the prompt of each turn past the context, and how many of them were in the cache."""
    client, previous, usages = server.openai(), None, []
    history = [each for i in range(TURNS) for each in (turn(i), {"role": "assistant", "content": f"answer {i} " * 9})]
    asked: list[Any] = [{"role": "developer", "content": "Be brief."}, *history]
    with server.http() as http:
        http.delete("/v1/cache")
    for i in range(TURNS, TURNS + MORE):
        asked = [*asked, turn(i)]
        response = client.responses.create(
            model="tiny", input=asked, store=stored, previous_response_id=previous, truncation="auto",
            max_output_tokens=ANSWER, temperature=0,
        )  # fmt: skip
        assert response.usage is not None
        usages.append((response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens))
        asked = [] if stored else [*asked, *(each.to_dict() for each in response.output)]
        previous = response.id if stored else None
    return usages


def test_at_most_one_turn_in_ten_is_read_as_a_whole(caching: Running) -> None:
    stored, sent = (converse(caching, stored=each) for each in (True, False))
    assert stored == sent, "a history that the server keeps is cut like one that the client sends"
    assert sum(cached < tokens / 2 for tokens, cached in stored) <= MORE // 10
    assert all(CONTEXT * 2 // 3 < tokens <= CONTEXT - ANSWER for tokens, _ in stored)


def starts(messages: Messages) -> list[int]:
    return starts_of_shorter(messages, CONTEXT, Encoder(tokenizer()._tokenizer.backend_tokenizer))


def test_a_start_depends_on_what_is_before_it_alone() -> None:
    thought = {"role": "assistant", "content": "", "reasoning_content": "so " * 200}  # which templates leave out
    messages = [each for i in range(100) for each in (turn(i), thought)]
    known = starts(messages)
    assert len(known) == 5, "about four in what the context holds"
    for end in range(1, len(messages), 2):
        *before, last = starts(messages[:end])
        assert [*before, last] == [*(i for i in known if i < end - 1), end - 1]


def test_calls_and_images_count_and_a_single_turn_is_kept() -> None:
    asked, image = {"role": "user", "content": "?"}, {"role": "user", "content": [InputImage(type="input_image")]}
    text = "a long text " * CONTEXT
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"text": text}}}
    assert starts([asked, {"role": "assistant", "content": "", "tool_calls": [call]}, asked, asked]) == [2, 3]
    assert starts([asked, {"role": "tool", "content": text}, asked, asked]) == [2, 3]
    assert starts([image, asked, asked]) == [1, 2]
    assert starts([asked] * 3) == [2]
    assert starts([asked, asked | {"role": "assistant"}]) == [0]
    assert starts([]) == [0]
