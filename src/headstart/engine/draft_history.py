"""How often drafts were accepted."""

from dataclasses import dataclass, field

from ..limits import MAX_K

MEMORY = 0.9  # weight that earlier rounds of a sequence keep per round: some 10 rounds count
PRIOR_WEIGHT = 3.0  # rounds for which the prior of a position counts: the pool's rate, or the position before


@dataclass(eq=False)
class DraftHistory:
    """How often drafts were accepted at each position, given that all before them were. Recent rounds weigh most."""

    max_k: int = MAX_K  # most drafts per step
    memory: float = MEMORY
    tried: list[float] = field(default_factory=lambda: [0.0] * MAX_K)
    accepted: list[float] = field(default_factory=lambda: [0.0] * MAX_K)

    def observe(self, accepted: int, proposed: int) -> None:
        """Count a round. The first rejected draft was tried too; those after it were not."""
        for j in range(min(proposed, accepted + 1)):
            self.count(j, j < accepted)

    def count(self, j: int, accepted: bool) -> None:
        self.tried[j] = self.memory * self.tried[j] + 1
        self.accepted[j] = self.memory * self.accepted[j] + accepted

    def rate(self, j: int, prior: float) -> float:
        """Return the acceptance rate at position j, close to `prior` where it was hardly tried."""
        return (self.accepted[j] + PRIOR_WEIGHT * prior) / (self.tried[j] + PRIOR_WEIGHT)
