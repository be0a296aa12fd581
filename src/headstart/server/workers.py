"""The worker processes of a server: started ahead, killed when they take too long, and then replaced."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import HeadstartError
from ..sampling.bounds import STACK
from .turns import Turns
from .worker import LENGTH

COUNT = 2
START_SECONDS = 60.0


class WorkerDied(HeadstartError):
    """A worker process ended, most likely of what it was given."""


class Worker:
    """One process. See worker.py for what it does."""

    def __init__(self, process: Process):
        self._process = process
        self._clean = True  # no answer is outstanding

    @classmethod
    async def start(cls, settings: dict[str, Any]) -> "Worker":
        script = Path(__file__).with_name("worker.py")
        # -P: the script's folder holds modules of ours, none of which is to be found in place of others.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(script), stdin=PIPE, stdout=PIPE, stderr=DEVNULL
        )
        worker = cls(process)
        try:
            await worker.call(settings, START_SECONDS)
        except BaseException:
            await worker.end()
            raise
        return worker

    @property
    def usable(self) -> bool:
        return self._clean and self._process.returncode is None

    async def call(self, message: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Return the answer to a message. TimeoutError after `seconds`, or where the process found that it had taken
        too much CPU time; WorkerDied where it died otherwise."""
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None, "it is a pipe"
        assert reader is not None, "it is a pipe"
        self._clean = False
        body = json.dumps(message, ensure_ascii=False).encode()
        try:
            async with asyncio.timeout(seconds):
                writer.write(LENGTH.pack(len(body)))
                writer.write(body)
                await writer.drain()
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                answer = await reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if await self._process.wait() == -signal.SIGPROF:
                raise TimeoutError from error
            raise WorkerDied("a worker process died of what it was given") from error
        self._clean = True
        return dict(json.loads(answer))

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.kill()
        await self._process.wait()


class Workers:
    """A few worker processes, which clients take in turn."""

    def __init__(self, tokenizer: TokenizerWrapper, count: int = COUNT):
        self._tokenizer, self._count = tokenizer, count
        self._turns = Turns(count, max(1, count - 1))  # one is always left to others
        self._settings: dict[str, Any] | None = None
        self._idle: list[asyncio.Future[Worker]] = []  # started, or starting
        self._busy: set[Worker] = set()
        self._ending: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start those that are missing, in the background."""
        while len(self._idle) + len(self._busy) < self._count:
            self._idle.append(asyncio.create_task(self._start()))

    async def close(self) -> None:
        """Kill them all."""
        self._count = 0
        for starting in self._idle:
            starting.cancel()
        idle = await asyncio.gather(*self._idle, return_exceptions=True)
        for worker in [*self._busy, *idle]:
            if isinstance(worker, Worker):
                self._end(worker)
        await asyncio.gather(*self._ending)

    @asynccontextmanager
    async def worker(self, client: str) -> AsyncIterator[Worker]:
        """Lend a worker. One that is left in the middle of a call is killed and replaced."""
        await self._turns.take(client)
        try:
            worker = await self._take()
            self._busy.add(worker)
            try:
                yield worker
            finally:
                self._busy.remove(worker)
                self._put_back(worker)
        finally:
            self._turns.give_back(client)

    async def _take(self) -> Worker:
        for attempt in range(3):
            self.start()
            if not self._idle:
                break
            starting = self._idle.pop(0)
            try:
                worker = await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._idle.append(starting)
                raise
            except (HeadstartError, OSError, TimeoutError):
                if attempt == 2:
                    raise
                continue
            if worker.usable:
                return worker
            self._end(worker)
        raise HeadstartError("no worker process could be started: the server's log says more")

    def _put_back(self, worker: Worker) -> None:
        if worker.usable and self._count:
            done: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
            done.set_result(worker)
            self._idle.insert(0, done)
        else:
            self._end(worker)
            self.start()

    def _end(self, worker: Worker) -> None:
        ending = asyncio.create_task(worker.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _start(self) -> Worker:
        if self._settings is None:
            self._settings = await asyncio.to_thread(_settings, self._tokenizer)
        return await Worker.start(self._settings)


def _settings(tokenizer: TokenizerWrapper) -> dict[str, Any]:
    backend = tokenizer._tokenizer.backend_tokenizer
    copy = type(backend).from_str(backend.to_str())
    copy.no_padding()
    copy.no_truncation()
    # Grammars are tried on a quarter of the stack that they get in the server.
    return {"tokenizer": copy.to_str(), "eos": sorted(tokenizer.eos_token_ids), "stack": STACK // 4}
