"""The states of a server, defined here alone. `/health`, the metrics and the dashboard report them.

| state | takes requests | |
| --- | --- | --- |
| starting | they wait | what the command line names is being imported, found or loaded |
| ok | yes | |
| degraded | yes | the device had trouble in the last minutes |
| draining | until it shuts down | it was told to stop |
| unhealthy | no | nothing runs any more: the process must be replaced |
"""

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from .errors import Refusal

if TYPE_CHECKING:
    from .model_pool import ModelPool

Status = Literal["starting", "ok", "degraded", "draining", "unhealthy"]
STATUSES: tuple[Status, ...] = get_args(Status)
READY = ("ok", "degraded")
TROUBLE_SECONDS = 300.0  # that trouble of the device is reported
WAIT_SECONDS = 30.0  # that a request waits for a server that cannot read it yet


class Health(NamedTuple):
    status: Status
    reason: str | None  # why it is not ok


class ServerState:
    def __init__(self, pool: "ModelPool | None" = None, *, names: Sequence[str] = ()):
        """Begin without models, as a server that starts does, or with them.

        `names`: of the models that it starts with, as far as they are known before any is found.
        """
        self.pool = pool
        self.names = names
        self.doing = None if pool is not None else "importing libraries"  # None: it has started
        self.draining = False
        self.restarted: tuple[str, float] | None = None  # why, and when, this process replaced another
        self._known = asyncio.Event()  # the models are, or never will be
        if pool is not None:
            self._known.set()

    def open(self, pool: "ModelPool") -> None:
        """Take requests from now on: each waits for its own model."""
        self.pool = pool
        self._known.set()

    def close(self) -> None:
        self.draining = True
        self._known.set()

    @property
    def context_length(self) -> int:
        """Return the longest context of the models, 0 before they are known."""
        return max((each.context_length for each in self.pool.models), default=0) if self.pool is not None else 0

    @property
    def lost(self) -> bool:
        return self.pool is not None and self.pool.device.lost

    def health(self) -> Health:
        device = self.pool.device if self.pool is not None else None
        if device is not None and device.failed:
            return Health("unhealthy", device.problem)
        if self.draining or (device is not None and device.closing):
            return Health("draining", "the server was told to stop")
        if self.doing is not None:
            return Health("starting", self.doing)
        trouble = device.trouble if device is not None else None
        what, when = (trouble.what, trouble.when) if trouble is not None else self.restarted or ("", -math.inf)
        ago = time.monotonic() - when
        return Health("degraded", f"{what} {ago:.0f} s ago") if ago < TROUBLE_SECONDS else Health("ok", None)

    def report(self) -> dict[str, Any]:
        """Return the JSON of /health."""
        pool = self.pool
        schedulers = [engine.scheduler for engine in pool.device.engines] if pool is not None else []
        return {
            **self.health()._asdict(),
            "model": pool.models[0].id if pool is not None else next(iter(self.names), None),
            "restarts": pool.device.restarts if pool is not None else 0,
            "running": sum(len(each.running.sequences) for each in schedulers),
            "prefilling": sum(len(each.prefilling) for each in schedulers),
            "queued": sum(len(each.queue) for each in schedulers) + (pool.waiting if pool is not None else 0),
        }

    def list_names(self) -> dict[str, Any]:
        """Return the JSON of /v1/models before the models are known."""
        loading = {"object": "model", "owned_by": "headstart", "state": "loading", "progress": 0.0, "memory_bytes": 0}
        ids = [Path(name).name if Path(name).is_dir() else name for name in self.names]
        return {"object": "list", "data": [{"id": id, **loading} for id in ids]}

    async def wait_for_models(self) -> None:
        """Wait until the models are known, so that requests can be read. Refuse what has waited too long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._known.wait(), WAIT_SECONDS)
        if self.pool is None:
            status, reason = self.health()
            message = f"this server is {status} ({reason}): try again later"
            code = "starting" if status == "starting" else "unavailable"
            raise Refusal(503, message, code=code, headers={"Retry-After": "5"})
