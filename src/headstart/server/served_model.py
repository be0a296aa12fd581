"""A model as clients see it: what is known of its files, and more once it is loaded."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cards import Card
from ..checkpoint import Layout
from ..checkpoint.adapters import StoredAdapter
from ..checkpoint.layout import hub_id
from ..kernels import choose_backend
from ..models import Model, text_config
from ..models.dflash import DFlash
from ..sampling import token_bytes
from .chat import ChatTemplate
from .fingerprint import Fingerprint


@dataclass(frozen=True)
class ModelInfo:
    id: str
    path: Path
    family: str
    context_length: int
    quantization: dict[str, Any] | None
    native_mtp: dict[str, Any]
    card: Card | None
    drafter: dict[str, Any] | None = None
    vision: bool = False  # with its vision tower
    adapters: Sequence[StoredAdapter] = ()
    given: Path | None = None  # the folder as the command line names it
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(
        cls,
        layout: Layout,
        *,
        id: str | None = None,
        mtp: bool | None = None,
        drafter: DFlash | None = None,
        vision: bool = False,
        adapters: Sequence[StoredAdapter] = (),
    ) -> "ModelInfo":
        path = layout.path.absolute()
        name = id or hub_id(path) or path.name
        decision = layout.dispatch(mtp)
        reason = decision.reason
        if reason and layout.path.is_absolute():  # do not tell remote clients the folder
            reason = reason.replace(str(layout.path), name)
        head = {"available": decision.drafts, "default_k": decision.k, "max_k": decision.max_k, "reason": reason}
        context = int(text_config(layout.config)["max_position_embeddings"])
        block = {"kind": "dflash", "max_k": drafter.max_k} if drafter is not None else None
        about = (layout.family, context, layout.quantization, head, layout.card, block, vision, adapters)
        return cls(name, path, *about, given=layout.path)

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

    def describe(self) -> dict[str, Any]:
        """Return the entry of /v1/models."""
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
                "thinking": self.recommended_sampling(thinking=True),
                "not_thinking": self.recommended_sampling(thinking=False),
            },
        }

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

    def recommended_sampling(self, *, thinking: bool) -> dict[str, Any]:
        """Return the makers' recommendation, as fields of SamplingParams."""
        if self.card is None:
            return {}
        defaults = self.card.sampling_defaults
        first, second = defaults.thinking, defaults.not_thinking
        chosen = (first or second) if thinking else (second or first)
        return chosen.model_dump(exclude_none=True) if chosen else {}


@dataclass(frozen=True)
class ServedModel:
    """A model that is loaded."""

    info: ModelInfo
    model: Model
    tokenizer: TokenizerWrapper

    @classmethod
    def of(cls, info: ModelInfo, model: Model, tokenizer: TokenizerWrapper) -> "ServedModel":
        return cls(info, replace(model, head_unavailable=info.native_mtp["reason"]), tokenizer)

    @property
    def id(self) -> str:
        return self.info.id

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.info, self.model)

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def recommended_sampling(self, *, thinking: bool) -> dict[str, Any]:
        return self.info.recommended_sampling(thinking=thinking)

    def token_bytes(self, token: int) -> bytes:
        return token_bytes(token, self.tokenizer)
