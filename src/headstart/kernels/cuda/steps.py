"""Drafts, acceptance and remembered passes on NVIDIA cards."""

from collections.abc import Sequence

import mlx.core as mx

from ...sampling import BatchContext, Choice, Proposal, Verdict
from ..drawn import DrawnByKernels
from ..report import Report
from .greedy import best_fits, launch_accept, launch_best, launch_columns, launch_starts
from .persistent import Persistent
from .report import CudaReport
from .sampling import draw_fits, join_cuts, launch_draw, launch_logprobs, launch_ratio


class CudaSteps(DrawnByKernels):
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

    def draws(self, vocabulary: int) -> bool:
        return draw_fits(vocabulary)

    launch_draw = staticmethod(launch_draw)
    launch_ratio = staticmethod(launch_ratio)
    launch_logprobs = staticmethod(launch_logprobs)

    def join_draws(self, draws: list[mx.array]) -> mx.array:
        return join_cuts(draws)

    def draft_starts(self, lengths: mx.array, counts: mx.array, n: int) -> tuple[mx.array, mx.array]:
        return launch_starts(lengths, counts, n)

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
        return super().choose(logits, window, proposal, max_k, context, permitted)

    def accept(self, choice: Choice, window: mx.array, max_k: mx.array, context: BatchContext) -> Verdict:
        return launch_accept(choice, window, max_k, context)

    def window(self, last: mx.array, drafts: mx.array) -> mx.array:
        return self.columns([last[:, None], drafts]) if drafts.shape[1] else last[:, None]

    def report(self, columns: Sequence[mx.array]) -> Report:
        return CudaReport(columns, self.persistent)

    def columns(self, arrays: list[mx.array]) -> mx.array:
        plain = len(arrays) > 1 and all(each.dtype == mx.int32 for each in arrays)
        return launch_columns(arrays)[0] if plain else super().columns(arrays)
