"""What all requests so far add up to. Only the event loop touches it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..engine import Stats


@dataclass
class Counters:
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # by endpoint and how they ended
    responses: Counter[int] = field(default_factory=Counter)  # by HTTP status
    bypasses: Counter[str] = field(default_factory=Counter)  # answers without drafts, by reason
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of those, found in the prefix cache
    first_tokens: int = 0  # answers that have begun
    first_token_seconds: float = 0.0  # from their arrival, added up
    generation_tokens: int = 0
    rounds: Counter[int] = field(default_factory=Counter)  # by depth
    proposed: Counter[int] = field(default_factory=Counter)  # by position, from 1
    accepted: Counter[int] = field(default_factory=Counter)
    paused_seconds: float = 0.0
    depth: int | None = None  # of the last round

    def add(self, before: Stats, now: Stats, *, first: bool = True, scored: bool = False) -> None:
        """An answer has gone on from `before` to `now`. Only the first to a prompt counts that; `scored`: also where
        the prompt is all there is."""
        if first and before.rounds == 0 and (now.rounds or scored):
            self.prompt_tokens += now.prompt_tokens
            self.cached_tokens += now.prefix_cache_hit
            if now.rounds and now.bypass_reason:
                self.bypasses[now.bypass_reason] += 1
        self.generation_tokens += now.generation_tokens - before.generation_tokens
        self.paused_seconds += now.paused_seconds - before.paused_seconds
        new = Counter(now.depths) - Counter(before.depths)
        self.rounds += new
        self.depth = max(new, default=self.depth)
        self.proposed += _by_position(now.proposed_by_position) - _by_position(before.proposed_by_position)
        self.accepted += _by_position(now.accepted_by_position) - _by_position(before.accepted_by_position)

    def report(self) -> dict[str, Any]:
        """What /v1/mtp/stats says of a model."""
        rounds, proposed, accepted = self.rounds.total(), self.proposed.total(), self.accepted.total()
        return {
            "rounds": rounds,
            "generation_tokens": self.generation_tokens,
            "tokens_per_round": self.generation_tokens / rounds if rounds else 0.0,
            "depth": self.depth,
            "rounds_by_depth": {str(k): self.rounds[k] for k in sorted(self.rounds)},
            "proposed_draft_tokens": proposed,
            "accepted_draft_tokens": accepted,
            "acceptance_rate": accepted / proposed if proposed else 0.0,
            "acceptance_by_position": [self.accepted[j] / self.proposed[j] for j in sorted(self.proposed)],
            "paused_seconds": self.paused_seconds,
            "bypasses": dict(self.bypasses),
        }


def _by_position(counts: list[int]) -> Counter[int]:
    return Counter(dict(enumerate(counts, 1)))
