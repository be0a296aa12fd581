"""The model of this server, as clients see it."""

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cards import Card
from ..checkpoint import Layout
from ..checkpoint.layout import hub_id
from ..kernels import selected
from ..models import Model
from ..sampling import token_bytes
from .chat import ChatTemplate
from .errors import Refusal


@dataclass(frozen=True)
class ServedModel:
    id: str
    model: Model
    tokenizer: TokenizerWrapper
    path: Path
    family: str
    quantization: dict[str, Any] | None
    card: Card | None
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, layout: Layout, model: Model, tokenizer: TokenizerWrapper, *, id: str | None = None) -> "ServedModel":
        path = layout.path.absolute()
        name = id or hub_id(path) or path.name
        if model.head_unavailable and layout.path.is_absolute():  # do not tell remote clients the folder
            model = replace(model, head_unavailable=model.head_unavailable.replace(str(layout.path), name))
        return cls(name, model, tokenizer, path, layout.family, layout.quantization, layout.card)

    def check_name(self, name: str | None) -> None:
        """Reject a request for another model. This one is known by its id, folder and hub id."""
        card = self.card.hub_id if self.card else None
        if name in (None, self.id, self.path.name, hub_id(self.path), card) or Path(str(name)) == self.path:
            return
        message = f"model {str(name)[:100]!r} is not served here: this server has {self.id!r}"
        raise Refusal(404, message, param="model", code="model_not_found")

    def describe(self) -> dict[str, Any]:
        """Return the entry of /v1/models."""
        model = self.model
        head = {"available": model.has_head, "default_k": model.default_k, "max_k": model.max_k}
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "headstart",
            "context_length": model.context_length,
            "family": self.family,
            "quantization": self.quantization,
            "kernels": selected(),
            "capabilities": self.capabilities,
            "native_mtp": {**head, "reason": model.head_unavailable},
            "sampling_defaults": {
                "thinking": self.recommended_sampling(thinking=True),
                "not_thinking": self.recommended_sampling(thinking=False),
            },
        }

    @property
    def capabilities(self) -> list[str]:
        """Return what the model can do here: it sees only with its vision tower."""
        known = self.card.capabilities if self.card else ["text"]
        vision = ["vision"] if self.model.tower is not None else []
        return [*(each for each in known if each != "vision"), *vision]

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def recommended_sampling(self, *, thinking: bool) -> dict[str, Any]:
        """Return the makers' recommendation, as fields of SamplingParams."""
        if self.card is None:
            return {}
        defaults = self.card.sampling_defaults
        first, second = defaults.thinking, defaults.not_thinking
        chosen = (first or second) if thinking else (second or first)
        return chosen.model_dump(exclude_none=True) if chosen else {}

    def token_bytes(self, token: int) -> bytes:
        return token_bytes(token, self.tokenizer)
