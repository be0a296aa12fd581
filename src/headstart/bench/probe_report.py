"""The result of a probe as Markdown, which is also what the terminal shows, and as JSON."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .measurement import Trial
from .probe import ProbeResult
from .report import bullets, table
from .system import SystemInfo

# Share of first drafts accepted on the model's own greedy text. Sound heads were seen at 72 to 90%, most broken ones
# at 0 to 35%; and a draft that is rejected more often than not seldom pays for itself.
SOUND = 0.5
UNLIKELY = 1.96  # standard errors below that: one sound head in 40 that is just at the line would be blamed
HEADS = ["k", "same answers", "tokens per round", "ms per step", "× the step at k = 0", "tokens/s", "× k = 0"]


@dataclass(frozen=True)
class ProbeReport:
    model: dict[str, Any]  # id, family, quantization, …
    machine: SystemInfo
    result: ProbeResult
    remedy: str  # how to get a sound head, where this one is not

    @property
    def fixed(self) -> dict[int, Trial]:
        """Return all depths but auto."""
        return {k: trial for k, trial in self.result.depths.items() if k != "auto"}

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
        return self.sound and all(divergence.rounding for divergence in self.result.divergences)

    def as_dict(self) -> dict[str, Any]:
        depths, fixed, divergences = self.result.depths, self.fixed, self.result.divergences
        steps = {str(k): trial.step_seconds for k, trial in fixed.items()}
        accepted, proposed = self.first_drafts
        return {
            "passed": self.passed,
            "identical": not divergences,
            "first_divergence": asdict(divergences[0]) if divergences else None,
            "first_draft_acceptance": accepted / proposed,
            "acceptance_by_position": fixed[max(fixed)].acceptance_by_position,
            "tokens_per_round": {str(k): trial.tokens_per_round for k, trial in depths.items()},
            "tokens_per_second": {str(k): trial.rate for k, trial in depths.items()},
            "cost_by_k": {k: {"seconds": step, "ratio": step / steps["0"]} for k, step in steps.items()},
            "best_k": self.best_k,
            "exact": fixed[0].exact,
            "model": self.model,
            "machine": asdict(self.machine),
            "remedy": self.remedy,
        }

    def markdown(self) -> str:
        name = self.model["id"]
        about = [[key, "none" if value is None else str(value)] for key, value in self.model.items() if key != "id"]
        parts = [f"# Probe of {name}: {'passed' if self.passed else 'failed'}", str(self.machine)]
        parts += [table(["model", name], about), self._depths(), bullets(self.conclusions())]
        return "\n\n".join(parts) + "\n"

    def conclusions(self) -> Iterator[str]:
        """Yield sentences that say what the figures mean, the verdict last."""
        fixed, deepest = self.fixed, max(self.fixed)
        yield "k: the number of tokens drafted per step. k = 0 is decoding without drafts."
        if fixed[0].exact:
            yield "The same tokens are promised: these kernels compute a row the same whatever stands beside it."
        else:
            yield "The same tokens are not promised: these kernels round differently with the number of rows."
        if not self.result.divergences:
            yield f"Every answer is that of plain decoding, at k = 1 to {deepest} and auto."
        for each in self.result.divergences:
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
        yield "Passed." if self.passed else "Failed."

    def _depths(self) -> str:
        plain = self.fixed[0]
        different = Counter(each.k for each in self.result.divergences)
        rows = []
        for k, trial in self.result.depths.items():
            same = f"{len(trial.sequences) - different[k]} of {len(trial.sequences)}"
            step, ratio = f"{1e3 * trial.step_seconds:.1f}", f"{trial.step_seconds / plain.step_seconds:.2f}"
            speed, gain = f"{trial.rate:.1f}", f"{trial.rate / plain.rate:.2f}"
            rows.append([str(k), same, f"{trial.tokens_per_round:.2f}", step, ratio, speed, gain])
        return table(HEADS, rows)
