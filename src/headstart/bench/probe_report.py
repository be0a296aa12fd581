"""The result of a probe as Markdown, which is also what the terminal shows, and as JSON."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .head_faults import COLLAPSED, collapsed
from .measurement import accepted_shares
from .probe import Divergence, ProbeResult
from .report import table
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
        plain = result.step_seconds[0]
        costs = [{"seconds": seconds, "ratio": seconds / plain} for seconds in result.step_seconds]
        return {
            "passed": result.passed,
            "identical": not result.divergences,
            "first_divergence": self._divergence(result.divergences[0]) if result.divergences else None,
            "acceptance_by_position": result.deepest.stats.acceptance_by_position,
            "tokens_per_round": {str(run.k): run.stats.tokens_per_round for run in result.runs},
            "cost_by_k": {str(k): cost for k, cost in enumerate(costs)},
            "best_k": result.best_k,
            "faults": [{**asdict(fault), "what": fault.what} for fault in result.faults],
            "tokens_per_second": {str(k): rate for k, rate in enumerate(result.tokens_per_second)},
            "first_draft_acceptance": result.first_draft_acceptance,
            "exact": result.exact,
            "rounding": result.rounding,
            "model": self.model,
            "machine": asdict(self.machine),
            "remedy": self.remedy,
        }

    def markdown(self) -> str:
        name = self.model["id"]
        about = [[key, "none" if value is None else str(value)] for key, value in self.model.items() if key != "id"]
        title = f"# Probe of {name}: {'passed' if self.result.passed else 'failed'}"
        return "\n\n".join([title, str(self.machine), table(["model", name], about), self.body()]) + "\n"

    def body(self) -> str:
        """Return the figures and what they mean, without the model and the machine."""
        faults = [self._faults()] if self.result.faults else []
        return "\n\n".join([self._depths(), *faults, "\n".join(f"- {line}" for line in self.conclusions())])

    def conclusions(self) -> Iterator[str]:
        """Yield sentences that say what the figures mean, the verdict last."""
        result = self.result
        yield "k: the number of tokens drafted per step. k = 0 is decoding without drafts."
        if result.exact:
            yield "The same tokens are promised: these kernels compute a row the same whatever stands beside it."
        else:
            yield (
                "The same tokens are not promised: these kernels round differently with the number of rows, which "
                f"may decide between tokens whose logits are less than {result.near_tie:.3g} apart."
            )
        if result.divergences:
            yield self._first_divergence()
        else:
            yield f"Every answer is that of plain decoding, at k = 1 to {result.deepest.k} and auto."
        accepted = f"{result.first_draft_acceptance:.0%} of {len(result.first_drafts)} first drafts are accepted"
        broken = f": the head is broken, clearly below {COLLAPSED:.0%}" if collapsed(result.first_drafts) else ""
        yield f"{accepted}{broken}."
        stats = result.deepest.stats
        if shares := accepted_shares(stats.accepted_by_position, stats.proposed_by_position):
            by_position = " ".join(f"{share:.0%}" for share in shares)
            yield f"Accepted by position at k = {result.deepest.k}, together with all before it: {by_position}."
        if result.faults:
            yield self.remedy
        else:
            yield "No fault: no other norms, feed or order of mtp.fc's inputs drafts better. No weights are zero."
        gain = max(result.tokens_per_second) / result.tokens_per_second[0]
        if result.best_k:
            yield f"Speculation pays here: k = {result.best_k} is expected to be {gain:.2f}× as fast as no drafts."
        else:
            yield "Speculation does not pay here: no depth is expected to be faster than decoding without drafts."
        yield "Passed." if result.passed else "Failed."

    def _depths(self) -> str:
        result, steps = self.result, self.result.step_seconds
        different = Counter(each.k for each in result.divergences)
        rows = []
        for number, run in enumerate(result.runs):
            same = f"{len(run.answers) - different[run.k]} of {len(run.answers)}"
            row = [str(run.k), same, f"{run.stats.tokens_per_round:.2f}", "", "", ""]
            if number < len(steps):  # "auto" is not timed
                ratio = f"{steps[number] / steps[0]:.2f}"
                row[3:] = [f"{1e3 * steps[number]:.1f}", ratio, f"{result.tokens_per_second[number]:.1f}"]
            rows.append(row)
        heads = ["k", "same answers", "tokens per round", "ms per step", "× the step at k = 0", "expected tokens/s"]
        return table(heads, rows)

    def _faults(self) -> str:
        rows = []
        for fault in self.result.faults:
            repaired = fault.repaired_acceptance_rate
            rates = [f"{fault.acceptance_rate:.0%}", "" if repaired is None else f"{repaired:.0%}"]
            rows.append([fault.name, fault.what, *rates])
        return table(["fault", "what", "first drafts accepted", "when repaired"], rows)

    def _first_divergence(self) -> str:
        result = self.result
        first = self._divergence(result.divergences[0])
        why = "a near-tie that rounding decides" if first["rounding"] else "a mistake"
        if first["margin"] is not None:
            why = f"their logits are {abs(first['margin']):.3g} apart, {why}"
        return (
            f"{len(result.divergences)} of {sum(len(run.answers) for run in result.runs[1:])} answers differ from "
            f"plain decoding. The first: k = {first['k']}, after {first['prompt']!r}, token {first['position'] + 1} "
            f"of the answer is {_token(first['drafted'])} instead of {_token(first['plain'])}: {why}."
        )

    def _divergence(self, divergence: Divergence) -> dict[str, Any]:
        """Return a divergence with its prompt and its tokens as text."""
        tokens = {name: getattr(divergence, name) for name in ("plain", "drafted")}
        return {
            **asdict(divergence),
            "prompt": self.result.prompts[divergence.prompt],
            **{n: None if i is None else {"id": i, "text": self.tokenizer.decode([i])} for n, i in tokens.items()},
            "margin": divergence.margin if isfinite(divergence.margin) else None,
            "rounding": self.result.is_rounding(divergence),
        }


def _token(token: dict[str, object] | None) -> str:
    return "the end" if token is None else f"{token['text']!r} ({token['id']})"
