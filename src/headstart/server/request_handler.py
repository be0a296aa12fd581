"""Handle requests for output: wait for the model, prepare the prompts, submit them, send the response."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from fastapi import Request as HTTPRequest
from fastapi import Response

from ..engine import Request
from ..errors import Busy, HeadstartError
from .anthropic_request import CountTokensRequest
from .errors import Refusal, to_refusal
from .event_stream import EventStream
from .loaded_model import LoadedModel
from .metrics import Meter, Metrics
from .middleware import Keys, client_of, owner_of
from .model_pool import ModelPool
from .pooled_model import PooledModel
from .prepare import Preparation, timed_out, waiting
from .prompt import Prompt
from .request_fields import GenerationRequest
from .response import ResponseWriter, json_response
from .running_request import RunningRequest
from .settings import Limits

PROGRESS_SECONDS = 2.0  # between two comments in a stream whose model is being loaded
OUTCOMES = {408: "timeout", 499: "cancelled"}  # of requests whose prompt was not prepared

Body = TypeVar("Body", bound=GenerationRequest)
Writer = TypeVar("Writer", bound="ResponseWriter[Any]")
Result = TypeVar("Result")
MakeWriter = Callable[[Body, Prompt, LoadedModel, list[Request]], Writer]


@dataclass
class RequestHandler:
    pool: ModelPool
    keys: Keys
    limits: Limits
    metrics: Metrics
    find: Callable[[str | None], PooledModel]
    running: dict[str, RunningRequest] = field(default_factory=dict)  # by id

    async def reply(
        self,
        body: Body,
        http: HTTPRequest,
        writer_type: MakeWriter[Body, ResponseWriter[Any]],
    ) -> Response:
        """Return the response to a request, in the format that `writer_type` writes."""
        answer = PendingAnswer(self, body, http, writer_type)
        if not body.stream:
            async with answer.started() as (writer, running):
                return json_response(await writer.complete(running.events()))
        if answer.model.ready or self.pool.misfit(answer.model):
            await answer.start()
        # StreamingResponse watches for the disconnect itself, and `close` follows.
        return EventStream(answer.stream(), sign=answer.sign, close=answer.close)

    async def acquire(self, model: PooledModel, http: HTTPRequest, deadline: float) -> LoadedModel:
        """Wait until a model is loaded. Raises if the client disconnects or the time is up before."""
        async with waiting(http, deadline, timed_out(self.limits)):
            return await self.pool.acquire(model)

    async def prepare(
        self, name: str | None, http: HTTPRequest, make: Callable[[LoadedModel, Preparation], Awaitable[Result]]
    ) -> Result:
        """Return what is made with a model's tokenizer and template alone."""
        model, client, deadline = self.find(name), client_of(http.scope, self.keys), self.deadline()
        loaded = await self.acquire(model, http, deadline)
        try:
            async with loaded.preparer.preparing(http, client, deadline, counting=True) as work:
                return await make(loaded, work)
        finally:
            self.pool.release(model)

    async def count_tokens(self, body: CountTokensRequest | GenerationRequest, http: HTTPRequest) -> int:
        body.check()
        return len((await self.prepare(body.model, http, body.make_prompt)).tokens)

    def cancel(self, id: str, http: HTTPRequest) -> None:
        """Cancel a request of the same client. Another client's is not found, so that ids cannot be probed."""
        running = self.running.get(id)
        if running is None or running.client != client_of(http.scope, self.keys):
            raise Refusal(404, f"no request {id[:100]!r} is running", param="id", code="not_found")
        running.cancel()

    def check_share(self, client: str) -> None:
        most = self.limits.requests_per_client
        if most is not None and sum(each.client == client for each in self.running.values()) >= most:
            message = f"{most} of your requests are in progress, the most for one client: wait for one of them"
            raise Busy(message, retry_after=1)

    def deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.limits.request_seconds

    def check_open(self) -> None:
        device = self.pool.device
        if not device.healthy:
            why = "it is shutting down" if device.closing else device.problem or "its engine is not running"
            raise Refusal(503, f"this server accepts no more requests: {why}", code="unavailable")


class PendingAnswer(Generic[Body, Writer]):
    """The answer to one request, from its check until it is closed."""

    def __init__(
        self,
        handler: RequestHandler,
        body: Body,
        http: HTTPRequest,
        writer_type: MakeWriter[Body, Writer],
    ):
        body.check()
        name = handler.pool.names.resolve(body.model)
        self.model = handler.find(name)
        handler.check_open()
        self._body = body.model_copy(update={"model": self.model.full_id(name)})
        self._handler, self._http, self._writer_type = handler, http, writer_type
        self._client, self._deadline = client_of(http.scope, handler.keys), handler.deadline()
        owner = owner_of(http.scope, handler.keys)
        self._meter = Meter(handler.metrics, self.model, http.url.path, time.perf_counter(), owner)
        self._loaded: LoadedModel | None = None
        self._running: tuple[Writer, RunningRequest] | None = None
        self._starting: asyncio.Future[tuple[Writer, RunningRequest]] | None = None

    async def start(self) -> tuple[Writer, RunningRequest]:
        """Wait for the model, prepare the prompts and submit them."""
        handler, body, requests = self._handler, self._body, list[Request]()
        try:
            self._loaded = loaded = await handler.acquire(self.model, self._http, self._deadline)
            async with loaded.preparer.preparing(self._http, self._client, self._deadline) as work:
                for part in body.parts():
                    prompt = await part.make_prompt(loaded, work)
                    request = part.engine_request(prompt, loaded.model.context_length)
                    requests.append(replace(request, priority=body.level, adapter=self.model.adapter_of(body.model)))
                if request.params.logprobs:
                    await work.run(loaded.token_bytes, 0)  # slow once, and must not block the event loop
                writer = await work.run(self._writer_type, body, prompt, loaded, requests)
            self._running = writer, self._submit(loaded, prompt, requests)
            handler.running[writer.id] = self._running[1]
            return self._running
        except BaseException as error:
            if isinstance(error, Refusal) and error.status_code in OUTCOMES:
                self._meter.end(OUTCOMES[error.status_code])
            self._release()
            raise

    def _submit(self, loaded: LoadedModel, prompt: Prompt, requests: list[Request]) -> RunningRequest:
        handler, client, deadline = self._handler, self._client, self._deadline
        handler.check_share(client)
        try:
            return RunningRequest(
                loaded.thread, requests, handler.limits, client=client, deadline=deadline, meter=self._meter
            )
        except HeadstartError as error:
            handler.check_open()  # it may have closed meanwhile
            raise to_refusal(error, prompt=prompt.param) from error

    @asynccontextmanager
    async def started(self) -> AsyncIterator[tuple[Writer, RunningRequest]]:
        """Start, and close when the block ends. A disconnect cancels the request."""
        writer, running = await self.start()
        watcher = asyncio.create_task(running.cancel_on_disconnect(self._http))
        try:
            yield writer, running
        finally:
            watcher.cancel()
            self.close()

    async def stream(self) -> AsyncIterator[str]:
        """Yield the response as server-sent events. Where it was not started, say how far the model is loaded."""
        try:
            if self._running is None:
                self._starting = asyncio.ensure_future(self.start())
                while self._loaded is None and not self._starting.done():
                    yield f": {self.model.id} is {self.model.state}, {self.model.progress:.0%} read\n\n"
                    await asyncio.wait((self._starting,), timeout=PROGRESS_SECONDS)
                await self._starting
            assert self._running is not None
            writer, running = self._running
            async for event in writer.stream(running.events()):
                yield event
        except Exception as error:  # the status has been sent
            yield to_refusal(error).event(self._http.url.path)

    def sign(self) -> str:
        """Return what a stream says where nothing has come for a while."""
        if self._running is None:
            return ": preparing\n\n"
        writer, running = self._running
        return writer.sign(*running.progress())

    def close(self) -> None:
        """Release what it holds, however far it came."""
        if self._starting is not None:
            self._starting.cancel()
        self._release()

    def _release(self) -> None:
        if self._running is not None:
            writer, running = self._running
            running.close()
            del self._handler.running[writer.id]
        if self._loaded is not None:
            self._handler.pool.release(self.model)
        self._loaded = self._running = None
