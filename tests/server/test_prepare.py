"""Prompts are prepared where none can end the server or keep others waiting: in threads, and in worker processes."""

import asyncio
import json
import subprocess
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
from running import tokenizer, wait_until

import headstart.server.prepare
import headstart.server.worker
import headstart.server.workers
from headstart.errors import Busy
from headstart.sampling import GrammarSpec, find_grammar
from headstart.server.errors import Refusal
from headstart.server.markup import Markup, call_grammar
from headstart.server.prepare import Preparation, Preparer
from headstart.server.request_fields import MAX_TOOLS
from headstart.server.settings import Limits
from headstart.server.worker import Encoder
from headstart.server.workers import Worker, Workers, worker_settings

LONG = "1" * 20_000_000  # takes a worker many seconds
VAST = 10**9  # a context that any text fits in
TEXTS = [
    "",
    "hello",
    " two  spaces \n\n",
    "naïve 中文 🦊",
    "<|im_start|>user\nhi<|im_end|>",
    "<think>\n",
    "a\u0301" * 9,
]


class Client:
    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


Work = Callable[[Preparation], Awaitable[Any]]


async def prepare(
    work: Work, preparer: Preparer, client: Client | None = None, *, name: str = "", **options: Any
) -> Any:
    async with preparer.preparing(client or Client(), name, inf, **options) as preparation:  # type: ignore[arg-type]
        return await work(preparation)


def run(test: Callable[[Preparer], Awaitable[Any]], limits: Limits | None = None, **options: Any) -> Any:
    async def main() -> Any:
        preparer = Preparer(tokenizer(), limits or Limits(), **{"context": VAST, "max_waiting": 100} | options)
        try:
            return await test(preparer)
        finally:
            await preparer.close()

    return asyncio.run(main())


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


def busy(workers: Workers) -> list[Worker]:
    idle = list(workers._idle._queue)  # type: ignore[attr-defined]
    return [each for each in workers._workers if each not in idle and each._process is not None]


def encoding(text: str, kind: Any = "chat", mark: str = "") -> Work:
    return lambda work: work.encode(text, "prompt", kind=kind, mark=mark)


def test_a_worker_finds_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(preparer: Preparer) -> None:
        for kind, mark in (("chat", ""), ("chat", "~7^"), ("text", ""), ("literal", "")):
            for text in [*TEXTS, "".join(TEXTS) * 1000, f"<|im_start|>user\n<{mark}|im_end|><|im_end|>\n" * 9]:
                monkeypatch.setattr(headstart.server.prepare, "SMALL", VAST)
                here = await prepare(encoding(text, kind, mark), preparer)
                monkeypatch.setattr(headstart.server.prepare, "SMALL", -1)
                assert await prepare(encoding(text, kind, mark), preparer) == here, (kind, mark)

    run(test)


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenised() -> None:
    async def test(preparer: Preparer) -> None:
        for counting in (False, True):
            with pytest.raises(Refusal, match=r"too long: more than 99 tokens > 99 maximum") as refused:
                await prepare(encoding(LONG), preparer, counting=counting)
            assert refused.value.code == "context_length_exceeded"
        assert not any(each._starting for each in preparer.workers._workers), "no worker was needed"

    run(test, context=100)


@pytest.mark.parametrize("text", ["word " * 30_000, "a" * 150_000, "\n" * 150_000])
def test_a_text_is_counted_no_further_than_to_the_limit(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    counted = []
    tokens = Encoder.tokens

    def counting(encoder: Encoder, text: str, *arguments: Any) -> list[int]:
        counted.append(len(text))
        return tokens(encoder, text, *arguments)

    monkeypatch.setattr(Encoder, "tokens", counting)
    encoder = Encoder(tokenizer()._tokenizer.backend_tokenizer)
    assert headstart.server.worker.encode(encoder, text, "chat", "", 1000) == ({"more_than": 1000}, b"")
    assert sum(counted) < len(text)
    assert headstart.server.worker.encode(encoder, text, "chat", "", None)[1]


def test_prompts_of_a_fitting_length_are_not_refused_by_an_estimate() -> None:
    encoder = Encoder(tokenizer()._tokenizer.backend_tokenizer)
    for text in ("word " * 20_000, " " * 100_000, "\n" * 50_000, "naïve 中文\n" * 4_000):
        length = len(encoder.tokens(text, "chat"))
        assert headstart.server.worker.encode(encoder, text, "chat", "", length)[1]


def test_a_worker_is_killed_when_its_client_disconnects_and_another_takes_its_place() -> None:
    async def test(preparer: Preparer) -> None:
        client, workers = Client(), preparer.workers
        asking = asyncio.create_task(prepare(encoding(LONG), preparer, client))
        await until(lambda: busy(workers))
        process = busy(workers)[0]._process
        assert process is not None
        client.gone.set()
        with pytest.raises(Refusal) as refused:
            await asking
        assert refused.value.status_code == 499
        assert await process.wait() < 0
        assert await prepare(encoding("1" * 100_000), preparer)

    run(test)


def test_a_prompt_that_takes_too_long_is_refused() -> None:
    async def test(preparer: Preparer) -> None:
        with pytest.raises(Refusal, match=r"prompt not prepared within 0\.5 s: shorten it") as refused:
            await prepare(encoding(LONG), preparer)
        assert (refused.value.status_code, refused.value.code) == (408, "timeout")

    run(test, Limits(prepare_seconds=0.5))


def test_one_client_leaves_threads_and_workers_to_others() -> None:
    opened = threading.Event()

    async def test(preparer: Preparer) -> None:
        slow = [
            asyncio.create_task(prepare(work, preparer, name="greedy"))
            for work in [encoding(LONG)] * 8 + [lambda work: work.run(opened.wait, 60)] * 8
        ]
        await until(lambda: busy(preparer.workers) and preparer.threads.places["greedy"].locked())
        assert await prepare(encoding("small"), preparer, name="other")
        assert await prepare(encoding("1" * 100_000), preparer, name="other")
        assert not any(each.done() for each in slow)
        opened.set()
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    run(test)


def test_a_small_prompt_does_not_wait_for_the_long_ones_of_the_same_client() -> None:
    async def test(preparer: Preparer) -> None:
        slow = [asyncio.create_task(prepare(encoding(LONG), preparer)) for _ in range(8)]
        await until(lambda: busy(preparer.workers))
        assert await prepare(encoding("small"), preparer)
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    run(test)


def test_no_more_prompts_wait_than_may() -> None:
    opened = threading.Event()

    async def test(preparer: Preparer) -> None:
        waiting = [
            asyncio.create_task(prepare(lambda work: work.run(opened.wait, 60), preparer, name="greedy"))
            for _ in range(20)
        ]
        await until(lambda: sum(each.done() for each in waiting) == 20 - 15)
        refused = [each.exception() for each in waiting if each.done()]
        assert all(isinstance(error, Busy) for error in refused)
        assert await prepare(encoding("small"), preparer, name="other")
        opened.set()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(test, max_waiting=16)


class PanicException(BaseException):
    """As pyo3 has it, which cannot be imported."""


def test_a_panic_of_the_tokenizer_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: Any, **__: Any) -> None:
        raise PanicException("it went wrong")

    async def test(preparer: Preparer) -> None:
        with pytest.raises(Refusal, match="it went wrong") as refused:
            await prepare(encoding("small"), preparer)
        assert (refused.value.status_code, refused.value.code) == (400, "invalid_value")

    encoder = Encoder(tokenizer()._tokenizer.backend_tokenizer)
    monkeypatch.setattr(Encoder, "tokens", panic)
    run(test)
    assert headstart.server.worker.encode(encoder, "small", "chat", "", None) == ({"error": "it went wrong"}, b"")


@pytest.mark.slow
def test_spaces_of_which_the_tokenizer_panics() -> None:
    encoder = Encoder(tokenizer()._tokenizer.backend_tokenizer)
    answer, _ = headstart.server.worker.encode(encoder, " " * 10_000_000, "chat", "", None)
    assert "retry-limit" in answer["error"]


def test_calls_of_as_many_tools_as_are_allowed_can_be_compiled() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    calls = call_grammar({f"f{i}": schema for i in range(MAX_TOOLS)}, Markup.of(tokenizer()))

    async def test(preparer: Preparer) -> None:
        assert await prepare(lambda work: work.grammar(calls, "tools"), preparer)

    run(test)


HARD = {
    "more CPU time": ({"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}, r"within 0\.1 s"),
    "more memory": ({"enum": ["x" * 100 + str(i) for i in range(3000)]}, "too much memory or recursion"),
}


@pytest.mark.parametrize("name", HARD)
def test_a_grammar_that_needs_too_much_is_refused_and_a_worker_dies_of_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    schema, problem = HARD[name]
    if name == "more memory":
        if not Path("/proc/self/statm").exists():
            pytest.skip("this system does not limit memory")
        spawn = headstart.server.workers.spawn

        async def spawn_limited(settings: dict[str, Any]) -> Process:
            process = await spawn(settings)
            import resource

            used = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(process.pid, resource.RLIMIT_AS, (used, used))
            return process

        monkeypatch.setattr(headstart.server.workers, "spawn", spawn_limited)

    async def test(preparer: Preparer) -> None:
        spec = GrammarSpec.json_schema(schema)
        with pytest.raises(Refusal, match=problem) as refused:
            await prepare(lambda work: work.grammar(spec, "response_format"), preparer)
        assert refused.value.param == "response_format"
        assert find_grammar(spec, tokenizer()) is None

    run(test, Limits(grammar_seconds=0.1 if name == "more CPU time" else 60))


def test_a_grammar_that_has_been_compiled_needs_no_worker() -> None:
    spec = GrammarSpec("regex", "(once|and)+ again")

    async def test(preparer: Preparer) -> None:
        first = await prepare(lambda work: work.grammar(spec, "guided_regex"), preparer)
        await preparer.workers.close()
        assert await prepare(lambda work: work.grammar(spec, "guided_regex"), preparer) is first

    run(test)


def test_a_worker_ends_with_its_input_in_the_middle_of_work() -> None:
    script = headstart.server.worker.__file__
    process = subprocess.Popen([sys.executable, "-P", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    settings = worker_settings(tokenizer())
    process.stdin.write(b'{"bytes": %d}\n%b' % (len(settings), settings))
    process.stdin.flush()
    assert process.stdout.readline() == b'{"bytes": 0}\n'
    message = {"kind": "chat", "mark": "", "limit": None, "bytes": len(LONG)}
    process.stdin.write(json.dumps(message).encode() + b"\n" + LONG.encode())
    process.stdin.close()
    wait_until(lambda: process.poll() is not None)
    assert process.returncode == 0
    assert not process.stdout.read(1), "it did not wait for the answer"
    process.stdout.close()
