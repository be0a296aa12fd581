"""Where requests are taken in: read, handed to the room, and their answers sent on their way."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from fastapi import Request as HTTPRequest
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine import EngineThread, Request
from ..errors import HeadstartError
from .access import Keys, client_of
from .answer import Answer
from .errors import Refusal, to_refusal
from .limits import Deadline, Limits
from .metrics import Meter, Metrics
from .prepare import Preparation, Preparer, disconnected
from .prompt import Prompt
from .served_model import ServedModel

OUTCOMES = {408: "timeout", 499: "cancelled"}  # of requests that were not read


class Prompting(Protocol):
    """A prompt of any API."""

    @property
    def model(self) -> str | None: ...
    def check(self) -> None:
        """Refuse what cannot be honoured as a whole."""

    async def read(self, served: ServedModel, work: Preparation) -> Prompt: ...


class Question(Prompting, Protocol):
    """A prompt to be answered."""

    @property
    def stream(self) -> bool | None: ...
    def request(self, prompt: Prompt, context: int) -> Request: ...


class Replying(Protocol):
    """Its answer, in that API's shape."""

    id: str

    async def whole(self, answer: Answer) -> str:
        """JSON."""

    def stream(self, answer: Answer) -> AsyncIterator[str]:
        """Server-sent events."""


Asked = TypeVar("Asked", bound=Question)


@dataclass
class RequestHandler:
    room: EngineThread
    served: ServedModel
    keys: Keys
    limits: Limits
    metrics: Metrics
    answers: dict[str, Answer] = field(default_factory=dict)  # under way, by id
    preparer: Preparer = field(init=False)

    def __post_init__(self) -> None:
        context, most = self.served.model.context_length, self.room.engine.queue.most  # that may wait for the engine
        self.preparer = Preparer(self.served.tokenizer, self.limits, context=context, max_waiting=most)

    async def reply(
        self, asked: Asked, http: HTTPRequest, shape: Callable[[Asked, Prompt, ServedModel], Replying]
    ) -> Response:
        asked.check()
        self.served.check_name(asked.model)
        self._check_open()
        meter = Meter(self.metrics, http.url.path, time.perf_counter())
        deadline = Deadline.after(self.limits.request_seconds)
        client = client_of(http.scope, self.keys)

        async def read(work: Preparation) -> tuple[Prompt, Request]:
            return await self._read(asked, work)

        try:
            prompt, request = await self.preparer.prepare(read, http, client, deadline)
        except Refusal as refused:
            if refused.status_code in OUTCOMES:
                meter.end(OUTCOMES[refused.status_code])
            raise
        reply = shape(asked, prompt, self.served)
        try:
            answer = Answer(self.room, request, client=client, deadline=deadline, meter=meter)
        except HeadstartError as error:
            self._check_open()  # it may have closed meanwhile
            raise to_refusal(error, prompt=prompt.param) from error
        self.answers[reply.id] = answer

        def close() -> None:
            answer.close()
            del self.answers[reply.id]

        if asked.stream:
            return EventStream(reply.stream(answer), close=close)
        try:
            async with cancelled_on_disconnect(answer, http):
                whole = await reply.whole(answer)
        finally:
            close()
        return Response(whole, media_type="application/json")

    async def count(self, asked: Prompting, http: HTTPRequest) -> int:
        """The tokens of a prompt."""
        asked.check()
        self.served.check_name(asked.model)
        deadline = Deadline.after(self.limits.request_seconds)
        client = client_of(http.scope, self.keys)

        async def read(work: Preparation) -> Prompt:
            return await asked.read(self.served, work)

        prompt = await self.preparer.prepare(read, http, client, deadline, counting=True)
        return len(prompt.tokens)

    def cancel(self, id: str, http: HTTPRequest) -> None:
        """Cancel a request of the same client. Another's is not found, so that ids cannot be probed."""
        answer = self.answers.get(id)
        if answer is None or answer.client != client_of(http.scope, self.keys):
            raise Refusal(404, f"no request {id[:100]!r} is under way", param="id", code="not_found")
        answer.cancel()

    def _check_open(self) -> None:
        if not self.room.healthy:
            why = "it is shutting down" if self.room.closing else self.room.problem or "its engine does not run"
            raise Refusal(503, f"this server takes no more requests: {why}", code="unavailable")

    async def _read(self, asked: Question, work: Preparation) -> tuple[Prompt, Request]:
        prompt = await asked.read(self.served, work)
        request = asked.request(prompt, self.served.model.context_length)
        if request.params.logprobs:
            await work.run(self.served.spell, 0)  # takes a while once, and here nobody waits
        return prompt, request


@asynccontextmanager
async def cancelled_on_disconnect(answer: Answer, http: HTTPRequest) -> AsyncIterator[None]:
    async def watch() -> None:
        await disconnected(http)
        answer.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class EventStream(StreamingResponse):
    """Server-sent events, until the last, or the client goes, or is dropped."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], *, close: Callable[[], None]):
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # also where nothing was ever sent
            self._close()
