"""Calls with one model keep what it has read, as long as the model lives."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache as make_mlx_lm_cache

import headstart
from headstart import PrefixCache, Request, SamplingParams
from headstart.engine import Engine
from headstart.engine.running import Running
from headstart.errors import RequestError
from headstart.models import Model

TOPIC = "word " * 300


@pytest.fixture(scope="module")
def loaded() -> tuple[Model, Any]:
    return headstart.load()


def chat_prompt(tokenizer: Any, *texts: str) -> list[int]:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False))


def test_a_chat_loop_reads_each_message_once(loaded: tuple[Model, Any]) -> None:
    """Each call gives the whole conversation. What was said before the last message is not read again."""
    model, tokenizer = loaded
    said, hits = [TOPIC], []
    for _ in range(3):
        responses = list(headstart.stream_generate(model, tokenizer, chat_prompt(tokenizer, *said), 8))
        hits.append(responses[-1].stats.prefix_cache_hit)
        said += ["".join(each.text for each in responses), TOPIC]
    assert hits[0] == 0
    assert 280 < hits[1] < hits[2]
    alone = Engine(model, tokenizer, prefix=PrefixCache(0))
    answer = headstart.generate(model, tokenizer, chat_prompt(tokenizer, *said[:5]), max_tokens=8, engine=alone)
    assert answer == said[5], "the answer differs from one without a cache"


def test_every_way_to_ask_shares_the_prefixes(loaded: tuple[Model, Any]) -> None:
    model, tokenizer = loaded
    prompt = chat_prompt(tokenizer, TOPIC)
    headstart.generate(model, tokenizer, prompt, max_tokens=1)
    batch = headstart.batch_generate(model, tokenizer, [prompt], max_tokens=1)
    *_, last = Engine(model, tokenizer).submit(Request(prompt, SamplingParams(max_tokens=1)))
    assert last.stats is not None
    assert last.stats.prefix_cache_hit == batch.stats[0].prefix_cache_hit > 280
    without = Engine(model, tokenizer, prefix=PrefixCache(0))
    *_, last = without.submit(Request(prompt, SamplingParams(max_tokens=1)))
    assert last.stats is not None
    assert last.stats.prefix_cache_hit == 0


def test_calls_that_run_together_are_one_batch(loaded: tuple[Model, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    engines, submit = set(), Engine.submit

    def keep(engine: Engine, request: Any) -> Any:
        engines.add(weakref.ref(engine))
        return submit(engine, request)

    monkeypatch.setattr(Engine, "submit", keep)
    prompts = ["def add(a, b):", "def mean(values):"]
    first, second = [headstart.stream_generate(model, tokenizer, each, 12, k=0) for each in prompts]
    together = ["".join(each.text for each in responses) for responses in (second, first)]
    assert len(engines) == 1
    del first, second
    gc.collect()
    assert all(each() is None for each in engines), "the engine outlives its requests"
    assert together == [headstart.generate(model, tokenizer, each, max_tokens=12, k=0) for each in reversed(prompts)]
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(headstart.generate, model, tokenizer, each, max_tokens=12) for each in prompts]
        assert [call.result() for call in calls] == together[::-1]


def test_what_was_read_ends_with_the_model() -> None:
    model, tokenizer = headstart.load()
    headstart.generate(model, tokenizer, chat_prompt(tokenizer, TOPIC), max_tokens=1)
    prefix = Engine(model, tokenizer).prefix
    assert prefix is not None
    assert prefix.stats().entries
    held, kept = weakref.ref(model), weakref.ref(prefix)
    del model, prefix
    gc.collect()
    assert held() is None
    assert kept() is None


def test_a_call_after_ctrl_c_begins_anew(loaded: tuple[Model, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    text, join = headstart.generate(model, tokenizer, "def add(a, b):", max_tokens=8), Running.join

    def stopped(running: Running, sequence: Any) -> None:
        monkeypatch.setattr(Running, "join", join)
        join(running, sequence)
        running.sequences.clear()  # as before its last line
        raise KeyboardInterrupt

    monkeypatch.setattr(Running, "join", stopped)
    responses = headstart.stream_generate(model, tokenizer, "def mean(values):", 8)
    with pytest.raises(KeyboardInterrupt):
        next(responses)
    assert headstart.generate(model, tokenizer, "def add(a, b):", max_tokens=8) == text


def test_a_prompt_cache_is_continued_by_each_prompt(loaded: tuple[Model, Any]) -> None:
    """As in mlx-lm's chat example: each call gives the new message only."""
    model, tokenizer = loaded
    cache = headstart.make_prompt_cache(model)
    first, second = chat_prompt(tokenizer, TOPIC), chat_prompt(tokenizer, "And now?")
    answer = [each.token for each in headstart.stream_generate(model, tokenizer, first, 8, prompt_cache=cache)]
    assert cache.tokens == first + answer
    *_, last = headstart.stream_generate(model, tokenizer, second, 8, prompt_cache=cache)
    assert last.prompt_tokens == len(first + answer + second)
    assert last.stats.prefix_cache_hit > 280
    whole = headstart.generate(model, tokenizer, first + answer + second, max_tokens=8)
    assert tokenizer.decode(cache.tokens[last.prompt_tokens :]) == whole


def test_a_refused_prompt_leaves_a_prompt_cache_as_it_is(loaded: tuple[Model, Any]) -> None:
    cache = headstart.make_prompt_cache(loaded[0])
    headstart.generate(*loaded, "def add(a, b):", max_tokens=2, prompt_cache=cache)
    before = list(cache.tokens)
    with pytest.raises(RequestError, match="prompt has"):
        headstart.generate(*loaded, [1] * 4090, prompt_cache=cache)
    assert cache.tokens == before


@pytest.mark.parametrize("empty", [True, False])
def test_mlx_lms_prompt_cache_is_refused_with_the_way_out(loaded: tuple[Model, Any], empty: bool) -> None:
    cache = [] if empty else make_mlx_lm_cache(loaded[0].lm)
    with pytest.raises(RequestError, match=r"prompt_cache is a list: make it with headstart\.make_prompt_cache"):
        headstart.generate(*loaded, "Hello", prompt_cache=cache)  # type: ignore[arg-type]


def test_a_prompt_cache_serves_its_own_model_and_no_images(loaded: tuple[Model, Any]) -> None:
    other, _ = headstart.load(mtp=False)
    with pytest.raises(RequestError, match="another model"):
        headstart.generate(*loaded, "Hello", prompt_cache=headstart.make_prompt_cache(other))
    with pytest.raises(RequestError, match="holds no images"):
        headstart.generate(*loaded, "Hello", prompt_cache=headstart.make_prompt_cache(loaded[0]), images=[b""])
    with pytest.raises(RequestError, match="max_kv_size"):
        headstart.make_prompt_cache(loaded[0], 128)  # type: ignore[arg-type]


def test_mlx_lms_functions_refuse_our_model_with_a_sentence(loaded: tuple[Model, Any]) -> None:
    with pytest.raises(RequestError, match=r"mlx_lm cannot run this model: use headstart\.generate"):
        mlx_lm.generate(*loaded, "Hello")
    with pytest.raises(RequestError, match="mlx_lm cannot"):
        mlx_lm.generate(*loaded, "Hello", prompt_cache=make_mlx_lm_cache(loaded[0].lm))
    with pytest.raises(RequestError, match="mlx_lm cannot"):
        mlx_lm.batch_generate(*loaded, [[1, 2]])
