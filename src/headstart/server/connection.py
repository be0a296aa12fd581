"""Client connections: how many there may be, how long the server waits for a client, and how they close.

uvicorn waits without limit for headers, and after closing for the client to read the rest. It also closes without
reading what the client still sends, which makes the client's system discard the response it has not read yet.
"""

import asyncio
import logging
import resource
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from ..errors import RequestError
from .errors import Refusal
from .limits import Limits

LOG = logging.getLogger("uvicorn.error")
MAX_CONNECTIONS = 2048
RESERVED_FILES = 128  # descriptors for files, workers and health checks
HEALTH_CONNECTIONS = 16  # connections above the limit
DISCARDED_BODIES = 4  # what is read of a refused request, in times the largest body
TLS_HELLO = b"\x16\x03"


class Connection(H11Protocol):
    """A client's connection, with a place in the pool of its server."""

    _stall_timer: asyncio.TimerHandle | None = None

    @property
    def _limits(self) -> Limits:
        return self.app_state["limits"]

    @property
    def _pool(self) -> "Pool":
        return self.app_state["pool"]

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def waits(self) -> bool:
        """Return whether the server waits for the client to send a request, or the rest of one, or to close."""
        working = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        return not working and not self.flow.write_paused

    def drop(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._lingering = LingeringTransport(transport, self)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        transport.set_write_buffer_limits(0)  # writing is paused as soon as anything is unread
        self.timeout_keep_alive = self._limits.idle_seconds  # type: ignore[assignment]
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        if not self._pool.add(self):
            self.app_state = {**self.app_state, "health_only": True}  # see RequestLimits

    def data_received(self, data: bytes) -> None:
        """Handle received data. The timer runs on until the headers of a request are complete."""
        if self._lingering.started:
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
        self._watch_stall(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._pool.update(self)
        self._cancel_stall_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._lingering.cancel_timer()
        self._pool.remove(self)
        self._cancel_stall_timer()

    def shutdown(self) -> None:
        if self._lingering.started:
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
        """Refuse what is not HTTP, with the status and message of h11's error, which is being handled."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(Refusal(status, f"invalid HTTP request: {str(error)[:200]}", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a request that offers to upgrade (to HTTP/2, say) is served as it is."""

    def _refuse(self, refusal: Refusal) -> None:
        """Respond in place of the app, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # a response has begun
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

    def _watch_stall(self, unread: int) -> None:
        self._stall_timer = self.loop.call_later(self._limits.stall_seconds, self._drop_if_stalled, unread)

    def _drop_if_stalled(self, unread: int) -> None:
        """Close if the client has read nothing since. While writing is paused, no data is added to what is unread."""
        left = self.transport.get_write_buffer_size()
        if left < unread:
            self._watch_stall(left)
        else:
            self.transport.abort()

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()


class LingeringTransport:
    """A transport that closes in two steps where the client is still sending: it ends the response, then reads on
    until the client closes, has sent too much, or its time is up."""

    def __init__(self, transport: asyncio.Transport, connection: Connection):
        self._transport = transport
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = None
        self._bytes_left = 0
        self.started = False
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.started or self._transport.is_closing()

    def close(self) -> None:
        connection, limits = self._connection, self._connection._limits
        if self.is_closing():
            return
        if connection.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            self._transport.close()
            return
        self.started = True
        self._bytes_left = DISCARDED_BODIES * limits.body_bytes
        with suppress(OSError):  # the client has disconnected
            self._transport.write_eof()
        connection.flow.resume_reading()
        self._timer = connection.loop.call_later(limits.linger_seconds, self._transport.abort)

    def discard(self, count: int) -> None:
        self._bytes_left -= count
        if self._bytes_left < 0:
            self._transport.abort()

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Pool:
    """The open connections.

    At a limit a new connection replaces the one that has waited longest for its client: among those of the same
    client, or else of the client that has the most waiting. If none waits, the new connection is refused.
    """

    def __init__(self, limits: Limits):
        self.limit = limits.connections or connection_limit()
        self.limit_per_client = max(1, self.limit // 2)
        self._connections: set[Connection] = set()
        self._by_client: Counter[str] = Counter()
        self._waiting: dict[Connection, None] = {}  # the longest waiting first

    def add(self, new: Connection) -> bool:
        """Count a connection. Return False if there are too many: then it is for health checks only."""
        excess = len(self._connections) - self.limit
        client_excess = self._by_client[new.address] - self.limit_per_client
        oldest = None
        if client_excess >= 0:
            oldest = next((each for each in self._waiting if each.address == new.address), None)
        elif excess >= 0 and self._waiting:
            ((address, _),) = Counter(each.address for each in self._waiting).most_common(1)
            oldest = next(each for each in self._waiting if each.address == address)
        if oldest is not None:
            self.remove(oldest)
            oldest.drop()
        self._connections.add(new)
        self._by_client[new.address] += 1
        self.update(new)
        if max(excess, client_excess) < 0:
            return True
        LOG.warning(
            "connection limit reached (%d, %d per client): see --max-connections", self.limit, self.limit_per_client
        )
        if oldest is None and max(excess, client_excess) >= HEALTH_CONNECTIONS:
            new.drop()
        return oldest is not None

    def update(self, connection: Connection) -> None:
        """Record whether a connection waits for its client. One that waited already keeps its place."""
        if connection in self._connections and connection.waits:
            self._waiting.setdefault(connection)
        else:
            self._waiting.pop(connection, None)

    def remove(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._waiting.pop(connection, None)
            self._by_client[connection.address] -= 1
            self._by_client += Counter()  # drops clients that have none


def connection_limit(wanted: int | None = None) -> int:
    """Return how many connections there may be, by the limit on open files. Refuse to want more."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(files - RESERVED_FILES, files // 4)
    if wanted is not None and wanted > allowed:
        raise RequestError(
            f"max_connections is {wanted}; with at most {files} open files it can be {allowed}: raise `ulimit -n`"
        )
    return wanted or min(MAX_CONNECTIONS, allowed)
