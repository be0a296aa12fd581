"""A head that is wired or stored wrongly is found out and its fault named, and a head that is right is not blamed."""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import mlx.core as mx
import pytest

from headstart.bench.head_faults import (
    TextPass,
    clearly_better,
    collapsed,
    copy_module,
    find_faults,
    first_drafts,
    rewire,
    run_trunk,
    shift_norms,
    with_head,
)
from headstart.bench.probe import decode_prompts, shortest_prompts
from headstart.bench.prompts import builtin_prompts
from headstart.checkpoint import load_model, load_tokenizer, read_layout, resolve
from headstart.checkpoint.convert import SIDECAR, convert, plan_conversion
from headstart.checkpoint.quantize import Recipe
from headstart.engine import Engine, Request
from headstart.models import Model
from headstart.sampling import SamplingParams

TOKENS = 40
ALL, LAYER, OWN = "all norms", "the norms of its layer", "mtp.norm and mtp.pre_fc_norm_*"


def zeroed(model: Model, *names: str) -> Model:
    """Its weights at these names are zeros; without names the whole head's."""
    head = copy_module(model.weights.mtp)
    for name, module in head.named_modules():
        if "weight" in module and (not names or name in names):
            module.weight = mx.zeros_like(module.weight)
    return with_head(model, head)


FAULTS: dict[str, Callable[[Model], Model]] = {
    "norms_shifted_twice": lambda model: shift_norms(model, 1.0, ALL),
    "norms_not_shifted": lambda model: shift_norms(model, -1.0, ALL),
    "pre_norm_feed": lambda model: rewire(model, fed_after_norm=False),
    "concat_swapped": lambda model: rewire(model, embedding_first=False),
    "zeroed": zeroed,
}


def text_passes(model: Model, prompts: list[list[int]]) -> list[TextPass]:
    answers = decode_prompts(model, load_tokenizer(resolve(None)), prompts, 0, TOKENS).answers
    return [run_trunk(model, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(resolve(None))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(resolve(None))
    return [prompt.tokens(tokenizer) for prompt in shortest_prompts(tokenizer)]


@pytest.fixture(scope="module")
def texts(model: Model, prompts: list[list[int]]) -> list[TextPass]:
    return text_passes(model, prompts)


@pytest.fixture(scope="module")
def more_texts(model: Model) -> list[TextPass]:
    """Enough to tell mild faults from chance."""
    tokenizer = load_tokenizer(resolve(None))
    return text_passes(model, [prompt.tokens(tokenizer) for prompt in builtin_prompts(("code", "chat"))])


@pytest.fixture(scope="module")
def healthy(model: Model, texts: list[TextPass]) -> float:
    found, faults = find_faults(model, texts)
    assert faults == []
    assert fmean(found) > 0.7
    return fmean(found)


OFTEN = ("norms_shifted_twice",)  # the others in the slow suite


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS])
def test_a_planted_fault_is_found_and_named(name: str, model: Model, texts: list[TextPass], healthy: float) -> None:
    found, faults = find_faults(FAULTS[name](model), texts)
    assert [fault.name for fault in faults] == [name]
    assert fmean(found) == faults[0].acceptance_rate < healthy
    assert faults[0].repaired_acceptance_rate == (None if name == "zeroed" else healthy)


def test_repairing_a_copy_leaves_the_head_as_it_is(model: Model) -> None:
    before = {name: module.weight for name, module in model.weights.mtp.named_modules() if "weight" in module}
    other = shift_norms(model, 1.0, ALL)
    for name, module in model.weights.mtp.named_modules():
        assert "weight" not in module or module.weight is before[name]
    assert mx.array_equal(other.weights.mtp.norm.weight, model.weights.mtp.norm.weight + 1)
    assert other.weights.mtp.fc.weight is model.weights.mtp.fc.weight


@pytest.mark.slow
def test_a_head_of_experts_that_is_right_is_not_blamed(prompts: list[list[int]]) -> None:
    model = load_model(resolve("tiny-qwen3.5-moe"))
    found, faults = find_faults(model, text_passes(model, prompts))
    assert faults == []
    assert fmean(found) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("by", [1.0, -1.0])
@pytest.mark.parametrize("group", [LAYER, OWN])
def test_norms_that_are_wrong_in_part_are_distinguished_from_the_rest(
    group: str, by: float, model: Model, more_texts: list[TextPass]
) -> None:
    _, faults = find_faults(shift_norms(model, by, group), more_texts)
    name = "norms_shifted_twice" if by > 0 else "norms_not_shifted"
    assert [(fault.name, fault.where) for fault in faults] == [(name, group)]


@pytest.mark.slow
def test_two_faults_at_once_are_both_named(model: Model, more_texts: list[TextPass]) -> None:
    both = rewire(shift_norms(model, 1.0, ALL), fed_after_norm=False)
    _, faults = find_faults(both, more_texts)
    assert sorted(fault.name for fault in faults) == ["norms_shifted_twice", "pre_norm_feed"]


def test_a_single_tensor_of_zeros_is_named_though_the_head_still_drafts(model: Model, texts: list[TextPass]) -> None:
    found, faults = find_faults(zeroed(model, "layers.0.mlp.down_proj"), texts[:1])
    assert ("zeroed", "mtp.layers.0.mlp.down_proj") in [(fault.name, fault.where) for fault in faults]
    assert any(found)


def test_a_weight_that_is_no_number_is_named(model: Model, texts: list[TextPass]) -> None:
    head = copy_module(model.weights.mtp)
    head.fc.weight = mx.where(mx.arange(head.fc.weight.shape[1]) == 7, mx.nan, head.fc.weight)
    _, faults = find_faults(with_head(model, head), texts[:1])
    assert [(fault.name, fault.where) for fault in faults] == [("not_finite", "mtp.fc")]


@pytest.mark.slow
def test_a_head_that_no_repair_helps_is_unexplained(model: Model, texts: list[TextPass]) -> None:
    head = copy_module(model.weights.mtp)
    head.fc.weight = mx.random.normal(head.fc.weight.shape, head.fc.weight.dtype, key=mx.random.key(0)) * 0.02
    found, faults = find_faults(with_head(model, head), texts)
    assert [fault.name for fault in faults] == ["unexplained"]
    assert collapsed(found)


def converted(folder: Path, **how: int) -> Path:
    convert(plan_conversion(read_layout(resolve(None)), folder, Recipe(mx.bfloat16, **how)))
    return folder


def rewrite_head(folder: Path, change: Callable[[str, mx.array], mx.array]) -> None:
    """Change the stored head, as another tool might have written it."""
    file = str(folder / SIDECAR)
    tensors, metadata = mx.load(file, return_metadata=True)
    mx.save_safetensors(file, {name: change(name, array) for name, array in tensors.items()}, metadata)


@pytest.mark.slow
def test_norms_shifted_twice_on_disk_are_found(tmp_path: Path, texts: list[TextPass], healthy: float) -> None:
    folder = converted(tmp_path / "model")
    rewrite_head(folder, lambda name, array: array + 1 if "norm" in name else array)
    _, faults = find_faults(load_model(folder), texts)
    assert [(fault.name, fault.where, fault.repaired_acceptance_rate) for fault in faults] == [
        ("norms_shifted_twice", ALL, healthy)
    ]


@pytest.mark.slow
def test_halves_of_fc_exchanged_on_disk_are_found(tmp_path: Path, texts: list[TextPass], healthy: float) -> None:
    folder = converted(tmp_path / "model")

    def exchange(name: str, array: mx.array) -> mx.array:
        return mx.concatenate(mx.split(array, 2, axis=1)[::-1], axis=1) if name.endswith("fc.weight") else array

    rewrite_head(folder, exchange)
    _, faults = find_faults(load_model(folder), texts)
    assert [(fault.name, fault.repaired_acceptance_rate) for fault in faults] == [("concat_swapped", healthy)]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [("weight", "scales", "biases"), ("weight", "biases"), ("scales", "biases")])
def test_zeros_in_a_quantised_head_are_found(parts: tuple[str, ...], tmp_path: Path, texts: list[TextPass]) -> None:
    folder = converted(tmp_path / "model", bits=4)
    zero = "layers.0.mlp.gate_proj"
    rewrite_head(folder, lambda name, array: mx.zeros_like(array) if zero in name and name.endswith(parts) else array)
    _, faults = find_faults(load_model(folder), texts[:1])
    assert [(fault.name, fault.where) for fault in faults] == [("zeroed", f"mtp.{zero}")]


def test_first_drafts_are_those_that_the_engine_accepts(model: Model, prompts: list[list[int]]) -> None:
    engine, prompt = Engine(model), prompts[0]
    events = list(engine.submit(Request(prompt, SamplingParams(k=1, max_tokens=TOKENS))))
    answer = [token for event in events for token in event.tokens]
    right, position, seen = first_drafts(model, run_trunk(model, prompt, answer)), 0, set()
    assert len(right) == len(answer)
    for event in events[:-1]:  # the last may have been left no room for a draft
        assert right[position] == (event.origins[0] == "draft")
        seen.add(right[position])
        position += len(event.tokens)
    assert seen == {True, False}


def is_collapsed(accepted: int, tried: int) -> bool:
    return collapsed([True] * accepted + [False] * (tried - accepted))


def test_a_head_is_collapsed_only_where_chance_does_not_explain_it() -> None:
    assert not is_collapsed(29, 60)  # 48 %, as a head of 55 % has it one time in six
    assert not is_collapsed(23, 60)
    assert is_collapsed(22, 60)
    assert is_collapsed(450, 1000)  # the same share of few says nothing
    assert not is_collapsed(9, 20)
    assert is_collapsed(0, 8)
    assert not is_collapsed(0, 0)
    chances = [math.comb(60, stood) * 0.55**stood * 0.45 ** (60 - stood) for stood in range(61)]
    blamed = sum(chance for stood, chance in enumerate(chances) if is_collapsed(stood, 60))
    assert blamed < 0.005  # of heads that are right at 55 %


def test_only_a_gain_beyond_chance_counts() -> None:
    half = [True, False] * 200
    assert not clearly_better(half, half)
    assert not clearly_better([not right for right in half], half)
    assert not clearly_better([True] * 5 + half[5:], half)  # 2 of 400
    assert clearly_better([True] * 60 + half[60:], half)  # 30 of 400, and none lost
    assert not clearly_better([True] * 4, [False] * 4)
    rare = [False] * 10_000
    assert not clearly_better([True] * 100 + rare[100:], rare)  # beyond chance, and nobody would notice
