"""Streams go on while a long prompt is read, prompts share the time that is left, and no text depends on it."""

import random
from itertools import pairwise

import pytest
from simulated_device import SimulatedDevice, Stream

from fixtures import FAMILIES, collect, generate, random_model, random_prompt, submit
from headstart.engine import Engine
from headstart.engine.prefill_time import PrefillTime
from headstart.engine.prompt_pass import PromptPass
from headstart.engine.slices import ALONE, GRID, OLDEST_EVERY, READ_STEPS, Slices
from headstart.kernels.cpu.backend import StockCpu
from headstart.state import PrefixCache

LONG = 2500

# Seconds as measured: the built-in model and a model of 1.5 billion parameters on two cores.
SMALL = {"token": 0.0006, "step": 0.0086, "context": 0.0002, "launch": 0.002}
LARGE = {"token": 0.04, "step": 0.15, "context": 0.004, "launch": 0.05}


def streaming(
    device: SimulatedDevice, patch: pytest.MonkeyPatch, streams: int = 4, length: int = LONG, **sizes: int
) -> tuple[Engine, list[Stream], Stream]:
    """Run `streams` until each has some tokens; then submit a long prompt and run until its first token."""
    device.install(patch)
    model = random_model("dense", **sizes)
    engine = Engine(model, max_sequences=16, prefix=PrefixCache(0))
    running = [Stream(device, engine, random_prompt(model, 9, n), max_tokens=5000) for n in range(streams)]
    while not all(len(stream.times) > 5 for stream in running):
        engine.run_once()
    long = Stream(device, engine, random_prompt(model, length, 9), max_tokens=4)
    return engine, running, long


def until(engine: Engine, *streams: Stream) -> None:
    """Run until each of these has its first token."""
    while not all(stream.times for stream in streams):
        assert engine.run_once()


@pytest.mark.parametrize("costs", [SMALL, LARGE], ids=["small", "large"])
def test_running_streams_wait_four_of_their_steps_at_most(
    costs: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice(**costs)
    engine, running, long = streaming(device, monkeypatch)
    until(engine, long)
    spare = GRID / 2 * (device.token + device.context * LONG / 1000)  # of rounding to the grid
    least = device.pass_seconds(LONG, GRID)
    bound = device.step + max(3 * device.step + spare, least)
    for stream in running:
        assert max(stream.gaps(long.submitted, long.times[0])) <= 1.02 * bound
    share = device.prompt_seconds(LONG) / long.first
    narrow = device.pass_seconds(LONG // 2, 512) / 512 * GRID / device.pass_seconds(LONG // 2, GRID)
    assert share > 0.5 * min(1, 2 * narrow)
    assert max(end - begin for _, begin, end in device.passes[-20:]) < 200


def test_a_prompt_is_read_in_whole_chunks_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(**SMALL)
    device.install(monkeypatch)
    model = random_model("dense")
    engine = Engine(model, prefix=PrefixCache(0))
    stream = Stream(device, engine, random_prompt(model, 1300), max_tokens=3)
    until(engine, stream)
    assert [(begin, end) for _, begin, end in device.passes] == [(0, 512), (512, 1024), (1024, 1299)]
    assert stream.first == pytest.approx(device.prompt_seconds(1299) + device.step)


def test_a_slow_device_reads_no_longer_than_a_second_before_it_looks_for_other_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimulatedDevice(**LARGE)
    device.install(monkeypatch)
    model = random_model("dense")
    engine = Engine(model, prefix=PrefixCache(0))
    stream = Stream(device, engine, random_prompt(model, LONG), max_tokens=3)
    for _ in range(20):
        engine.run_once()
    times = [when for when, *_ in device.passes]
    assert all(b - a <= 1.4 * ALONE for a, b in pairwise(times[5:]))  # it has learnt how long they take
    stream.handle.cancel()
    engine.run_once()
    assert stream.ended == device.now == device.ready
    assert not engine.scheduler.busy


@pytest.mark.parametrize(("token", "step"), [(0.01, 1 / 15), (0.004, 1 / 40)])
def test_where_prompts_cannot_be_cut_streams_wait_for_some_layers(
    token: float, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Macs that read 100 and 250 tokens a second: a chunk takes five and two seconds, a layer of 28 little."""
    device = SimulatedDevice(token=token, step=step, asynchronous=True, cut=None)
    engine, running, long = streaming(device, monkeypatch, num_hidden_layers=28)
    until(engine, long)
    read = [(begin, end) for _, begin, end in device.passes if end > 20]
    assert read == [*((begin, begin + 512) for begin in range(0, 2048, 512)), (2048, LONG - 1)]
    gaps = running[0].gaps(long.submitted, long.times[0])
    assert max(gaps) < 0.5
    assert max(gaps) <= max(READ_STEPS * step, 512 * token / 28) + 2 * step
    assert LONG * token / long.first > 0.7


def test_a_step_is_timed_by_the_device_and_not_by_a_host_that_describes_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An H200 with 35B-A3B takes as long for a layer of a pass, whose tokens are eight times as many there."""
    device = SimulatedDevice(token=1.6e-4, step=0.0028, asynchronous=True, cut=64, widest=1024, describe=0.001)
    device.ahead = 2
    engine, running, long = streaming(device, monkeypatch, num_hidden_layers=40)
    until(engine, long)
    gaps = running[0].gaps(long.submitted, long.times[0])
    layer = device.widest * device.token / 40
    assert max(gaps) <= (READ_STEPS + 1) * device.step + 2 * layer + 2 * device.describe
    assert device.prompt_seconds(LONG) / long.first > 0.5


def test_streams_make_up_for_pieces_that_take_longer_than_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(token=0.004, step=0.025, asynchronous=True, cut=None)
    engine, running, long = streaming(device, monkeypatch)
    until(engine, long)
    layers = len(engine.model.layers)
    assert max(running[0].gaps(long.submitted, long.times[0])) <= 512 * device.token / layers + 2 * device.step
    launched = [when for when, _, end in device.passes if end > 20][1:]  # the first was not charged: none was timed
    for before, after in pairwise(launched):
        assert after - before == pytest.approx((1 + 1 / READ_STEPS) * 512 * device.token, rel=0.03)


def test_a_prompt_is_read_however_short_steps_are(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(token=0.004, step=0.0002, launch=0.01)
    engine, _, long = streaming(device, monkeypatch, streams=1, length=80)
    until(engine, long)
    own = sum(device.pass_seconds(begin, end - begin) for _, begin, end in device.passes if end - begin == GRID)
    assert long.first < own / 0.7


def test_a_short_prompt_waits_for_one_slice_of_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(**SMALL)
    engine, _, long = streaming(device, monkeypatch)
    for _ in range(20):
        engine.run_once()
    short = Stream(device, engine, random_prompt(engine.model, 60, 5), max_tokens=3)
    until(engine, short)
    turns = OLDEST_EVERY / (OLDEST_EVERY - 1)
    own = device.prompt_seconds(60) * (1 + 1 / READ_STEPS) * turns
    assert short.first < own + 3 * (READ_STEPS + 1) * device.step
    assert not long.times


def test_short_prompts_share_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(**SMALL)
    engine, running, long = streaming(device, monkeypatch)
    for _ in range(20):
        engine.run_once()
    shorts = [Stream(device, engine, random_prompt(engine.model, 5, n), max_tokens=9) for n in range(4)]
    until(engine, *shorts)
    assert len({stream.times[0] for stream in shorts}) <= 2
    assert max(running[0].gaps(shorts[0].submitted, device.now)) < 5 * device.step
    assert not long.times


def test_short_prompts_that_keep_coming_do_not_stop_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(**SMALL)
    engine, _, long = streaming(device, monkeypatch, length=600)
    shorts = []
    while not long.times:
        if len(engine.scheduler.prefilling) < 3:
            shorts.append(Stream(device, engine, random_prompt(engine.model, 100, len(shorts)), max_tokens=1))
            assert len(shorts) < 50
        engine.run_once()
    read = sum(end - begin for when, begin, end in device.passes if when >= long.submitted)
    assert read < 600 * (OLDEST_EVERY + 1)
    assert len(shorts) > 5


def test_a_long_prompt_is_cancelled_after_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(**SMALL)
    engine, running, long = streaming(device, monkeypatch)
    for _ in range(10):
        engine.run_once()
    begun = device.now
    long.handle.cancel()
    engine.run_once()
    assert long.ended is not None
    assert long.ended - begun <= device.step
    before = [len(stream.tokens) for stream in running]
    for _ in range(3):
        engine.run_once()
    assert [len(stream.tokens) for stream in running] > before
    assert not engine.scheduler.prefilling


def random_slices(patch: pytest.MonkeyPatch, seed: int) -> list[int]:
    """Have prompts cut anywhere, whatever runs, and in any order."""
    rng, widths = random.Random(seed), list[int]()

    def width(self: Slices, begin: int, end: int) -> int:
        widths.append(rng.choice((1, 2, 7, 8, 13, 40)))
        return widths[-1]

    patch.setattr(Slices, "width", width)
    patch.setattr(Slices, "pieces", lambda self, reading: rng.randint(0, reading.left))
    patch.setattr(Slices, "next", lambda self, waiting: rng.choice(list(waiting)))
    return widths


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_do_not_depend_on_the_slices(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and seeded, with drafts and without, on a hit and on a miss."""
    model = random_model(family)
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 32)
    prompts = [random_prompt(model, length, length) for length in (3, 33, 70, 101)]
    asked = [
        {"k": 0},
        {"k": 3},
        {"k": "auto", "temperature": 0.9, "seed": 5},
    ]
    expected = [generate(model, prompt, max_tokens=12, **each).tokens for prompt in prompts for each in asked]
    for seed in range(2):
        with monkeypatch.context() as patch:
            widths = random_slices(patch, seed)
            engine = Engine(model, prefix=PrefixCache(10**8, chunk=32), memory_limit=10**9)
            for _ in range(2):
                handles = [submit(engine, prompt, max_tokens=12, **each) for prompt in prompts for each in asked]
                answers = [collect(handle) for handle in handles]
                assert [answer.tokens for answer in answers] == expected
                assert all(answer.stats is not None and answer.stats.exact for answer in answers)
            assert len(widths) > 50


def test_times_of_passes_are_learnt_by_context_length() -> None:
    time = PrefillTime(4)
    assert time.seconds(0, 8) is None
    for seconds in (9.0, 0.5, 0.5):  # the first of a process takes longer
        time.observe(0, 500, seconds)
    assert time.seconds(0, 500) == pytest.approx(0.5)
    assert time.width(0, 0.5) == pytest.approx(500)
    assert time.seconds(3000, 500) == pytest.approx(0.5)  # the nearest that is known
    time.observe(4000, 4500, 1.0)
    assert time.seconds(3000, 500) == pytest.approx(1.0)
    assert time.seconds(100, 500) == pytest.approx(0.5)


def reading(width: int, **timed: float) -> PromptPass:
    return PromptPass(0, width, 4, iter(()), 4, **timed)  # type: ignore[arg-type]


def test_other_engines_streams_count_too() -> None:
    slices = Slices(StockCpu(), pieces=4)
    slices.time.observe(0, 512, 0.52)
    slices.begin(running=False)
    assert slices.width(0, 4000) == 512
    assert slices.pieces(reading(512)) == 4
    slices.others = 0.02
    slices.begin(running=False)
    assert slices.width(0, 4000) == pytest.approx(4 * 0.06 * 1000, abs=GRID)
    assert slices.pieces(reading(232)) == 1
    slices.begin(running=False)
    assert slices.pieces(reading(100)) == 2


def test_a_pass_of_which_nothing_is_known_is_measured_by_its_first_piece() -> None:
    slices = Slices(StockCpu(), pieces=4)
    slices.others = 0.02
    slices.begin(running=False)
    assert slices.pieces(reading(50)) == 4  # as narrow as may be
    slices._cut = None
    slices.begin(running=False)
    assert slices.pieces(reading(512)) == 1
    slices.begin(running=False)
    assert slices.pieces(reading(512, seconds=0.02, timed=1)) == 3
