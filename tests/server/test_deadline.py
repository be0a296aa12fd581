"""At its deadline an answer is over, whether or not anybody reads it."""

import asyncio
import time

import pytest
from running import CONTEXT, pooled_model, tiny, tokenizer, wait_until
from scripted import ScriptedRoom

from headstart.engine import Engine, EngineThread, Request
from headstart.server.errors import Refusal
from headstart.server.metrics import Meter, Metrics
from headstart.server.model_pool import ModelPool
from headstart.server.running_request import RunningRequest
from headstart.server.settings import Limits
from headstart.server.states import ServerState


def answer(room: EngineThread, pool: ModelPool, seconds: float) -> RunningRequest:
    meter = Meter(Metrics(ServerState(pool), pool), pool.models[0], "/v1/completions", time.perf_counter())
    deadline = asyncio.get_running_loop().time() + seconds
    return RunningRequest(room, [Request([5])], Limits(), client="", deadline=deadline, meter=meter)


def test_tokens_generated_in_time_and_read_too_late_are_too_late() -> None:
    room = ScriptedRoom(Engine(tiny(True, CONTEXT), tokenizer()))
    room.scripts.append("All of this was said at once.")
    room.start()

    async def read_late() -> None:
        late = answer(room, ModelPool.of_one(room, pooled_model()), seconds=0.2)
        while late._events.empty():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        async for _ in late.events():
            pass

    with pytest.raises(Refusal) as refusal:
        asyncio.run(read_late())
    assert (refusal.value.status_code, refusal.value.code) == (408, "timeout")
    room.close(10)


def test_a_sequence_without_a_listener_is_freed_at_the_deadline() -> None:
    room = EngineThread(Engine(tiny(True, CONTEXT), tokenizer()))

    async def never_read() -> None:
        pool = ModelPool.of_one(room, pooled_model())
        room.start()
        late = answer(room, pool, seconds=0.1)
        await asyncio.sleep(0.3)
        assert late._handles[0].cancelled
        assert pool.models[0].counters.requests["/v1/completions", "timeout"] == 1

    asyncio.run(never_read())
    wait_until(lambda: not room.engine.scheduler.busy)
    room.close(10)
