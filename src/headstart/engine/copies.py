"""Find what a sequence is repeating: an edited function, a quote, a tool's output, the next record of a list.

The host keeps an index of every MATCH tokens and where they occurred last. While the newest tokens repeat earlier
ones, `distance` says how far back those are, and the tokens that followed there are proposed as drafts (`draft.py`).
How often such a copy goes on is counted for every token, whether it was proposed or not, so that the depth controller
knows what a copy would earn before it tries one.
"""

from collections.abc import Sequence

from ..limits import MAX_K
from .draft_history import DraftHistory

MATCH = 3  # least tokens that must repeat; the device compares as many
LONGEST = 128  # longer matches count like this one
MEMORY = 0.97  # weight that earlier tokens of a sequence keep per token: some 30 tokens count


class CopyIndex:
    """Where a sequence's newest tokens occurred before. Takes constant time per token, and memory linear in them."""

    def __init__(self, max_k: int = MAX_K):
        self.max_k = max_k  # most drafts per step
        self.distance = 0  # the newest tokens equal those so far back; 0 without a match
        self.length = 0  # how many tokens do
        self._history = DraftHistory(memory=MEMORY)  # whether copies went on, by length of the match
        self._positions: dict[int, int] = {}  # hash of MATCH tokens → index after their last occurrence
        self._seen = 0  # tokens that are indexed

    def update(self, tokens: Sequence[int], pool: DraftHistory) -> None:
        """Take in the tokens added since the last call: first a prompt, then a round's. `pool` counts them too."""
        if not self._seen and len(tokens) > MATCH:
            windows = zip(*(tokens[i : len(tokens) - MATCH + i] for i in range(MATCH)), strict=True)
            self._positions = dict(zip(map(hash, windows), range(MATCH, len(tokens)), strict=True))
            self._seen = len(tokens) - 1
        for end in range(self._seen + 1, len(tokens) + 1):
            if self.distance:
                goes_on = tokens[end - 1] == tokens[end - 1 - self.distance]
                for history in (self._history, pool):
                    history.count(_class(self.length), goes_on)
                self.length += 1
                if not goes_on:
                    self.distance = self.length = 0
            window = hash(tuple(tokens[max(end - MATCH, 0) : end]))
            before = self._positions.get(window)
            self._positions[window] = end
            if not self.distance and before is not None:
                self.length = _repeated(tokens, end, before)
                self.distance = end - before if self.length >= MATCH else 0  # others only have the same hash
        self._seen = len(tokens)

    def survival(self, pool: DraftHistory, unread: int = 0) -> list[float]:
        """Return, by position, the chance that a copied draft and all before it are right.

        `unread` tokens were generated since the last update: the copy may have ended among them.
        """
        if not self.distance:
            return []
        chances, chance = [], 1.0
        for length in range(self.length, self.length + unread + self.max_k):
            which = _class(length)
            chance *= self._history.rate(which, pool.rate(which, length / (length + 2)))
            chances.append(chance)
        return chances[unread:]


def _repeated(tokens: Sequence[int], end: int, before: int) -> int:
    """Return how many tokens up to `end` equal those up to `before`, at most LONGEST."""
    for length in range(min(before, LONGEST)):
        if tokens[before - 1 - length] != tokens[end - 1 - length]:
            return length
    return min(before, LONGEST)


def _class(length: int) -> int:
    """Return the class of a match by its length: each is twice as long as the one before."""
    return min(length, LONGEST).bit_length()
