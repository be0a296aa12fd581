"""Is a model's head sound, and does drafting pay on this machine? What `headstart probe` measures."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine import Engine, Request
from ..models import Model
from ..sampling import SamplingParams
from .local import K, decode_batch
from .measurement import Trial, add_by_position
from .prompts import KINDS, builtin_prompts

# Share of first drafts accepted on the model's own greedy text. Sound heads were seen at 72 to 90%, most broken ones
# at 0 to 35%; and a draft that is rejected more often than not seldom pays for itself.
SOUND = 0.5
UNLIKELY = 1.96  # standard errors below that: one sound head in 40 that is just at the line would be blamed
NEAR_TIE = 1.0  # rounding may decide between logits this close; a factor of e in probability is a mistake


@dataclass(frozen=True)
class DepthResult:
    """All texts at one depth."""

    k: K
    answers: list[list[int]]  # token ids
    tokens_per_second: float
    tokens_per_round: float
    step_seconds: float
    proposed: list[int]  # drafts by position
    accepted: list[int]


@dataclass(frozen=True)
class Divergence:
    """The first token of an answer that is not that of plain decoding."""

    k: K
    prompt: str  # its kind
    position: int  # in the answer
    plain: int  # token ids
    drafted: int
    margin: float | None  # by how many logits the model prefers the plain token; None where one of them is unlikely


@dataclass(frozen=True)
class ProbeResult:
    exact: bool  # kernels compute a row whatever stands beside it, so the same tokens are promised
    depths: list[DepthResult]  # k = 0, 1, 2, …, auto
    divergences: list[Divergence]

    @property
    def first_drafts(self) -> tuple[int, int]:
        """Return how many first drafts were accepted, and of how many: at k = 1, where there are most of them."""
        return self.depths[1].accepted[0], self.depths[1].proposed[0]

    @property
    def sound(self) -> bool:
        """Return whether the upper end of Wilson's interval of the share of first drafts reaches SOUND."""
        accepted, proposed = self.first_drafts
        return accepted + UNLIKELY * math.sqrt(SOUND * (1 - SOUND) * proposed) >= SOUND * proposed

    @property
    def passed(self) -> bool:
        """Return whether the head is sound and the output is the model's own."""
        return self.sound and all(map(self.is_rounding, self.divergences))

    def is_rounding(self, divergence: Divergence) -> bool:
        """Return whether rounding explains a divergence. Where the same tokens are promised nothing excuses one."""
        return not self.exact and divergence.margin is not None and abs(divergence.margin) <= NEAR_TIE

    @property
    def best(self) -> DepthResult:
        """Return the fastest fixed depth."""
        return max(self.depths[:-1], key=lambda depth: depth.tokens_per_second)


def probe_prompts(tokenizer: TokenizerWrapper) -> dict[str, list[int]]:
    """Return the shortest built-in prompt of each kind: a probe is about what comes after it."""
    return {kind: min((each.tokens(tokenizer) for each in builtin_prompts([kind])), key=len) for kind in KINDS}


def probe_model(
    model: Model, prompts: Mapping[str, Sequence[int]], k: int, tokens: int, progress: Callable[[str], None]
) -> ProbeResult:
    """Decode each prompt alone at every depth up to k and with auto, all depths by turns.

    `progress` is called before each run, (k + 2) · (1 + prompts) times, with what comes next.
    """
    depths: list[K] = [*range(k + 1), "auto"]
    trials: dict[K, list[Trial]] = {depth: [] for depth in depths}
    for depth in depths:
        progress(f"warming up, k={depth}")
        decode_batch(model, [next(iter(prompts.values()))], depth, tokens)
    for kind, prompt in prompts.items():
        for depth in depths:
            progress(f"{kind}, k={depth}")
            trials[depth].append(decode_batch(model, [prompt], depth, tokens))
    results = [_add_up(depth, trials[depth]) for depth in depths]
    return ProbeResult(trials[0][0].exact, results, find_divergences(model, prompts, results))


def find_divergences(
    model: Model, prompts: Mapping[str, Sequence[int]], depths: Sequence[DepthResult]
) -> list[Divergence]:
    """Return where answers first differ from those of plain decoding, the first of `depths`."""
    found = []
    for depth in depths[1:]:
        for (kind, prompt), plain, drafted in zip(prompts.items(), depths[0].answers, depth.answers, strict=True):
            pairs = enumerate(zip(plain, drafted, strict=True))
            if (at := next((position for position, (a, b) in pairs if a != b), None)) is not None:
                margin = _margin(model, [*prompt, *plain[:at]], plain[at], drafted[at])
                found.append(Divergence(depth.k, kind, at, plain[at], drafted[at], margin))
    return found


def _add_up(k: K, trials: Sequence[Trial]) -> DepthResult:
    tokens, seconds = sum(trial.tokens for trial in trials), sum(trial.seconds for trial in trials)
    rounds = sum(trial.tokens / trial.tokens_per_round for trial in trials)
    return DepthResult(
        k=k,
        answers=[trial.sequences[0] for trial in trials],
        tokens_per_second=tokens / seconds,
        tokens_per_round=tokens / rounds,
        step_seconds=seconds / rounds,
        proposed=add_by_position([trial.proposed for trial in trials]),
        accepted=add_by_position([trial.accepted for trial in trials]),
    )


def _margin(model: Model, text: Sequence[int], plain: int, drafted: int) -> float | None:
    """Return how much likelier one token is than the other after a text, as a difference of logits."""
    params = SamplingParams(max_tokens=1, k=0, logprobs=True, top_logprobs=8)
    events = Engine(model).submit(Request(text, params))
    (token,) = [each for event in events for each in event.logprobs or ()]
    likeliest = dict(token.top)
    return likeliest[plain] - likeliest[drafted] if {plain, drafted} <= likeliest.keys() else None
