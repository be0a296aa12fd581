"""Any thread may run an engine, and read what it hands out, whichever thread ran it before."""

from collections.abc import Callable
from threading import Thread
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import headstart
from headstart import Request, SamplingParams
from headstart.engine import Engine, Handle, streams
from headstart.models import Model

PROMPTS = ["def add(a, b):", "the same, the same, the same,", "word " * 600]


@pytest.fixture(scope="module")
def loaded() -> tuple[Model, Any]:
    return headstart.load()


def requests(tokenizer: Any, *, keep_logits: bool = False) -> list[Request]:
    """Return requests that join a batch and leave it at different times."""
    params = [SamplingParams(max_tokens=n, seed=n, temperature=1.0, k="auto" if n == 12 else 3) for n in (12, 21, 30)]
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    return [Request(*each, keep_logits=keep_logits) for each in zip(prompts, params, strict=True)]


def in_a_thread(function: Callable[[], object]) -> None:
    thread = Thread(target=function)
    thread.start()
    thread.join()


def tokens_of(handle: Handle) -> list[int]:
    events = list(handle)
    assert events[-1].error is None
    return [token for event in events for token in event.tokens]


def test_each_iteration_may_be_another_threads(loaded: tuple[Model, Any]) -> None:
    model, tokenizer = loaded
    alone = [tokens_of(Engine(model, tokenizer).submit(request)) for request in requests(tokenizer)]
    engine = Engine(model, tokenizer)
    handles = [engine.submit(request) for request in requests(tokenizer)]
    while engine.scheduler.busy:
        in_a_thread(engine.run_once)
    assert [tokens_of(handle) for handle in handles] == alone
    assert engine.recovery.retries == 0


@pytest.mark.parametrize("threaded", [False, True])
def test_logits_may_be_read_in_another_thread(loaded: tuple[Model, Any], threaded: bool) -> None:
    model, tokenizer = loaded
    request, *_ = requests(tokenizer, keep_logits=True)
    engine = Engine(model, tokenizer)
    if threaded:
        with headstart.EngineThread(engine) as running:
            events = list(running.submit(request))
    else:
        handle = engine.submit(request)
        in_a_thread(lambda: [None for _ in iter(engine.run_once, False)])
        events = list(handle)
    for event in events:
        if event.tokens:
            assert event.logits is not None
            assert np.isfinite(np.array(event.logits.astype(mx.float32))).all()
            assert len(event.logits) == len(event.tokens)


def test_engines_without_work_leave_their_streams_to_others(loaded: tuple[Model, Any]) -> None:
    """A stream is a thread of the operating system, and stays until the process ends."""
    model, tokenizer = loaded
    engines = [Engine(model, tokenizer) for _ in range(3)]
    tokens_of(engines[0].submit(requests(tokenizer)[0]))
    before = [*streams._idle[str(mx.default_device())]]
    for engine in engines:
        tokens_of(engine.submit(requests(tokenizer)[0]))
    assert streams._idle[str(mx.default_device())] == before
