"""The routes of OpenAI's responses: over HTTP, and over web sockets as Open Responses has them."""

import asyncio
import json
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response, WebSocket
from pydantic import ValidationError
from starlette.types import Message
from starlette.websockets import WebSocketDisconnect

from .bodies import SMALL_BODY, read_body
from .compaction import CompactionWriter, CompactRequest, ask_for_summary
from .errors import Refusal, refuse, to_refusal
from .middleware import MAX_VALUES, ValueCounter, client_of
from .request_handler import PendingAnswer, RequestHandler
from .response import json_response
from .responses_request import ResponsesRequest
from .responses_response import ResponsesWriter, Save
from .responses_store import Latest, ResponseStore, StoredResponse
from .states import ServerState
from .threads import Threads

SOCKET_SECONDS = 3600.0  # that a web socket may be open


class Responses:
    """Responses, and those that can be continued."""

    def __init__(self, handler: RequestHandler, threads: Threads, state: ServerState):
        self.handler, self.threads, self.state, self.store = handler, threads, state, ResponseStore()

    async def continued(self, body: ResponsesRequest, client: str, latest: Latest | None = None) -> ResponsesRequest:
        """Return a request with the conversation that it continues. `latest`: what else it may continue, by id."""
        if previous := self.store.previous(body, client, latest or {}):
            return await self.threads.run(client, previous.before, body)
        return body

    def save(self, body: ResponsesRequest, client: str, latest: Latest | None = None) -> Save | None:
        """Return what keeps a response to a request, for all its connections and as the `latest` of one."""
        stores = body.store is not False
        if not stores and latest is None:
            return None

        async def save(id: str, response: str, output: list[dict[str, Any]]) -> None:
            stored = await self.threads.run(client, StoredResponse.of, body, response, output, client)
            if latest is not None:
                latest[id] = stored
            if stores:
                self.store.put(id, stored)

        return save


def add_responses_routes(app: FastAPI, handler: RequestHandler, threads: Threads, state: ServerState) -> None:
    responses = Responses(handler, threads, state)
    store = responses.store

    @app.post("/v1/responses")
    async def create(body: ResponsesRequest, http: Request) -> Response:
        client = client_of(http.scope, handler.keys)
        body = await responses.continued(body, client)
        return await handler.reply(body, http, partial(ResponsesWriter, save=responses.save(body, client)))

    @app.websocket("/v1/responses")
    async def socket(socket: WebSocket) -> None:
        await ResponsesSocket(socket, responses).run()

    @app.post("/v1/responses/compact")
    async def compact(body: CompactRequest, http: Request) -> Response:
        conversation = await responses.continued(body.conversation(), client_of(http.scope, handler.keys))
        if not conversation.items:
            refuse("input", "there is nothing to compact: send a conversation, or the id of a response")
        return await handler.reply(ask_for_summary(conversation), http, CompactionWriter)

    @app.get("/v1/responses/{id}")
    async def stored_response(id: str, http: Request, stream: bool = False) -> Response:
        if stream:
            refuse("stream", "a stored response is not streamed again: leave it out", "unsupported")
        stored = store.get(id, client := client_of(http.scope, handler.keys))
        return json_response(await threads.run(client, stored.json))

    @app.delete("/v1/responses/{id}")
    async def delete_response(id: str, http: Request) -> dict[str, Any]:
        store.delete(id, client_of(http.scope, handler.keys))
        return {"id": id, "object": "response.deleted", "deleted": True}


class ResponsesSocket:
    """A web socket on which one response is created after another. It remembers the last one, stored or not."""

    def __init__(self, socket: WebSocket, responses: Responses):
        self._socket, self._responses = socket, responses
        self._client = client_of(socket.scope, responses.handler.keys)
        self._latest: Latest = {}

    async def run(self) -> None:
        from .sockets import Messages  # imported with the first web socket

        connection = self._socket.scope["state"]["socket"]
        await self._socket.accept()
        messages, ends = Messages(self._socket), asyncio.get_running_loop().time() + SOCKET_SECONDS
        try:
            while True:
                async with asyncio.timeout_at(ends):
                    text = await messages.next()
                if text is None:
                    return
                connection.set_waits(False)
                await self._answer(text, messages.gone)
                connection.set_waits(True)
        except TimeoutError:
            message = f"a connection may be open for {SOCKET_SECONDS / 60:g} minutes: open another"
            await self._send_error(Refusal(400, message, code="websocket_connection_limit_reached"))
            await self._socket.close()
        except WebSocketDisconnect:
            pass
        finally:
            messages.close()

    async def _answer(self, text: str, gone: asyncio.Event) -> None:
        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        http = Request({**self._socket.scope, "type": "http", "method": "POST"}, receive)
        latest, self._latest = self._latest, {}  # a response that fails takes along the one that it continues
        handler, client = self._responses.handler, self._client
        try:
            body = await self._responses.continued(await self._read(text), client, latest)
            writer_type = partial(ResponsesWriter, save=self._responses.save(body, client, self._latest))
            async with PendingAnswer(handler, body, http, writer_type).started() as (writer, running):
                async for _, start, response in writer.messages(running.events()):
                    await self._socket.send_text(f"{start}{response}}}")
        except WebSocketDisconnect:
            raise
        except Exception as error:
            await self._send_error(to_refusal(error))

    async def _read(self, text: str) -> ResponsesRequest:
        if len(text) <= SMALL_BODY:
            return self._parse(text)
        return await self._responses.threads.run(self._client, self._parse, text)

    def _parse(self, text: str) -> ResponsesRequest:
        body = text.encode()
        ValueCounter(MAX_VALUES + self._responses.state.context_length).add(body)
        found = read_body(bytearray(body), _validate)
        assert isinstance(found, ResponsesRequest)
        return found

    async def _send_error(self, refusal: Refusal) -> None:
        error = {"type": "error", "status": refusal.status_code, **refusal.openai_body}
        await self._socket.send_text(json.dumps(error))


def _validate(value: Any, loc: tuple[str, ...]) -> tuple[ResponsesRequest | None, list[Any]]:
    if not isinstance(value, dict) or value.pop("type", None) != "response.create":
        refuse("type", "a message is a JSON object with the type 'response.create'")
    value.pop("stream", None)  # Codex sends it
    try:
        return ResponsesRequest.model_validate(value), []
    except ValidationError as error:
        return None, [{**each, "loc": (*loc, *each["loc"])} for each in error.errors(include_url=False)]
