"""The result of a probe as Markdown, which is also what the terminal shows, and as JSON."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .measurement import accepted_shares
from .probe import ProbeResult
from .report import bullets, table
from .system import SystemInfo


@dataclass(frozen=True)
class ProbeReport:
    model: dict[str, Any]  # id, family, quantization, …
    machine: SystemInfo
    result: ProbeResult
    tokenizer: TokenizerWrapper
    remedy: str  # how to get a sound head, where this one is not

    def as_dict(self) -> dict[str, Any]:
        result = self.result
        fixed = {str(depth.k): depth for depth in result.depths[:-1]}
        accepted, proposed = result.first_drafts
        return {
            "passed": result.passed,
            "identical": not result.divergences,
            "first_divergence": self._first_divergence() if result.divergences else None,
            "first_draft_acceptance": accepted / proposed,
            "acceptance_by_position": self._acceptance(),
            "tokens_per_round": {str(depth.k): depth.tokens_per_round for depth in result.depths},
            "tokens_per_second": {str(depth.k): depth.tokens_per_second for depth in result.depths},
            "cost_by_k": {
                k: {"seconds": depth.step_seconds, "ratio": depth.step_seconds / fixed["0"].step_seconds}
                for k, depth in fixed.items()
            },
            "best_k": result.best.k,
            "exact": result.exact,
            "model": self.model,
            "machine": asdict(self.machine),
            "remedy": self.remedy,
        }

    def markdown(self) -> str:
        name = self.model["id"]
        about = [[key, "none" if value is None else str(value)] for key, value in self.model.items() if key != "id"]
        parts = [f"# Probe of {name}: {'passed' if self.result.passed else 'failed'}", str(self.machine)]
        parts += [table(["model", name], about), self._depths()]
        return "\n\n".join([*parts, bullets(self.conclusions())]) + "\n"

    def conclusions(self) -> Iterator[str]:
        """Yield sentences that say what the figures mean, the verdict last."""
        result = self.result
        yield "k: the number of tokens drafted per step. k = 0 is decoding without drafts."
        if result.exact:
            yield "The same tokens are promised: these kernels compute a row the same whatever stands beside it."
        else:
            yield "The same tokens are not promised: these kernels round differently with the number of rows."
        if result.divergences:
            first = self._first_divergence()
            why = "a near-tie that rounding decides" if first["rounding"] else "a mistake"
            yield (
                f"{len(result.divergences)} of {sum(len(depth.answers) for depth in result.depths[1:])} answers "
                f"differ from plain decoding. The first: k = {first['k']}, after the {first['prompt']} prompt, token "
                f"{first['position'] + 1} is {first['drafted']!r} instead of {first['plain']!r}: {why}."
            )
        else:
            yield f"Every answer is that of plain decoding, at k = 1 to {result.depths[-2].k} and auto."
        accepted, proposed = result.first_drafts
        broken = ": too few for a sound head. Its weights are damaged or belong to another model"
        yield f"{accepted / proposed:.0%} of {proposed} first drafts are accepted{'' if result.sound else broken}."
        if not result.sound:
            yield self.remedy
        if shares := self._acceptance():
            by_position = " ".join(f"{share:.0%}" for share in shares)
            yield f"Accepted by position at k = {result.depths[-2].k}, together with all before it: {by_position}."
        if result.best.k:
            gain = result.best.tokens_per_second / result.depths[0].tokens_per_second
            yield f"Speculation pays here: k = {result.best.k} is {gain:.2f}× as fast as no drafts."
        else:
            yield "Speculation does not pay here: no depth is faster than decoding without drafts."
        yield "Passed." if result.passed else "Failed."

    def _acceptance(self) -> list[float]:
        """Return acceptance by position at the largest fixed depth, which says most."""
        return accepted_shares(self.result.depths[-2].accepted, self.result.depths[-2].proposed)

    def _depths(self) -> str:
        plain = self.result.depths[0]
        different = Counter(each.k for each in self.result.divergences)
        rows = []
        for depth in self.result.depths:
            row = [str(depth.k), f"{len(depth.answers) - different[depth.k]} of {len(depth.answers)}"]
            row += [f"{depth.tokens_per_round:.2f}", f"{1e3 * depth.step_seconds:.1f}"]
            row.append(f"{depth.step_seconds / plain.step_seconds:.2f}")
            row.append(f"{depth.tokens_per_second:.1f}")
            rows.append([*row, f"{depth.tokens_per_second / plain.tokens_per_second:.2f}"])
        heads = ["k", "same answers", "tokens per round", "ms per step", "× the step at k = 0", "tokens/s", "gain"]
        return table(heads, rows)

    def _first_divergence(self) -> dict[str, Any]:
        """Return the first divergence with its tokens as text."""
        first = self.result.divergences[0]
        texts = {name: self.tokenizer.decode([getattr(first, name)]) for name in ("plain", "drafted")}
        return {**asdict(first), **texts, "rounding": self.result.is_rounding(first)}
