"""Drafts, acceptance and remembered passes on NVIDIA cards."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...sampling import BatchContext, Choice, Controls, Proposal, Sampler, Verdict
from ...sampling.distribution import Distribution
from ...sampling.noise import Purpose
from ..graph import Remembering
from ..report import Report
from ..sampling import adjust
from .greedy import best_fits, launch_accept, launch_best, launch_columns, launch_starts
from .persistent import Persistent
from .report import CudaReport
from .sampling import draw_fits, join_cuts, launch_draw, launch_ratio


class CudaSteps(Remembering):
    """What of a step is around the layers."""

    def __init__(self, description: str = "native (cuda)"):
        super().__init__(description)
        self.persistent = Persistent()

    def form(self) -> bool:
        return self.persistent.claim()  # or not any more: another description

    def carried(self) -> list[mx.array]:
        return [self.persistent.status]

    def carry(self, arrays: list[mx.array]) -> None:
        (self.persistent.status,) = arrays

    def release(self) -> None:
        self.persistent.release()

    def best_tokens(self, logits: mx.array) -> mx.array:
        return launch_best(logits).tokens if best_fits(logits) else super().best_tokens(logits)

    def packed_sampler(self, context: BatchContext, vocabulary: int) -> tuple[Any, ...] | None:
        controls = context.controls
        drawn = controls.kernels_suffice and not controls.adjusts and draw_fits(vocabulary)
        return context.sampler if drawn and not controls.argmax_only else super().packed_sampler(context, vocabulary)

    def draw_packed(self, logits: mx.array, sampler: tuple[Any, ...], draft: int) -> tuple[mx.array, mx.array]:
        token, _, cuts, _ = launch_draw(logits, Sampler(*sampler), draft)
        return token, cuts

    def join_draws(self, draws: list[mx.array]) -> mx.array:
        return join_cuts(draws)

    def draft_starts(self, lengths: mx.array, counts: mx.array, n: int) -> tuple[mx.array, mx.array]:
        return launch_starts(lengths, counts, n)

    def propose(
        self, logits: mx.array, proposal: Proposal, context: BatchContext, certain: mx.array | None = None
    ) -> Proposal:
        controls = context.controls
        if controls.argmax_only or not controls.kernels_suffice or not draw_fits(logits.shape[-1]):
            return super().propose(logits, proposal, context, certain)
        first, sources = proposal.tokens.shape[1], proposal.sources
        logits = adjust(logits, context, proposal.tokens, first)
        token, _, cuts, _ = launch_draw(logits, context.sampler, first)
        if certain is not None:
            token = mx.where(certain >= 0, certain, token)
            cuts = mx.concatenate([cuts[..., :3], certain[..., None]], axis=-1)
        if "ratio" in controls.rules:
            sources = (*sources, (logits, cuts))
        return Proposal(mx.concatenate([proposal.tokens, token], axis=1), sources)

    def propose_certain(self, certain: mx.array, controls: Controls, vocabulary: int) -> Proposal:
        made = super().propose_certain(certain, controls, vocabulary)
        if not made.sources or not draw_fits(vocabulary) or not controls.kernels_suffice:
            return made
        cuts = mx.concatenate([mx.zeros((*certain.shape, 3), mx.int32), made.tokens[..., None]], axis=-1)
        return made._replace(sources=((mx.zeros((1, 1, 1), mx.bfloat16), cuts),))  # logits that are not read

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
        if controls.argmax_only and permitted is None and best_fits(logits):
            return launch_best(logits)
        if controls.argmax_only or not controls.kernels_suffice or not draw_fits(logits.shape[-1]):
            return super().choose(logits, window, proposal, max_k, context, permitted)
        adjusted = adjust(logits, context, proposal.tokens, 0, permitted)
        drawn = launch_draw(adjusted, context.sampler)
        # What was forbidden or penalised may be NaN too.
        finite = drawn.finite if adjusted is logits else mx.isfinite(logits.max(axis=-1)).astype(mx.int32)
        if "ratio" not in controls.rules or window.shape[1] == 1:
            return Choice(drawn.tokens, finite)
        given = adjusted, drawn, window, proposal.sources, context.sampler, max_k, context.remaining
        tokens, most = launch_ratio(*given)
        return Choice(tokens, finite, most)

    def accept(self, choice: Choice, window: mx.array, max_k: mx.array, context: BatchContext) -> Verdict:
        return launch_accept(choice, window, max_k, context)

    def draw(
        self, logits: mx.array, context: BatchContext, purpose: Purpose, first: int
    ) -> tuple[mx.array, Distribution]:
        """Draw a token from each row. What a sequence draws must not depend on the others. So the kernel draws for
        all sequences but those with XTC, whatever the others need."""
        tokens, drawn_from = super().draw(logits, context, purpose, first)
        if not draw_fits(logits.shape[-1]):
            return tokens, drawn_from
        drawn = launch_draw(logits, context.sampler, first if purpose == Purpose.DRAFT else None).tokens
        xtc = context.controls.xtc
        return drawn if xtc is None else mx.where(xtc.probability.squeeze(-1) > 0, tokens, drawn), drawn_from

    def window(self, last: mx.array, drafts: mx.array) -> mx.array:
        return self.columns([last[:, None], drafts]) if drafts.shape[1] else last[:, None]

    def report(self, columns: Sequence[mx.array]) -> Report:
        return CudaReport(columns, self.persistent)

    def columns(self, arrays: list[mx.array]) -> mx.array:
        plain = len(arrays) > 1 and all(each.dtype == mx.int32 for each in arrays)
        return launch_columns(arrays)[0] if plain else super().columns(arrays)
