"""What is trained is what drafts: the chains of training are those of the engine's head, and gradients are right."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from fixtures import family_model, random_prompt
from headstart import models
from headstart.kernels import Backend
from headstart.kernels.cpu.backend import CpuBackend
from headstart.kernels.cuda.backend import cuda_backend
from headstart.models import Model
from headstart.training.chains import chains
from headstart.training.head import new_head, opened_head, trained_parameters
from headstart.training.loss import WEIGHTS, evaluate, loss_and_gradients, trunk_hidden

STEPS = len(WEIGHTS)
WITH_HEADS = ["dense", "moe", "next", "glm4_moe"]
WITHOUT = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "ministral3"]


def config_of(model: Model) -> dict[str, Any]:
    kinds = {family.name: kind for kind, family in reversed(models.FAMILIES.items())}
    return {**model.config, "model_type": model.config.get("model_type", kinds[model.family.name])}


def text(model: Model, length: int = 20, rows: int = 2) -> mx.array:
    return mx.array([random_prompt(model, length, seed) for seed in range(rows)])


def by_the_engine(model: Model, hidden: mx.array, tokens: mx.array, start: int) -> list[mx.array]:
    """The drafts' hidden states of a chain from one position, as a step of the engine runs the head."""
    state = model.make_head_state(tokens.shape[0])
    made = model.head(hidden[:, : start + 1], tokens[:, 1 : start + 2], state)
    state.commit(mx.full((tokens.shape[0],), start + 1, mx.int32), most=start + 1)
    found = [made[:, -1:]]
    for step in range(1, STEPS):
        ahead = state.ahead(step - 1)
        found.append(model.head(found[-1], tokens[:, start + 1 + step : start + 2 + step], ahead))
    return found


def differences(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> float:
    return max(float(mx.abs(a - b).max() / mx.abs(b).max()) for a, b in zip(ours, theirs, strict=True))


def trained_and_frozen(family: str) -> tuple[Model, Model]:
    """A model with a head as it is trained, and the same with that head as it decodes."""
    model = family_model(family)
    if family in WITH_HEADS:
        return opened_head(model, config_of(model)), model
    trained = new_head(model, config_of(model), text(model))
    mx.random.seed(1)  # what a new head makes of a token's embedding is nothing
    mtp = trained.weights.mtp
    mtp.fc.weight = mtp.fc.weight + 0.1 * mx.random.normal(mtp.fc.weight.shape)
    return trained, replace(model, weights=trained.weights)


@pytest.mark.parametrize("family", WITH_HEADS + WITHOUT)
def test_chains_are_those_of_the_engine(family: str) -> None:
    trained, decoding = trained_and_frozen(family)
    tokens = text(decoding)
    hidden = trunk_hidden(decoding, tokens)
    made = chains(trained, hidden[:, : tokens.shape[1] - STEPS], tokens, STEPS)
    for start in (0, 7, tokens.shape[1] - STEPS - 1):
        engine = by_the_engine(decoding, hidden, tokens, start)
        ours = [each[:, start : start + 1] for each in made]
        assert differences(ours, engine) < 2e-5
        for mine, theirs in zip(ours, engine, strict=True):
            best = mx.argmax(trained.draft_logits(mine), axis=-1)
            assert best.tolist() == mx.argmax(decoding.draft_logits(theirs), axis=-1).tolist()


def test_a_window_cuts_chains_as_it_cuts_the_engines() -> None:
    model = family_model("mistral", sliding_window=6)
    trained = new_head(model, config_of(model), text(model))
    decoding = replace(model, weights=trained.weights)
    tokens = text(model)
    hidden = trunk_hidden(model, tokens)
    made = chains(trained, hidden[:, : tokens.shape[1] - STEPS], tokens, STEPS)
    engine = by_the_engine(decoding, hidden, tokens, 12)
    assert differences([each[:, 12:13] for each in made], engine) < 2e-5


@pytest.mark.parametrize("family", ["llama", "dense", "qwen3"])  # experts are chosen in leaps
def test_gradients_lead_downhill_as_the_losses_say(family: str) -> None:
    """The losses change along a direction by as much as the gradients say."""
    trained, decoding = trained_and_frozen(family)
    tokens = text(decoding, 16)
    counts = mx.ones((2, 16 - STEPS))
    parameters = trained_parameters(trained.weights.mtp)
    _, gradients = loss_and_gradients(trained, decoding, parameters, tokens, counts)
    flat: Any = tree_flatten(gradients)
    length = mx.sqrt(sum((g.square().sum() for _, g in flat), mx.array(0.0)))

    def loss_at(distance: float) -> float:
        moved = {name: value + distance * dict(flat)[name] / length for name, value in tree_flatten(parameters)}
        trained.weights.mtp.load_weights(list(moved.items()), strict=False)
        return float((evaluate(trained, decoding, tokens, counts).losses * mx.array(WEIGHTS)).sum())

    slope = (loss_at(1e-2) - loss_at(-1e-2)) / 2e-2
    assert slope == pytest.approx(float(length), rel=2e-2)


@pytest.mark.parametrize("backend", ["native", "cuda"])
@pytest.mark.parametrize("family", ["llama", "dense", "moe", "qwen3_moe", "glm4_moe"])
def test_products_of_a_device_have_the_gradients_of_mlx(family: str, backend: str) -> None:
    trained, decoding = trained_and_frozen(family)
    if backend == "native" and not isinstance(decoding.backend, CpuBackend):
        pytest.skip("no native kernels here")
    if backend == "cuda":
        quantised = {n: m for n, m in decoding.weights.named_modules() if n.endswith(("embed_tokens", "lm_head"))}
        assert quantised
        nn.quantize(decoding.weights, 32, 4, class_predicate=lambda path, _: path in quantised)
        trained = replace(trained, backend=cuda_backend().with_gradients())
    tokens, counts = text(decoding, 16), mx.ones((2, 16 - STEPS))
    parameters = trained_parameters(trained.weights.mtp)
    native = loss_and_gradients(trained, decoding, parameters, tokens, counts)
    stock = loss_and_gradients(replace(trained, backend=Backend()), decoding, parameters, tokens, counts)
    assert mx.allclose(native[0].losses, stock[0].losses, rtol=1e-5)
    ours, theirs = (dict(tree_flatten(each[1])) for each in (native, stock))
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert mx.abs(gradient - ours[name]).max() <= 1e-4 * mx.abs(gradient).max(), name


def test_experts_stay_as_they_are() -> None:
    trained, decoding = trained_and_frozen("qwen3_moe")
    layer = decoding.weights.layers[-1]
    assert trained.weights.mtp.layers[0].mlp.switch_mlp is layer.mlp.switch_mlp
    names = [name for name, _ in tree_flatten(trained_parameters(trained.weights.mtp))]
    assert not any("switch_mlp" in name for name in names)
    assert any("gate" in name for name in names)
