"""What cannot be honoured is refused before any work, by its name; what can be honoured without a head is."""

import pytest

from fixtures import generate, mlx_lm_greedy, random_model, random_prompt, submit
from headstart.engine import Engine, Request
from headstart.errors import RequestError
from headstart.sampling import SamplingParams


def refused(prompt: list[int], **params: object) -> str:
    engine = Engine(random_model("dense"))
    with pytest.raises(RequestError) as raised:
        submit(engine, prompt, **params)
    assert not engine.run_once()  # nothing was queued
    return str(raised.value)


def test_an_empty_prompt_is_refused() -> None:
    assert "empty" in refused([])


def test_a_prompt_over_the_context_is_refused_with_the_limit() -> None:
    context = random_model("dense").context_length
    for length in (context, context + 1):
        message = refused([1] * length)
        assert str(length) in message
        assert str(context - 1) in message


def test_the_longest_prompt_that_fits_leaves_room_for_one_token() -> None:
    model = random_model("dense", max_position_embeddings=40)
    answer = generate(model, random_prompt(model, 39), max_tokens=8, k=3)
    assert (answer.finish_reason, len(answer.tokens)) == ("length", 1)
    answer = generate(model, random_prompt(model, 35), max_tokens=100, k=8)
    assert (answer.finish_reason, len(answer.tokens)) == ("length", 5)
    assert answer.tokens == mlx_lm_greedy(model, random_prompt(model, 35), 5)


@pytest.mark.parametrize("token", [-1, 256, 10**6])
def test_a_token_outside_the_vocabulary_is_refused_by_its_id(token: int) -> None:
    message = refused([3, token, 4])
    assert str(token) in message
    assert "255" in message


@pytest.mark.parametrize("k", [-1, 16, 2.5, "3", None, True])
def test_a_depth_out_of_range_is_refused(k: object) -> None:
    message = refused([3, 4], k=k)
    assert repr(k) in message
    assert "0 to 15" in message


@pytest.mark.parametrize("max_tokens", [0, -5])
def test_an_answer_of_no_tokens_is_refused(max_tokens: int) -> None:
    assert "max_tokens" in refused([3, 4], max_tokens=max_tokens)


def test_a_depth_without_a_head_is_refused_with_the_reason() -> None:
    model = random_model("dense", head=False)
    with pytest.raises(RequestError, match="cannot draft") as raised:
        submit(Engine(model), [3, 4], k=3)
    assert model.head_unavailable is not None
    assert model.head_unavailable in str(raised.value)


def test_without_a_head_the_default_depth_copies_at_most_and_gives_the_reason() -> None:
    model = random_model("dense", head=False)
    prompt = random_prompt(model, 9)
    for k in ("auto", 0):
        answer = generate(model, prompt, max_tokens=12, k=k)
        assert answer.tokens == mlx_lm_greedy(model, prompt, 12)
        assert answer.stats.drafter_kind == ("copy" if k == "auto" else None)
        assert answer.stats.bypass_reason == model.head_unavailable
        assert answer.stats.proposed_draft_tokens == 0
        assert set(answer.origins) == {"plain"}


def test_a_refused_request_disturbs_nobody() -> None:
    model = random_model("dense")
    engine = Engine(model)
    prompt = random_prompt(model, 9)
    handle = submit(engine, prompt, max_tokens=12, k=3)
    engine.run_once()
    for bad in ([], [999]):
        with pytest.raises(RequestError):
            engine.submit(Request(bad, SamplingParams()))
    assert [t for event in handle for t in event.tokens] == mlx_lm_greedy(model, prompt, 12)
