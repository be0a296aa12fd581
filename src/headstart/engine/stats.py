"""Statistics of one answer. `as_dict` has the field names of the server's `generation_stats`."""

from collections import Counter
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal

Origin = Literal["draft", "copy", "correction", "bonus", "plain"]
SUMMED = (
    "generation_tokens",
    "rounds",
    "proposed_copies",
    "accepted_copies",
    "proposed_blocks",
    "accepted_blocks",
    "paused_seconds",
    "first_round_tokens",
)


def origins(count: int, accepted: int, proposed: int, copied: int = 0) -> list[Origin]:
    """Return the origin of a round's first `count` tokens: accepted drafts, then one of the trunk's own.

    The first `copied` drafts come from the context, the others from the head.
    """
    own: Origin = "plain" if proposed == 0 else "bonus" if accepted == proposed else "correction"
    drafts: list[Origin] = ["copy" if j < copied else "draft" for j in range(accepted)]
    return [*drafts, own][:count]


@dataclass
class Stats:
    drafter_kind: (
        str | None
    )  # the sources of drafts that it may use, with plus signs: native_mtp, copy, a drafter's kind
    bypass_reason: str | None  # why neither the drafter nor the head drafted
    clamped_to: int | None = None  # the highest depth used, if the request asked for more
    exact: bool = False  # the output is that of plain decoding, bit for bit
    prompt_tokens: int = 0
    prefix_cache_hit: int = 0  # tokens of the prompt that were not prefilled
    generation_tokens: int = 0
    rounds: int = 0
    depths: Counter[int] = field(default_factory=Counter)  # rounds by k
    paused_seconds: float = 0.0  # in rounds without drafts, though the request allowed them
    last_pause_reason: str | None = None  # of the last round without drafts at automatic depth
    estimated_gain_by_k: list[float] = field(default_factory=list)  # speed relative to k = 0, at automatic depth
    proposed_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    proposed_copies: int = 0  # drafts copied from the context
    accepted_copies: int = 0
    proposed_blocks: int = 0  # drafts of the drafter
    accepted_blocks: int = 0
    prompt_seconds: float = 0.0  # from admission to the end of the first round
    generation_seconds: float = 0.0  # since then
    first_round_tokens: int = 0
    dtype: str = ""  # of the model's activations
    ranks: int = 1  # machines of the cluster
    adapter: str | None = None  # of the request

    @classmethod
    def of(cls, answers: "list[Stats]") -> "Stats":
        """Combine the stats of several answers that ran side by side."""
        totals: dict[str, Any] = {name: sum(getattr(each, name) for each in answers) for name in SUMMED}
        return replace(
            answers[0],
            **totals,
            exact=all(each.exact for each in answers),
            depths=sum((each.depths for each in answers), Counter()),
            proposed_by_position=_sums([each.proposed_by_position for each in answers]),
            accepted_by_position=_sums([each.accepted_by_position for each in answers]),
            generation_seconds=max(each.generation_seconds for each in answers),
        )

    def copy(self) -> "Stats":
        """Return a snapshot. Called once per sequence and round, so it must be fast: `replace` takes ten times as
        long, and so does a counter's own `copy`."""
        snapshot = copy(self)
        snapshot.depths = Counter()
        dict.update(snapshot.depths, self.depths)
        snapshot.proposed_by_position = self.proposed_by_position.copy()
        snapshot.accepted_by_position = self.accepted_by_position.copy()
        return snapshot

    def count(
        self, tokens: int, accepted: int, proposed: int, copied: int, seconds: float, *, block: bool = False
    ) -> None:
        """Count a round that ended `seconds` after admission. `copied` of the proposed drafts are from the context,
        the others from the block drafter if `block`, else from the head.

        `tokens` were sent to the client: fewer than `accepted` + 1 if the answer ended within the round.
        """
        if self.rounds == 0:
            self.prompt_seconds = seconds
            self.first_round_tokens = tokens
        self.generation_seconds = seconds - self.prompt_seconds
        self.rounds += 1
        self.generation_tokens += tokens
        missing = proposed - len(self.proposed_by_position)
        self.proposed_by_position += [0] * missing
        self.accepted_by_position += [0] * missing
        self.proposed_copies += min(copied, proposed)
        self.accepted_copies += min(copied, accepted, tokens)
        self.proposed_blocks += block * max(proposed - copied, 0)
        self.accepted_blocks += block * max(min(accepted, tokens) - copied, 0)
        for j in range(proposed):
            self.proposed_by_position[j] += 1
            self.accepted_by_position[j] += j < min(tokens, accepted)

    def count_depth(self, k: int, seconds: float) -> None:
        self.depths[k] += 1
        if k == 0 and self.drafter_kind is not None:
            self.paused_seconds += seconds

    @property
    def paused_reason(self) -> str | None:
        """Return the reason if speculation was paused for most of the answer."""
        return self.last_pause_reason if 2 * self.depths[0] > sum(self.depths.values()) else None

    @property
    def proposed_draft_tokens(self) -> int:
        return sum(self.proposed_by_position)

    @property
    def accepted_draft_tokens(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def accepted_by_source(self) -> dict[str, int]:
        """Return the accepted drafts of the head, of the block drafter, and those copied from the context."""
        head = self.accepted_draft_tokens - self.accepted_blocks - self.accepted_copies
        return {"head": head, "drafter": self.accepted_blocks, "copy": self.accepted_copies}

    @property
    def proposed_by_source(self) -> dict[str, int]:
        head = self.proposed_draft_tokens - self.proposed_blocks - self.proposed_copies
        return {"head": head, "drafter": self.proposed_blocks, "copy": self.proposed_copies}

    @property
    def acceptance_by_position(self) -> list[float]:
        """Return, by position j, the share of rounds with at least j drafts in which at least j were accepted."""
        pairs = zip(self.accepted_by_position, self.proposed_by_position, strict=True)
        return [accepted / proposed for accepted, proposed in pairs]

    @property
    def tokens_per_round(self) -> float:
        return _ratio(self.generation_tokens, self.rounds)

    @property
    def generation_tps(self) -> float:
        """Return the tokens per second from the second round on, 0 without one: the first counts as the prompt's."""
        return _ratio(self.generation_tokens - self.first_round_tokens, self.generation_seconds)

    @property
    def prompt_tps(self) -> float:
        """Prefilled tokens per second, without those from the prefix cache."""
        return _ratio(self.prompt_tokens - self.prefix_cache_hit, self.prompt_seconds)

    def as_dict(self) -> dict[str, object]:
        return {
            "drafter_kind": self.drafter_kind,
            "num_draft_tokens": _ratio(self.proposed_draft_tokens, self.rounds),
            "num_draft_tokens_clamped_to": self.clamped_to,
            "proposed_draft_tokens": self.proposed_draft_tokens,
            "accepted_draft_tokens": self.accepted_draft_tokens,
            "proposed_by_source": self.proposed_by_source,
            "accepted_by_source": self.accepted_by_source,
            "acceptance_rate": _ratio(self.accepted_draft_tokens, self.proposed_draft_tokens),
            "acceptance_by_position": self.acceptance_by_position,
            "rounds": self.rounds,
            "rounds_by_depth": {str(k): rounds for k, rounds in sorted(self.depths.items())},
            "paused_seconds": self.paused_seconds,
            "estimated_gain_by_k": self.estimated_gain_by_k,
            "tokens_per_round": self.tokens_per_round,
            "ranks": self.ranks,
            "prompt_tps": self.prompt_tps,
            "generation_tps": self.generation_tps,
            "prefix_cache_hit": self.prefix_cache_hit,
            "bypass_reason": self.bypass_reason,
            "paused_reason": self.paused_reason,
            "ignored_fields": [],
            "exact": self.exact,
            "dtype": self.dtype,
            "adapter": self.adapter,
        }


def _sums(columns: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*columns, fillvalue=0)]


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
