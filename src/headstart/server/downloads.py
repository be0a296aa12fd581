"""Downloads that clients have asked for, and their removal. A model joins the server's when it is complete."""

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

from ..checkpoint.layout import HUB_ID, hub_id
from ..checkpoint.local import pull, remove
from ..error_log import log_error
from ..errors import HeadstartError
from .errors import Refusal, refuse
from .log import LOG
from .model_pool import ModelPool
from .pooled_model import PooledModel


@dataclass
class Download:
    id: str
    state: str = "downloading"  # complete, failed
    bytes: int = 0
    total_bytes: int = 0
    problem: str | None = None

    def report(self, done: int, total: int) -> None:
        self.bytes, self.total_bytes = done, total


class Downloads:
    def __init__(self, pool: ModelPool):
        self._pool = pool
        self._all: dict[str, Download] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def describe(self) -> list[dict[str, Any]]:
        return [asdict(each) for each in self._all.values()]

    def start(self, repo: str) -> Download:
        """Download a model of the hub, unless that is under way."""
        if not HUB_ID.fullmatch(repo):
            refuse("model", f"{repo[:100]!r} is not a hub id: send org/name")
        if (known := self._all.get(repo)) is not None and known.state == "downloading":
            return known
        self._all[repo] = found = Download(repo)
        task = asyncio.create_task(self._run(found))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return found

    def find(self, name: str | None) -> PooledModel:
        """Return the model that a request names. If it may be on the hub, download it and have the client wait."""
        try:
            return self._pool.find(name)
        except Refusal:
            if name is None or not HUB_ID.fullmatch(name):
                raise
        under_way = self.start(name)
        done = f"{under_way.bytes:,} of {under_way.total_bytes:,} bytes"
        message = f"model {name!r} is being downloaded ({done}): try again later"
        raise Refusal(503, message, param="model", code="model_downloading", headers={"Retry-After": "30"})

    def can_remove(self, model: PooledModel) -> bool:
        """Return whether clients may delete a model: one in the Hugging Face cache, not the first, not pinned."""
        return not model.pinned and model is not self._pool.models[0] and hub_id(model.path) is not None

    async def remove(self, model: PooledModel) -> None:
        """Unload a model that no request uses, and delete its files."""
        if not self.can_remove(model):
            refuse(
                "model", f"{model.id} stays: it is the first, pinned, or not in the Hugging Face cache", "unsupported"
            )
        await self._pool.remove(model)
        await asyncio.to_thread(remove, str(hub_id(model.path)))
        self._all.pop(model.id, None)

    async def _run(self, download: Download) -> None:
        try:
            folder = await asyncio.to_thread(pull, download.id, download.report)
            model = await asyncio.to_thread(PooledModel.of, folder)
            if not any(each.id == model.id for each in self._pool.models):
                self._pool.add(model)
            download.state = "complete"
        except Exception as error:
            if not isinstance(error, HeadstartError):
                log_error(LOG, "a download failed", error=error)
            download.state, download.problem = "failed", str(error).removeprefix(f"{download.id}: ")
