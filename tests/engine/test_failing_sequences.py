"""A sequence that fails ends alone, with its error; its neighbours generate what they would have generated."""

from collections.abc import Callable

import mlx.core as mx
import pytest

import headstart.engine.pending_step
import headstart.engine.prefill
import headstart.engine.step as loop
from fixtures import batch_of, collect, generate, mlx_lm_greedy, random_model, random_prompt, submit
from headstart.engine import Engine, Handle
from headstart.engine.batch import Batch
from headstart.engine.draft import SOURCES, Source
from headstart.errors import HeadstartError
from headstart.kernels.cpu.backend import CpuBackend
from headstart.kernels.types import PendingDrafts
from headstart.models import Model
from headstart.sampling import Proposal
from headstart.state import KV, PrefixCache, Recurrent


def poison_keys(memory: KV | Recurrent, row: int) -> None:
    if isinstance(memory, KV):
        memory.keys[row] = mx.array(mx.nan)


def poison_stale_values(memory: KV | Recurrent, row: int) -> None:
    """Only where nothing has been written: masked, and yet 0·NaN is NaN."""
    if isinstance(memory, KV):
        memory.values[row, :, -1:] = mx.array(mx.nan)
        memory.values[row, :, 60:64] = mx.array(mx.nan)


def poison_recurrence(memory: KV | Recurrent, row: int) -> None:
    if isinstance(memory, Recurrent):
        memory.state[row] = mx.array(mx.nan)


def poison_convolution(memory: KV | Recurrent, row: int) -> None:
    if isinstance(memory, Recurrent):
        memory.conv[row] = mx.array(mx.inf)
        if memory.pending is not None:  # after three accepted drafts the convolution reads only theirs
            PendingDrafts(*memory.pending).qkv[row] = mx.array(mx.inf)


def poison(engine: Engine, handle: Handle, how: Callable[[KV | Recurrent, int], None]) -> None:
    index = next(i for i, row in enumerate(engine.scheduler.running.sequences) if row.handle is handle)
    assert engine.scheduler.running.batch is not None
    for memory in engine.scheduler.running.batch.trunk_state.layers:
        how(memory, index)


@pytest.mark.parametrize("how", [poison_keys, poison_recurrence, poison_convolution])
@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_sequence_whose_logits_are_not_finite_ends_alone(
    how: Callable[[KV | Recurrent, int], None], k: int
) -> None:
    model = random_model("dense")
    prompts = [random_prompt(model, length, length) for length in (9, 12, 15)]
    expected = [mlx_lm_greedy(model, prompt, 30) for prompt in prompts]
    engine = Engine(model, max_sequences=3)
    handles = [submit(engine, prompt, max_tokens=30, k=k) for prompt in prompts]
    engine.prefill_all()
    poison(engine, handles[1], how)
    late = submit(engine, prompts[1], max_tokens=30, k=k)  # takes its place in the batch
    good, bad, also_good, late_answer = [collect(handle) for handle in (*handles, late)]

    assert bad.finish_reason == "error"
    assert isinstance(bad.error, HeadstartError)
    assert "not finite" in str(bad.error)
    assert bad.tokens == expected[1][: len(bad.tokens)]
    assert len(bad.tokens) < 30
    for answer, tokens in ((good, expected[0]), (also_good, expected[2]), (late_answer, expected[1])):
        assert (answer.finish_reason, answer.error, answer.tokens) == ("length", None, tokens)


@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_stale_values_that_are_not_finite_end_their_sequence_with_stock_ops(k: int, stock_ops: None) -> None:
    test_a_sequence_whose_logits_are_not_finite_ends_alone(poison_stale_values, k)


@pytest.mark.parametrize("k", [0, 3])
def test_cpu_kernels_do_not_read_stale_values(k: int) -> None:
    model = random_model("dense")
    if not isinstance(model.backend, CpuBackend):
        pytest.skip("needs the native CPU kernels")
    prompts = [random_prompt(model, length, length) for length in (9, 12)]
    expected = [generate(model, prompt, max_tokens=30, k=0).tokens for prompt in prompts]
    engine = Engine(model, max_sequences=2)
    handles = [submit(engine, prompt, max_tokens=30, k=k) for prompt in prompts]
    engine.prefill_all()
    poison(engine, handles[1], poison_stale_values)
    assert [collect(handle).tokens for handle in handles] == expected


@pytest.mark.parametrize("token", [0, 101, 255])
@pytest.mark.parametrize("k", [0, 3])
def test_a_single_nan_among_the_logits_is_noticed(token: int, k: int) -> None:
    """argmax may pass over it, or call it token 0."""
    model = random_model.__wrapped__("dense")
    model.weights.lm_head.weight[token] = mx.array(mx.nan)
    answer = generate(model, random_prompt(model, 9), max_tokens=8, k=k)
    assert (answer.finish_reason, answer.tokens) == ("error", [])


def test_only_logits_of_emitted_tokens_must_be_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits after a rejected draft are not used; those after an accepted one are."""
    model = random_model("dense")
    prompts = [random_prompt(model, length, length) for length in (9, 12)]
    truth = [mlx_lm_greedy(model, prompt, 1)[0] for prompt in prompts]
    honest, logits = SOURCES[Source.HEAD], Model.logits

    def first_row_right_second_wrong(model: Model, batch: Batch, k: int, *how: object, **more: object) -> Proposal:
        return honest(model, batch, k)._replace(tokens=mx.array([[truth[0]], [truth[1] ^ 1]], mx.int32))

    def finite_before_the_draft_only(self: Model, hidden: mx.array) -> mx.array:
        return mx.where(mx.arange(hidden.shape[1])[:, None] > 0, mx.nan, logits(self, hidden))

    batch = batch_of(model, *prompts)
    monkeypatch.setitem(SOURCES, Source.HEAD, first_row_right_second_wrong)
    monkeypatch.setattr(Model, "logits", finite_before_the_draft_only)
    round = loop.step(model, batch, 1)
    assert round.verdict.accepted.tolist() == [1, 0]
    assert round.verdict.finite.tolist() == [False, True]


def test_a_sequence_whose_prompt_cannot_be_prefilled_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("dense")
    prompts = [random_prompt(model, length, length) for length in (9, 13, 15)]
    prefill = headstart.engine.prefill.prefill_by_layers

    def failing(model, batch, tokens, following, *rest):  # type: ignore[no-untyped-def]
        if tokens[0].tolist() == prompts[1][: tokens.shape[1]]:
            raise ValueError("no room")
        return prefill(model, batch, tokens, following, *rest)

    monkeypatch.setattr(headstart.engine.prefill, "prefill_by_layers", failing)
    engine = Engine(model)
    good, bad, also_good = [collect(h) for h in [submit(engine, p, max_tokens=12, k=3) for p in prompts]]
    assert (bad.finish_reason, bad.tokens) == ("error", [])
    assert isinstance(bad.error, HeadstartError)
    assert "no room" in str(bad.error)
    assert good.tokens == mlx_lm_greedy(model, prompts[0], 12)
    assert also_good.tokens == mlx_lm_greedy(model, prompts[2], 12)


def test_a_sequence_that_cannot_join_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("dense")
    prompts = [random_prompt(model, length, length) for length in (9, 13)]
    engine = Engine(model)
    handles = [submit(engine, prompt, max_tokens=12, k=3) for prompt in prompts]
    join = engine.scheduler.running.join

    def failing(row):  # type: ignore[no-untyped-def]
        if row.handle is handles[1]:
            raise ValueError("no room")
        join(row)

    monkeypatch.setattr(engine.scheduler.running, "join", failing)
    good, bad = [collect(handle) for handle in handles]
    assert (bad.finish_reason, bad.tokens) == ("error", [])
    assert good.tokens == mlx_lm_greedy(model, prompts[0], 12)


def failing_prefills(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The next `times` chunks find no memory."""
    honest, left = headstart.engine.prefill.prefill_by_layers, iter(range(times))

    def prefill(*args: object) -> object:
        if next(left, None) is not None:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return honest(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(headstart.engine.prefill, "prefill_by_layers", prefill)


def test_where_a_prompt_finds_no_memory_the_prefix_cache_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prefix = random_model("dense"), PrefixCache(10**8)
    engine = Engine(model, prefix=prefix, memory_limit=10**9)
    long = random_prompt(model, 600)
    first = collect(submit(engine, long, max_tokens=4))
    assert prefix.stats().bytes
    failing_prefills(monkeypatch, 1)
    again = collect(submit(engine, random_prompt(model, 40), max_tokens=4))
    assert (again.finish_reason, again.error) == ("length", None)
    assert not prefix.stats().bytes
    assert collect(submit(engine, long, max_tokens=4)).tokens == first.tokens


def test_a_prompt_that_never_finds_memory_ends_though_it_fills_the_prefix_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, prefix = random_model("dense"), PrefixCache(10**8)
    honest = headstart.engine.prefill.prefill_by_layers

    def prefill(model: Model, batch: Batch, *chunk: mx.array) -> object:
        if batch.trunk_state.bounds[0] >= 1024:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return honest(model, batch, *chunk)

    monkeypatch.setattr(headstart.engine.prefill, "prefill_by_layers", prefill)
    engine = Engine(model, prefix=prefix, memory_limit=10**9)
    handle = submit(engine, random_prompt(model, 1200), max_tokens=4)
    for _ in range(20):
        engine.run_once()
    assert not engine.scheduler.busy
    assert collect(handle).finish_reason == "error"


@pytest.mark.parametrize("error", [RuntimeError("[malloc] Unable to allocate 1 bytes."), ValueError("not of yours")])
def test_no_request_fails_because_steps_could_not_be_timed(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model.__wrapped__("dense")  # nothing is known of it

    def failing(*args: object) -> None:
        raise error

    engine, expected = Engine(model), mlx_lm_greedy(model, random_prompt(model, 9), 4)
    with monkeypatch.context() as patch:
        patch.setattr("headstart.engine.engine.time_steps", failing)
        assert collect(submit(engine, random_prompt(model, 9), max_tokens=4)).tokens == expected
    assert "calibration failed" in caplog.text
    assert collect(submit(engine, random_prompt(model, 9), max_tokens=4)).tokens == expected


def test_where_a_prompt_finds_no_memory_the_youngest_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is read after a failure may be the oldest."""
    model = random_model("dense")
    engine = Engine(model)
    old = submit(engine, random_prompt(model, 9), max_tokens=40, k=2)
    young = submit(engine, random_prompt(model, 10), max_tokens=40, k=2)
    engine.prefill_all()
    while not engine.scheduler.running.sequences[1].num_generated:
        engine.run_once()
    engine.recovery.recompute_all()
    engine.scheduler.prefilling.rotate(-1)  # the young one first
    engine.run_once()
    assert [row.handle for row in engine.scheduler.running.sequences] == [young]
    failing_prefills(monkeypatch, 1)
    good, bad = collect(old), collect(young)
    assert (good.finish_reason, good.tokens) == ("length", mlx_lm_greedy(model, random_prompt(model, 9), 40))
    assert bad.finish_reason == "error"


def test_a_prompt_that_cannot_be_remembered_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prefix = random_model("dense"), PrefixCache(10**8)
    long = random_prompt(model, 600)

    def no_room(*args: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(prefix, "store", no_room)
    answer = collect(submit(Engine(model, prefix=prefix, memory_limit=10**9), long, max_tokens=4))
    assert (answer.finish_reason, answer.tokens) == ("length", generate(model, long, max_tokens=4).tokens)


REQUESTS: list[dict[str, object]] = [
    {"k": 3},
    {"k": "auto", "temperature": 1.0, "seed": 7},
    {"k": 0, "repetition_penalty": 1.3},
    {"k": 2, "temperature": 0.8, "seed": 3, "presence_penalty": 0.5, "min_tokens": 5},
]


def start(model: Model, engine: Engine) -> list[Handle]:
    """Requests of all kinds, and the engine in the middle of their answers."""
    prompts = [random_prompt(model, 9 + 4 * i, i) for i in range(len(REQUESTS))]
    handles = [submit(engine, prompt, max_tokens=24, **how) for prompt, how in zip(prompts, REQUESTS, strict=True)]
    engine.prefill_all()  # between steps, slices of prompts are as long as clocks say
    engine.run_once()
    return handles


def alone(handle: Handle, model: Model) -> list[int]:
    return collect(Engine(model).submit(handle.request)).tokens


def failing_where(monkeypatch: pytest.MonkeyPatch, error: Exception, bad: Callable[[Batch], bool]) -> list[int]:
    """From now on a step fails where `bad` is true. Returns the sizes of the batches that did, as they come."""
    honest, failed = loop.step, []

    def step(model: Model, batch: Batch, k: int, guide: object, **sources: object) -> object:
        if bad(batch):
            failed.append(batch.size)
            raise error
        return honest(model, batch, k, guide, **sources)  # type: ignore[arg-type]

    monkeypatch.setattr(headstart.engine.pending_step, "step", step)
    return failed


@pytest.mark.parametrize("family", [pytest.param("dense", marks=pytest.mark.slow), "moe"])
def test_a_step_that_fails_once_costs_nobody_a_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(family)
    engine = Engine(model)
    handles = start(model, engine)
    failed = failing_where(monkeypatch, RuntimeError("the device stumbled"), lambda batch: not failed)
    answers = [collect(handle) for handle in handles]
    assert failed == [4]
    for handle, answer in zip(handles, answers, strict=True):
        assert (answer.finish_reason, answer.error) == ("length", None)
        assert answer.tokens == alone(handle, model)


def test_a_sequence_that_makes_every_step_fail_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch does not show whose fault it was."""
    model = random_model("dense")
    engine = Engine(model)
    handles = start(model, engine)
    bad = engine.scheduler.running.sequences[1].params
    failed = failing_where(monkeypatch, RuntimeError("its sampling is broken\nx"), lambda batch: bad in batch.params)
    answers = [collect(handle) for handle in handles]
    assert failed == [4, 1]
    for i, (handle, answer) in enumerate(zip(handles, answers, strict=True)):
        if i == 1:
            assert answer.finish_reason == "error"
            assert str(answer.error) == "RuntimeError: its sampling is broken"  # in one line
        else:
            assert (answer.finish_reason, answer.tokens) == ("length", alone(handle, model))


@pytest.mark.parametrize("message", ["[malloc] Unable to allocate 1 bytes.", "cudaMalloc failed: out of memory"])
def test_where_memory_runs_out_the_youngest_ends_and_the_others_complete(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("dense")
    engine = Engine(model)
    handles = start(model, engine)
    failed = failing_where(monkeypatch, RuntimeError(message), lambda batch: batch.size > 2)
    answers = [collect(handle) for handle in handles]
    assert failed[0] == 4
    assert [answer.finish_reason for answer in answers] == ["length", "length", "error", "error"]
    assert message in str(answers[-1].error)
    for handle, answer in zip(handles[:2], answers[:2], strict=True):
        assert answer.tokens == alone(handle, model)


def test_where_sequences_fail_only_together_the_youngest_go_until_the_rest_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model("dense")
    engine = Engine(model)
    handles = start(model, engine)
    failing_where(monkeypatch, RuntimeError("too many"), lambda batch: batch.size > 1)
    answers = [collect(handle) for handle in handles]
    assert answers[0].finish_reason == "length"
    assert "error" in {answer.finish_reason for answer in answers}
    for handle, answer in zip(handles, answers, strict=True):
        assert answer.finish_reason == "error" or answer.tokens == alone(handle, model)


def test_an_engine_whose_steps_all_fail_ends_them_and_can_be_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model("dense")
    engine = Engine(model)
    handles = start(model, engine)
    with monkeypatch.context() as patch:
        failing_where(patch, RuntimeError("the device is gone"), lambda batch: True)
        answers = [collect(handle) for handle in handles]
    assert {answer.finish_reason for answer in answers} == {"error"}
    assert all("the device is gone" in str(answer.error) for answer in answers)
    again = collect(engine.submit(handles[0].request))
    assert again.tokens == alone(handles[0], model)
