"""The model of this server, and the other models on this machine, as clients see them."""

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cards import Card, all_cards
from ..checkpoint import Layout
from ..checkpoint.hub import LocalModel, local_models
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
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "headstart",
            "context_length": model.context_length,
            "family": self.family,
            "quantization": self.quantization,
            "kernels": selected(),
            "capabilities": list(self.card.capabilities) if self.card else ["text"],
            "native_mtp": _native_mtp(model.has_head, model.default_k, model.max_k, model.head_unavailable),
            "sampling_defaults": {
                "thinking": self.recommended_sampling(thinking=True),
                "not_thinking": self.recommended_sampling(thinking=False),
            },
        }

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


def model_list(loaded: Path) -> dict[str, Any]:
    """Return the models on disk, and known ones that are not. Slow: it reads the headers of their files.

    `loaded`: the folder of the served model.
    """
    found = local_models()
    cards = {card.name for each in found if each.layout is not None and (card := each.layout.card) is not None}
    return {
        "on_disk": [_describe_found(each, loaded) for each in found],
        "known": [_describe_card(card) for card in all_cards() if card.name not in cards],
    }


def _describe_found(found: LocalModel, loaded: Path) -> dict[str, Any]:
    layout, decision = found.layout, found.dispatch
    card = layout.card if layout is not None else None
    mtp = _native_mtp(False, 0, 0, None)
    if decision is not None:
        mtp = _native_mtp(decision.drafts, decision.k, decision.max_k, _without_folder(decision.reason, found))
    return {
        "id": found.name,
        "loaded": found.folder.resolve() == loaded.resolve(),  # perhaps under another name
        "problem": _without_folder(found.problem, found),
        "bytes": layout.bytes if layout is not None else None,
        "family": layout.family if layout is not None else None,
        "quantization": layout.quantization if layout is not None else None,
        "context_length": card.context_length if card is not None else None,
        "capabilities": list(card.capabilities) if card is not None else [],
        "native_mtp": mtp,
    }


def _describe_card(card: Card) -> dict[str, Any]:
    head = card.native_mtp
    mtp = _native_mtp(False, 0, 0, "the model was released without a head")
    return {
        "id": card.hub_id or card.name,
        "parameters": card.parameters,
        "active_parameters": card.active_parameters,
        "family": card.family,
        "context_length": card.context_length,
        "capabilities": list(card.capabilities),
        "native_mtp": _native_mtp(True, head.default_k, head.max_k, None) if head is not None else mtp,
    }


def _native_mtp(available: bool, default_k: int, max_k: int, reason: str | None) -> dict[str, Any]:
    return {"available": available, "default_k": default_k, "max_k": max_k, "reason": reason}


def _without_folder(text: str | None, found: LocalModel) -> str | None:
    """Return a message with the model's name in place of its folder, which remote clients need not know."""
    return text.replace(str(found.folder), found.name) if text is not None else None
