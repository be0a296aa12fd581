"""One of the models of a server, and whether it is loaded."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint import LoadPlan, Needs, load_model, load_tokenizer
from ..engine import Engine, EngineThread, Settings
from ..errors import RequestError
from ..models import Model
from .counters import Counters
from .prepare import Preparer
from .served_model import ModelInfo, ServedModel

Load = Callable[[Callable[[float], None]], Model]  # is told what to call with the share that has been read


class LoadedModel(NamedTuple):
    served: ServedModel
    thread: EngineThread
    preparer: Preparer


@dataclass(eq=False)
class PooledModel:
    info: ModelInfo
    load: Load
    load_tokenizer: Callable[[], TokenizerWrapper]
    needs: Needs
    prefix_bytes: int = 0  # of its prefix cache
    pinned: bool = False
    loaded: LoadedModel | None = None
    counters: Counters = field(default_factory=Counters)
    settings: Settings | None = None  # of when it was loaded last
    failure: Exception | None = None  # of its last loading
    loading: bool = False
    progress: float = 0.0  # of loading
    draining: bool = False  # new requests wait until it was unloaded and is loaded again
    loads: int = 0
    loaded_at: float = 0.0
    used_at: float = 0.0  # when its last request ended
    requests: int = 0  # that hold it
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    waiting_since: float = 0.0

    @classmethod
    def of(
        cls,
        folder: Path,
        *,
        id: str | None = None,
        mtp: bool | None = None,
        head: str | None = None,
        drafter: Path | None = None,
        kv_bits: int | None = None,
        max_image_pixels: int | None = None,
        adapters: Mapping[str, Path] | None = None,
        pinned: bool = False,
    ) -> "PooledModel":
        """Read what a folder's files say of a model. The other arguments are those of `load_model`; with
        `max_image_pixels` the model sees images."""
        given: dict[str, Any] = {"mtp": mtp, "head": head, "drafter": drafter, "adapters": adapters}
        given["kv_bits"] = kv_bits
        if max_image_pixels is not None:
            given |= {"vision": True, "max_image_pixels": max_image_pixels}
        plan = LoadPlan.of(folder, **given)
        vision = plan.model.tower is not None
        if max_image_pixels is not None and not vision:
            raise RequestError(f"--images: this model cannot see: {plan.model.tower_unavailable}")

        def load(progress: Callable[[float], None]) -> Model:
            return load_model(folder, **given, progress=progress)

        info = ModelInfo.of(
            plan.layout, id=id, mtp=mtp, drafter=plan.model.drafter, vision=vision, adapters=plan.adapters
        )
        return cls(info, load, partial(load_tokenizer, folder), plan.needs, pinned=pinned)

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def engine(self) -> Engine | None:
        return self.loaded.thread.engine if self.loaded is not None else None

    @property
    def ready(self) -> bool:
        return self.loaded is not None and not self.draining

    @property
    def state(self) -> str:
        if self.loading:
            return "loading"
        return "loaded" if self.loaded is not None else "failed" if self.problem else "unloaded"

    @property
    def problem(self) -> str | None:
        """Return why it could not be loaded, without the folder, which clients need not know."""
        if self.failure is None:
            return None
        return f"model {self.id!r} could not be loaded: {str(self.failure).replace(str(self.info.path), self.id)}"

    @property
    def current_settings(self) -> Settings:
        if self.loaded is not None:
            return self.loaded.thread.settings
        return self.settings or Settings(max_k=self.info.most_drafts)

    def configure(self, **changes: Any) -> Settings:
        self.settings = replace(self.current_settings, **changes)
        if self.loaded is not None:
            self.loaded.thread.settings = self.settings
        return self.settings

    def report(self) -> dict[str, Any]:
        """Return the entry of /v1/mtp/stats."""
        engine = self.engine
        return {
            **self.counters.report(),
            "expected_speed_by_depth": [round(gain, 3) for gain in engine.depth.gains] if engine else [],
            "kernels": self.info.kernels,
            "state": self.state,
            "loads": self.loads,
            "running": len(engine.scheduler.running.sequences) if engine else 0,
            "prefilling": len(engine.scheduler.prefilling) if engine else 0,
            "queued": (len(engine.scheduler.queue) if engine else 0) + len(self.waiters),
        }

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models: the model's and those of its adapters."""
        return [self.describe(name) for name in (self.id, *(f"{self.id}:{a.name}" for a in self.info.adapters))]

    def describe(self, name: str | None = None) -> dict[str, Any]:
        """Return the entry of what a request names: the model, or one of its adapters, whose `parent` it is."""
        adapter = self.info.adapter_of(name)
        of_adapter = {
            "id": self.info.full_id(name),
            "parent": self.id,
            "adapter": next(
                ({"rank": a.rank, "scale": a.scale} for a in self.info.adapters if a.name == adapter), {}
            ),
        }
        waiting = {"progress": round(self.progress, 3)} if self.loading else {}
        place = {"pinned": self.pinned, "loads": self.loads, "memory_bytes": self.needs.weights, **waiting}
        own = {**self.info.describe(), "state": self.state, "problem": self.problem, **place}
        return own if adapter is None else own | of_adapter
