"""Several ranks on loopback say what one process says, whatever the depth."""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from ranks import run

from checkpoints import write
from fixtures import random_prompt, submit
from headstart.checkpoint import load
from headstart.engine import Engine
from headstart.models import Model

# A stage for each of three, with and without keys; heads for four, of which two share keys.
SIZES = {"num_hidden_layers": 3, "full_attention_interval": 2, "linear_num_key_heads": 4}
ROUNDING = 1e-4  # of log-probabilities from logits around 10, in float32
LENGTH = 12
COUNTED = 15  # tokens in whole rounds: none is launched before the host knows that the answer has ended
SAMPLED = {"temperature": 3.0, "seed": 7}  # or the model, which is sure of itself, would say the same for any seed

Folders = Callable[[str], str]
Results = list[list[dict[str, Any]]]  # of every rank, of every model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @cache
    def made(family: str) -> str:
        return str(write(tmp_path_factory.mktemp(family), family, **SIZES))

    return made


@cache
def alone(folder: str) -> Model:
    return load(folder, dtype=mx.float32)


def questions(folder: str) -> list[dict[str, Any]]:
    """Greedy and seeded, of different lengths."""
    prompts = [random_prompt(alone(folder), length, length) for length in (9, 4)]
    return [{"prompt": prompts[0], "params": {}}, {"prompt": prompts[1], "params": SAMPLED}]


def asked(question: dict[str, Any], **params: Any) -> dict[str, Any]:
    return question | {"params": {"max_tokens": LENGTH, "logprobs": True, **question["params"], **params}}


def at_depths(folder: str, depths: Iterable[int]) -> list[list[dict[str, Any]]]:
    return [[asked(each, k=k) for each in questions(folder)] for k in depths]


@cache
def said_alone(folder: str, number: int) -> list[list[Any]]:
    """What one process says to a question, and what it thinks of it."""
    question, said = asked(questions(folder)[number], k=2), []
    for event in submit(Engine(alone(folder)), question["prompt"], **question["params"]):
        said += [[token, each.logprob] for token, each in zip(event.tokens, event.logprobs or (), strict=True)]
    return said


def crowd(folder: str) -> list[dict[str, Any]]:
    """Depths that a clock chooses, a row without a seed, one that is cancelled, and one that waits for a place."""
    greedy, seeded = questions(folder)
    rows = [asked(greedy), asked(seeded, seed=None), asked(greedy, max_tokens=200), asked(seeded)]
    rows[2]["cancelled_after"] = 1
    return rows


def again(folder: str) -> list[list[dict[str, Any]]]:
    """A long prompt, the same with its beginning known, and once more after that was forgotten."""
    long = asked({"prompt": random_prompt(alone(folder), 530), "params": {}}, max_tokens=4)
    return [[long], [long], [long | {"after_clearing": True}]]


def check_depths(results: Results, index: int, folder: str, depths: int, *, exactly: bool) -> None:
    """All ranks say the same with the same bits, for every depth, and it is what one process says."""
    said = results[0][index]["said"]
    for other in results[1:]:
        assert other[index]["said"] == said
    for number in range(len(questions(folder))):
        answers = said[number : 2 * depths : 2]
        assert answers == [answers[0]] * depths
        expected = said_alone(folder, number)
        if exactly:
            assert answers[0] == expected
            continue
        assert [token for token, _ in answers[0]] == [token for token, _ in expected]
        gaps = [abs(mine - theirs) for (_, mine), (_, theirs) in zip(answers[0], expected, strict=True)]
        print(f"{folder}: log-probabilities differ by up to {max(gaps):.1e}")
        assert max(gaps) < ROUNDING
    stats = [task["stats"] for task in results[0][index]["tasks"]]
    assert {(each["ranks"], each["exact"]) for each in stats} == {(len(results), True)}
    assert all(each["communication_seconds_per_round"] > 0 for each in stats)


def check_crowd(results: Results, index: int) -> None:
    """It comes after four answers to the two questions."""
    greedy, seeded, _, _, first, unseeded, cancelled, late = results[0][index]["said"][:8]
    assert (first, late) == (greedy, seeded)
    assert len(unseeded) == LENGTH
    assert len(cancelled) < 200


def test_two_tensor_parallel_ranks_say_what_one_process_says_in_as_many_rounds(
    folder: Folders, tmp_path: Path
) -> None:
    """Two collectives for every layer of the trunk in a round, whatever is drafted."""
    dense = folder("dense")
    counted = [[asked({"prompt": [5], "params": {}}, k=k, max_tokens=COUNTED)] for k in (0, 3)]
    tasks = [*at_depths(dense, (0, 3)), crowd(dense), *counted]
    results = run(2, {"split": "tensor", "models": [{"folder": dense, "tasks": tasks}]}, tmp_path)
    check_depths(results, 0, dense, 2, exactly=False)
    check_crowd(results, 0)
    plain, drafted = results[0][0]["tasks"][-2:]
    assert plain["operations"] == 2 * SIZES["num_hidden_layers"] * COUNTED
    assert drafted["operations"] == 2 * SIZES["num_hidden_layers"] * drafted["rounds"]
    assert plain["operations"] / drafted["operations"] == drafted["stats"]["tokens_per_round"] > 1


def test_two_pipeline_parallel_ranks_say_exactly_what_one_process_says(folder: Folders, tmp_path: Path) -> None:
    moe = folder("moe")
    tasks = [*at_depths(moe, (0, 3)), crowd(moe), *again(moe)]
    results = run(2, {"split": "pipeline", "models": [{"folder": moe, "tasks": tasks}]}, tmp_path)
    check_depths(results, 0, moe, 2, exactly=True)
    check_crowd(results, 0)
    assert results[0][0]["said"][8:] == [results[0][0]["said"][8]] * 3
    assert [task["stats"]["prefix_cache_hit"] for task in results[0][0]["tasks"][-3:]] == [0, 512, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("split", "ranks"), [("tensor", 2), ("tensor", 4), ("pipeline", 2), ("pipeline", 3)])
def test_ranks_say_the_same_for_every_depth(split: str, ranks: int, folder: Folders, tmp_path: Path) -> None:
    packed = str(write(tmp_path / "packed", "dense", "converted", bits=4, group_size=32, **SIZES))
    folders = [folder("dense"), folder("moe"), folder("next"), packed]
    models = [{"folder": each, "tasks": [*at_depths(each, range(5)), *again(each)]} for each in folders]
    results = run(ranks, {"split": split, "models": models}, tmp_path)
    for index, each in enumerate(folders):
        check_depths(results, index, each, 5, exactly=split == "pipeline")
        assert results[0][index]["said"][10:] == [results[0][index]["said"][10]] * 3
        assert [task["stats"]["prefix_cache_hit"] for task in results[0][index]["tasks"][-3:]] == [0, 512, 0]
