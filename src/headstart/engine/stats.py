"""What speculation did for one request. The field names are the server's `generation_stats`."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal

Origin = Literal["draft", "correction", "bonus", "plain"]


def origins(said: int, accepted: int, proposed: int) -> list[Origin]:
    """Where each token of a round came from: accepted drafts, then the model's own."""
    own: Origin = "plain" if proposed == 0 else "bonus" if accepted == proposed else "correction"
    return [*["draft"] * min(said, accepted), *[own] * (said - accepted)]  # type: ignore[list-item]


@dataclass
class Stats:
    drafter_kind: Literal["native_mtp"] | None
    bypass_reason: str | None  # why nothing was drafted
    clamped_to: int | None = None  # the depth that ran at most, where the request asked for more
    exact: bool = False  # the output is that of plain decoding, bit for bit
    prompt_tokens: int = 0
    prefix_cache_hit: int = 0  # tokens of the prompt that did not have to be read
    generation_tokens: int = 0
    rounds: int = 0
    depths: dict[int, int] = field(default_factory=dict)  # rounds by k
    paused_seconds: float = 0.0  # time in rounds of no drafts that the request would have allowed
    last_pause_reason: str | None = None  # why the last round without drafts had none, where the depth was left open
    estimated_gain_by_k: list[float] = field(default_factory=list)  # over k = 0, where the depth was left open
    proposed_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    prompt_seconds: float = 0.0  # until the first round was known
    generation_seconds: float = 0.0  # since then
    first_round_tokens: int = 0
    ranks: int = 1  # machines that it ran on
    communication_seconds: float = 0.0  # between them, as far as rounds and the speed of messages tell

    @classmethod
    def of(cls, answers: "list[Stats]") -> "Stats":
        """All answers to one prompt, which ran side by side."""
        first, depths = answers[0], Counter[int]()
        for each in answers:
            depths += Counter(each.depths)
        return replace(
            first,
            exact=all(each.exact for each in answers),
            generation_tokens=sum(each.generation_tokens for each in answers),
            rounds=sum(each.rounds for each in answers),
            depths=dict(depths),
            paused_seconds=sum(each.paused_seconds for each in answers),
            proposed_by_position=_sums([each.proposed_by_position for each in answers]),
            accepted_by_position=_sums([each.accepted_by_position for each in answers]),
            generation_seconds=max(each.generation_seconds for each in answers),
            first_round_tokens=sum(each.first_round_tokens for each in answers),
            communication_seconds=sum(each.communication_seconds for each in answers),
        )

    def copy(self) -> "Stats":
        """As of now, to hand out. Once a row and round, so nothing slower than this."""
        return replace(
            self,
            depths=self.depths.copy(),
            proposed_by_position=self.proposed_by_position.copy(),
            accepted_by_position=self.accepted_by_position.copy(),
        )

    def count(self, said: int, accepted: int, proposed: int, seconds: float) -> None:
        """A round that said `said` tokens to the user, `seconds` after the request was let in. An end in the middle
        of the round may have cut the rest off."""
        if self.rounds == 0:
            self.prompt_seconds, self.first_round_tokens = seconds, said
        self.generation_seconds = seconds - self.prompt_seconds
        self.rounds += 1
        self.generation_tokens += said
        missing = proposed - len(self.proposed_by_position)
        self.proposed_by_position += [0] * missing
        self.accepted_by_position += [0] * missing
        for j in range(proposed):
            self.proposed_by_position[j] += 1
            self.accepted_by_position[j] += j < min(said, accepted)

    def count_depth(self, k: int, seconds: float) -> None:
        self.depths[k] = self.depths.get(k, 0) + 1
        if k == 0 and self.drafter_kind is not None:
            self.paused_seconds += seconds

    @property
    def paused_reason(self) -> str | None:
        """Why speculation was paused for most of the answer."""
        return self.last_pause_reason if 2 * self.depths.get(0, 0) > sum(self.depths.values()) else None

    @property
    def proposed_draft_tokens(self) -> int:
        return sum(self.proposed_by_position)

    @property
    def accepted_draft_tokens(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Cumulative: of the rounds that drafted at least j tokens, the share that accepted at least j."""
        pairs = zip(self.accepted_by_position, self.proposed_by_position, strict=True)
        return [accepted / proposed for accepted, proposed in pairs]

    @property
    def tokens_per_round(self) -> float:
        return _ratio(self.generation_tokens, self.rounds)

    @property
    def generation_tps(self) -> float:
        """Of the tokens after the first round, whose time is the prompt's."""
        return _ratio(self.generation_tokens - self.first_round_tokens, self.generation_seconds)

    @property
    def prompt_tps(self) -> float:
        """Of the tokens that had to be read."""
        return _ratio(self.prompt_tokens - self.prefix_cache_hit, self.prompt_seconds)

    def as_dict(self) -> dict[str, object]:
        return {
            "drafter_kind": self.drafter_kind,
            "num_draft_tokens": _ratio(self.proposed_draft_tokens, self.rounds),
            "num_draft_tokens_clamped_to": self.clamped_to,
            "proposed_draft_tokens": self.proposed_draft_tokens,
            "accepted_draft_tokens": self.accepted_draft_tokens,
            "acceptance_rate": _ratio(self.accepted_draft_tokens, self.proposed_draft_tokens),
            "acceptance_by_position": self.acceptance_by_position,
            "rounds": self.rounds,
            "rounds_by_depth": {str(k): rounds for k, rounds in sorted(self.depths.items())},
            "paused_seconds": self.paused_seconds,
            "estimated_gain_by_k": self.estimated_gain_by_k,
            "tokens_per_round": self.tokens_per_round,
            "ranks": self.ranks,
            "communication_seconds_per_round": _ratio(self.communication_seconds, self.rounds),
            "prompt_tps": self.prompt_tps,
            "generation_tps": self.generation_tps,
            "prefix_cache_hit": self.prefix_cache_hit,
            "bypass_reason": self.bypass_reason,
            "paused_reason": self.paused_reason,
            "ignored_fields": [],
            "exact": self.exact,
        }


def _sums(columns: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*columns, fillvalue=0)]


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
