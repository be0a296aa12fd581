"""Our forwards against mlx-lm's and against the recorded outputs of the built-in models."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from fixtures import FAMILIES, builtin_model, random_model, random_prompt, recorded_experts
from headstart.models import Model

REFERENCE = Path(__file__).parents[1] / "reference"
BUILTIN = ("tiny-qwen3.5", "tiny-qwen3.5-moe")
ROUNDING = 1e-4  # a recorded margin above this cannot be lost to float32's order of summation


def trunk(model: Model, tokens: mx.array) -> mx.array:
    return model.trunk(tokens, model.make_state(tokens.shape[0]), certain=tokens.shape[1])


@pytest.mark.usefixtures("stock_ops")
@pytest.mark.parametrize(
    ("family", "tie"),
    [
        pytest.param(family, tie, marks=[] if tie == (family == "dense") else pytest.mark.slow)
        for family in FAMILIES
        for tie in (False, True)
    ],
)
def test_trunk_logits_are_mlx_lms_to_the_last_bit(family: str, tie: bool) -> None:
    model = random_model(family, tie=tie)
    tokens = mx.array([random_prompt(model, 70, seed) for seed in range(2)])
    assert mx.array_equal(model.logits(trunk(model, tokens)), model.lm(tokens))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("certain", [1, 3, 7])
def test_a_window_has_the_logits_of_a_plain_pass_however_much_of_it_is_certain(family: str, certain: int) -> None:
    model = random_model(family)
    tokens = mx.array([random_prompt(model, 40)])
    rows = model.make_state(1)
    model.trunk(tokens[:, :33], rows, certain=33)
    rows.commit(mx.array([33]), most=33)
    window = model.logits(model.trunk(tokens[:, 33:], rows, certain=certain))
    assert mx.array_equal(window, model.logits(trunk(model, tokens))[:, 33:])


@lru_cache
def recorded(name: str) -> list[tuple[dict[str, Any], mx.array, mx.array]]:
    """Every recorded prompt with its tokens [1, T] and the trunk's hiddens [1, T, H]."""
    model = builtin_model(name, mx.float32)
    prompts = json.loads((REFERENCE / f"{name}-reference.json").read_text())["prompts"]
    ids = [mx.array([prompt["prompt_ids"] + prompt["greedy_ids"]]) for prompt in prompts]
    return [(prompt, tokens, trunk(model, tokens)) for prompt, tokens in zip(prompts, ids, strict=True)]


@pytest.mark.usefixtures("stock_ops")
@pytest.mark.parametrize("name", BUILTIN)
def test_trunk_logits_of_the_builtin_models_are_mlx_lms_to_the_last_bit(name: str) -> None:
    model = builtin_model(name, mx.float32)
    prompt = json.loads((REFERENCE / f"{name}-reference.json").read_text())["prompts"][0]
    tokens = mx.array([prompt["prompt_ids"]])
    assert mx.array_equal(model.logits(trunk(model, tokens)), model.lm(tokens))


@pytest.mark.parametrize("name", BUILTIN)
def test_trunk_logits_of_the_builtin_models_are_mlx_lms_up_to_rounding(name: str) -> None:
    """With the kernels of this machine, whose sums have another order."""
    model = builtin_model(name, mx.float32)
    prompt, tokens, hidden = recorded(name)[0]
    length = len(prompt["prompt_ids"])
    assert mx.allclose(model.logits(hidden)[:, :length], model.lm(tokens[:, :length]), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("name", BUILTIN)
def test_greedy_tokens_are_the_recorded_ones(name: str) -> None:
    model = builtin_model(name, mx.float32)
    for prompt, _, hidden in recorded(name):
        assert min(prompt["greedy_margins"]) > ROUNDING  # so none needs excusing
        logits = model.logits(hidden)[0, len(prompt["prompt_ids"]) - 1 : -1]
        assert mx.argmax(logits, axis=-1).tolist() == prompt["greedy_ids"]
        top = prompt["first_step_top5"]
        difference = logits[0, mx.array(top["ids"])] - mx.array(top["logits"])
        assert mx.abs(difference).max().item() < 2e-3  # recorded with few digits


@pytest.mark.parametrize("name", BUILTIN)
def test_draft_chains_are_the_recorded_ones(name: str) -> None:
    model = builtin_model(name, mx.float32)
    for prompt, tokens, hidden in recorded(name):
        assert min(min(margins) for margins in prompt["mtp_margins"]) > ROUNDING
        rows, start = model.make_head_state(1), 0
        for d, chain in enumerate(prompt["mtp_drafts"]):
            pairs = len(prompt["prompt_ids"]) + d
            x = model.head(hidden[:, start:pairs], tokens[:, start + 1 : pairs + 1], rows)[:, -1:]
            rows.commit(mx.array([pairs - start]), most=pairs - start)
            start = pairs
            drafts = [mx.argmax(model.draft_logits(x), axis=-1)]
            for j in range(len(chain) - 1):
                x = model.head(x, drafts[-1], rows.ahead(j))
                drafts.append(mx.argmax(model.draft_logits(x), axis=-1))
            assert mx.concatenate(drafts, axis=1)[0].tolist() == chain


def test_the_experts_chosen_are_the_recorded_ones() -> None:
    name = "tiny-qwen3.5-moe"
    model = builtin_model(name, mx.float32)
    prompt, tokens, _ = recorded(name)[0]
    # A router's probability is below 1, so its rounding is far below these margins too.
    assert min(min(layer) for layer in prompt["router_margins"]) > 1e-5
    with recorded_experts(model) as layers:
        mx.eval(trunk(model, tokens[:, : len(prompt["prompt_ids"])]))
    for layer, experts in zip(layers, prompt["router_topk"], strict=True):
        assert layer.asked[0][0].tolist() == [sorted(chosen) for chosen in experts]
