"""Listening for connections: how many there may be, and how long the server waits for a client.

uvicorn waits without limit for headers, and after closing for the client to read the rest.
"""

import asyncio
import logging
import resource
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import HeadstartError, RequestError
from .settings import Limits

LOG = logging.getLogger("uvicorn.error")
BACKLOG = 2048  # connections that may wait to be accepted, as in uvicorn
MAX_CONNECTIONS = 2048
RESERVED_FILES = 128  # descriptors for files, workers and health checks
PIECE = 2**14  # bytes that are read from a connection at a time: chunks of one byte each take 10 µs
HEALTH_CONNECTIONS = 16  # connections above the limit
SOCKET_PATHS = ("/v1/responses", "/responses")  # of web sockets


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Connections are refused there until `listen`."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        return bound
    except OSError as error:
        bound.close()
        raise _cannot_listen(host, port, error) from error


def listen(bound: socket.socket) -> None:
    """Let connections wait until the server runs."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:  # another process that was bound there too came first
        host, port, *_ = bound.getsockname()
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> HeadstartError:
    return HeadstartError(f"cannot listen on {host}:{port} ({error}): choose another --port or --host")


class PooledConnection:
    """A connection with a place in the pool of its server, dropped if its client leaves what was sent unread."""

    app_state: dict[str, Any]
    client: tuple[str, int] | None
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    idle_since = 0.0  # by the event loop's clock: when it was made, or its last response was complete
    waits = True  # for the client: to send a request, or the rest of one, or to close
    _stall_timer: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def drop(self) -> None:
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()  # type: ignore[misc]
        self._watch_stall(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()  # type: ignore[misc]
        self._cancel_stall_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # type: ignore[misc]
        self._cancel_stall_timer()
        self.app_state["pool"].connections.discard(self)

    def _watch_stall(self, unread: int) -> None:
        self._stall_timer = self.loop.call_later(
            self.app_state["limits"].stall_seconds, self._drop_if_stalled, unread
        )

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


class Connection(PooledConnection, H11Protocol):
    """A client's connection."""

    @property
    def waits(self) -> bool:  # type: ignore[override]
        working = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        return not working and not self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # writing is paused as soon as anything is unread
        transport.max_size = PIECE  # type: ignore[attr-defined]  # of asyncio's own transports
        self.idle_since = self.loop.time()
        self.timeout_keep_alive = self.app_state["limits"].idle_seconds
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        if not self.app_state["pool"].add(self):
            self.app_state = {**self.app_state, "health_only": True}  # see RequestChecks

    def data_received(self, data: bytes) -> None:
        """Handle received data. The timer runs on until the headers of a request are complete."""
        self.conn.receive_data(data)
        self.handle_events()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; within a request, close."""
        if self.conn.our_state is h11.IDLE:
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _should_upgrade_to_ws(self) -> bool:
        return self.scope["method"] == "GET" and self.scope["path"] in SOCKET_PATHS

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        from .sockets import Socket  # few clients want one

        self.ws_protocol_class = Socket
        super().handle_websocket_upgrade(event)
        self.app_state["pool"].connections.discard(self)

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a request that offers to upgrade (to HTTP/2, say) is served as it is."""


class Pool:
    """The open connections.

    At a limit a new connection replaces the one that has waited longest for its client, of the same client where that
    has too many. If none waits, the new connection is only for health checks.
    """

    def __init__(self, limits: Limits):
        self.limit = limits.connections or connection_limit()
        self.limit_per_client = max(1, self.limit // 2)
        self.connections: set[PooledConnection] = set()

    def add(self, new: PooledConnection) -> bool:
        """Add a connection. Return whether it is for any request, not only for health checks."""
        own = [each for each in self.connections if each.address == new.address]
        excess, own_excess = len(self.connections) - self.limit, len(own) - self.limit_per_client
        self.connections.add(new)
        if max(excess, own_excess) < 0:
            return True
        LOG.warning(
            "connection limit reached (%d, %d per client): see --max-connections", self.limit, self.limit_per_client
        )
        candidates = own if own_excess >= 0 else self.connections - {new}
        oldest = min((each for each in candidates if each.waits), key=lambda each: each.idle_since, default=None)
        if oldest is not None:
            self.connections.discard(oldest)
            oldest.drop()
        elif max(excess, own_excess) >= HEALTH_CONNECTIONS:
            new.drop()
        return oldest is not None


def connection_limit(wanted: int | None = None) -> int:
    """Return how many connections there may be, by the limit on open files. Refuse to want more."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(files - RESERVED_FILES, files // 4)
    if wanted is not None and wanted > allowed:
        raise RequestError(
            f"max_connections is {wanted}; with at most {files} open files it can be {allowed}: raise `ulimit -n`"
        )
    return wanted or min(MAX_CONNECTIONS, allowed)
