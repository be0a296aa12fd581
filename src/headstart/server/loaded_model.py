"""A model while it is loaded: its engine, and what prepares prompts for it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cards import SamplingDefaults
from ..engine import EngineThread
from ..models import Model
from ..sampling import token_bytes
from .chat import ChatTemplate
from .fingerprint import Fingerprint
from .prepare import Preparer
from .settings import Limits


@dataclass(frozen=True)
class LoadedModel:
    thread: EngineThread
    preparer: Preparer
    fingerprint: Fingerprint
    sampling: SamplingDefaults

    @classmethod
    def of(
        cls, thread: EngineThread, folders: list[Path], sampling: SamplingDefaults, limits: Limits
    ) -> "LoadedModel":
        """`folders`: of the model and of its adapters."""
        engine = thread.engine
        assert engine.tokenizer is not None
        context, most = engine.model.context_length, engine.scheduler.queue.max_size
        preparer = Preparer(engine.tokenizer, limits, context=context, max_waiting=most)
        return cls(thread, preparer, Fingerprint(folders, engine.model), sampling)

    @property
    def model(self) -> Model:
        return self.thread.engine.model

    @property
    def tokenizer(self) -> TokenizerWrapper:
        return self.preparer.tokenizer

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def token_bytes(self, token: int) -> bytes:
        return token_bytes(token, self.tokenizer)
