"""The one model that a server has: its names, what its card says, and how it reads a prompt."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cards import Card
from ..checkpoint import Layout
from ..checkpoint.identity import hub_id
from ..models import Model
from .errors import Refusal
from .openai import ChatRequest, CompletionRequest


@dataclass(frozen=True)
class Served:
    id: str
    model: Model
    tokenizer: TokenizerWrapper
    path: Path
    family: str
    quantization: dict[str, Any] | None
    card: Card | None
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, layout: Layout, model: Model, tokenizer: TokenizerWrapper, *, id: str | None = None) -> "Served":
        path = layout.path.absolute()
        name = id or hub_id(path) or path.name
        return cls(name, model, tokenizer, path, layout.family, layout.quantization, layout.card)

    def answers_to(self, name: str) -> bool:
        card = self.card.hub_id if self.card else None
        return name in (self.id, self.path.name, hub_id(self.path), card) or Path(name) == self.path

    def check_name(self, name: str | None) -> None:
        if name is not None and not self.answers_to(name):
            message = f"model {name[:100]!r} is not served here: this server has {self.id!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    def describe(self) -> dict[str, Any]:
        """An entry of /v1/models."""
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "headstart",
            "context_length": self.model.context_length,
            "family": self.family,
            "quantization": self.quantization,
            "capabilities": list(self.card.capabilities) if self.card else ["text"],
            "native_mtp": {
                "available": self.model.has_head,
                "default_k": self.model.default_k,
                "max_k": self.model.max_k,
                "reason": self.model.head_unavailable,
            },
        }

    def read(self, asked: ChatRequest | CompletionRequest) -> list[int]:
        """The tokens of a prompt."""
        if isinstance(asked, CompletionRequest):
            return self._read_text(asked.prompt)
        if not self.tokenizer.has_chat_template:
            message = "messages: the model has no chat template: use /v1/completions"
            raise Refusal(400, message, param="messages", code="unsupported")
        messages = [message.for_template() for message in asked.messages]
        try:
            # None is neither yes nor no, so that the template's own default holds. mlx-lm would say yes.
            tokens = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=None)
        except TemplateError as error:
            message = f"messages: the model's chat template refuses them: {error}"
            raise Refusal(400, message, param="messages", code="invalid_value") from error
        return list(tokens)

    def _read_text(self, prompt: str | list[int] | list[str]) -> list[int]:
        match prompt:
            case str(text) | [str(text)]:
                return list(self.tokenizer.encode(text))
            case [int(), *_]:
                return [token for token in prompt if isinstance(token, int)]
            case [_, *_]:
                raise Refusal(400, "prompt: one at a time: send the others alone", param="prompt", code="unsupported")
        raise Refusal(400, "prompt is empty: give at least one token", param="prompt", code="invalid_value")
