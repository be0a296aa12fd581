"""Engines that take turns in one thread: what each says, and the memory that they share."""

from concurrent.futures import Future

import pytest

from fixtures import collect, generate, random_model, random_prompt
from headstart.engine import DeviceThread, Engine, EngineThread, Request
from headstart.errors import EngineDown
from headstart.sampling import SamplingParams

MODELS = [random_model("dense", seed=seed) for seed in (0, 1)]
PROMPTS = [random_prompt(MODELS[0], 9 + 3 * i, i) for i in range(4)]


def request(prompt: list[int], tokens: int = 20) -> Request:
    return Request(prompt, SamplingParams(max_tokens=tokens, k=2))


def test_engines_in_turn_say_what_each_says_alone_also_after_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    device = DeviceThread()
    threads = [EngineThread(Engine(model), device) for model in MODELS]
    honest, deaths = threads[0].engine.run_once, iter(range(1))

    def dying() -> bool:
        if threads[0].engine.scheduler.running.sequences and next(deaths, None) is not None:
            raise SystemExit("killed")
        return honest()

    monkeypatch.setattr(threads[0].engine, "run_once", dying)
    device.start()
    handles = [[thread.submit(request(prompt)) for prompt in PROMPTS] for thread in threads]
    answers = [[collect(handle).tokens for handle in each] for each in handles]
    device.close(60)
    assert device.restarts == 1
    assert answers == [[generate(model, prompt, max_tokens=20, k=2).tokens for prompt in PROMPTS] for model in MODELS]


def test_sequences_of_all_engines_share_the_memory_and_none_starves() -> None:
    device = DeviceThread()
    engines = [Engine(model) for model in MODELS]
    for engine in engines:
        EngineThread(engine, device)
    prompts = [PROMPTS[0], random_prompt(MODELS[0], 900)]
    needed = [engines[0].scheduler._bytes([_sequence(engines[0], prompt)]) for prompt in prompts]
    device.memory = needed[1]  # the long one fits alone, and two or more short ones do
    assert 2 * needed[0] < device.memory < needed[0] + needed[1]
    most = 0

    def watch(engine: Engine) -> None:
        honest = engine.run_once

        def run_once() -> bool:
            nonlocal most
            more = honest()
            most = max(most, sum(each.scheduler.admitted_bytes for each in engines))
            return more

        engine.run_once = run_once  # type: ignore[method-assign]

    for engine in engines:
        watch(engine)
    short = [engines[0].submit(request(prompts[0])) for _ in range(6)]
    long = engines[1].submit(request(prompts[1]))
    device.start()
    assert collect(long).tokens == generate(MODELS[1], prompts[1], max_tokens=20, k=2).tokens
    answers = [collect(handle).tokens for handle in short]
    device.close(60)
    assert answers == [generate(MODELS[0], prompts[0], max_tokens=20, k=2).tokens] * 6
    assert 0 < most <= device.memory


def _sequence(engine: Engine, prompt: list[int]) -> object:
    """The request as the engine queues it."""
    engine.submit(request(prompt))
    (sequence,) = engine.scheduler.queue.all()
    engine.scheduler.queue.remove(sequence)
    return sequence


def test_a_function_runs_between_iterations_and_gives_way_to_them() -> None:
    device = DeviceThread()
    thread = EngineThread(Engine(MODELS[0]), device)
    device.start()

    def long() -> int:
        handle = thread.submit(request(PROMPTS[0]))
        while thread.engine.scheduler.busy:
            device.give_way()
        return len(collect(handle).tokens)

    def fail() -> None:
        raise ValueError("no such file")

    assert device.call(long).result(60) == 20
    failed: Future[None] = device.call(fail)
    with pytest.raises(ValueError, match="no such file"):
        failed.result(60)
    assert device.healthy
    device.close(60)
    with pytest.raises(EngineDown):
        device.call(long).result(60)
