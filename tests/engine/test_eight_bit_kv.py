"""A KV cache in eight bits takes about half the memory. It says that it is not exact, and is still the same for every
depth, batch and prefix hit: every token is rounded by itself."""

import mlx.core as mx
import pytest

import headstart.engine.prefill
from fixtures import Answer, collect, random_model, random_prompt
from headstart.engine import Engine, Request
from headstart.errors import CheckpointError
from headstart.models import Model
from headstart.models.memory import Footprint
from headstart.sampling import SamplingParams
from headstart.state import KV, PrefixCache

C = 16


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headstart.engine.prefill, "CHUNK", C)


def ask(engine: Engine, *prompts: list[int], k: int = 3) -> list[Answer]:
    params = SamplingParams(max_tokens=12, k=k)
    return [collect(handle) for handle in [engine.submit(Request(prompt, params)) for prompt in prompts]]


def first_logits(model: Model, prompt: list[int]) -> mx.array:
    request = Request(prompt, SamplingParams(max_tokens=1, k=0), keep_logits=True)
    return next(event.logits for event in Engine(model).submit(request) if event.logits is not None)


@pytest.mark.parametrize("family", [pytest.param("dense", marks=pytest.mark.slow), "next"])
def test_answers_do_not_depend_on_depth_batch_or_hits_and_say_that_they_are_not_exact(family: str) -> None:
    model = random_model(family).with_eight_bit_kv()
    prompts = [random_prompt(model, length, length) for length in (2 * C + 5, 3 * C + 1, 7)]
    alone = [ask(Engine(model), prompt, k=0)[0] for prompt in prompts]
    engine = Engine(model, prefix=PrefixCache(1 << 28, chunk=C, eight_bits=True))
    for answers in (ask(engine, *prompts), ask(engine, *prompts), ask(Engine(model), *prompts, k=5)):
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone]
        assert not any(answer.stats.exact for answer in answers if answer.stats is not None)
    assert engine.prefix is not None
    assert engine.prefix.stats().hits == 2


def test_they_are_near_to_exact_ones_in_about_half_the_memory() -> None:
    model = random_model("dense")
    small, prompt = model.with_eight_bit_kv(), random_prompt(model, 3 * C)
    exact, near = first_logits(model, prompt), first_logits(small, prompt)
    assert not mx.array_equal(exact, near)
    assert mx.allclose(exact, near, atol=0.05)
    half = random_model("dense", head_dim=256).with_eight_bit_kv()
    full = Footprint.of(random_model("dense", head_dim=256)).position
    assert Footprint.of(half).position == full * (8 + 32 / 32) / 32  # and a scale for 32 numbers


def test_rows_join_and_leave_with_their_scales() -> None:
    rows = [KV.empty(1, 2, 32, mx.float32, eight_bits=True) for _ in range(3)]
    for n, each in enumerate(rows):
        each.grow(4)
        each.reach = 4
        each.update_and_fetch(mx.full((1, 2, 4, 32), n + 1.0), mx.full((1, 2, 4, 32), -n - 1.0))
    for other in rows[1:]:
        rows[0].join(other)
    rows[0].keep(mx.array([2, 0]), 4)
    rows[0].reach, rows[0].offset = 4, mx.array([4, 4])
    rows[0].grow(8)
    keys, values = rows[0].update_and_fetch(mx.ones((2, 2, 1, 32)), mx.ones((2, 2, 1, 32)))
    assert mx.allclose(keys[:, 0, 0, 0], mx.array([3.0, 1.0]))
    assert mx.allclose(values[:, 1, 3, 31], mx.array([-3.0, -1.0]))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(CheckpointError, match="heads of 16"):
        random_model("dense", head_dim=16).with_eight_bit_kv()
