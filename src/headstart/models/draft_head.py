"""A model's head, as chains of drafts run it (see `kernels/drafts.py`)."""

from typing import TYPE_CHECKING

import mlx.core as mx

from ..state import BatchState

if TYPE_CHECKING:
    from .heads import HeadPasses


class ModelHead:
    """`reduced`: only the draft vocabulary can be drawn, where the module's output layer is the first's."""

    def __init__(self, model: "HeadPasses", reduced: bool):
        self.model, self.reduced = model, reduced
        self.modules = model.head_modules
        self.chained = model.family.head.chained
        self.hidden_size = model.hidden_size
        self.vocabulary = model.vocabulary

    def run(
        self,
        state: BatchState,
        hidden: mx.array,
        tokens: mx.array,
        module: int,
        last: mx.array | None,
        embeddings: mx.array | None = None,
    ) -> mx.array:
        return self.model.head(hidden, tokens, state, module, last, embeddings)

    def scores(self, hidden: mx.array, module: int) -> tuple[mx.array, mx.array | None]:
        """Return the logits [B, W, V] of a module's output, or those of some tokens [B, W, R] and their ids [R]."""
        model, some = self.model, self.model.draft_vocabulary
        spec, logits = model.family.head, model.backend.logits
        if not spec.chains_after_norm:
            hidden = model.backend.norm(hidden, model.head_layers[module].following)
        if self.reduced and some is not None and (module == 0 or not spec.own_lm_head):
            return logits(hidden, some.lm_head), some.ids
        return logits(hidden, model.draft_lm_head(module)), None

    def logits(self, hidden: mx.array, module: int) -> mx.array:
        logits, ids = self.scores(hidden, module)
        some = self.model.draft_vocabulary
        return logits if ids is None or some is None else some.full(logits, self.vocabulary)
