"""The result of a probe as Markdown, which is also what the terminal shows, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .estimate import accepted_shares
from .faults import COLLAPSED
from .identity import TOP_LOGPROBS, Divergence, divergences
from .probe import ProbeResult
from .report import table
from .system import SystemInfo


@dataclass(frozen=True)
class ProbeReport:
    name: str
    about: dict[str, Any]  # of the model: family, quantization, …
    system: SystemInfo
    result: ProbeResult
    tokenizer: TokenizerWrapper
    remedy: str  # how to get a sound head, where this one is not

    def as_dict(self) -> dict[str, Any]:
        result = self.result
        return {
            "passed": result.passed,
            "identical": not result.divergences,
            "first_divergence": self._divergence(result.divergences[0]) if result.divergences else None,
            "acceptance_by_position": result.deepest.stats.acceptance_by_position,
            "tokens_per_round": {str(run.k): run.stats.tokens_per_round for run in result.runs},
            "cost_by_k": {str(each.k): {"seconds": each.seconds, "ratio": each.ratio} for each in result.step_times},
            "best_k": result.best_k,
            "faults": [{**asdict(fault), "what": fault.what} for fault in result.faults],
            "tokens_per_second": {str(k): rate for k, rate in result.tokens_per_second.items()},
            "collapsed": result.first_drafts.collapsed,
            "first_drafts": result.first_drafts.share,
            "first_drafts_tried": result.first_drafts.tried,
            "exact": result.exact,
            "kernels": result.kernels,
            "rounding": result.rounding,
            "divergences": len(result.divergences),
            "prompts": len(result.prompts),
            "tokens": result.tokens,
            "model": {"name": self.name, **self.about},
            "machine": asdict(self.system),
            "remedy": self.remedy,
        }

    def markdown(self) -> str:
        about = [[key, "none" if value is None else str(value)] for key, value in self.about.items()]
        parts = [f"# Probe of {self.name}: {'passed' if self.result.passed else 'failed'}", str(self.system)]
        parts += [table(["model", self.name], about), self._depths()]
        if self.result.faults:
            parts.append(self._faults())
        return "\n\n".join([*parts, "\n".join(f"- {line}" for line in self.conclusions())]) + "\n"

    def conclusions(self) -> Iterator[str]:
        """Yield sentences that say what the figures mean, the verdict last."""
        result, drafts = self.result, self.result.first_drafts
        yield "Kernels: " + "; ".join(f"{what} {whose}" for what, whose in result.kernels.items()) + "."
        if result.exact:
            yield "The same tokens are promised: these kernels compute a row the same whatever stands beside it."
        else:
            yield (
                "The same tokens are not promised: these kernels round differently with the number of rows. On these "
                f"texts two logits moved by up to {result.rounding:.3g} against each other."
            )
        if result.divergences:
            yield self._first_divergence()
        else:
            yield f"Every answer is that of plain decoding, at k = 1 to {result.deepest.k} and auto."
        accepted = f"{drafts.share:.0%} of {drafts.tried} first drafts are accepted"
        yield (
            f"{accepted}: the head is broken, clearly below {COLLAPSED:.0%}." if drafts.collapsed else f"{accepted}."
        )
        stats = result.deepest.stats
        if shares := accepted_shares(stats.accepted_by_position, stats.proposed_by_position):
            by_position = " ".join(f"{share:.0%}" for share in shares)
            yield f"Accepted by position at k = {result.deepest.k}, together with all before it: {by_position}."
        if result.faults:
            yield self.remedy
        else:
            yield "No fault: no other norms, feed or order of mtp.fc's inputs drafts better. No weights are zero."
        rates = result.tokens_per_second
        gain = rates[result.best_k] / rates[0]
        if result.best_k:
            yield f"Speculation pays here: k = {result.best_k} is expected to be {gain:.2f}× as fast as no drafts."
        else:
            yield "Speculation does not pay here: no depth is expected to be faster than decoding without drafts."
        yield "Passed." if result.passed else "Failed."

    def _depths(self) -> str:
        result = self.result
        times = {each.k: each for each in result.step_times}
        rows = []
        for run in result.runs:
            same = len(run.answers) - len(divergences(result.runs[0], run))
            row = [str(run.k), f"{same} of {len(run.answers)}", f"{run.stats.tokens_per_round:.2f}"]
            if run.k == "auto":
                row += ["", "", ""]
            else:
                step = times[run.k]
                row += [f"{1e3 * step.seconds:.1f}", f"{step.ratio:.2f}", f"{result.tokens_per_second[run.k]:.1f}"]
            rows.append(row)
        heads = ["k", "same answers", "tokens per round", "ms per step", "× the step at k = 0", "expected tokens/s"]
        return table(heads, rows)

    def _faults(self) -> str:
        rows = [
            [each.name, each.what, f"{each.acceptance:.0%}", "" if each.repaired is None else f"{each.repaired:.0%}"]
            for each in self.result.faults
        ]
        return table(["fault", "what", "first drafts accepted", "when repaired"], rows)

    def _first_divergence(self) -> str:
        result = self.result
        first = result.divergences[0]
        described = self._divergence(first)
        gaps = ""
        if first.plain_gap is not None and first.drafted_gap is not None:
            gaps = f" Each preferred its own, by {first.plain_gap:.3g} and {first.drafted_gap:.3g} in logits"
            gaps += ": a near-tie that rounding decides." if result.is_rounding(first) else ": a mistake."
        elif first.plain is not None and first.drafted is not None:
            gaps = f" One run's token is not among the {TOP_LOGPROBS} likeliest of the other: a mistake."
        return (
            f"{len(result.divergences)} of {sum(len(run.answers) for run in result.runs[1:])} answers differ from "
            f"plain decoding. The first: k = {first.k}, after {described['prompt']!r}, token {first.position + 1} of "
            f"the answer is {_token(described['drafted'])} instead of {_token(described['plain'])}.{gaps}"
        )

    def _divergence(self, divergence: Divergence) -> dict[str, Any]:
        """Return a divergence with its prompt and its tokens as text."""

        def token(id: int | None) -> dict[str, Any] | None:
            return None if id is None else {"id": id, "text": self.tokenizer.decode([id])}

        return {
            **asdict(divergence),
            "prompt": self.result.prompts[divergence.prompt],
            "plain": token(divergence.plain),
            "drafted": token(divergence.drafted),
            "rounding": self.result.is_rounding(divergence),
        }


def _token(token: dict[str, object] | None) -> str:
    return "the end" if token is None else f"{token['text']!r} ({token['id']})"
