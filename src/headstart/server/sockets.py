"""Web sockets: connections on which a client sends messages, one of which is answered at a time."""

import asyncio
from typing import Any

from starlette.websockets import WebSocket
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.server import ServerProtocol

from .listen import PooledConnection

MOST_FRAMES = 1024  # of a message
MOST_WAITING = 4  # messages of a client that are read while another is answered
TOO_LARGE = 1009


class Socket(PooledConnection, WebSocketsSansIOProtocol):
    """A web socket in the pool of connections. It has taken the place of the connection that asked for it."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any]):
        super().__init__(config, server_state, {**app_state, "socket": self})
        limits = app_state["limits"]
        # Without extensions: a compressed message could be larger than any limit.
        self.conn = ServerProtocol(max_size=limits.body_bytes)
        self.ping_timeout = limits.body_seconds  # no pong arrives within a frame
        self._closes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        self.app_state["pool"].connections.add(self)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MOST_FRAMES:
            super().handle_cont(event)
        else:
            self.conn.fail(TOO_LARGE, f"a message of more than {MOST_FRAMES} frames")
            self.handle_parser_exception()

    def set_waits(self, waits: bool) -> None:
        """Note whether the client is waited for, or is answered."""
        self.waits, self.idle_since = waits, self.loop.time()
        if waits and self._closes:
            super().shutdown()

    def shutdown(self) -> None:
        """Close when the server stops, after the answer that is being sent."""
        self._closes = True
        if self.waits:
            super().shutdown()


class Messages:
    """What a client sends. While one message is answered a few more are read, until the client goes."""

    def __init__(self, socket: WebSocket):
        self._socket = socket
        self._texts: asyncio.Queue[str | None] = asyncio.Queue(MOST_WAITING)
        self.gone = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    def close(self) -> None:
        self._reading.cancel()

    async def next(self) -> str | None:
        """Return the next message, None once the client has gone."""
        text = await self._texts.get()
        return None if self.gone.is_set() else text

    async def _read(self) -> None:
        while (message := await self._socket.receive())["type"] == "websocket.receive":
            await self._texts.put(message.get("text") or "")
        self.gone.set()
        await self._texts.put(None)
