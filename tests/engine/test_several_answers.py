"""Several answers to one prompt: it is read once, and then each answer is a sequence like any other."""

import mlx.core as mx
import pytest

import headstart.engine.prefill
from fixtures import generate, random_model, random_prompt
from headstart.engine import Engine, Event, Handle, Request
from headstart.errors import RequestError
from headstart.sampling import SamplingParams
from headstart.state import PrefixCache

MODEL = random_model()
PROMPT = random_prompt(MODEL, 40)


def answers(engine: Engine, n: int, prompt: list[int] = PROMPT, **params: object) -> list[list[Event]]:
    """The events of each."""
    told: list[list[Event]] = [[] for _ in range(n)]
    for event in engine.submit(Request(prompt, SamplingParams(**params), n=n)):  # type: ignore[arg-type]
        told[event.choice].append(event)
    return told


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("family", ["dense", "next"])
def test_greedy_answers_are_all_the_same_as_the_one(family: str, k: int) -> None:
    model = random_model(family)
    alone = generate(model, PROMPT[:20], max_tokens=12, k=k).tokens
    for each in answers(Engine(model), 3, PROMPT[:20], max_tokens=12, k=k):
        assert tokens(each) == alone
        assert [event.finish_reason for event in each][-1] == "length"


def test_seeded_answers_differ_and_do_not_depend_on_depth_or_number() -> None:
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    three = [tokens(each) for each in answers(Engine(MODEL), 3, k=0, **params)]
    assert len({tuple(each) for each in three}) == 3
    assert [tokens(each) for each in answers(Engine(MODEL), 3, k=4, **params)] == three
    assert [tokens(each) for each in answers(Engine(MODEL), 2, k=2, **params)] == three[:2]


@pytest.mark.parametrize("prefix", [None, 2**26])
def test_the_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch, prefix: int | None) -> None:
    read: list[int] = []
    prefill = headstart.engine.prefill.prefill_by_layers

    def counted(model: object, batch: object, chunk: mx.array, *rest: object) -> object:
        read.append(chunk.shape[1])
        return prefill(model, batch, chunk, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(headstart.engine.prefill, "prefill_by_layers", counted)
    engine = Engine(MODEL, prefix=PrefixCache(prefix) if prefix else None)
    answers(engine, 4, max_tokens=3)
    assert read == [len(PROMPT) - 1]


def test_stop_and_stats_are_each_answers_own() -> None:
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 30}
    free = [tokens(each) for each in answers(Engine(MODEL), 2, **params)]
    stop = next(token for token in free[1] if token not in free[0])
    first, second = answers(Engine(MODEL), 2, stop_ids=[stop], **params)
    assert (tokens(first), first[-1].finish_reason) == (free[0], "length")
    assert (tokens(second), second[-1].finish_reason) == (free[1][: free[1].index(stop) + 1], "stop")
    assert first[-1].stats is not None
    assert second[-1].stats is not None
    assert (first[-1].stats.generation_tokens, second[-1].stats.generation_tokens) == (30, len(tokens(second)))


def test_answers_are_cancelled_together_wherever_they_are() -> None:
    for turns in range(4):
        engine = Engine(MODEL)
        handle = engine.submit(Request(PROMPT, SamplingParams(max_tokens=500), n=3))
        for _ in range(turns):
            engine.run_once()
        handle.cancel()
        ends = [event.choice for event in handle if event.finish_reason == "cancelled"]
        assert sorted(ends) == [0, 1, 2]
        assert not engine.scheduler.busy


def test_answers_wait_until_there_is_a_place_for_all() -> None:
    engine = Engine(MODEL, max_sequences=3)
    one = engine.submit(Request(PROMPT, SamplingParams(max_tokens=30, k=0)))
    engine.run_once()
    three = engine.submit(Request(PROMPT, SamplingParams(max_tokens=5, k=0), n=3))
    engine.run_once()
    assert (
        len(engine.scheduler.running.sequences),
        len(engine.scheduler.prefilling),
        len(engine.scheduler.queue),
    ) == (1, 0, 1)
    assert sum(event.finish_reason == "length" for event in three) == 3
    assert [event.finish_reason for event in one][-1] == "length"


def test_more_answers_than_places_are_refused() -> None:
    for n, problem in ((4, "n is 4, and at most 3"), (0, "n is 0; it must be")):
        with pytest.raises(RequestError, match=problem):
            Engine(MODEL, max_sequences=3).submit(Request(PROMPT, n=n))


class CancelledWhileAsked(Handle):
    """Another thread cancels it after it was asked whether it is."""

    _asked = 0

    @property
    def cancelled(self) -> bool:  # type: ignore[override]
        self._asked += 1
        return self._asked > 1


def test_answers_are_cancelled_together_whenever_that_happens() -> None:
    """Or several machines, of which one decides, would go on with different sequences."""
    engine = Engine(MODEL)
    handle = engine.submit(Request(PROMPT, SamplingParams(max_tokens=20, k=0), n=2))
    while len(engine.scheduler.running.sequences) < 2:
        engine.run_once()
    handle.__class__ = CancelledWhileAsked
    engine.run_once()
    assert len(engine.scheduler.running.sequences) == 2
    engine.run_once()
    assert engine.scheduler.running.sequences == []
    assert [event.finish_reason for event in handle if event.finish_reason] == ["cancelled"] * 2


def test_progress_is_reported_once_though_the_sequences_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they have generated is prefilled too, beyond the end of the prompt."""
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 4)
    engine = Engine(MODEL)
    events: list[Event] = []
    engine.submit(Request(PROMPT, SamplingParams(max_tokens=8, k=0), n=2), listener=events.append)
    while len(engine.scheduler.running.sequences) < 2:
        engine.run_once()
    engine.run_once()
    engine.recovery.recompute_all()
    while engine.run_once():
        pass
    assert [event.prompt_processed for event in events if event.prompt_processed] == list(
        range(4, len(PROMPT) - 1, 4)
    )
    assert [event.finish_reason for event in events if event.finish_reason] == ["length"] * 2


def test_a_prompt_that_is_recomputed_halfway_reports_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 4)
    engine = Engine(MODEL)
    events: list[Event] = []
    engine.submit(Request(PROMPT, SamplingParams(max_tokens=2, k=0)), listener=events.append)
    while not events:
        engine.run_once()
    engine.recovery.recompute_all()
    while engine.run_once():
        pass
    assert [event.prompt_processed for event in events if event.prompt_processed] == list(
        range(4, len(PROMPT) - 1, 4)
    )
