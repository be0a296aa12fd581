"""Several ranks on loopback generate what one process does, whatever the depth and the request."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from rank import ask, noted
from ranks import run

from checkpoints import write
from fixtures import random_prompt
from headstart.checkpoint import load_model, load_tokenizer
from headstart.engine import Engine
from headstart.models import Model
from headstart.models.memory import Footprint
from headstart.state import CHUNK, PrefixCache

# A stage for each of three, with and without keys; heads for four, of which two share keys.
SIZES = {"num_hidden_layers": 3, "full_attention_interval": 2, "linear_num_key_heads": 4}
ROUNDING = 1e-4  # of log-probabilities from logits around 10, in float32
LENGTH = 12
COUNTED = 15  # tokens in whole rounds: none is launched before the host knows that the answer has ended
SAMPLED = {"temperature": 3.0, "seed": 7}  # or the model, which is sure of itself, would say the same for any seed

Folders = Callable[[str], str]
Task = list[dict[str, Any]]
Results = list[list[dict[str, Any]]]  # of every rank, of every model
Output = dict[str, Any]  # to one request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @cache
    def made(family: str) -> str:
        return str(write(tmp_path_factory.mktemp(family), family, **SIZES))

    return made


@cache
def alone(folder: str) -> Model:
    return load_model(folder, dtype=mx.float32)


def questions(folder: str) -> Task:
    """Greedy and seeded, of different lengths."""
    prompts = [random_prompt(alone(folder), length, length) for length in (9, 4)]
    return [{"prompt": prompts[0], "params": {}}, {"prompt": prompts[1], "params": SAMPLED}]


def asked(question: dict[str, Any], **params: Any) -> dict[str, Any]:
    return question | {"params": {"max_tokens": LENGTH, "logprobs": True, **question["params"], **params}}


def at_depths(folder: str, depths: Iterable[int]) -> list[Task]:
    return [[asked(each, k=k) for each in questions(folder)] for k in depths]


def again(folder: str) -> list[Task]:
    """A long prompt, the same with its beginning known, and once more after that was forgotten."""
    long = asked({"prompt": random_prompt(alone(folder), 530), "params": {}}, max_tokens=4)
    return [[long], [long], [long | {"after_clearing": True}]]


def counted() -> list[Task]:
    return [[asked({"prompt": [5], "params": {}}, k=k, max_tokens=COUNTED)] for k in (0, 3)]


def crowd(folder: str) -> list[Task]:
    """Depths chosen by timings, a sequence without a seed, one that is cancelled, and one that waits in the queue."""
    greedy, seeded = questions(folder)
    rows = [asked(greedy), asked(seeded, seed=None), asked(greedy, max_tokens=200), asked(seeded)]
    rows[2]["cancelled_after"] = 1
    return [rows]


def everything(folder: str) -> list[Task]:
    """What a request may ask for besides, and the settings of the server that it comes through."""
    greedy, seeded = questions(folder)
    return [
        [asked(seeded, k=2) | {"n": 2}, asked(greedy, k=3, grammar="[a-f]{6}")],
        [asked(greedy), asked(seeded, stop=(stop(folder),))],
        [asked(greedy, k=3) | {"max_k": 1}],
        [asked(seeded) | {"max_k": 0}],
    ]


def cramped(folder: str) -> dict[str, Any]:
    """A cache for one prompt, in eight bits, and on one of two ranks no room for two sequences that grow beyond 512
    positions: neither whole nor as two ranks share it."""

    def question(length: int, seed: int, tokens: int) -> dict[str, Any]:
        return asked({"prompt": random_prompt(alone(folder), length, seed), "params": {}}, max_tokens=tokens)

    footprint, growing = Footprint.of(alone(folder)), [question(479, seed, 40) for seed in (1, 2)]
    first, second = [question(530, 3, 4)], [question(530, 4, 4)]
    return {
        "folder": folder,
        "cache": int(1.4 * footprint.bytes([CHUNK])),
        "memory": [10**9, int(1.02 * footprint.bytes([512, 512]))],
        "tasks": [growing, first, second, second, first],
    }


@cache
def stop(folder: str) -> str:
    """A text in the middle of the answer to the second question."""
    tokenizer = load_tokenizer(Path(folder))
    said = said_alone(folder, [[asked(questions(folder)[1])]])[0]["answers"]["0"]
    texts = [tokenizer.decode([token]) for token, _ in said]
    return next(text for text in texts[3:] if text.isprintable() and text.isascii() and text not in texts[:3])


def said_alone(folder: str, tasks: list[Task]) -> list[Output]:
    """What one process with enough memory generates."""
    engine = Engine(alone(folder), load_tokenizer(Path(folder)), max_sequences=3, prefix=PrefixCache(10**8))
    mx.disable_compile()  # as in the ranks
    with noted() as said:
        ask(engine, tasks)
    mx.enable_compile()
    return list(json.loads(json.dumps(list(said.values()))))


def assert_same(said: list[Output], expected: list[Output], *, exactly: bool) -> None:
    if exactly:
        assert said == expected
        return
    gaps = [0.0]
    for mine, theirs in zip(said, expected, strict=True):
        assert mine["ends"] == theirs["ends"]
        assert mine["answers"].keys() == theirs["answers"].keys()
        for answer, other in ((mine["answers"][choice], theirs["answers"][choice]) for choice in mine["answers"]):
            assert [token for token, _ in answer] == [token for token, _ in other]
            gaps += [abs(a - b) for (_, a), (_, b) in zip(answer, other, strict=True)]
    print(f"log-probabilities differ by up to {max(gaps):.1e}")
    assert max(gaps) < ROUNDING


def check(
    results: Results, index: int, folder: str, tasks: list[Task], depths: int, *, exactly: bool
) -> list[Output]:
    """All ranks say and keep the same with the same bits, for every depth, and it is what one process says to
    `tasks`. Returns what was said after them."""
    said = results[0][index]["said"]
    for other in results[1:]:
        assert (other[index]["said"], other[index]["cache"]) == (said, results[0][index]["cache"])
    expected = said_alone(folder, tasks)
    assert_same(said[: len(expected)], expected, exactly=exactly)
    for number in range(2 if depths else 0):
        answers = said[number : 2 * depths : 2]
        assert answers == [answers[0]] * depths
    stats = [task["stats"] for task in results[0][index]["tasks"][: len(tasks)]]
    assert {(each["ranks"], each["exact"]) for each in stats} == {(len(results), True)}
    return list(said[len(expected) :])


def check_again(tasks: list[dict[str, Any]]) -> None:
    assert [task["stats"]["prefix_cache_hit"] for task in tasks] == [0, 512, 0]


@pytest.mark.parametrize(
    ("split", "family", "operations"),
    [
        ("tensor", "dense", 2 * SIZES["num_hidden_layers"]),
        pytest.param("pipeline", "moe", 2, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_generate_what_one_process_does_with_as_many_collectives_as_rounds(
    split: str, family: str, operations: int, folder: Folders, tmp_path: Path
) -> None:
    where, exactly = folder(family), split == "pipeline"
    tasks = [*at_depths(where, range(5)), *again(where), *counted(), *everything(where)]
    small = cramped(where)
    models = [{"folder": where, "tasks": tasks + crowd(where)}, small]
    results = run(2, {"split": split, "models": models}, tmp_path)

    first, unseeded, cancelled, late = check(results, 0, where, tasks, 5, exactly=exactly)
    assert [first, late] == results[0][0]["said"][:2]
    assert len(unseeded["answers"]["0"]) == LENGTH
    assert cancelled["ends"] == {"0": ["cancelled", None, None]}

    told = results[0][0]["tasks"]
    check_again(told[5:8])
    plain, drafted = told[8:10]
    assert plain["operations"] == operations * COUNTED
    assert drafted["operations"] == operations * drafted["stats"]["rounds"]
    assert plain["operations"] / drafted["operations"] == drafted["stats"]["tokens_per_round"] > 1
    below, off = told[12:14]
    assert below["stats"]["num_draft_tokens_clamped_to"] == 1
    assert off["stats"]["bypass_reason"] == "speculation is switched off"

    # Room for one prompt: the next one takes it. Of the two rows one waits until the other has ended.
    growing, *_ = small["tasks"]
    _, first_again = check(results, 1, where, small["tasks"][:3], 0, exactly=exactly)
    told = results[0][1]["tasks"]
    assert told[0]["gave_up"] > 0
    assert [task["stats"]["prefix_cache_hit"] for task in told[1:]] == [0, 0, 512, 0]
    assert [task["stats"]["exact"] for task in told[1:]] == [True, True, False, True]
    assert first_again == results[0][1]["said"][len(growing)]
    assert results[0][1]["cache"]["evictions"] > 1


@pytest.mark.slow
@pytest.mark.parametrize(("split", "ranks"), [("tensor", 2), ("tensor", 4), ("pipeline", 2), ("pipeline", 3)])
def test_ranks_generate_the_same_at_every_depth(split: str, ranks: int, folder: Folders, tmp_path: Path) -> None:
    packed = str(write(tmp_path / "packed", "dense", "converted", bits=4, group_size=32, **SIZES))
    folders = [folder("dense"), folder("moe"), folder("next"), packed]
    tasks = {each: [*at_depths(each, range(5)), *again(each), *everything(each)] for each in folders}
    results = run(
        ranks, {"split": split, "models": [{"folder": each, "tasks": tasks[each]} for each in folders]}, tmp_path
    )
    for index, each in enumerate(folders):
        check(results, index, each, tasks[each], 5, exactly=split == "pipeline")
        check_again(results[0][index]["tasks"][5:8])
