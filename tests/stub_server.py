"""A server of OpenAI's API with known delays, and an event loop on which time passes only while all wait.

Client and server speak real HTTP over a real socket, in one loop. A busy machine does not
change its clock, so figures can be compared with the schedule itself.
"""

import asyncio
import json
import selectors
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

QUIET = 0.004  # seconds in which nothing has come through any socket: all are waiting for the clock


class Waits(selectors.DefaultSelector):
    """Sleep by moving the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if events := super().select(0 if timeout == 0 else QUIET):
            return events
        if timeout is None:
            return super().select(1)
        self.now += max(timeout, 0)
        return []


class Timeless(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._waits = Waits()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.now


def run(main: Awaitable[T]) -> T:
    with asyncio.Runner(loop_factory=Timeless) as runner:

        async def wrapped() -> T:
            return await main

        return runner.run(wrapped())


@dataclass(frozen=True)
class Schedule:
    """A stream: after so many seconds so many tokens, each a word of four letters."""

    pieces: Sequence[tuple[float, int]]
    usage: dict[str, Any] | None = field(default_factory=dict)  # beside the tokens; None: not reported
    stats: dict[str, Any] | None = None
    odd: str | None = None  # an event of its own, before the others
    chat: bool = True
    end: str = "stop"  # or error, break, stall
    finish_reason: str | None = "length"
    after: float = 0.0  # from the last piece to the end

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.pieces)


Answer = Schedule | tuple[int, Any]  # or a status and what comes with it


@dataclass
class Stub:
    """Answer each request with what `answer` returns for its body and the number of requests under way."""

    answer: Callable[[dict[str, Any], int], Answer]
    models: Sequence[str] = ("stub",)
    key: str | None = None
    asked: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)  # that came with requests
    busy: int = 0
    most: int = 0  # at a time

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *headers = head.decode().split("\r\n")
                fields = {name.lower(): value for name, _, value in (h.partition(": ") for h in headers)}
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                await self._answer(line.split()[1], fields, json.loads(body or b"{}"), writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the client has gone, or the test is over
        finally:
            writer.close()

    async def _answer(self, path: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter) -> None:
        key = headers["authorization"].removeprefix("Bearer ") if "authorization" in headers else None
        self.keys.add(key)
        if self.key is not None and key != self.key:
            return _whole(writer, 401, {"error": {"message": "no valid key"}})
        if path == "/v1/models":
            return _whole(writer, 200, {"data": [{"id": name} for name in self.models]})
        self.asked.append((asyncio.get_running_loop().time(), path, body))
        if body["model"] not in self.models:
            return _whole(writer, 404, {"error": {"message": f"there is no model {body['model']}"}})
        self.busy += 1
        self.most = max(self.most, self.busy)
        try:
            answer = self.answer(body, self.busy)
            if isinstance(answer, tuple):
                return _whole(writer, *answer)
            return await _stream(writer, answer)
        finally:
            self.busy -= 1


def _whole(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    kind = "text/plain" if isinstance(content, str) else "application/json"
    writer.write(
        f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )


async def _stream(writer: asyncio.StreamWriter, schedule: Schedule) -> None:
    def send(data: str) -> None:
        event = f"data: {data}\n\n".encode()
        writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")

    def choice(text: str, finish_reason: str | None = None) -> dict[str, Any]:
        content = {"delta": {"content": text}} if schedule.chat else {"text": text}
        return {"index": 0, **content, "finish_reason": finish_reason}

    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    send(json.dumps({"choices": [choice("")]}))  # the role, which is no token
    if schedule.odd is not None:
        send(schedule.odd)
    sent = 0
    for seconds, tokens in schedule.pieces:
        await asyncio.sleep(seconds)
        sent += tokens
        chunk: dict[str, Any] = {"choices": [choice("word" * tokens)]}
        send(json.dumps(chunk))
    if schedule.end == "error":
        send(json.dumps({"error": {"message": "it failed here"}}))
    elif schedule.end == "break":
        writer.close()
        return
    elif schedule.end == "stall":
        await asyncio.sleep(10**6)
    else:
        await asyncio.sleep(schedule.after)
        send(json.dumps({"choices": [choice("", schedule.finish_reason)]}))
        if schedule.usage is not None:
            send(json.dumps({"choices": [], "usage": {"completion_tokens": sent, **schedule.usage}}))
        if schedule.stats is not None:
            send(json.dumps({"choices": [], "generation_stats": schedule.stats}))
        send("[DONE]")
    writer.write(b"0\r\n\r\n")
