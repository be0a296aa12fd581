"""All drafts of a head with one module, each from the draft before it: a graph by itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..kernels.cuda.sampling import Sampler, join_cuts, launch_draw
from ..kernels.greedy import join_columns
from ..state import BatchState


def draft_chain(
    head: Callable[..., mx.array],
    best_draft: Callable[[mx.array, bool], mx.array],
    draft_logits: Callable[[mx.array, bool], mx.array],
    state: BatchState,
    hidden: mx.array,
    token: mx.array,
    last: mx.array | None,
    starts: mx.array,
    reduced: bool,
    ratio: bool,
    *sampler: Any,
) -> list[mx.array]:
    """Return the drafts [B, k] that begin at `starts` [k, B], each the argmax, or drawn if there is a `Sampler`. For
    the `ratio` rule also what they were drawn from: cuts [B, k, 4], then logits [B, 1, V] of each."""
    drafts, cuts, rows = [], [], []
    for j in range(starts.shape[0]):
        if j:  # past the committed pairs: the next step overwrites what is written there
            state, last = replace(state, lengths=starts[j - 1]), None
        hidden = head(state, hidden, token, None, 0, last)
        if sampler:
            rows.append(draft_logits(hidden, reduced))
            token, _, cut, _ = launch_draw(rows[-1], Sampler(*sampler), j)
            cuts.append(cut)
        else:
            token = best_draft(hidden, reduced)
        drafts.append(token)
    return [join_columns(drafts), *([join_cuts(cuts), *rows] if ratio else ())]
