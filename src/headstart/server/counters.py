"""What all requests to a model add up to."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from ..engine import Stats


@dataclass
class Counters:
    """Totals since the server started. Only the event loop changes them."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # by endpoint and outcome
    bypasses: Counter[str] = field(default_factory=Counter)  # answers without drafts, by reason
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens, found in the prefix cache
    first_tokens: int = 0  # answers that have begun
    first_token_seconds: float = 0.0  # sum of their times to first token
    generation_tokens: int = 0
    rounds: Counter[int] = field(default_factory=Counter)  # by depth
    proposed: Counter[int] = field(default_factory=Counter)  # drafts by position, from 1
    accepted: Counter[int] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)  # head, drafter, copy
    tokens: defaultdict[str, Counter[int]] = field(  # generated, by owner of the key and by id
        default_factory=lambda: defaultdict(Counter)
    )
    paused_seconds: float = 0.0
    depth: int | None = None  # of the last round
    adapters: "dict[str, Counters]" = field(default_factory=dict)  # what of this was with each adapter

    def add(self, before: Stats, now: Stats, *, first: bool = True) -> None:
        """Add what an answer's stats gained between `before` and `now`.

        `first`: this is the first answer to its prompt. Only that one counts the prompt.
        """
        if now.adapter is not None:
            own = self.adapters.setdefault(now.adapter, Counters())
            own.add(replace(before, adapter=None), replace(now, adapter=None), first=first)
        if first and before.rounds == 0 and now.rounds:
            self.prompt_tokens += now.prompt_tokens
            self.cached_tokens += now.prefix_cache_hit
            if now.bypass_reason:
                self.bypasses[now.bypass_reason] += 1
        self.generation_tokens += now.generation_tokens - before.generation_tokens
        self.paused_seconds += now.paused_seconds - before.paused_seconds
        rounds = Counter(now.depths) - Counter(before.depths)
        self.rounds += rounds
        self.depth = max(rounds, default=self.depth)
        self.proposed += _by_position(now.proposed_by_position) - _by_position(before.proposed_by_position)
        self.accepted += _by_position(now.accepted_by_position) - _by_position(before.accepted_by_position)
        self.accepted_by_source += Counter(now.accepted_by_source) - Counter(before.accepted_by_source)

    def acceptance(self) -> dict[str, Any]:
        rounds, proposed, accepted = self.rounds.total(), self.proposed.total(), self.accepted.total()
        return {
            "rounds": rounds,
            "generation_tokens": self.generation_tokens,
            "tokens_per_round": self.generation_tokens / rounds if rounds else 0.0,
            "proposed_draft_tokens": proposed,
            "accepted_draft_tokens": accepted,
            "acceptance_rate": accepted / proposed if proposed else 0.0,
        }

    def report(self) -> dict[str, Any]:
        positions = sorted(self.proposed)
        return {
            **self.acceptance(),
            "depth": self.depth,
            "rounds_by_depth": {str(k): self.rounds[k] for k in sorted(self.rounds)},
            "accepted_by_source": {source: self.accepted_by_source[source] for source in ("head", "drafter", "copy")},
            "proposed_by_position": [self.proposed[j] for j in positions],
            "accepted_by_position": [self.accepted[j] for j in positions],
            "acceptance_by_position": [self.accepted[j] / self.proposed[j] for j in positions],
            "paused_seconds": self.paused_seconds,
            "bypasses": dict(self.bypasses),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "first_tokens": self.first_tokens,
            "first_token_seconds": self.first_token_seconds,
            "adapters": {name: own.acceptance() for name, own in self.adapters.items()},
        }


def _by_position(counts: list[int]) -> Counter[int]:
    return Counter(dict(enumerate(counts, 1)))
