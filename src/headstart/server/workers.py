"""The worker processes of a server: started ahead, killed when they take too long, and restarted."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import HeadstartError
from ..sampling.bounds import STACK
from .threads import ClientPlaces

PROCESSES = 2
START_SECONDS = 60.0
PIECE = 2**16  # bytes that are sent or received at a time


Json = dict[str, Any]


class Answer(NamedTuple):
    json: Json
    data: bytearray


class WorkerDied(HeadstartError):
    """A worker process ended, most likely because of its request."""


class Workers:
    """A few worker processes, which clients take in turn."""

    def __init__(self, tokenizer: TokenizerWrapper):
        settings = cache(partial(worker_settings, tokenizer))
        self._workers = [Worker(settings) for _ in range(PROCESSES)]
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self._places = ClientPlaces(PROCESSES - 1)  # one is always left to others

    def start(self) -> None:
        """Start the processes in the background."""
        for worker in self._workers:
            worker.start()

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))

    @asynccontextmanager
    async def worker(self, client: str) -> "AsyncIterator[Worker]":
        """Lend a worker to a client when it is its turn."""
        async with self._places[client]:
            worker = await self._idle.get()
            try:
                yield worker
            finally:
                self._idle.put_nowait(worker)


class Worker:
    """A worker process (see worker.py), restarted whenever it died or a call did not come to its end."""

    def __init__(self, settings: Callable[[], bytes]):
        self._settings = settings
        self._starting: asyncio.Task[Process] | None = None
        self._process: Process | None = None
        self._closed = False

    def start(self) -> "asyncio.Task[Process]":
        """Start the process in the background, unless it runs or is being started."""
        running = self._process is not None and self._process.returncode is None
        if self._starting is None or (self._starting.done() and not running):
            self._starting = asyncio.create_task(self._start())
        return self._starting

    async def call(self, message: Json, data: bytes = b"") -> Answer:
        """Return the answer to a message and the data that it is about.

        Raises:
            TimeoutError: the process exceeded the CPU time that the message allowed.
            WorkerDied: it died otherwise.
        """
        process = await asyncio.shield(self.start())
        try:
            return await exchange(process, message, data)
        except BaseException:  # also where the caller was cancelled: the process is still working
            if not self._closed:
                self._starting = asyncio.create_task(self._start())
            raise

    async def close(self) -> None:
        """Kill the process and wait for its end."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._kill()

    async def _start(self) -> Process:
        await self._kill()
        self._process = await spawn(await asyncio.to_thread(self._settings))
        return self._process

    async def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


async def spawn(settings: bytes) -> Process:
    """Start a process and wait until it is ready."""
    script = str(Path(__file__).with_name("worker.py"))
    # -P: the script's folder holds modules of ours, none of which may be imported in place of others.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", script, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=PIECE
    )
    try:
        await asyncio.wait_for(exchange(process, {}, settings), START_SECONDS)
    except BaseException as error:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if isinstance(error, Exception):
            raise HeadstartError("no worker process could be started") from error
        raise
    return process


async def exchange(process: Process, message: Json, data: bytes = b"") -> Answer:
    """Send one line of JSON and the data after it, piece by piece, and return what comes back."""
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    found = bytearray()
    try:
        process.stdin.write(json.dumps({**message, "bytes": len(data)}).encode() + b"\n")
        for start in range(0, len(data), PIECE):
            process.stdin.write(data[start : start + PIECE])
            await process.stdin.drain()
        answer = json.loads(await process.stdout.readuntil(b"\n"))
        size = answer.pop("bytes")
        while len(found) < size:
            found += await process.stdout.readexactly(min(PIECE, size - len(found)))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        if await process.wait() == -signal.SIGPROF:
            raise TimeoutError from error
        raise WorkerDied("a worker process died of its request") from error
    return Answer(answer, found)


def worker_settings(tokenizer: TokenizerWrapper) -> bytes:
    """Return in JSON what a worker process needs to know."""
    backend = tokenizer._tokenizer.backend_tokenizer
    # Grammars are tried on a quarter of the stack that they get in the server.
    settings = {"tokenizer": backend.to_str(), "eos": sorted(tokenizer.eos_token_ids), "stack": STACK // 4}
    return json.dumps(settings).encode()
