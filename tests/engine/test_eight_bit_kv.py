"""A KV cache in eight bits takes about half the memory. It says that it is not exact, and is still the same for every
depth, batch and prefix hit: every token is rounded by itself."""

from typing import Any

import mlx.core as mx
import pytest

from fixtures import EVERY_FAMILY, Answer, collect, family_model, random_model, random_prompt
from headstart.engine import Engine, Request
from headstart.errors import CheckpointError
from headstart.models import Model
from headstart.models.memory import Footprint
from headstart.sampling import SamplingParams
from headstart.state import KV, PrefixCache

C = 16


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", C)


def ask(engine: Engine, *prompts: list[int], k: int | str = 3) -> list[Answer]:
    params = SamplingParams(max_tokens=12, k=k)
    return [collect(handle) for handle in [engine.submit(Request(prompt, params)) for prompt in prompts]]


def first_logits(model: Model, prompt: list[int]) -> mx.array:
    request = Request(prompt, SamplingParams(max_tokens=1, k=0), keep_logits=True)
    return next(event.logits for event in Engine(model).submit(request) if event.logits is not None)


@pytest.mark.parametrize("family", [pytest.param("dense", marks=pytest.mark.slow), "next"])
def test_answers_do_not_depend_on_depth_batch_or_hits_and_say_that_they_are_not_exact(family: str) -> None:
    model = random_model(family).with_kv_bits(8)
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
    small, prompt = model.with_kv_bits(8), random_prompt(model, 3 * C)
    exact, near = first_logits(model, prompt), first_logits(small, prompt)
    assert not mx.array_equal(exact, near)
    assert mx.allclose(exact, near, atol=0.05)
    half = random_model("dense", head_dim=256).with_kv_bits(8)
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


HALVED = {"num_attention_heads": 2, "num_key_value_heads": 1}
LATENT = ("glm4_moe_lite", "deepseek_v3", "longcat_flash", "deepseek_v32", "glm_moe_dsa", "bailing_hybrid")
SIZES: dict[str, dict[str, Any]] = {  # with which heads are multiples of 32, where they are not already
    **dict.fromkeys(("llama", "sliding", "qwen2", "ernie4_5_moe", "mimo"), HALVED),
    **{family: {"qk_rope_head_dim": 32} for family in LATENT},
    "mimo_v2_flash": dict.fromkeys(("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim"), 32),
    "nemotron_h": {"head_dim": 32},
}


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_family_keeps_its_keys_and_values_in_eight_bits(family: str) -> None:
    """Or says which of its heads cannot be."""
    if family in SIZES:
        with pytest.raises(CheckpointError, match=r"heads of (16|24) numbers cannot be kept in 8 bits"):
            family_model(family).with_kv_bits(8)
    exact = family_model(family, **SIZES.get(family, {}))
    model, prompts = exact.with_kv_bits(8), [random_prompt(exact, length, length) for length in (C + 5, 7)]
    kept = [memory for memory in model.make_state(1).layers if isinstance(memory, KV)]
    assert kept
    assert all(each.keys.dtype == each.values.dtype == mx.int8 for each in kept)
    text = mx.array([random_prompt(exact, 40)])
    near, true = (each.logits(each.trunk(text, each.make_state(1), 40))[0] for each in (model, exact))
    errors = mx.linalg.norm(near - true, axis=-1) / mx.linalg.norm(true, axis=-1)
    assert 0 < mx.median(errors) < 0.05  # few are far: routers take another expert where two are nearly equal
    alone = [ask(Engine(model), prompt, k=0)[0] for prompt in prompts]
    together = ask(Engine(model), *prompts, k=3 if model.has_head else "auto")
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert not any(answer.stats.exact for answer in together if answer.stats is not None)
