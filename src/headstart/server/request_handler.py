"""Handle requests for output: prepare the prompt, submit it to the engine, send the response."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from fastapi import Request as HTTPRequest
from fastapi import Response

from ..engine import EngineThread, Event, Handle, Request
from ..errors import Busy, HeadstartError
from .anthropic_request import CountTokensRequest
from .chat import Prompt
from .errors import Refusal, to_refusal
from .event_stream import EventStream
from .metrics import Meter, Metrics
from .middleware import Keys, client_of, owner_of
from .model_pool import ModelPool
from .pooled_model import LoadedModel, PooledModel
from .prepare import Preparation, disconnected, timed_out
from .request_fields import GenerationRequest
from .response import ResponseWriter, json_response
from .served_model import ServedModel
from .settings import Limits

PROGRESS_SECONDS = 2.0  # between two comments in a stream whose model is being loaded
OUTCOMES = {408: "timeout", 499: "cancelled"}  # of requests whose prompt was not prepared

Body = TypeVar("Body", bound=GenerationRequest)
Writer = TypeVar("Writer", bound=ResponseWriter)
Result = TypeVar("Result")


@dataclass
class RequestHandler:
    pool: ModelPool
    keys: Keys
    limits: Limits
    metrics: Metrics
    find: Callable[[str | None], PooledModel]
    running: "dict[str, RunningRequest]" = field(default_factory=dict)  # by id

    async def reply(
        self, body: Body, http: HTTPRequest, writer_type: Callable[[Body, Prompt, ServedModel], ResponseWriter]
    ) -> Response:
        """Return the response to a request, in the format that `writer_type` writes."""
        if not body.stream:
            async with self.submitted(body, http, writer_type) as (writer, running):
                watcher = asyncio.create_task(running.cancel_on_disconnect(http))
                try:
                    return json_response(await writer.complete(running.events()))
                finally:
                    watcher.cancel()
        model, submit, acquired = self._begin(body, http, writer_type)
        if not model.ready and not self.pool.misfit(model):
            return self._stream_when_loaded(model, acquired, submit, http.url.path)
        writer, running = await self._finish_submitting(model, submit, acquired)

        def close() -> None:
            self._end(writer, running)
            self.pool.release(model)

        # StreamingResponse watches for the disconnect itself, and `close` follows.
        events = writer.stream(running.events())
        return EventStream(events, sign=lambda: writer.sign(*running.progress()), close=close)

    @asynccontextmanager
    async def submitted(
        self, body: Body, http: HTTPRequest, writer_type: Callable[[Body, Prompt, ServedModel], Writer]
    ) -> "AsyncIterator[tuple[Writer, RunningRequest]]":
        """Submit a request, and release it when the block ends."""
        model, submit, acquired = self._begin(body, http, writer_type)
        writer, running = await self._finish_submitting(model, submit, acquired)
        try:
            yield writer, running
        finally:
            self._end(writer, running)
            self.pool.release(model)

    def _begin(
        self, body: Body, http: HTTPRequest, writer_type: Callable[[Body, Prompt, ServedModel], Writer]
    ) -> "tuple[PooledModel, Submit[Writer], asyncio.Future[LoadedModel]]":
        """Check a request, and start to wait for its model."""
        body.check()
        body = body.model_copy(update={"model": self.pool.names.resolve(body.model)})
        model = self.find(body.model)
        self._check_open()
        owner = owner_of(http.scope, self.keys)
        meter = Meter(self.metrics, model, http.url.path, time.perf_counter(), owner)
        submit = partial(self._submit, body, http, writer_type, meter, deadline := self._deadline())
        return model, submit, asyncio.ensure_future(self._acquire(model, http, deadline, meter))

    async def _finish_submitting(
        self, model: PooledModel, submit: "Submit[Writer]", acquired: asyncio.Future[LoadedModel]
    ) -> "tuple[Writer, RunningRequest]":
        try:
            return await submit(await acquired)
        except BaseException:
            self.pool.abandon(model, acquired)
            raise

    def _stream_when_loaded(
        self,
        model: PooledModel,
        acquired: asyncio.Future[LoadedModel],
        submit: "Submit[ResponseWriter]",
        path: str,
    ) -> "EventStream":
        """Stream how far the model is loaded, as comments that clients skip, and then the response."""
        submitted = []

        async def events() -> AsyncIterator[str]:
            try:
                while not acquired.done():
                    yield f": {model.id} is {model.state}, {model.progress:.0%} read\n\n"
                    await asyncio.wait((acquired,), timeout=PROGRESS_SECONDS)
                writer, running = await submit(acquired.result())
                submitted.append((writer, running))
                async for event in writer.stream(running.events()):
                    yield event
            except Exception as error:  # the status has been sent
                yield to_refusal(error).event(path)

        def sign() -> str:
            return next((writer.sign(*running.progress()) for writer, running in submitted), ": preparing\n\n")

        def close() -> None:
            for each in submitted:
                self._end(*each)
            self.pool.abandon(model, acquired)

        return EventStream(events(), sign=sign, close=close)

    async def _submit(
        self,
        body: Body,
        http: HTTPRequest,
        writer_type: Callable[[Body, Prompt, ServedModel], Writer],
        meter: Meter,
        deadline: float,
        loaded: LoadedModel,
    ) -> "tuple[Writer, RunningRequest]":
        """Prepare the prompts of a request and submit them to the engine."""
        served, client = loaded.served, client_of(http.scope, self.keys)

        async def make_requests(work: Preparation) -> tuple[Prompt, Writer, list[Request]]:
            requests: list[Request] = []
            for part in body.parts():
                prompt = await part.make_prompt(served, work)
                request = part.engine_request(prompt, served.model.context_length)
                adapter = served.info.adapter_of(body.model)
                requests.append(replace(request, priority=body.level, adapter=adapter))
            if request.params.logprobs:
                await work.run(served.token_bytes, 0)  # slow once, and must not block the event loop
            return prompt, await work.run(writer_type, body, prompt, served), requests

        try:
            prompt, writer, requests = await loaded.preparer.prepare(make_requests, http, client, deadline)
        except Refusal as refused:
            if refused.status_code in OUTCOMES:
                meter.end(OUTCOMES[refused.status_code])
            raise
        self._check_share(client)
        try:
            running = RunningRequest(
                loaded.thread, requests, self.limits, client=client, deadline=deadline, meter=meter
            )
        except HeadstartError as error:
            self._check_open()  # it may have closed meanwhile
            raise to_refusal(error, prompt=prompt.param) from error
        self.running[writer.id] = running
        return writer, running

    def _end(self, writer: ResponseWriter, running: "RunningRequest") -> None:
        running.close()
        del self.running[writer.id]

    async def _acquire(
        self, model: PooledModel, http: HTTPRequest, deadline: float, meter: Meter | None = None
    ) -> LoadedModel:
        """Wait until a model is loaded. Raises if the client disconnects or the time is up before."""
        if model.ready:
            return await self.pool.acquire(model)
        loading, gone = asyncio.ensure_future(self.pool.acquire(model)), asyncio.create_task(disconnected(http))
        try:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            await asyncio.wait((loading, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                return loading.result()
            if meter is not None:
                meter.end("cancelled" if gone.done() else "timeout")
            raise Refusal(499, "client disconnected", code="gone") if gone.done() else timed_out(self.limits)
        except asyncio.CancelledError:
            self.pool.abandon(model, loading)
            raise
        finally:
            loading.cancel()  # unless it is done
            gone.cancel()

    async def prepare(
        self, name: str | None, http: HTTPRequest, make: Callable[[ServedModel, Preparation], Awaitable[Result]]
    ) -> Result:
        """Return what is made with a model's tokenizer and template alone."""
        model, client, deadline = self.find(name), client_of(http.scope, self.keys), self._deadline()
        loaded = await self._acquire(model, http, deadline)
        try:
            return await loaded.preparer.prepare(partial(make, loaded.served), http, client, deadline, counting=True)
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

    def _check_share(self, client: str) -> None:
        most = self.limits.requests_per_client
        if most is not None and sum(each.client == client for each in self.running.values()) >= most:
            message = f"{most} of your requests are in progress, the most for one client: wait for one of them"
            raise Busy(message, retry_after=1)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.limits.request_seconds

    def _check_open(self) -> None:
        device = self.pool.device
        if not device.healthy:
            why = "it is shutting down" if device.closing else device.problem or "its engine is not running"
            raise Refusal(503, f"this server accepts no more requests: {why}", code="unavailable")


class RunningRequest:
    """A request submitted to the engine, seen from the event loop. The engine never waits for its reader.

    It has one engine request for each prompt. Their answers are numbered consecutively.
    """

    def __init__(
        self,
        thread: EngineThread,
        requests: Sequence[Request],
        limits: Limits,
        *,
        client: str,
        deadline: float,
        meter: Meter,
    ):
        loop = asyncio.get_running_loop()
        self.client = client  # who may cancel it
        self._events: asyncio.Queue[tuple[Event, float] | None] = asyncio.Queue()  # None: the deadline has passed
        self._limits, self._meter = limits, meter
        self._cancelled = False  # by the client, not by the engine
        self._late = False

        def listen(before: int, event: Event) -> None:  # in the engine's thread
            event = replace(event, choice=before + event.choice)
            loop.call_soon_threadsafe(self._events.put_nowait, (event, time.perf_counter()))

        self._handles: list[Handle] = []
        self._n = requests[0].n
        self._lengths = [len(request.prompt) for request in requests]
        self._prefilled = [0] * len(requests)
        try:
            for i, request in enumerate(requests):
                listener: Callable[[Event], None] = partial(listen, i * self._n)
                if limits.recorder is not None:
                    listener = limits.recorder.following(request, thread.engine.model.vocabulary, listener)
                self._handles.append(thread.submit(request, client=client, listener=listener))
        except HeadstartError:
            self.cancel()
            raise
        self._alarm = loop.call_at(deadline, self._time_out)

    def cancel(self) -> None:
        self._cancelled = True
        self._cancel_all()

    def _cancel_all(self) -> None:
        for handle in self._handles:
            handle.cancel()

    def close(self) -> None:
        """Release the request, however it ended.

        Cancel what is left, and count it as cancelled unless it was counted before.
        """
        self._alarm.cancel()
        self._meter.end("cancelled")
        self.cancel()

    async def cancel_on_disconnect(self, http: HTTPRequest) -> None:
        await disconnected(http)
        self.cancel()

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until all choices are finished. Raises if the request fails or takes too long."""
        finish_reasons: list[str] = []
        answers = self._n * len(self._handles)
        while len(finish_reasons) < answers:
            timed = None if self._late else await self._events.get()
            if timed is None:  # events still in the queue are too late
                raise timed_out(self._limits)
            event, when = timed
            prompt = event.choice // self._n
            self._prefilled[prompt] = event.prompt_processed or self._lengths[prompt]
            self._meter.count(event, when, first=event.choice % self._n == 0)
            if event.error is not None:
                self._meter.end("error")
                raise event.error
            if event.finish_reason == "cancelled" and not self._cancelled:
                message = "the server is shutting down: this response is incomplete"
                raise Refusal(503, message, code="shutting_down")
            finish_reasons += [event.finish_reason] if event.finish_reason is not None else []
            if len(finish_reasons) == answers:
                self._meter.end(next((each for each in ("cancelled", "length") if each in finish_reasons), "stop"))
            yield event

    def progress(self) -> tuple[int, int]:
        """Return how many tokens of its prompts have been prefilled, and how many there are."""
        return sum(self._prefilled), sum(self._lengths)

    def _time_out(self) -> None:
        """Free the engine's resources at once, whether or not the events are being read."""
        self._late = True
        self._meter.end("timeout")
        self._cancel_all()
        self._events.put_nowait(None)


Submit = Callable[[LoadedModel], Awaitable[tuple[Writer, RunningRequest]]]
