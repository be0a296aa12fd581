"""How a multi-token-prediction head is wired, and its weights."""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn


@dataclass(frozen=True)
class HeadNames:
    """Names of the parts of a head beside its decoder layers, as in released files."""

    fc: str = "fc"
    embedding_norm: str = "pre_fc_norm_embedding"
    hidden_norm: str = "pre_fc_norm_hidden"
    norm: str = "norm"
    lm_head: str = "lm_head"
    embedding: str = "embed_tokens"
    added: str | None = None  # projects the embedding, which every stream of `fc`(hidden) is given; no concatenation


@dataclass(frozen=True)
class HeadSpec:
    """How a multi-token-prediction head is wired. The defaults are Qwen3.5's, as in vLLM, SGLang and llama.cpp."""

    embedding_first: bool = True  # fc(concat[embedding, hidden]) or fc(concat[hidden, embedding])
    fed_after_norm: bool = True  # the trunk's hidden after its final norm, or before
    chains_after_norm: bool = True  # draft j+1 takes the head's hidden after its own norm, or before
    own_lm_head: bool = False  # or the trunk's
    own_embedding: bool = False  # or the trunk's
    first_embedding_is_zero: bool = False  # in the pair at position 0
    chained: bool = True  # module j > 0 is given module j-1's hidden of the same position, or the trunk's
    own_norm: bool = True  # at the head's end, or the trunk's
    in_layer: bool = False  # every module has its own parts, beside its decoder layer's; or all share one set
    modules: int | None = None  # None: as many as config.json says
    names: HeadNames = HeadNames()
    released_as: str = "mtp."  # prefix of a module's tensors: {layer} counts from the trunk's first, {module} from 0


QWEN_HEAD = HeadSpec()


class Head(nn.Module):
    """The weights under `mtp.*`, with upstream's names for what is in a module."""

    def __init__(
        self,
        spec: HeadSpec,
        layers: list[nn.Module],
        hidden: int,
        vocabulary: int,
        eps: float,
        parts: dict[str, nn.Module] | None = None,
    ):
        """`parts`: those beside the layers, where they are not the usual ones."""
        super().__init__()
        self.layers = layers
        if parts is not None:
            for name, part in parts.items():
                _put(self, name, part)
            return
        for owner in layers if spec.in_layer else [self]:
            _put(owner, spec.names.fc, nn.Linear(2 * hidden, hidden, bias=False))
            norms = (spec.names.embedding_norm, spec.names.hidden_norm, spec.names.norm)
            for name in norms if spec.own_norm else norms[:2]:
                _put(owner, name, nn.RMSNorm(hidden, eps))
            if spec.own_lm_head:
                _put(owner, spec.names.lm_head, nn.Linear(hidden, vocabulary, bias=False))
            if spec.own_embedding:
                _put(owner, spec.names.embedding, nn.Embedding(vocabulary, hidden))


def _put(owner: nn.Module, path: str, part: nn.Module) -> None:
    *outer, name = path.split(".")
    for each in outer:
        if each not in owner:
            setattr(owner, each, nn.Module())
        owner = owner[each]
    setattr(owner, name, part)


def find_part(owner: nn.Module, path: str) -> Any:
    """Return a part by its dotted name, None if there is none."""
    for name in path.split("."):
        if name not in owner:
            return None
        owner = owner[name]
    return owner


def share_missing_parts(head: nn.Module, spec: HeadSpec, stored: Container[str]) -> None:
    """Drop a head's own embedding and output layer where its `stored` parameters lack them: the trunk's are used."""
    for module, layer in enumerate(head.layers if spec.in_layer else []):
        for path in (spec.names.embedding, spec.names.lm_head):
            outer, _, name = path.rpartition(".")
            owner = find_part(layer, outer) if outer else layer
            if owner is not None and f"mtp.layers.{module}.{path}.weight" not in stored:
                owner.pop(name, None)


class Weights(nn.Module):
    """Every weight under its canonical name, whatever the checkpoint and mlx-lm call it."""

    def __init__(self, text: nn.Module, lm_head: nn.Module | None, mtp: Head | None, beside: Iterable[str] = ()):
        super().__init__()
        self.embed_tokens = text.embed_tokens
        self.layers = text.layers
        self.norm = text.norm
        for name in beside:
            if text.get(name) is not None:
                self[name] = text[name]
        if lm_head is not None:
            self.lm_head = lm_head
        if mtp is not None:
            self.mtp = mtp
