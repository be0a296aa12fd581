"""How often drafts were accepted."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from ..limits import MAX_K

MEMORY = 0.9  # weight that earlier rounds of a sequence keep per round: some 10 rounds count
PRIOR_WEIGHT = 3.0  # rounds for which the prior of a position counts: the pool's rate, or the position before


@dataclass(eq=False)
class DraftHistory:
    """How often drafts of each kind were accepted, given that all before them were. Recent rounds weigh most.

    A kind is a source and a position, or whatever else its user tells apart.
    """

    max_k: int = MAX_K  # most drafts per step
    memory: float = MEMORY
    counts: dict[Hashable, tuple[float, float]] = field(default_factory=dict)  # tried, accepted

    def observe(self, source: int, accepted: int, proposed: int) -> None:
        """Count a round. The first rejected draft was tried too; those after it were not."""
        for j in range(min(proposed, accepted + 1)):
            self.count((source, j), j < accepted)

    def count(self, kind: Hashable, accepted: bool) -> None:
        before = self.counts.get(kind, (0.0, 0.0))
        self.counts[kind] = (self.memory * before[0] + 1, self.memory * before[1] + accepted)

    def rate(self, kind: Hashable, prior: float) -> float:
        """Return the acceptance rate of a kind, close to `prior` where it was hardly tried."""
        tried, accepted = self.counts.get(kind, (0.0, 0.0))
        return (accepted + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)
