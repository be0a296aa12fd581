"""How often drafts were accepted."""

from collections import defaultdict
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
    tried: dict[Hashable, float] = field(default_factory=lambda: defaultdict(float))
    accepted: dict[Hashable, float] = field(default_factory=lambda: defaultdict(float))

    def observe(self, source: int, accepted: int, proposed: int) -> None:
        """Count a round. The first rejected draft was tried too; those after it were not."""
        for j in range(min(proposed, accepted + 1)):
            self.count((source, j), j < accepted)

    def count(self, kind: Hashable, accepted: bool) -> None:
        self.tried[kind] = self.memory * self.tried[kind] + 1
        self.accepted[kind] = self.memory * self.accepted[kind] + accepted

    def rate(self, kind: Hashable, prior: float) -> float:
        """Return the acceptance rate of a kind, close to `prior` where it was hardly tried."""
        if kind not in self.tried:
            return prior
        return (self.accepted[kind] + PRIOR_WEIGHT * prior) / (self.tried[kind] + PRIOR_WEIGHT)
