"""A program written for mlx-lm moves over by changing one import."""

import dataclasses
import math
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import can_trim_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.sample_utils import make_sampler as make_mlx_lm_sampler

import headstart
from adapters import write_adapter
from headstart import SamplingParams, checkpoint
from headstart.arguments import sampling_params
from headstart.engine import Engine, Handle
from headstart.errors import RequestError
from headstart.library import GenerationResponse
from headstart.models import Model
from headstart.sampling import SamplingOptions

API: Any = headstart  # not typed: what callers get wrong
# The answer ends by itself after 46 tokens.
QUESTION = "Write a Python function that reads a JSON file and returns its contents."


@pytest.fixture(scope="module")
def loaded() -> tuple[Model, Any]:
    """In float32, where mlx-lm's way through the layers and ours round alike."""
    folder = checkpoint.resolve()
    return checkpoint.load_model(folder, dtype=mx.float32), checkpoint.load_tokenizer(folder)


@pytest.fixture(scope="module")
def prompt(loaded: tuple[Model, Any]) -> list[int]:
    _, tokenizer = loaded
    messages = [{"role": "user", "content": QUESTION}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)


def test_importing_headstart_imports_nothing_heavy() -> None:
    program = (
        "import sys, headstart; headstart.errors.HeadstartError; "
        "print([m for m in ('mlx', 'mlx_lm', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_the_public_names_are_there() -> None:
    for name in headstart.__all__:
        assert getattr(headstart, name) is not None
        assert name in dir(headstart)
    assert headstart.PrefixCache(10**6).max_bytes == 10**6  # for Engine(prefix=…)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        headstart.nonsense  # noqa: B018


def test_load_gives_the_builtin_model_and_its_tokenizer() -> None:
    model, tokenizer = headstart.load()
    assert model.has_head
    assert tokenizer.decode(tokenizer.encode("def f(): pass")) == "def f(): pass"
    without, _ = headstart.load("tiny-qwen3.5", mtp=False)
    assert not without.has_head


@pytest.mark.parametrize(
    ("max_tokens", "k"),
    [(1, 3), pytest.param(7, 0, marks=pytest.mark.slow), (7, 3), pytest.param(60, 3, marks=pytest.mark.slow)],
)
def test_responses_are_those_of_mlx_lm(loaded: Any, prompt: list[int], max_tokens: int, k: int) -> None:
    """Same tokens, same text piece by piece, same end: cut short at 1 and 7 tokens, its own at 60."""
    model, tokenizer = loaded
    theirs = list(mlx_lm.stream_generate(model.lm, tokenizer, mx.array(prompt), max_tokens=max_tokens))
    ours = list(headstart.stream_generate(model, tokenizer, mx.array(prompt), max_tokens=max_tokens, k=k))

    def told(response: Any) -> list[Any]:
        same = ("token", "text", "prompt_tokens", "generation_tokens", "finish_reason")
        return [getattr(response, name) for name in same]

    assert [told(response) for response in ours] == [told(response) for response in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprobs.dtype == mx.float32
        assert mx.allclose(mine.logprobs, other.logprobs, atol=1e-3)
    assert all(response.prompt_tps > 0 and response.peak_memory > 0 for response in ours)
    assert max_tokens == 1 or ours[-1].generation_tps > 0  # one token has no rate: its time is the prompt's
    assert ours[-1].finish_reason == ("stop" if max_tokens == 60 else "length")


def test_a_response_has_every_field_of_mlx_lm() -> None:
    theirs = {f.name for f in dataclasses.fields(import_module("mlx_lm.generate").GenerationResponse)}
    ours = {f.name for f in dataclasses.fields(GenerationResponse)} | {"logprobs"}
    assert theirs <= ours


def test_from_draft_marks_the_tokens_that_were_drafted(loaded: Any, prompt: list[int]) -> None:
    drafted = list(headstart.stream_generate(*loaded, prompt, 12, k=3))
    assert any(r.from_draft for r in drafted)
    assert [r.from_draft for r in drafted] == [r.origin == "draft" for r in drafted]
    assert drafted[-1].stats.accepted_draft_tokens == sum(r.from_draft for r in drafted)
    assert not any(r.from_draft for r in headstart.stream_generate(*loaded, prompt, 12, k=0))


def test_multi_byte_characters_come_out_whole(loaded: Any) -> None:
    """A character that is several tokens must not be cut, and what is left at the end must be flushed."""
    model, tokenizer = loaded
    prompt = tokenizer.encode('names = ["žluťoučký kůň", "日本語", "žluťoučký kůň", "日本語", "')
    theirs = [r.text for r in mlx_lm.stream_generate(model.lm, tokenizer, prompt, max_tokens=13)]
    ours = [r.text for r in headstart.stream_generate(model, tokenizer, prompt, max_tokens=13)]
    assert ours == theirs
    assert len("".join(ours)) != len("".join(ours).encode()), "the model wrote ASCII only: choose another prompt"


def test_generate_returns_the_text_and_prints_the_rates(loaded: Any, prompt: list[int], capsys: Any) -> None:
    text = headstart.generate(*loaded, prompt, max_tokens=8)
    assert capsys.readouterr().out == ""
    assert text == mlx_lm.generate(loaded[0].lm, loaded[1], prompt, max_tokens=8)
    assert headstart.generate(*loaded, prompt, verbose=True, max_tokens=8) == text
    said = capsys.readouterr().out
    assert text in said
    assert f"Prompt: {len(prompt)} tokens" in said
    assert re.search(r"Generation: 8 tokens, \d+\.\d+ tokens-per-sec", said)
    headstart.generate(*loaded, prompt, verbose=True, max_tokens=1)
    assert "Generation: 1 tokens\n" in capsys.readouterr().out


def test_a_prompt_may_be_text_ids_or_an_array(loaded: Any) -> None:
    _, tokenizer = loaded
    ids = tokenizer.encode("def add(a, b):")
    texts = [headstart.generate(*loaded, prompt, max_tokens=6) for prompt in ("def add(a, b):", ids, mx.array(ids))]
    assert texts[0]
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("half \ud83d of it", "is not text: it holds half a character, '\\ud83d' at position 5"),
        (b"bytes", "is bytes; it must be text or token ids: decode it"),
        (bytearray(b"bytes"), "is bytearray"),
        (memoryview(b"bytes"), "is memoryview"),
    ],
)
def test_a_prompt_that_is_no_text_is_refused(loaded: Any, prompt: Any, problem: str) -> None:
    for call in (headstart.generate, headstart.stream_generate):
        with pytest.raises(RequestError, match=re.escape(f"prompt {problem}")):
            call(*loaded, prompt)
    with pytest.raises(RequestError, match=r"^prompt is"):
        headstart.batch_generate(*loaded, ["fine", prompt])
    with pytest.raises(RequestError, match=r"^prompt is .* it must be token ids"):
        headstart.Request(prompt)


def test_closing_the_generator_cancels_the_request(
    loaded: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    handles: list[Handle] = []
    submit: Callable[..., Handle] = Engine.submit

    def keep(engine: Engine, request: Any) -> Handle:
        handles.append(submit(engine, request))
        return handles[-1]

    monkeypatch.setattr(Engine, "submit", keep)
    responses = headstart.stream_generate(*loaded, prompt)
    next(responses)
    assert not handles[0].cancelled
    responses.close()
    assert handles[0].cancelled


@pytest.mark.parametrize("way", ["close", "forget"])
def test_a_generator_that_never_started_leaves_nothing_on_a_shared_engine(
    loaded: Any, prompt: list[int], way: str
) -> None:
    model, tokenizer = loaded
    engine, calls = Engine(model, tokenizer), []
    responses = headstart.stream_generate(
        model, tokenizer, prompt, engine=engine, prompt_progress_callback=lambda *done: calls.append(done)
    )
    assert (calls, engine.scheduler.busy) == ([], True)
    if way == "close":
        responses.close()
    del responses
    assert not engine.run_once()


def test_no_limit_means_the_end_of_the_context(loaded: Any, prompt: list[int]) -> None:
    model, tokenizer = loaded
    short = dataclasses.replace(model, config={**model.config, "max_position_embeddings": len(prompt) + 9})
    *_, last = headstart.stream_generate(short, tokenizer, prompt, max_tokens=-1)
    assert last.finish_reason == "length"
    assert last.generation_tokens == 9


def test_progress_is_reported_at_both_ends_of_the_prompt(loaded: Any, prompt: list[int]) -> None:
    told, engine = list[tuple[int, int]](), Engine(*loaded)  # which has timed nothing, and reads the prompt at once
    headstart.generate(
        *loaded,
        prompt,
        max_tokens=2,
        engine=engine,
        prompt_progress_callback=lambda done, total: told.append((done, total)),
    )
    assert told == [(0, len(prompt)), (len(prompt), len(prompt))]


def test_progress_of_a_long_prompt_is_reported_chunk_by_chunk(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 16)
    told: list[tuple[int, int]] = []
    long = [1 + i % 50 for i in range(40)]
    headstart.generate(
        *loaded, long, max_tokens=2, prompt_progress_callback=lambda done, total: told.append((done, total))
    )
    assert {(0, 40), (16, 40), (32, 40), (40, 40)} <= set(told)  # and between, on a slow machine
    assert told == sorted(told)


def test_kv_caches_in_eight_bits_are_asked_for_when_a_model_is_loaded(prompt: list[int]) -> None:
    small = headstart.load(kv_bits=8)
    responses = list(headstart.stream_generate(*small, prompt, max_tokens=3, kv_bits=8))
    assert [response.stats.exact for response in responses] == [False] * 3
    for bits in (4, 0):
        with pytest.raises(RequestError, match=f"kv_bits is {bits}"):
            headstart.load(kv_bits=bits)
    with pytest.raises(RequestError, match="kv_bits is not supported: give kv_bits=8 to load"):
        headstart.generate(*small, prompt, kv_bits=4)


def test_arguments_that_change_nothing_are_taken(loaded: Any, prompt: list[int]) -> None:
    plain = headstart.generate(*loaded, prompt, max_tokens=3)
    unused: dict[str, Any] = {"draft_model": None, "kv_bits": None, "prompt_cache": None, "logits_processors": []}
    assert plain == headstart.generate(*loaded, prompt, max_tokens=3, prefill_step_size=512, **unused)


@pytest.mark.parametrize("sampler", [headstart.make_sampler(), make_mlx_lm_sampler(temp=0.0)])
def test_a_greedy_sampler_is_taken(loaded: Any, prompt: list[int], sampler: Any) -> None:
    plain = headstart.generate(*loaded, prompt, max_tokens=3)
    assert plain == headstart.generate(*loaded, prompt, max_tokens=3, sampler=sampler)


def test_make_sampler_returns_mlx_lms_sampler_as_sampling_params() -> None:
    """mlx-lm's defaults are off; so is its top_p of 0."""
    assert headstart.make_sampler() == SamplingParams()
    sampler = headstart.make_sampler(0.7, 0.9, 0.05, 2, 20, 0.1, 0.2, [1, 2])
    assert sampler == SamplingParams(
        temperature=0.7,
        top_p=0.9,
        min_p=0.05,
        min_tokens_to_keep=2,
        top_k=20,
        xtc_probability=0.1,
        xtc_threshold=0.2,
        xtc_special_tokens=(1, 2),
    )
    with pytest.raises(RequestError, match=r"top_p is 1\.5"):
        headstart.make_sampler(temp=1.0, top_p=1.5)


def test_a_sampler_of_mlx_lm_is_taken_by_its_parameters(loaded: Any, prompt: list[int]) -> None:
    """So that changing one import is enough. None of the names may be lost."""
    for given in (
        {"temp": 0.9},
        {"temp": 1.5, "top_p": 0.9, "top_k": 30},
        {"temp": 1.2, "min_p": 0.05, "min_tokens_to_keep": 3},
        {"temp": 1.2, "xtc_probability": 0.5, "xtc_threshold": 0.2, "xtc_special_tokens": [3, 4]},
    ):
        assert sampling_params(make_mlx_lm_sampler(**given), {"max_tokens": 256}, loaded[0]) == (
            headstart.make_sampler(**given)
        )
    text, greedy = [
        headstart.generate(*loaded, prompt, max_tokens=12, sampler=make_mlx_lm_sampler(temp), seed=1)
        for temp in (1.5, 0)
    ]
    assert text == headstart.generate(*loaded, prompt, max_tokens=12, temperature=1.5, seed=1) != greedy


def test_a_sampler_and_further_parameters_reach_the_engine(loaded: Any, prompt: list[int]) -> None:
    """Seeded, so the same for every k; and another seed is another text."""
    sampler = headstart.make_sampler(temp=1.5)
    texts = [
        headstart.generate(*loaded, prompt, max_tokens=12, sampler=sampler, seed=seed, k=k)
        for seed, k in [(1, 0), (1, 3), (2, 0)]
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)}, "sampler: .* temperature, top_p"),
        ({"sampler": partial(make_mlx_lm_sampler(temp=0.7))}, "sampler: .*make_sampler"),
        ({"logits_processors": make_logits_processors(repetition_penalty=1.1)}, "logits_processors .*repetition_pen"),
        ({"draft_model": object()}, "draft_model "),
        ({"num_draft_tokens": 3}, "num_draft_tokens .*k"),
        ({"prompt_cache": [object()]}, "prompt_cache "),
        ({"input_embeddings": mx.zeros((2, 4))}, "input_embeddings "),
        ({"max_kv_size": 128}, "max_kv_size "),
        ({"kv_bits": 4}, "kv_bits "),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"k": 16}, "k is 16"),
        (
            {"sampler": headstart.make_sampler(0.7), "temperature": 0.5, "seed": 1},
            "^temperature: also set by",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    loaded: Any, prompt: list[int], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        headstart.stream_generate(*loaded, prompt, **arguments)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        (mx.array([[1, 2]]), "one flat sequence"),
        ([{"role": "user", "content": "x"}], r"is a list of messages: tokenizer\.apply_chat_template\(messages"),
        ([1, 8192], "token id 8192: ids go from 0 to 8191"),
        ([1] * 4096, "prompt has 4096 tokens"),
    ],
)
def test_a_bad_prompt_is_refused(loaded: Any, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        headstart.stream_generate(*loaded, prompt)


def test_an_unknown_argument_is_a_type_error(loaded: Any, prompt: list[int]) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        headstart.stream_generate(*loaded, prompt, nonsense=1)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda m, t: API.load(5), "path is an int: give a folder"),
        (lambda m, t: API.load(""), "the model's name is empty"),
        (lambda m, t: API.load(adapters=["a"]), "adapters is a list: give a dict"),
        (lambda m, t: API.load(adapters={"a": None}), "adapter 'a' is a NoneType: give its folder"),
        (lambda m, t: API.load(adapters={5: "a"}), "adapter 5: a name begins with"),
        (lambda m, t: API.generate(m, None, "a"), "tokenizer is a NoneType: load it"),
        (lambda m, t: API.generate(m, t, "a", engine=5), "engine is an int: make one"),
        (lambda m, t: API.generate(m, t, "a", adapter=5), "adapter is an int: give the name"),
        (lambda m, t: API.generate(m, t, "a", prompt_progress_callback=5), "progress_callback is not a function"),
        (lambda m, t: API.batch_generate(m, t, None), "prompts is a NoneType: give a list"),
        (lambda m, t: API.batch_generate(m, None, ["a"]), "tokenizer is a NoneType: load it"),
        (lambda m, t: API.Engine(None, t), "model is a NoneType: load it"),
        (lambda m, t: API.Engine(m, 5), "tokenizer is an int: load it"),
        (lambda m, t: API.Engine(m, max_sequences=None), "max_sequences is a NoneType: give"),
        (lambda m, t: API.Engine(m, prefix=5), "prefix is an int: make a PrefixCache"),
        (lambda m, t: API.EngineThread(m), "engine is a Model: make one"),
        (lambda m, t: API.PrefixCache(math.nan), "max_bytes is nan; it must be 0 or more"),
    ],
)  # fmt: skip
def test_an_argument_of_another_type_is_named(loaded: Any, call: Callable[..., Any], problem: str) -> None:
    with pytest.raises(headstart.errors.HeadstartError, match=problem):
        call(*loaded)


def test_a_model_of_mlx_lm_is_refused_with_the_way_out(loaded: Any, prompt: list[int]) -> None:
    model, tokenizer = loaded
    with pytest.raises(RequestError, match=r"headstart\.load"):
        headstart.stream_generate(model.lm, tokenizer, prompt)


def test_a_batch_of_a_model_of_mlx_lm_is_refused_too_and_prints_its_rates_if_asked(
    loaded: Any, prompt: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = loaded
    with pytest.raises(RequestError, match=r"headstart\.load"):
        headstart.batch_generate(model.lm, tokenizer, [prompt])
    headstart.batch_generate(model, tokenizer, [prompt, prompt], 4, k=0, verbose=True)
    assert "Generation: 8 tokens, " in capsys.readouterr().out
    headstart.batch_generate(model, tokenizer, [prompt, prompt], 1, verbose=True)
    assert "Generation: 2 tokens\n" in capsys.readouterr().out


def test_an_answer_that_others_ended_is_an_error_with_that_reason(loaded: Any, prompt: list[int]) -> None:
    model, tokenizer = loaded
    engine = headstart.Engine(model, tokenizer)
    responses = headstart.stream_generate(model, tokenizer, prompt, max_tokens=20, k=0, engine=engine)
    next(responses)
    engine.cancel_all()
    with pytest.raises(headstart.errors.HeadstartError, match="cut off"):
        list(responses)


@pytest.mark.parametrize(
    ("argument", "meant"),
    [("temprature", "temperature"), ("temp", "temperature"), ("max_token", "max_tokens"), ("zzz", None)],
)
def test_a_misspelt_argument_is_named_with_what_was_meant(
    loaded: tuple[Model, Any], argument: str, meant: str | None
) -> None:
    expected = f"unknown argument '{argument}'" + (f": did you mean '{meant}'" if meant else "$")
    for call in (headstart.generate, headstart.stream_generate, headstart.batch_generate):
        with pytest.raises(TypeError, match=expected):
            call(*loaded, "Hello", **{argument: 1})


def test_a_request_of_text_is_refused_with_a_remedy() -> None:
    with pytest.raises(RequestError, match="encode it with the tokenizer"):
        headstart.Request("text")  # type: ignore[arg-type]


def test_type_checkers_know_every_sampling_parameter() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)} - {"max_tokens", "k"}
    assert set(SamplingOptions.__annotations__) == fields
    documented = set(re.findall(r"^ {8}(\w+): ", SamplingParams.__doc__ or "", re.MULTILINE))
    assert documented == fields | {"max_tokens", "k"}


def test_a_batch_gets_the_texts_that_each_prompt_gets_alone(loaded: tuple[Model, Any], prompt: list[int]) -> None:
    prompts = [prompt, "def add(a, b):", prompt[:9]]
    batch = headstart.batch_generate(*loaded, prompts, max_tokens=12, max_sequences=2, temperature=0.8, seed=4)
    alone = [headstart.generate(*loaded, each, max_tokens=12, temperature=0.8, seed=4) for each in prompts]
    assert batch.texts == alone
    assert [stats.generation_tokens for stats in batch.stats] == [12, 12, 12]


def test_a_batch_takes_a_sampler_and_a_limit_for_each_prompt(loaded: tuple[Model, Any], prompt: list[int]) -> None:
    prompts, sampler = [prompt, "def add(a, b):"], headstart.make_sampler(0.8)
    batch = headstart.batch_generate(*loaded, prompts, [3, 7], sampler=sampler, seed=4)
    assert [stats.generation_tokens for stats in batch.stats] == [3, 7]
    alone = [headstart.generate(*loaded, each, max_tokens=7, temperature=0.8, seed=4) for each in prompts]
    assert alone[1] == batch.texts[1]
    assert alone[0].startswith(batch.texts[0])
    assert headstart.batch_generate(*loaded, prompts, (3, 7), sampler=sampler, seed=4).texts == batch.texts


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"max_tokens": [3]}, "max_tokens has 1 numbers for 2 prompts"),
        ({"max_tokens": [3, None]}, "max_tokens is None; it must be a whole number"),
        ({"max_tokens": 3.0}, "max_tokens is 3.0; it must be a whole number"),
        ({"max_tokens": None}, "max_tokens is None; it must be a whole number"),
        ({"sampler": "greedy"}, "sampler is a str: make one with headstart.make_sampler"),
        ({"sampler": [headstart.make_sampler()] * 2}, "sampler is a list: make one"),
        ({"sampler": max}, "sampler: a callable is not supported"),
        ({"return_logprobs": True}, "return_logprobs is not supported: use stream_generate"),
        ({"stop_tokens": [[1]]}, "stop_tokens is not supported: use stop_ids"),
    ],
)
def test_a_batch_refuses_what_it_cannot_honour(
    loaded: tuple[Model, Any], arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(problem)):
        headstart.batch_generate(*loaded, ["a", "b"], **arguments)


def test_a_batch_takes_what_mlx_lm_takes(loaded: tuple[Model, Any]) -> None:
    unused = {"return_prompt_caches": False, "return_token_ids": False, "logits_processors": []}
    sizes: dict[str, Any] = {"completion_batch_size": 2, "prefill_batch_size": 2, "prefill_step_size": 64}
    assert len(headstart.batch_generate(*loaded, ["a", "b"], 3, **sizes, **unused).texts) == 2
    with pytest.raises(RequestError, match="prompts is one text: give a list"):
        headstart.batch_generate(*loaded, "ab", 3)


def test_numbers_of_numpy_are_numbers() -> None:
    plain = SamplingParams(temperature=0.5, top_k=3, max_tokens=7)
    assert SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), max_tokens=np.uint8(7)) == plain  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"top_k is 0\.5; it must be a whole number"):
        SamplingParams(top_k=np.float32(0.5))  # type: ignore[arg-type]


def test_load_takes_arguments_for_the_tokenizer() -> None:
    with pytest.raises(RequestError, match="tokenizer_config is an int: give a dict"):
        headstart.load("tiny-qwen3.5", 5)  # type: ignore[arg-type]
    end = {"eos_token": "<|im_start|>", "trust_remote_code": True}
    assert headstart.load("tiny-qwen3.5", end)[1].eos_token == "<|im_start|>"


@pytest.mark.parametrize("given", [{"revision": "main"}, {"model_config": {"x": 1}}, {"return_config": True}])
def test_load_refuses_what_it_cannot_honour(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(given))} is not supported: "):
        headstart.load("tiny-qwen3.5", **given)
    unused: Any = {"lazy": True, "trust_remote_code": True, "model_config": {}, "revision": None}
    assert headstart.load("tiny-qwen3.5", **unused)[0].most_drafts


def test_functions_of_mlx_lm_refuse_our_prompt_cache_with_a_sentence(loaded: Any) -> None:
    for function in (can_trim_prompt_cache, lambda cache: save_prompt_cache("unused", cache)):
        with pytest.raises(RequestError, match="a prompt cache has no layers: keep its `tokens`"):
            function(headstart.make_prompt_cache(loaded[0]))


def test_an_adapter_given_to_load_is_the_one_of_every_request(tmp_path: Path, prompt: list[int]) -> None:
    """As in mlx-lm. Requests may still name another."""
    folder = checkpoint.resolve()
    first, second = [write_adapter(tmp_path / str(seed), folder, seed=seed, scale=6.0) for seed in (1, 2)]
    parts = {"first": first, "second": second}
    named, tokenizer = headstart.load(adapters=parts)
    model, _ = headstart.load(adapter_path=first, adapters={"second": second})
    expected = [
        headstart.generate(named, tokenizer, prompt, max_tokens=8, adapter=name) for name in ("first", "second", None)
    ]
    assert len(set(expected)) == 3, "the adapters make no difference: choose others"
    assert headstart.generate(model, tokenizer, prompt, max_tokens=8) == expected[0]
    assert headstart.batch_generate(model, tokenizer, [prompt], max_tokens=8).texts == expected[:1]
    assert headstart.generate(model, tokenizer, prompt, max_tokens=8, adapter="second") == expected[1]


def test_threads_share_one_batch_through_an_engine_thread(loaded: tuple[Model, Any], prompt: list[int]) -> None:
    prompts = [prompt, "def add(a, b):", prompt[:9]]
    alone = [headstart.generate(*loaded, each, max_tokens=12) for each in prompts]
    with headstart.EngineThread(headstart.Engine(*loaded)) as engine, ThreadPoolExecutor() as pool:
        calls = [pool.submit(headstart.generate, *loaded, each, max_tokens=12, engine=engine) for each in prompts]
        assert [call.result() for call in calls] == alone
    with pytest.raises(headstart.errors.Busy):
        headstart.generate(*loaded, prompt, engine=engine)


def test_an_engine_without_a_thread_cannot_be_made_to_wait_for_one(loaded: tuple[Model, Any]) -> None:
    with pytest.raises(TypeError, match="threaded"):
        headstart.Engine(*loaded, threaded=True)
    with pytest.raises(headstart.errors.EngineDown, match="not started"):
        headstart.EngineThread(headstart.Engine(*loaded)).submit(headstart.Request([1, 2]))


def test_sampling_params_import_nothing_heavy() -> None:
    program = (
        "import sys; from headstart import GrammarSpec, SamplingParams; SamplingParams(temperature=1); "
        "print([m for m in ('mlx', 'mlx_lm', 'transformers', 'llguidance', 'pydantic', 'typer') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
