"""A client's connection, which is dropped when the client does not read what it is sent."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import Limits


class Connection(H11Protocol):
    """uvicorn's, whose own way of closing waits for the client to read the rest, however long that takes."""

    _watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # writing is paused as soon as anything is unread

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._watch is not None:
            self._watch.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._watch is not None:
            self._watch.cancel()

    def _look_again(self, unread: int) -> None:
        limits: Limits = self.app_state["limits"]
        self._watch = self.loop.call_later(limits.stall_seconds, self._drop_if_stalled, unread)

    def _drop_if_stalled(self, unread: int) -> None:
        """A slow reader is not a stalled one. While writing is paused nothing is added to what is unread."""
        left = self.transport.get_write_buffer_size()
        if left < unread:
            self._look_again(left)
        else:
            self.transport.abort()
