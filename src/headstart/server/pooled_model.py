"""One of the models of a server: what is known of its files, and whether it is loaded."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cards import Card, SamplingDefaults
from ..checkpoint import Layout, LoadPlan, Needs, load_model, load_tokenizer
from ..checkpoint.adapters import StoredAdapter
from ..checkpoint.layout import hub_id
from ..engine import Engine, EngineThread, Settings
from ..errors import RequestError
from ..kernels import choose_backend
from ..models import Model, text_config
from ..models.assistant import Assistant
from ..models.dflash import DFlash
from .counters import Counters
from .errors import refuse
from .loaded_model import LoadedModel
from .settings import Limits

Load = Callable[[Callable[[float], None]], Model]  # is told what to call with the share that has been read


@dataclass(eq=False)
class PooledModel:
    id: str
    path: Path
    given: Path  # the folder as the command line names it
    family: str
    context_length: int
    quantization: dict[str, Any] | None
    native_mtp: dict[str, Any]
    card: Card | None
    load: Load
    load_tokenizer: Callable[[], TokenizerWrapper]
    needs: Needs
    drafter: dict[str, Any] | None = None
    vision: bool = False  # with its vision tower
    adapters: Sequence[StoredAdapter] = ()
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
    created: int = field(default_factory=lambda: int(time.time()))
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

        parts: dict[str, Any] = {"drafter": plan.model.drafter, "vision": vision, "adapters": plan.adapters}
        tokenizer = partial(load_tokenizer, folder)
        return cls.of_layout(plan.layout, load, tokenizer, plan.needs, id=id, mtp=mtp, pinned=pinned, **parts)

    @classmethod
    def of_layout(
        cls,
        layout: Layout,
        load: Load,
        load_tokenizer: Callable[[], TokenizerWrapper],
        needs: Needs,
        *,
        id: str | None = None,
        mtp: bool | None = None,
        drafter: DFlash | Assistant | None = None,
        **fields: Any,
    ) -> "PooledModel":
        path = layout.path.absolute()
        name = id or hub_id(path) or path.name
        decision = layout.dispatch(mtp)
        reason = decision.reason
        if reason and layout.path.is_absolute():  # do not tell remote clients the folder
            reason = reason.replace(str(layout.path), name)
        return cls(
            id=name,
            path=path,
            given=layout.path,
            family=layout.family,
            context_length=int(text_config(layout.config)["max_position_embeddings"]),
            quantization=layout.quantization,
            native_mtp={
                "available": decision.drafts,
                "default_k": decision.k,
                "max_k": decision.max_k,
                "reason": reason,
            },
            card=layout.card,
            load=load,
            load_tokenizer=load_tokenizer,
            needs=needs,
            drafter={"kind": drafter.kind, "max_k": drafter.max_k} if drafter is not None else None,
            **fields,
        )

    @classmethod
    def of_loaded(cls, layout: Layout, model: Model, tokenizer: TokenizerWrapper, **fields: Any) -> "PooledModel":
        """Return one whose files have been read already."""
        return cls.of_layout(layout, lambda progress: model, lambda: tokenizer, Needs(0, 0), **fields)

    def read(self, progress: Callable[[float], None] = lambda share: None) -> Model:
        """Return the model itself. `progress` is told the share that has been read."""
        return replace(self.load(progress), head_unavailable=self.native_mtp["reason"])

    def put(self, thread: EngineThread, limits: Limits) -> None:
        """Take up the engine of a model that has just been loaded."""
        thread.settings = self.settings or thread.settings
        folders = [self.path, *(each.path for each in self.adapters)]
        self.loaded = LoadedModel.of(thread, folders, self.sampling, limits)
        self.loads += 1

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
        return f"model {self.id!r} could not be loaded: {str(self.failure).replace(str(self.path), self.id)}"

    @property
    def current_settings(self) -> Settings:
        if self.loaded is not None:
            return self.loaded.thread.settings
        return self.settings or Settings(max_k=self.most_drafts)

    def configure(self, **changes: Any) -> Settings:
        """Change settings, for new requests, or refuse what the model cannot do."""
        for name, value in changes.items():
            if value and not self.most_drafts:
                refuse(name, f"this model cannot draft: {self.native_mtp['reason']}", "unsupported")
        if changes.get("max_k", 0) > self.most_drafts:
            refuse("max_k", f"is {changes['max_k']}; this model drafts at most {self.most_drafts}")
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
            "kernels": self.kernels,
            "state": self.state,
            "loads": self.loads,
            "running": len(engine.scheduler.running.sequences) if engine else 0,
            "prefilling": len(engine.scheduler.prefilling) if engine else 0,
            "queued": (len(engine.scheduler.queue) if engine else 0) + len(self.waiters),
        }

    @property
    def most_drafts(self) -> int:
        """Return the most drafts per step of the head or the drafter, 0 without either."""
        head = self.native_mtp["max_k"] if self.native_mtp["available"] else 0
        return max(head, self.drafter["max_k"] if self.drafter is not None else 0)

    def answers_to(self, name: str) -> bool:
        """Return whether clients may mean this model: by its id, folder or hub id."""
        card = self.card.hub_id if self.card else None
        return name in (self.id, self.path.name, hub_id(self.path), card) or Path(name) in (self.path, self.given)

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a request means by a model's name, a colon and its own."""
        model, _, adapter = (name or "").rpartition(":")
        known = any(each.name == adapter for each in self.adapters)
        return adapter if known and self.answers_to(model) else None

    def full_id(self, name: str | None) -> str:
        """Return the id of what a request names: the model's, and that of an adapter."""
        adapter = self.adapter_of(name)
        return self.id if adapter is None else f"{self.id}:{adapter}"

    @property
    def kernels(self) -> str:
        """Return which kernels compute here, and how many layers do not use fused ones for their adapters' sake."""
        changed = {layer for adapter in self.adapters for layer in adapter.layers}
        unfused = f"; {len(changed)} linear layers with adapters are not fused" if changed else ""
        return f"{choose_backend()}{unfused}"

    @property
    def capabilities(self) -> list[str]:
        """Return what the model can do here: it sees only with its vision tower."""
        known = self.card.capabilities if self.card else ["text"]
        return [*(each for each in known if each != "vision"), *(["vision"] if self.vision else [])]

    @property
    def sampling(self) -> SamplingDefaults:
        """Return the makers' recommendations."""
        return self.card.sampling_defaults if self.card is not None else SamplingDefaults()

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models: the model's and those of its adapters."""
        return [self.describe(name) for name in (self.id, *(f"{self.id}:{a.name}" for a in self.adapters))]

    def describe(self, name: str | None = None) -> dict[str, Any]:
        """Return the entry of what a request names: the model, or one of its adapters, whose `parent` it is."""
        wanted = self.adapter_of(name)
        adapters = [{"rank": each.rank, "scale": each.scale} for each in self.adapters if each.name == wanted]
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "headstart",
            "context_length": self.context_length,
            "family": self.family,
            "quantization": self.quantization,
            "kernels": self.kernels,
            "capabilities": self.capabilities,
            "native_mtp": self.native_mtp,
            "drafter": self.drafter,
            "sampling_defaults": {
                "thinking": self.sampling.params(thinking=True),
                "not_thinking": self.sampling.params(thinking=False),
            },
            "state": self.state,
            "problem": self.problem,
            "pinned": self.pinned,
            "loads": self.loads,
            "memory_bytes": self.needs.weights,
            **({"progress": round(self.progress, 3)} if self.loading else {}),
            **({"id": self.full_id(name), "parent": self.id, "adapter": adapters[0]} if adapters else {}),
        }
