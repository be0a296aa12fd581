"""How many drafts a step may have. What the model, the server, the request and the load allow meets here alone.

The controller chooses within these limits (`depth.py`), and of what was drafted `allowed_drafts` takes on the device
what a sequence still has room for, since only the device knows how far it is.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..limits import MAX_K
from ..models import Model
from ..sampling import SamplingParams
from .depth import Plan
from .draft import draft_limits
from .invariance import max_invariant_rows

if TYPE_CHECKING:
    from .sequence import SequenceState


class DraftLimit(NamedTuple):
    """The most drafts per step of one sequence, by where they come from."""

    drafted: int  # by the model's head or block drafter
    copied: int  # from the context
    bypass_reason: str | None  # why nothing is drafted

    @property
    def most(self) -> int:
        return max(self.drafted, self.copied)


def request_limit(params: SamplingParams, model: Model, max_k: int) -> DraftLimit:
    """Return the limit of a request's sequences. `max_k`: most drafts per step that the server allows."""
    k, reason = _drafted(params, model, max_k)
    # A fixed k asks for drafts of one source. The optimistic rule would accept a copy that never ends.
    if params.k != "auto" or not model.copies or params.rule == "optimistic":
        return DraftLimit(k, 0, reason)
    return DraftLimit(k, MAX_K if 0 < model.most_drafts <= max_k else max_k, reason)  # below that, the user's limit


def _drafted(params: SamplingParams, model: Model, max_k: int) -> tuple[int, str | None]:
    limits, most = draft_limits(model), min(max_k, model.most_drafts)
    if not limits:
        return 0, model.head_unavailable or "the model has no head"
    if params.k == 0:
        return 0, "the request asked for no drafts"
    if most == 0:
        return 0, "speculation is switched off"
    return (most if params.k == "auto" else min(params.k, most, next(iter(limits.values())))), None


def step_limit(model: Model, running: "Sequence[SequenceState]") -> int:
    """Return the limit of a step of these sequences.

    The kernels compute so many positions independently. Beyond, MLX's are used, which add up in another order: where
    even single tokens are too many, the stats of their sequences say so.
    """
    rows = max_invariant_rows(model)
    if len(running) > rows:
        for sequence in running:
            sequence.stats.exact = False
    return max(min(MAX_K, rows // len(running) - 1), 0)


def fixed_plan(model: Model, running: "Sequence[SequenceState]", most: int = MAX_K) -> Plan:
    """Return the plan where no sequence leaves k open: the largest k, of which each accepts at most its own."""
    k = min(most, max(sequence.limits.drafted for sequence in running))
    return next((Plan(min(k, limit), source) for source, limit in draft_limits(model).items()), Plan(0))
