"""A client's connection: how long the server waits for the client, and how it closes.

uvicorn's own waits for ever: for headers, and after closing for the client to read the rest. It also closes without
reading what the client still sends, which makes the client's system discard the answer it has not read yet.
"""

import asyncio
import sys
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .errors import Refusal
from .limits import Limits
from .pool import Pool, health_only

DISCARDED = 4  # times the largest body: what is read of a refused request
TLS_HELLO = b"\x16\x03"


class Connection(H11Protocol):
    _watch: asyncio.TimerHandle | None = None

    @property
    def _limits(self) -> Limits:
        return self.app_state["limits"]

    @property
    def _pool(self) -> Pool:
        return self.app_state["pool"]

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def waits(self) -> bool:
        """Whether it is the client's turn: to send a request, or the rest of one, or to close."""
        at_work = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        return not at_work and not self.flow.write_paused

    def drop(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._lingering = Lingering(transport, self)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        transport.set_write_buffer_limits(0)  # writing is paused as soon as anything is unread
        self.timeout_keep_alive = self._limits.idle_seconds  # type: ignore[assignment]
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        if not self._pool.enter(self):
            self.app = health_only(self.app)

    def data_received(self, data: bytes) -> None:
        """Handle what has come. The timer runs on until the headers of a request are complete."""
        if self._lingering.begun:
            self._lingering.discard(len(data))
        elif data.startswith(TLS_HELLO) and self.conn.their_state is h11.IDLE:
            self.logger.warning("a client spoke TLS to this port: use http://, or a proxy in front that has TLS")
            self.transport.abort()
        else:
            self.conn.receive_data(data)
            self.handle_events()
            self._pool.update(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._pool.update(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._pool.update(self)
        self._look_again(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._pool.update(self)
        if self._watch is not None:
            self._watch.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._lingering.end()
        self._pool.leave(self)
        if self._watch is not None:
            self._watch.cancel()

    def shutdown(self) -> None:
        if self._lingering.begun:
            self.transport.abort()
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            message = f"request headers not received within {self._limits.idle_seconds:g} s"
            self._refuse(Refusal(408, message, code="timeout"))
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP. h11, whose error is being handled, says why and with which status."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(Refusal(status, f"invalid HTTP request: {str(error)[:200]}", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: a request that offers to upgrade (to HTTP/2, say) is served as it is."""

    def _refuse(self, refusal: Refusal) -> None:
        """Answer in place of the app, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has been begun
            self.transport.abort()
            return
        if self.cycle is not None and not self.cycle.response_complete:  # the rest of its body will not come
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        response = refusal.response(self.scope["path"] if self.scope else "")
        status, headers = response.status_code, [*response.raw_headers, (b"connection", b"close")]
        events: tuple[Any, ...] = (
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _look_again(self, unread: int) -> None:
        self._watch = self.loop.call_later(self._limits.stall_seconds, self._drop_if_stalled, unread)

    def _drop_if_stalled(self, unread: int) -> None:
        """A slow reader is not a stalled one. While writing is paused nothing is added to what is unread."""
        left = self.transport.get_write_buffer_size()
        if left < unread:
            self._look_again(left)
        else:
            self.transport.abort()


class Lingering:
    """A transport that closes in two steps where the client is still sending: it ends the answer, then reads on until
    the client closes, has sent too much, or its time is up."""

    def __init__(self, transport: asyncio.Transport, connection: Connection):
        self._transport, self._connection = transport, connection
        self._end: asyncio.TimerHandle | None = None
        self._left = 0  # bytes
        self.begun = False
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.begun or self._transport.is_closing()

    def close(self) -> None:
        connection, limits = self._connection, self._connection._limits
        if self.is_closing():
            return
        if connection.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            self._transport.close()
            return
        self.begun, self._left = True, DISCARDED * limits.body_bytes
        with suppress(OSError):  # the client has gone
            self._transport.write_eof()
        connection.flow.resume_reading()
        self._end = connection.loop.call_later(limits.linger_seconds, self._transport.abort)

    def discard(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            self._transport.abort()

    def end(self) -> None:
        if self._end is not None:
            self._end.cancel()
