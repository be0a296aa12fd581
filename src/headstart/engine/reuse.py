"""Where a row finds the beginning of its prompt already taken in, and where it leaves its own for others."""

from collections.abc import Sequence

import mlx.core as mx

from ..models import Model
from ..state import PrefixCache
from .batch import Batch, UnseenPairs
from .memory import is_shortage


def resume(model: Model, batch: Batch, tokens: Sequence[int], prefix: PrefixCache) -> int:
    """Let a new row begin after what is known of its tokens → how many of them that is.

    A row that will not draft takes the head along while it takes in its prompt: then every entry serves every row.
    """
    if model.has_head and batch.head is None:
        batch.head = model.make_head_state(1)
    if (found := prefix.resume(tokens, batch.rows, batch.head)) is None:
        return 0
    taken, hidden = found
    if batch.head is not None:  # the last hidden's pair is made with this row's own next token
        batch.waiting = UnseenPairs(hidden, mx.array([tokens[taken : taken + 1]], mx.int32), mx.ones((1,), mx.int32))
    return taken


def leave(batch: Batch, tokens: Sequence[int], taken: int, prefix: PrefixCache) -> None:
    """Keep what the row holds for those that begin like it, if it stands where it can be resumed."""
    if taken and taken % prefix.chunk == 0:
        mx.eval(batch.arrays())
        try:
            prefix.store(tokens, taken, batch.rows, batch.head, batch.waiting.hidden)
        except Exception as error:  # the row itself has all it needs
            if not is_shortage(error):
                raise
            prefix.clear()
