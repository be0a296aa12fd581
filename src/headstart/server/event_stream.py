"""Server-sent events of a response."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

QUIET_SECONDS = 5.0  # after which a stream says how far it is: proxies end silent connections


class EventStream(StreamingResponse):
    """Server-sent events, and a `sign` between them whenever none has come for a while."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], *, sign: Callable[[], str], close: Callable[[], None]):
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._sign, self._close = sign, close
        self._sent: float | None = None  # when; None: nothing may be sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()

        async def note(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            self._sent = None if is_last else loop.time()
            await send(message)

        signs = asyncio.create_task(self._send_signs(note))
        try:
            await super().__call__(scope, receive, note)
        finally:  # also if nothing was ever sent
            signs.cancel()
            self._close()

    async def _send_signs(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # the client has gone
            while True:
                waited = loop.time() - self._sent if self._sent is not None else 0.0
                if waited >= QUIET_SECONDS:
                    await send({"type": "http.response.body", "body": self._sign().encode(), "more_body": True})
                    waited = 0.0
                await asyncio.sleep(QUIET_SECONDS - waited)
