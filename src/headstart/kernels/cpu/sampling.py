"""Draw tokens and verify drafts by the extension, in one operation each, whatever a sequence's parameters.

What a draft was drawn from is its logits and six numbers: the first and the last token that could be drawn, the
logarithm of the sum over these, and the only one or -1.
"""

from typing import Any

import mlx.core as mx

from ...sampling import BatchContext, Choice, Controls, Proposal
from ...sampling.distribution import Distribution
from ...sampling.noise import Purpose
from ..backend import Backend
from ..sampling import adjust


class Sampled(Backend):
    """Sampling on CPUs. The optimistic rule, which accepts every draft, is left to MLX's operations."""

    native: Any

    def propose(
        self, logits: mx.array, proposal: Proposal, context: BatchContext, given: mx.array | None = None
    ) -> Proposal:
        controls = context.controls
        if controls.argmax_only or "optimistic" in controls.rules:
            return super().propose(logits, proposal, context, given)
        first, sources = proposal.tokens.shape[1], proposal.sources
        logits = _taken(adjust(logits, context, proposal.tokens, first))
        tokens, _, drawn = self.native.draw(logits, _sampling(context), first)
        if given is not None:
            tokens = mx.where(given >= 0, given, tokens)
            drawn = mx.concatenate([drawn[..., :5], given[..., None]], axis=-1)
        if "ratio" in controls.rules:
            sources = (*sources, (logits, drawn))
        return Proposal(mx.concatenate([proposal.tokens, tokens], axis=1), sources)

    def propose_given(self, given: mx.array, controls: Controls, vocabulary: int) -> Proposal:
        made = super().propose_given(given, controls, vocabulary)
        if not made.sources or "optimistic" in controls.rules:
            return made
        drawn = mx.concatenate([mx.zeros((*given.shape, 5), mx.int32), made.tokens[..., None]], axis=-1)
        return made._replace(sources=((mx.zeros((1,)), drawn),))  # logits that are not read

    def choose(
        self,
        logits: mx.array,
        window: mx.array,
        proposal: Proposal,
        max_k: mx.array,
        context: BatchContext,
        permitted: mx.array | None = None,
    ) -> Choice:
        controls = context.controls
        if controls.argmax_only or "optimistic" in controls.rules:
            return super().choose(logits, window, proposal, max_k, context, permitted)
        adjusted = _taken(adjust(logits, context, proposal.tokens, 0, permitted))
        if "ratio" in controls.rules and window.shape[1] > 1:
            asked = adjusted, _sampling(context), window, max_k, context.remaining, list(proposal.sources)
            tokens, finite, most = self.native.verify(*asked)
        else:
            tokens, finite, _ = self.native.draw(adjusted, _sampling(context), -1)
            most = None
        # What was forbidden or penalised may be infinite too.
        if controls.adjusts or permitted is not None:
            finite = mx.isfinite(logits.max(axis=-1)).astype(mx.int32)
        return Choice(tokens, finite, most)

    def draw(
        self, logits: mx.array, context: BatchContext, purpose: Purpose, first: int
    ) -> tuple[mx.array, Distribution]:
        tokens, drawn_from = super().draw(logits, context, purpose, first)
        if purpose == Purpose.NEXT and "ratio" in context.controls.rules:
            return tokens, drawn_from
        drawn = self.native.draw(_taken(logits), _sampling(context), first if purpose == Purpose.DRAFT else -1)
        return drawn[0], drawn_from


def _sampling(context: BatchContext) -> list[mx.array]:
    xtc = context.controls.xtc
    return [*context.sampler[:4], *(() if xtc is None else xtc)]


def _taken(logits: mx.array) -> mx.array:
    """Return logits in a type that the kernels take."""
    return logits if logits.dtype in (mx.bfloat16, mx.float32) else logits.astype(mx.float32)
