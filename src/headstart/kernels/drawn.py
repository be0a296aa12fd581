"""Draw and accept by kernels for GPUs, whatever a sequence's parameters.

What a draft was drawn from is its logits, as they were changed, and where they begin and end: six numbers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..sampling import BatchContext, Choice, Controls, Logprobs, Proposal, Sampler
from ..sampling.window import Source
from .graph import Remembering
from .sampling import adjust, count_permitted


class Draws(NamedTuple):
    tokens: mx.array  # [B, W] int32
    finite: mx.array  # [B, W] int32, 0 where a logit of the model is NaN or the largest infinite
    cuts: mx.array  # [B, W, 6] int32, what each was drawn from, for a kernel that has the logits
    logits: mx.array  # [B, W, V], as they were changed
    work: tuple[mx.array, ...]  # what else is known of the rows


class DrawnByKernels(Remembering):
    """Sampling by three launchers of a device."""

    def draws(self, vocabulary: int) -> bool:
        """Return whether kernels draw. They must then draw for every batch, or a seeded text would depend on its
        neighbours."""
        raise NotImplementedError

    def launch_draw(
        self,
        logits: mx.array,
        sampler: Sampler,
        draft: int | None = None,
        drafts: mx.array | None = None,
        permitted: mx.array | None = None,
    ) -> Draws:
        """Draw a token from each row of logits [B, W, V], for the next positions: those of the target itself, or from
        number `draft` on.

        Args:
            drafts: [B, k], those before the last position, if what changes logits depends on them.
            permitted: [B, W, V], the tokens that grammars permit at each position.
        """
        raise NotImplementedError

    def launch_ratio(
        self,
        drawn: Draws,
        window: mx.array,
        sources: Sequence[Source],
        sampler: Sampler,
        optimistic: mx.array,
        max_k: mx.array,
        remaining: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Verify the drafts of a window [B, W] against what tokens were `drawn` from.

        A source is the logits of some drafts, [B, 1, V] of each or [B, W, V] of all, and then their cuts [B, n, 6];
        there is none if no sequence uses the ratio rule.

        Returns tokens [B, W] and how many of the drafts are the first of them, [B]: W where the rule is another one.
        """
        raise NotImplementedError

    def launch_logprobs(self, logits: mx.array, tokens: mx.array, top: int) -> Logprobs:
        """Return the log-probabilities of `tokens` [B, W] and of the `top` best tokens under logits [B, W, V]."""
        raise NotImplementedError

    def packed_sampler(self, context: BatchContext, vocabulary: int) -> tuple[Any, ...] | None:
        controls = context.controls
        if controls.argmax_only or controls.top_n_sigma is not None or not self.draws(vocabulary):
            return super().packed_sampler(context, vocabulary)
        return context.sampler

    def draw_packed(self, logits: mx.array, sampler: tuple[Any, ...], drafts: list[mx.array]) -> list[mx.array]:
        how = Sampler(*sampler)
        before = self.columns(drafts) if drafts and how.adjusts else None
        drawn = self.launch_draw(logits, how, len(drafts), before)
        return [drawn.tokens, drawn.cuts, drawn.logits]

    def _draw(
        self,
        logits: mx.array,
        context: BatchContext,
        draft: int | None,
        drafts: mx.array,
        permitted: mx.array | None = None,
    ) -> Draws:
        """Draw as `launch_draw` does. The kernels do not know of top-n-sigma, which is done to the logits."""
        sampler = context.sampler
        if context.controls.top_n_sigma is None:
            return self.launch_draw(logits, sampler, draft, drafts, permitted)
        changed, finite = adjust(logits, context, drafts, draft or 0, permitted), mx.isfinite(logits.max(axis=-1))
        drawn = self.launch_draw(changed, sampler.of_changed, draft)
        return drawn._replace(finite=finite.astype(mx.int32))

    def propose(
        self, logits: mx.array, proposal: Proposal, context: BatchContext, given: mx.array | None = None
    ) -> Proposal:
        controls = context.controls
        if controls.argmax_only or not self.draws(logits.shape[-1]):
            return super().propose(logits, proposal, context, given)
        sources = proposal.sources
        drawn = self._draw(logits, context, proposal.tokens.shape[1], proposal.tokens)
        token, cuts = drawn.tokens, drawn.cuts
        if given is not None:
            token = mx.where(given >= 0, given, token)
            cuts = mx.concatenate([cuts[..., :5], given[..., None]], axis=-1)
        if "ratio" in controls.rules:
            sources = (*sources, (drawn.logits, cuts))
        return Proposal(mx.concatenate([proposal.tokens, token], axis=1), sources)

    def propose_given(self, given: mx.array, controls: Controls, vocabulary: int) -> Proposal:
        made = super().propose_given(given, controls, vocabulary)
        if not made.sources or not self.draws(vocabulary):
            return made
        cuts = mx.concatenate([mx.zeros((*given.shape, 5), mx.int32), made.tokens[..., None]], axis=-1)
        return made._replace(sources=((mx.zeros((1, 1, 8), mx.bfloat16), cuts),))  # logits that are not read

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
        if not self.draws(logits.shape[-1]) or (controls.argmax_only and permitted is None):
            return super().choose(logits, window, proposal, max_k, context, permitted)
        drawn = self._draw(logits, context, None, proposal.tokens, permitted)
        if not controls.rules & {"ratio", "optimistic"} or window.shape[1] == 1:
            return Choice(drawn.tokens, drawn.finite)
        if permitted is not None and "optimistic" in controls.rules:
            most = mx.minimum(max_k, count_permitted(proposal.tokens, permitted))
            max_k = mx.where(controls.optimistic, most, max_k)
        asked = window, proposal.sources, context.sampler, controls.optimistic, max_k, context.remaining
        tokens, accepted = self.launch_ratio(drawn, *asked)
        return Choice(tokens, drawn.finite, accepted)

    def logprobs(self, logits: mx.array, tokens: mx.array, top: int) -> Logprobs:
        ours = self.draws(logits.shape[-1])
        return self.launch_logprobs(logits, tokens, top) if ours else super().logprobs(logits, tokens, top)
