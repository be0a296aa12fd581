"""The engine for asyncio: coroutines share a batch, and what they leave early is cancelled."""

import asyncio

import pytest

from fixtures import generate, random_model, random_prompt
from headstart.engine import AsyncEngine, Request
from headstart.errors import RequestError
from headstart.sampling import SamplingParams

PROMPTS = [random_prompt(random_model("dense"), 5 + 2 * i, i) for i in range(5)]


async def tokens_of(engine: AsyncEngine, prompt: list[int], max_tokens: int = 20) -> list[int]:
    request = Request(prompt, SamplingParams(max_tokens=max_tokens))
    return [token async for event in engine.stream(request) for token in event.tokens]


def test_concurrent_requests_share_a_batch_and_get_their_own_answers() -> None:
    model, together = random_model("dense"), 0

    async def main() -> list[list[int]]:
        nonlocal together
        async with AsyncEngine(model, max_sequences=8) as engine:

            async def watch() -> None:
                nonlocal together
                while True:
                    together = max(together, engine._thread.running)
                    await asyncio.sleep(0)

            watcher = asyncio.create_task(watch())
            answers = await asyncio.gather(*[tokens_of(engine, prompt, 60) for prompt in PROMPTS])
            watcher.cancel()
            return answers

    assert asyncio.run(main()) == [generate(model, prompt, max_tokens=60).tokens for prompt in PROMPTS]
    assert together > 1


def test_a_stream_that_is_left_early_is_cancelled() -> None:
    async def main() -> None:
        async with AsyncEngine(random_model("dense")) as engine:
            stream = engine.stream(Request(PROMPTS[0], SamplingParams(max_tokens=2000)))
            assert (await anext(stream)).tokens
            await stream.aclose()
            while engine._thread.engine.scheduler.busy:
                await asyncio.sleep(0.01)
            assert len(await tokens_of(engine, PROMPTS[1])) == 20

    asyncio.run(asyncio.wait_for(main(), 60))


def test_leaving_the_block_waits_for_running_requests() -> None:
    async def main() -> list[int]:
        async with AsyncEngine(random_model("dense")) as engine:
            task = asyncio.create_task(tokens_of(engine, PROMPTS[0], 30))
            while not engine._thread.engine.scheduler.busy:
                await asyncio.sleep(0)
        return await task

    assert len(asyncio.run(main())) == 30


def test_an_error_leaves_the_block_at_once_and_a_bad_request_raises_its_own() -> None:
    async def main() -> None:
        async with AsyncEngine(random_model("dense")) as engine:
            with pytest.raises(RequestError, match="prompt is empty"):
                await tokens_of(engine, [])
            task = asyncio.create_task(tokens_of(engine, PROMPTS[0], 2000))
            while not engine._thread.engine.scheduler.busy:
                await asyncio.sleep(0)
            task.cancel()
            raise KeyError("of the caller")

    with pytest.raises(KeyError):
        asyncio.run(asyncio.wait_for(main(), 60))
