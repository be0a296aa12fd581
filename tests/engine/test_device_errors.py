"""Errors of Metal, put in on purpose: nobody's answer changes, or one request ends and says why.

A command that fails takes with it what was handed over beside it, and MLX reports it once. So the tests spoil the
state of other sequences too, as the device would.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest

import headstart.engine.prefill
from fixtures import collect, generate, random_model, random_prompt, submit
from headstart.engine import DeviceThread, Engine, EngineThread, Request
from headstart.engine.batch import Batch
from headstart.engine.device_error import is_failed_command, is_out_of_memory, is_timeout, raise_if_lost
from headstart.engine.pending_step import PendingStep
from headstart.engine.recovery import MOST_FAILURES, NARROWEST
from headstart.errors import DeviceLost, EngineDown, HeadstartError, OutOfMemory
from headstart.kernels.cpu.backend import StockCpu
from headstart.models import Model
from headstart.sampling import SamplingParams
from headstart.state import CHUNK, PrefixCache
from metal_errors import HANG, IGNORED, INSUFFICIENT, INTERACTIVITY, RESOURCES, TIMEOUT

MODEL = random_model("dense")
PROMPTS = [random_prompt(MODEL, length, length) for length in (9, 13, 16)]
LONG = random_prompt(MODEL, 1300, 1)
TOKENS = 12


@pytest.fixture(autouse=True)
def cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac's GPU reads whole chunks."""
    monkeypatch.setattr(StockCpu, "cut", None)


def plain(prompt: list[int], tokens: int = TOKENS) -> list[int]:
    return generate(MODEL, prompt, max_tokens=tokens, k=2).tokens


def spoil(batch: Batch | None) -> None:
    """Make the state of a batch what it is after a command failed: anything."""
    for layer in batch.trunk_state.layers if batch is not None else ():
        for array in layer.arrays():
            array[:] = mx.array(17, array.dtype)


@pytest.mark.parametrize(
    ("message", "memory", "timeout", "command"),
    [
        (TIMEOUT, False, True, True),
        (INTERACTIVITY, False, True, True),
        (HANG, False, False, True),
        (INSUFFICIENT, True, False, True),
        (RESOURCES, True, False, False),
        ("[malloc] Unable to allocate 1 bytes.", True, False, False),
        (TIMEOUT.replace("Caused GPU Timeout Error", "Délai"), False, True, True),
        ("broken", False, False, False),
    ],
)
def test_errors_are_told_apart_by_their_messages(message: str, memory: bool, timeout: bool, command: bool) -> None:
    error = RuntimeError(message)
    assert (is_out_of_memory(error), is_timeout(error), is_failed_command(error)) == (memory, timeout, command)
    raise_if_lost(error)
    with pytest.raises(DeviceLost, match=r"driver ignores this process .* start it again .*SubmissionsIgnored"):
        raise_if_lost(RuntimeError(IGNORED))


class Prefills:
    """Notes where every pass over a prompt begins and ends, and lets those fail that are too wide."""

    def __init__(self, patch: pytest.MonkeyPatch, error: str, widest: int, begin: int = 0):
        self.passes: list[tuple[int, int]] = []
        honest = headstart.engine.prefill.prefill_by_layers

        def prefill(model: Model, batch: Batch, tokens: mx.array, *rest: Any) -> Any:
            start, width = batch.trunk_state.bounds[0], tokens.shape[1]
            self.passes.append((start, start + width))
            if start + width > begin and width > widest:
                raise RuntimeError(error)
            return honest(model, batch, tokens, *rest)

        patch.setattr(headstart.engine.prefill, "prefill_by_layers", prefill)


@pytest.mark.parametrize("error", [TIMEOUT, INTERACTIVITY])
def test_a_timeout_narrows_the_passes_over_prompts_and_costs_nobody_a_token(
    monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    expected = [plain(prompt) for prompt in (PROMPTS[0], LONG)]
    engine = Engine(MODEL)
    handles = [submit(engine, prompt, max_tokens=TOKENS, k=2) for prompt in (PROMPTS[0], LONG)]
    seen = Prefills(monkeypatch, error, widest=CHUNK // 4)
    assert [collect(handle).tokens for handle in handles] == expected
    assert engine.recovery.widest_pass == CHUNK // 4
    assert engine.recovery.recomputed["device"] >= 2
    after = seen.passes[-len(LONG) // engine.recovery.widest_pass :]
    assert all(end - start <= engine.recovery.widest_pass for start, end in after)
    assert all(before[1] == later[0] for before, later in pairwise(after))


def test_a_prompt_that_times_out_late_goes_on_from_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(LONG)
    engine = Engine(MODEL, prefix=PrefixCache(10**8), memory_limit=10**9)
    seen = Prefills(monkeypatch, TIMEOUT, widest=CHUNK // 2, begin=1100)
    handle = submit(engine, LONG, max_tokens=TOKENS, k=2)
    assert collect(handle).tokens == expected
    assert seen.passes == [(0, 512), (512, 1024), (1024, 1299), (1024, 1280), (1280, 1299)]
    monkeypatch.undo()
    again = collect(submit(engine, LONG, max_tokens=TOKENS, k=2))
    assert (again.tokens, again.stats and again.stats.prefix_cache_hit) == (expected, 1024)


def fail_step(
    patch: pytest.MonkeyPatch, error: str, spoiled: Callable[[], list[Batch | None]], times: int = 1
) -> None:
    """Have the next steps that are read fail, with all that is on the device."""
    left, honest = iter(range(times)), PendingStep.read

    def read(self: PendingStep) -> list[list[int]]:
        if next(left, None) is None:
            return honest(self)
        for batch in spoiled():
            spoil(batch)
        raise RuntimeError(error)

    patch.setattr(PendingStep, "read", read)


@pytest.mark.parametrize("error", [TIMEOUT, HANG])
def test_a_command_that_fails_takes_a_prompt_in_the_middle_with_it(
    monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    expected = [plain(PROMPTS[0], 30), plain(LONG)]
    engine = Engine(MODEL)
    first = submit(engine, PROMPTS[0], max_tokens=30, k=2)
    while not engine.scheduler.running.sequences:
        engine.run_once()
    second = submit(engine, LONG, max_tokens=TOKENS, k=2)
    while not (engine.scheduler.prefilling and engine.scheduler.prefilling[0].num_prefilled):
        engine.run_once()
    waiting = engine.scheduler.prefilling
    fail_step(monkeypatch, error, lambda: [engine.scheduler.running.batch, *(each.batch for each in waiting)])
    assert [collect(handle).tokens for handle in (first, second)] == expected
    assert engine.recovery.widest_pass == (CHUNK // 2 if error == TIMEOUT else CHUNK)
    assert engine.recovery.retries == 1


def test_where_a_command_finds_no_memory_the_youngest_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [plain(prompt) for prompt in PROMPTS]
    engine = Engine(MODEL)
    handles = [submit(engine, prompt, max_tokens=TOKENS, k=2) for prompt in PROMPTS]
    engine.prefill_all()
    fail_step(monkeypatch, INSUFFICIENT, lambda: [engine.scheduler.running.batch])
    *others, last = [collect(handle) for handle in handles]
    assert [answer.tokens for answer in others] == expected[:2]
    assert isinstance(last.error, OutOfMemory)
    assert engine.recovery.widest_pass == CHUNK


def test_where_there_are_too_many_buffers_the_prefix_cache_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, times = PrefixCache(10**8), iter(range(1))
    engine = Engine(MODEL, prefix=prefix, memory_limit=10**9)
    collect(submit(engine, LONG, max_tokens=4))
    assert prefix.stats().bytes
    honest = headstart.engine.prefill.prefill_by_layers

    def prefill(*arguments: Any) -> Any:
        if next(times, None) is not None:
            raise RuntimeError(RESOURCES)
        return honest(*arguments)

    monkeypatch.setattr(headstart.engine.prefill, "prefill_by_layers", prefill)
    assert collect(submit(engine, PROMPTS[0], max_tokens=TOKENS, k=2)).tokens == plain(PROMPTS[0])
    assert not prefix.stats().bytes


def test_a_prompt_whose_every_pass_times_out_ends_alone_and_names_the_ways_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = plain(PROMPTS[0], 30)
    engine = Engine(MODEL)
    seen = Prefills(monkeypatch, INTERACTIVITY, widest=8, begin=600)
    good, bad = (submit(engine, prompt, max_tokens=30, k=2) for prompt in (PROMPTS[0], LONG))
    answer, ended = collect(good), collect(bad)
    assert (answer.error, answer.tokens) == (None, expected)
    assert isinstance(ended.error, HeadstartError)
    for part in ("held up the display", "let the display sleep", "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1", "Impacting"):
        assert part in str(ended.error)
    assert engine.recovery.widest_pass == NARROWEST
    assert sum(end > 600 for _, end in seen.passes) == MOST_FAILURES + 1


def test_steps_that_go_on_to_fail_end_the_youngest(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(PROMPTS[0])
    engine = Engine(MODEL)
    handles = [submit(engine, prompt, max_tokens=TOKENS, k=2) for prompt in PROMPTS[:2]]
    engine.prefill_all()
    fail_step(monkeypatch, TIMEOUT, list, times=MOST_FAILURES + 1)
    first, last = [collect(handle) for handle in handles]
    assert (first.error, first.tokens) == (None, expected)
    assert isinstance(last.error, HeadstartError)


def test_a_failure_that_shows_in_the_logprobs_is_no_sequences_own(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(PROMPTS[0])
    engine, times = Engine(MODEL), iter(range(1))
    honest = PendingStep.emit

    def emit(self: PendingStep, *arguments: Any) -> None:
        if next(times, None) is not None:
            spoil(engine.scheduler.running.batch)
            raise RuntimeError(HANG)
        honest(self, *arguments)

    monkeypatch.setattr(PendingStep, "emit", emit)
    answer = collect(submit(engine, PROMPTS[0], max_tokens=TOKENS, k=2, logprobs=True))
    assert (answer.error, answer.tokens) == (None, expected)


@pytest.fixture
def two_engines() -> Iterator[tuple[DeviceThread, list[EngineThread]]]:
    device = DeviceThread()
    yield device, [EngineThread(Engine(random_model("dense", seed=seed)), device) for seed in (0, 1)]
    device.close(0)


def test_a_command_that_fails_takes_with_it_what_other_engines_have_on_the_device(
    monkeypatch: pytest.MonkeyPatch, two_engines: tuple[DeviceThread, list[EngineThread]]
) -> None:
    device, threads = two_engines
    engines = [thread.engine for thread in threads]
    expected = [generate(engine.model, LONG, max_tokens=40, k=2).tokens for engine in engines]
    handles = [submit(engine, LONG, max_tokens=40, k=2) for engine in engines]
    while not all(engine.scheduler.running.sequences for engine in engines):
        device._take_turns()
    fail_step(monkeypatch, TIMEOUT, lambda: [engine.scheduler.running.batch for engine in engines])
    device.start()
    assert [collect(handle).tokens for handle in handles] == expected
    assert [engine.recovery.recomputed["device"] for engine in engines] == [1, 1]


def test_an_engine_whose_device_is_lost_says_so_to_who_iterates(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MODEL)
    Prefills(monkeypatch, IGNORED, widest=0)
    handle = submit(engine, PROMPTS[0], max_tokens=TOKENS)
    with pytest.raises(DeviceLost, match="start it again"):
        collect(handle)


def test_a_lost_device_ends_all_requests_and_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, two_engines: tuple[DeviceThread, list[EngineThread]]
) -> None:
    device, threads = two_engines
    device.start()
    assert device.healthy
    fail_step(monkeypatch, IGNORED, list)
    request = Request(PROMPTS[0], SamplingParams(max_tokens=TOKENS))
    answer = collect(threads[0].submit(request))
    assert isinstance(answer.error, EngineDown)
    assert "driver ignores this process" in str(answer.error)
    assert (device.lost, device.healthy, device.restarts) == (True, False, 0)
    with pytest.raises(EngineDown, match="driver ignores this process"):
        threads[1].submit(request)


def test_a_device_that_is_lost_while_a_model_loads_is_noticed(
    two_engines: tuple[DeviceThread, list[EngineThread]],
) -> None:
    device, _ = two_engines
    device.start()

    def load() -> None:
        raise RuntimeError(IGNORED)

    with pytest.raises(RuntimeError, match="SubmissionsIgnored"):
        device.call(load).result(60)
    assert device._thread is not None
    device._thread.join(60)
    assert device.lost
