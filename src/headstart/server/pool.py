"""How many connections there may be, in all and of one client."""

import logging
import resource
from collections import Counter
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import RequestError
from .errors import Refusal
from .hosts import EXEMPT
from .limits import Limits

LOG = logging.getLogger("uvicorn.error")
MOST = 2048
RESERVE = 128  # descriptors for files, workers and health
FOR_HEALTH = 16  # connections above the limit


class Member(Protocol):
    @property
    def address(self) -> str: ...
    @property
    def waits(self) -> bool:
        """Whether it is the client's turn."""

    def drop(self) -> None: ...


class Pool:
    """The open connections.

    At a limit a new connection takes the place of the one that has waited longest for its client: of the same
    client's, or else of the client's that has the most waiting. Where none waits the new one is refused.
    """

    def __init__(self, limits: Limits):
        self.most = limits.connections or most_connections()
        self.most_per_client = max(1, self.most // 2)
        self._members: set[Member] = set()
        self._by_client: Counter[str] = Counter()
        self._waiting: dict[str, dict[Member, None]] = {}  # by client, the longest first

    def enter(self, new: Member) -> bool:
        """Count a connection. Return False if there are too many: then it is for health checks only."""
        full, full_client = len(self._members) - self.most, self._by_client[new.address] - self.most_per_client
        oldest = None
        if full_client >= 0:
            oldest = next(iter(self._waiting.get(new.address, ())), None)
        elif full >= 0:
            oldest = next(iter(max(self._waiting.values(), key=len, default=())), None)
        if oldest is not None:
            self.leave(oldest)
            oldest.drop()
        self._members.add(new)
        self._by_client[new.address] += 1
        self.update(new)
        if max(full, full_client) < 0:
            return True
        LOG.warning(
            "connection limit reached (%d, %d per client): see --max-connections", self.most, self.most_per_client
        )
        if oldest is None and max(full, full_client) >= FOR_HEALTH:
            new.drop()
        return oldest is not None

    def update(self, member: Member) -> None:
        """Note whether a connection waits for its client."""
        if member in self._members and member.waits:
            self._waiting.setdefault(member.address, {}).setdefault(member)  # where it is already, it keeps its place
        else:
            self._forget(member)

    def leave(self, member: Member) -> None:
        if member not in self._members:
            return
        self._forget(member)
        self._members.remove(member)
        self._by_client[member.address] -= 1
        if not self._by_client[member.address]:
            del self._by_client[member.address]

    def _forget(self, member: Member) -> None:
        waiting = self._waiting.get(member.address, {})
        waiting.pop(member, None)
        if not waiting:
            self._waiting.pop(member.address, None)


def most_connections(wanted: int | None = None) -> int:
    """Return how many connections there may be, by the limit on open files. Refuse to want more."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST if files == resource.RLIM_INFINITY else max(files - RESERVE, files // 4)
    if wanted is not None and wanted > allowed:
        raise RequestError(
            f"max_connections is {wanted}; with at most {files} open files it can be {allowed}: raise `ulimit -n`"
        )
    return wanted or min(MOST, allowed)


def health_only(app: ASGIApp) -> ASGIApp:
    """Return an app that answers health checks, and refuses all else because there are too many connections."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in EXEMPT:
            await app(scope, receive, send)
            return
        headers = {"Retry-After": "1", "Connection": "close"}
        refusal = Refusal(503, "too many connections: try again later", code="too_many_connections", headers=headers)
        await refusal.response(scope["path"])(scope, receive, send)

    return serve
