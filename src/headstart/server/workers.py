"""The worker processes of a server: started ahead, killed when they take too long, and restarted."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import HeadstartError
from ..sampling.bounds import STACK

PROCESSES = 2
START_SECONDS = 60.0
START_ATTEMPTS = 3
MAX_LINE = 2**31  # bytes of an answer: a worker's memory is limited


class WorkerDied(HeadstartError):
    """A worker process ended, most likely because of its request."""


class Turns:
    """A semaphore of `places` that clients take in turn, each at most `per_client`. Used from one event loop."""

    def __init__(self, places: int, per_client: int):
        self._places = places
        self._per_client = per_client
        self._taken: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the client that is next first

    async def take(self, client: str) -> None:
        """Wait for a place. It must be given back."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had just been granted
                self.give_back(client)
            raise

    def give_back(self, client: str) -> None:
        self._taken[client] -= 1
        self._taken += Counter()  # drops clients that hold none
        self._grant()

    def _grant(self) -> None:
        while self._taken.total() < self._places:
            client = next((each for each in self._waiting if self._taken[each] < self._per_client), None)
            if client is None:
                return
            turn = self._waiting[client].popleft()
            if self._waiting[client]:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            if not turn.done():  # not cancelled
                self._taken[client] += 1
                turn.set_result(None)


class Worker:
    """A worker process (see worker.py), restarted whenever it died or a call did not come to its end."""

    def __init__(self, settings: Callable[[], dict[str, Any]]):
        self._settings = settings
        self._starting: asyncio.Task[Process] | None = None
        self._process: Process | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process in the background, unless it runs or is being started."""
        starting = self._starting is not None and not self._starting.done()
        running = self._process is not None and self._process.returncode is None
        if not starting and not running and not self._closed:
            self._starting = asyncio.create_task(self._start())

    async def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a message.

        Raises:
            TimeoutError: the process exceeded the CPU time that the message allowed.
            WorkerDied: it died otherwise.
        """
        process = await self._ready()
        try:
            return await exchange(process, message)
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

    async def _ready(self) -> Process:
        for _ in range(START_ATTEMPTS):
            self.start()
            if self._starting is None or self._closed:
                break
            with suppress(HeadstartError, OSError, TimeoutError):
                return await asyncio.shield(self._starting)
        raise HeadstartError("no worker process could be started")

    async def _start(self) -> Process:
        await self._kill()
        self._process = await spawn(await asyncio.to_thread(self._settings))
        return self._process

    async def _kill(self) -> None:
        if self._process is not None:
            kill(self._process)
            await self._process.wait()


async def spawn(settings: dict[str, Any]) -> Process:
    """Start a process and wait until it is ready."""
    script = str(Path(__file__).with_name("worker.py"))
    # -P: the script's folder holds modules of ours, none of which may be imported in place of others.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", script, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=MAX_LINE
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            await exchange(process, settings)
    except BaseException:
        kill(process)
        await process.wait()
        raise
    return process


async def exchange(process: Process, message: dict[str, Any]) -> dict[str, Any]:
    """Send one line of JSON and return the one that comes back."""
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    try:
        process.stdin.write(json.dumps(message, ensure_ascii=False).encode() + b"\n")
        await process.stdin.drain()
        answer = await process.stdout.readuntil(b"\n")
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        if await process.wait() == -signal.SIGPROF:
            raise TimeoutError from error
        raise WorkerDied("a worker process died of its request") from error
    return dict(json.loads(answer))


def kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


class Workers:
    """A few worker processes, which clients take in turn."""

    def __init__(self, tokenizer: TokenizerWrapper, count: int = PROCESSES):
        settings = cache(partial(worker_settings, tokenizer))
        self._workers = [Worker(settings) for _ in range(count)]
        self._idle = list(self._workers)
        self._turns = Turns(count, max(1, count - 1))  # one is always left to others

    def start(self) -> None:
        """Start the processes in the background."""
        for worker in self._workers:
            worker.start()

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))

    @asynccontextmanager
    async def worker(self, client: str) -> AsyncIterator[Worker]:
        """Lend a worker to a client when it is its turn."""
        await self._turns.take(client)
        worker = self._idle.pop(0)
        try:
            yield worker
        finally:
            self._idle.insert(0, worker)
            self._turns.give_back(client)


def worker_settings(tokenizer: TokenizerWrapper) -> dict[str, Any]:
    """Return what a worker process needs to know."""
    backend = tokenizer._tokenizer.backend_tokenizer
    copy = type(backend).from_str(backend.to_str())
    copy.no_padding()
    copy.no_truncation()
    # Grammars are tried on a quarter of the stack that they get in the server.
    return {"tokenizer": copy.to_str(), "eos": sorted(tokenizer.eos_token_ids), "stack": STACK // 4}
