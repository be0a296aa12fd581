"""Is a model's head sound, and does drafting pay on this machine? What `headstart probe` measures, and its report."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine import Engine, Request
from ..models import Model
from ..sampling import SamplingParams
from .local import K, decode_batch
from .measurement import Trial, add_up
from .prompts import KINDS, builtin_prompts
from .report import bullets, table
from .system import SystemInfo

# Share of first drafts accepted on the model's own greedy text. Sound heads were seen at 72 to 90%, most broken ones
# at 0 to 35%; and a draft that is rejected more often than not seldom pays for itself.
SOUND = 0.5
UNLIKELY = 1.96  # standard errors below that: one sound head in 40 that is just at the line would be blamed
HEADS = ["k", "same answers", "tokens per round", "ms per step", "× the step at k = 0", "tokens/s", "× k = 0"]
NEAR_TIE = 1.0  # rounding may decide between logits this close; a factor of e in probability is a mistake


@dataclass(frozen=True)
class Divergence:
    """The first token of an answer that is not that of plain decoding."""

    k: K
    prompt: str  # its kind
    position: int  # in the answer
    plain: str  # tokens
    drafted: str
    rounding: bool  # it is a near-tie, where the same tokens are not promised: nothing else excuses it


def probe_prompts(tokenizer: TokenizerWrapper) -> dict[str, list[int]]:
    """Return the shortest built-in prompt of each kind: a probe is about what comes after it."""
    return {kind: min((each.tokens(tokenizer) for each in builtin_prompts([kind])), key=len) for kind in KINDS}


def decode_depths(
    model: Model,
    prompts: Mapping[str, Sequence[int]],
    k: int,
    tokens: int,
    progress: Callable[[str], None],
    enough: Callable[[], bool] = lambda: False,
) -> dict[K, Trial]:
    """Decode each prompt alone at every depth up to k and with auto, all depths by turns, and add up the prompts: the
    first, and others until it is `enough`.

    `progress` is called before each run, (k + 2) · (1 + prompts) times, with what comes next.
    """
    depths: list[K] = [*range(k + 1), "auto"]
    trials: dict[K, list[Trial]] = {depth: [] for depth in depths}
    for depth in depths:
        progress(f"warming up, k={depth}")
        decode_batch(model, [next(iter(prompts.values()))], depth, tokens)
    for number, (kind, prompt) in enumerate(prompts.items()):
        if number and enough():
            break
        for depth in depths:
            progress(f"{kind}, k={depth}")
            trials[depth].append(decode_batch(model, [prompt], depth, tokens))
    return {depth: add_up(trials[depth]) for depth in depths}


def find_divergences(
    model: Model,
    tokenizer: TokenizerWrapper,
    prompts: Mapping[str, Sequence[int]],
    plain_trial: Trial,
    trials: Mapping[K, Trial],
) -> list[Divergence]:
    """Return where the answers of each trial, by depth, first differ from those of `plain_trial`."""
    found = []
    for k, trial in trials.items():
        answers = zip(prompts.items(), plain_trial.sequences, trial.sequences, strict=True)
        for (kind, prompt), plain, drafted in answers:
            pairs = enumerate(zip(plain, drafted, strict=False))  # a batch is cut off when its first answer ends
            if (at := next((position for position, (a, b) in pairs if a != b), None)) is not None:
                rounding = not trial.exact and is_near_tie(model, [*prompt, *plain[:at]], plain[at], drafted[at])
                first, second = tokenizer.decode([plain[at]]), tokenizer.decode([drafted[at]])
                found.append(Divergence(k, kind, at, first, second, rounding))
    return found


def is_near_tie(model: Model, text: Sequence[int], plain: int, drafted: int) -> bool:
    """Return whether the logits of two tokens after a text are so close that rounding may decide between them."""
    params = SamplingParams(max_tokens=1, k=0, logprobs=True, top_logprobs=8)
    events = Engine(model).submit(Request(text, params))
    (token,) = [each for event in events for each in event.logprobs or ()]
    likeliest = dict(token.top)
    return {plain, drafted} <= likeliest.keys() and abs(likeliest[plain] - likeliest[drafted]) <= NEAR_TIE


@dataclass(frozen=True)
class ProbeReport:
    model: dict[str, Any]  # id, family, quantization, …
    machine: SystemInfo
    depths: dict[K, Trial]  # of all texts, at k = 0, 1, 2, … and auto
    divergences: list[Divergence]
    remedy: str  # how to get a sound head, where this one is not
    excluded: Sequence[str] = ()  # kernels that failed, were wrong or crashed on this machine, and why

    @property
    def fixed(self) -> dict[int, Trial]:
        """Return all depths but auto."""
        return {k: trial for k, trial in self.depths.items() if k != "auto"}

    @property
    def best_k(self) -> int:
        return max(self.fixed, key=lambda k: self.fixed[k].rate)

    @property
    def first_drafts(self) -> tuple[int, int]:
        """Return how many first drafts were accepted, and of how many: at k = 1, where there are most of them."""
        return self.fixed[1].accepted[0], self.fixed[1].proposed[0]

    @property
    def sound(self) -> bool:
        """Return whether the upper end of Wilson's interval of the share of first drafts reaches SOUND."""
        accepted, proposed = self.first_drafts
        return accepted + UNLIKELY * math.sqrt(SOUND * (1 - SOUND) * proposed) >= SOUND * proposed

    @property
    def passed(self) -> bool:
        """Return whether the head is sound and the output is the model's own."""
        return self.sound and all(divergence.rounding for divergence in self.divergences)

    def as_dict(self) -> dict[str, Any]:
        fixed = self.fixed
        steps = {str(k): trial.step_seconds for k, trial in fixed.items()}
        accepted, proposed = self.first_drafts
        return {
            "passed": self.passed,
            "identical": not self.divergences,
            "first_divergence": asdict(self.divergences[0]) if self.divergences else None,
            "first_draft_acceptance": accepted / proposed,
            "acceptance_by_position": fixed[max(fixed)].acceptance_by_position,
            "tokens_per_round": {str(k): trial.tokens_per_round for k, trial in self.depths.items()},
            "tokens_per_second": {str(k): trial.rate for k, trial in self.depths.items()},
            "cost_by_k": {k: {"seconds": step, "ratio": step / steps["0"]} for k, step in steps.items()},
            "best_k": self.best_k,
            "exact": fixed[0].exact,
            "model": self.model,
            "machine": asdict(self.machine),
            "remedy": self.remedy,
            "excluded_kernels": list(self.excluded),
        }

    def markdown(self) -> str:
        name = self.model["id"]
        about = [[key, "none" if value is None else str(value)] for key, value in self.model.items() if key != "id"]
        parts = [f"# Probe of {name}: {'passed' if self.passed else 'failed'}", str(self.machine)]
        return "\n\n".join([*parts, table(["model", name], about), self.body()]) + "\n"

    def body(self) -> str:
        """Return the figures and what they mean, without the model and the machine."""
        return "\n\n".join([self._depths(), bullets(self.conclusions())])

    def conclusions(self) -> Iterator[str]:
        """Yield sentences that say what the figures mean, the verdict last."""
        fixed, deepest = self.fixed, max(self.fixed)
        yield "k: the number of tokens drafted per step. k = 0 is decoding without drafts."
        if fixed[0].exact:
            yield "The same tokens are promised: these kernels compute a row the same whatever stands beside it."
        else:
            yield "The same tokens are not promised: these kernels round differently with the number of rows."
        if not self.divergences:
            yield f"Every answer is that of plain decoding, at k = 1 to {deepest} and auto."
        for each in self.divergences:
            why = "a near-tie that rounding decides" if each.rounding else "a mistake"
            place = f"k = {each.k}, {each.prompt} prompt, token {each.position + 1}"
            yield f"Not as in plain decoding: {place} is {each.drafted!r} instead of {each.plain!r}, {why}."
        accepted, proposed = self.first_drafts
        broken = ": too few for a sound head. Its weights are damaged or belong to another model"
        yield f"{accepted / proposed:.0%} of {proposed} first drafts are accepted{'' if self.sound else broken}."
        if not self.sound:
            yield self.remedy
        if shares := fixed[deepest].acceptance_by_position:
            by_position = " ".join(f"{share:.0%}" for share in shares)
            yield f"Accepted by position at k = {deepest}, together with all before it: {by_position}."
        if self.best_k:
            gain = fixed[self.best_k].rate / fixed[0].rate
            yield f"Speculation pays here: k = {self.best_k} is {gain:.2f}× as fast as no drafts."
        else:
            yield "Speculation does not pay here: no depth is faster than decoding without drafts."
        for kernel in self.excluded:
            yield f"Not used on this machine: {kernel}."
        yield "Passed." if self.passed else "Failed."

    def _depths(self) -> str:
        plain = self.fixed[0]
        different = Counter(each.k for each in self.divergences)
        rows = []
        for k, trial in self.depths.items():
            same = f"{len(trial.sequences) - different[k]} of {len(trial.sequences)}"
            step, ratio = f"{1e3 * trial.step_seconds:.1f}", f"{trial.step_seconds / plain.step_seconds:.2f}"
            speed, gain = f"{trial.rate:.1f}", f"{trial.rate / plain.rate:.2f}"
            rows.append([str(k), same, f"{trial.tokens_per_round:.2f}", step, ratio, speed, gain])
        return table(HEADS, rows)
