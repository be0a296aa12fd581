"""How a model's head runs: over pairs of hidden states and tokens, a module at a time."""

from collections.abc import Container
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels.layers import Layer, Pass
from ..state import BatchState
from .abilities import Abilities
from .draft_head import ModelHead
from .draft_vocabulary import DraftVocabulary
from .family import Family
from .head import Weights, find_part, share_missing_parts
from .head_input import PairParts, pair_input


class HeadPasses(Abilities):
    """The head of a `Model`."""

    family: Family
    lm: nn.Module
    weights: Weights
    draft_vocabulary: DraftVocabulary | None

    @property
    def has_head(self) -> bool:
        return "mtp" in self.weights

    @property
    def head_modules(self) -> int:
        return len(self.weights.mtp.layers) if self.has_head else 1

    @property
    def hidden_size(self) -> int:
        """Return the numbers of a hidden state as the head is fed it: of all streams before their mean."""
        streams = 1 if self.family.head.fed_after_norm else self.family.streams(self.lm)
        return int(self.config["hidden_size"]) * streams

    @cached_property
    def head_layers(self) -> tuple[Layer, ...]:
        """Return what the layers of the head's modules are, a stack each."""
        modules = enumerate(self.weights.mtp.layers)
        return tuple(self.family.describe([each], self._head_norm(number))[0] for number, each in modules)

    def head(
        self,
        hidden: mx.array,
        tokens: mx.array,
        state: BatchState,
        module: int = 0,
        last: mx.array | None = None,
        embeddings: mx.array | None = None,
    ) -> mx.array:
        """Run the head over pairs (hidden of position t, token t+1), [B, W, H] and [B, W] → [B, W, H].

        The output predicts token t+2 and, with that token, is the next pair of the chain. With `last` [B] only the
        output at that index is returned, [B, 1, H]. `embeddings` [B, W, H] take the place of the tokens' own.
        """
        given = PairParts(self.family.head, partial(self._part, module), self.weights.embed_tokens)
        x = pair_input(self.backend, given, hidden, tokens, embeddings, state.lengths, self.dtype)
        backend, layer = self.backend, self.head_layers[module]
        run = Pass(state.reserve(tokens.shape[1]), state.accepted, last=last)
        x, normed = backend.decoder_layer(layer, x, None, [state.layers[module]], run)
        if not self.family.head.chains_after_norm:
            return x
        return backend.norm(x, layer.following) if normed is None else normed

    @cached_property
    def draft_head(self) -> ModelHead:
        """Return the head as chains of drafts run it."""
        return ModelHead(self, reduced=False)

    @cached_property
    def reduced_head(self) -> ModelHead:
        """Return the head that drafts from the draft vocabulary only."""
        return ModelHead(self, reduced=True)

    def draft_logits(self, hidden: mx.array, reduced: bool = False, *, module: int = 0) -> mx.array:
        """Return the logits [B, W, V] of hidden states [B, W, H] from a module of `head`."""
        return (self.reduced_head if reduced else self.draft_head).logits(hidden, module)

    def _part(self, module: int, path: str) -> Any:
        """Return a part of a head's module by its name, None if the trunk's is used."""
        mtp = self.weights.mtp
        return find_part(mtp.layers[module] if self.family.head.in_layer else mtp, path)

    def _head_norm(self, module: int) -> nn.Module:
        spec = self.family.head
        return self._part(module, spec.names.norm) if spec.own_norm else self.weights.norm

    def draft_lm_head(self, module: int = 0) -> nn.Module:
        """Return the output layer of a head's module."""
        own: nn.Module | None = self._part(module, self.family.head.names.lm_head)
        return own if own is not None else self._lm_head

    def share_missing(self, stored: Container[str]) -> None:
        """Use the trunk's embedding and output layer where a head's `stored` parameters lack its own copies."""
        share_missing_parts(self.weights.mtp, self.family.head, stored)

    @property
    def _lm_head(self) -> nn.Module:
        return self.weights["lm_head" if "lm_head" in self.weights else "embed_tokens"]
