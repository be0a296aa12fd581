"""A sequence never depends on its neighbours: they join, leave, end and are cancelled, and it generates the same."""

import random
from dataclasses import replace
from functools import lru_cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from fixtures import (
    FAMILIES,
    Answer,
    collect,
    family_model,
    generate,
    mlx_lm_greedy,
    random_model,
    random_prompt,
    submit,
)
from headstart import batch_generate
from headstart.checkpoint import load_model, load_tokenizer, resolve
from headstart.engine import Engine
from headstart.engine.invariance import is_batch_invariant
from headstart.engine.limit import step_limit
from headstart.engine.stats import Stats
from headstart.kernels.cpu.backend import StockCpu, cpu_backend
from headstart.kernels.share import Alone
from headstart.limits import MAX_K
from headstart.models import Model
from headstart.state import BLOCK

LENGTHS = (2, 3, 9, 16, 17, 31, 40, 70)
LONGEST = 56


@lru_cache
def expected(family: str, length: int) -> list[int]:
    model = random_model(family)
    return mlx_lm_greedy(model, random_prompt(model, length, length), LONGEST)


def assert_as_alone(family: str, length: int, limit: int, cancelled: bool, answer: Answer) -> None:
    assert answer.error is None
    alone = expected(family, length)[:limit]
    if cancelled and answer.finish_reason == "cancelled":
        assert answer.tokens == alone[: len(answer.tokens)]
        assert len(answer.tokens) < limit
    else:
        assert answer.finish_reason == "length"
        assert answer.tokens == alone


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        pytest.param(*case, marks=[] if case in (("dense", 5), ("next", 2)) else pytest.mark.slow)
        for case in product(FAMILIES, (1, 2, 5, 16))
    ],
)
def test_a_sequence_generates_the_same_whichever_join_leave_or_are_cancelled(
    family: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 64)
    model, rng = random_model(family), random.Random(f"{family} {rows}")
    engine = Engine(model, max_sequences=rows)
    requests, widest, todo = [], 0, 2 * rows + 4
    busy = True
    while todo or busy:
        while todo and rng.random() < 0.6:  # submitted while others run
            filling = len(requests) < rows  # by answers that are still being said when the last of them joins
            length, k = rng.choice(LENGTHS), rng.randint(0, 3) if filling else rng.choice(["auto", *range(9)])
            limit = LONGEST if filling else rng.randint(1, LONGEST)
            handle = submit(engine, random_prompt(model, length, length), max_tokens=limit, k=k)
            cancel_after = None if filling or rng.random() < 0.6 else rng.randint(0, 12)
            requests.append([length, limit, cancel_after, handle])
            todo -= 1
        for request in requests:
            if request[2] is not None:
                request[2] -= 1
                if request[2] < 0:
                    request[3].cancel()
        busy = engine.run_once()
        widest = max(widest, len(engine.scheduler.running.sequences))
    assert widest == rows
    for length, limit, cancel_after, handle in requests:
        assert_as_alone(family, length, limit, cancel_after is not None, collect(handle))


def test_sequences_generate_the_same_when_their_kv_caches_grow_at_different_times() -> None:
    """The host's bounds of the lengths stay bounds: what a landed round gives back, it had not used."""
    model = random_model("dense")
    prompts = [random_prompt(model, BLOCK - length, length) for length in (40, 20, 4, 1)]
    engine = Engine(model, max_sequences=3)
    handles = [submit(engine, prompt, max_tokens=44, k=k) for prompt, k in zip(prompts, (8, 0, 3, 5), strict=True)]
    largest = 0
    while engine.run_once():
        if engine.scheduler.running.batch is not None:
            lengths = engine.scheduler.running.batch.trunk_state.lengths.tolist()
            slack = [
                bound - length
                for bound, length in zip(engine.scheduler.running.batch.trunk_state.bounds, lengths, strict=True)
            ]
            assert all(0 <= spare <= 9 for spare in slack)  # no more than the round in flight may yet turn down
            largest = max(largest, *lengths)
    assert largest > BLOCK
    for prompt, handle in zip(prompts, handles, strict=True):
        assert collect(handle).tokens == mlx_lm_greedy(model, prompt, 44)


def test_a_request_can_be_cancelled_at_every_point_of_its_life() -> None:
    """Queued, halfway through its prompt, before its first token, in flight, and after its end."""
    model = random_model("dense")
    for turns in range(12):
        engine = Engine(model, max_sequences=2)
        neighbour = submit(engine, random_prompt(model, 17, 17), max_tokens=LONGEST, k=3)
        handle = submit(engine, random_prompt(model, 9, 9), max_tokens=4, k=2)
        for _ in range(turns):
            engine.run_once()
        handle.cancel()
        assert_as_alone("dense", 9, 4, True, collect(handle))
        assert_as_alone("dense", 17, LONGEST, False, collect(neighbour))
        assert not engine.run_once()


def test_a_cancelled_handle_ends_with_one_last_event() -> None:
    model = random_model("dense")
    engine = Engine(model)
    handle = submit(engine, random_prompt(model, 9), max_tokens=LONGEST)
    handle.cancel()
    handle.cancel()
    events = list(handle)
    assert [event.finish_reason for event in events] == ["cancelled"]
    assert handle._events.empty()


def test_a_handle_that_has_ended_has_nothing_more_to_say() -> None:
    model = random_model("dense")
    handle = submit(Engine(model), random_prompt(model, 9), max_tokens=2)
    assert list(handle)

    def run_once() -> None:
        pytest.fail("an ended handle ran the engine")

    handle._run_once = run_once
    assert list(handle) == []


class Differs(Alone):
    """Another machine that shares the model has found that its kernels do not compute sequences independently."""

    def everywhere(self, here: bool) -> bool:
        return False


def test_sequences_are_independent_where_they_are_on_every_machine() -> None:
    assert is_batch_invariant(random_model("dense"))
    assert not is_batch_invariant(replace(random_model("dense"), share=Differs()))


def test_every_pass_is_made_whatever_the_first_ones_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other machines take part in them, and may have seen something else."""
    passes: list[int] = []

    def logits(model: Model, window: int, sequences: int) -> mx.array:
        passes.append(window)
        return mx.full((sequences, window, 1), len(passes))

    monkeypatch.setattr("headstart.engine.invariance._logits", logits)
    model = replace(random_model("dense"), backend=StockCpu())
    assert not is_batch_invariant(model)
    assert len(passes) == 3 + len(model.backend.windows)


@pytest.mark.parametrize(("family", "shown"), [("dense", True), ("moe", True), ("nemotron_h", False)])
def test_what_the_kernels_tests_show_is_not_measured(
    family: str, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first request waits for no pass that is not its own."""
    passes: list[int] = []

    def logits(model: Model, window: int, sequences: int) -> mx.array:
        passes.append(window)
        return mx.zeros((sequences, window, 1))

    monkeypatch.setattr("headstart.engine.invariance._logits", logits)
    model = replace(family_model(family), backend=cpu_backend())
    assert is_batch_invariant(model)
    assert (not passes) is shown


def limits(model: Model, *counts: int) -> list[tuple[int, bool]]:
    """For so many sequences, how many drafts a step may have, and whether their stats still report them as exact."""
    found = []
    for count in counts:
        running: Any = [SimpleNamespace(stats=Stats(None, None, exact=True)) for _ in range(count)]
        found.append((step_limit(model, running), all(sequence.stats.exact for sequence in running)))
    return found


class Limited(StockCpu):
    """A device whose kernels compute so many rows independently, once they were checked."""

    def __init__(self, most_rows: int, checked: bool = True):
        super().__init__("some rows")
        self.most_rows, self.checked = most_rows, checked

    def is_exact(self, *given: Any) -> bool:
        return self.checked


def test_what_was_checked_is_exact_for_as_many_rows_as_kernels_take() -> None:
    unchecked = replace(random_model("dense"), backend=Limited(16, checked=False))
    assert not is_batch_invariant(unchecked)
    assert limits(unchecked, 1, 100) == [(MAX_K, True)] * 2
    checked = replace(random_model("dense"), backend=Limited(16))
    assert is_batch_invariant(checked)
    assert limits(checked, 1, 4, 8, 9, 16, 17) == [(15, True), (3, True), (1, True), (0, True), (0, True), (0, False)]


def test_many_sequences_draft_no_more_than_our_kernels_take() -> None:
    """The product of more positions is mlx's, which adds up in another order."""
    assert limits(random_model("dense"), 100) == [(MAX_K, True)]
    model = replace(random_model("dense"), backend=Limited(144))
    ks = [k for k, _ in limits(model, 1, 16, 17, 20, 72, 144, 300)]
    assert ks == [15, 8, 7, 6, 1, 0, 0]
    assert limits(model, 144, 145) == [(0, True), (0, False)]
    model = replace(model, backend=Limited(9))
    engine = Engine(model)
    handles = [submit(engine, random_prompt(model, n + 3, n), max_tokens=12, k=8) for n in range(3)]
    answers = [collect(handle) for handle in handles]
    assert [a.tokens for a in answers] == [
        generate(model, random_prompt(model, n + 3, n), max_tokens=12, k=0).tokens for n in range(3)
    ]
    assert all(answer.stats.as_dict()["rounds_by_depth"].get("2") for answer in answers)


def test_experts_in_the_type_of_their_files_give_the_same_texts_at_every_depth() -> None:
    """bfloat16 where native kernels compute, float32 where stock ops do."""
    folder = resolve("tiny-qwen3.5-moe")
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    prompts = ["def add(a, b):\n    return", "class Tree:\n"]
    together = [batch_generate(model, tokenizer, prompts, 16, k=k).texts for k in (0, 3)]
    alone = [batch_generate(model, tokenizer, [prompt], 16, k=2).texts[0] for prompt in prompts]
    assert together == [alone, alone]
