"""How Headstart runs on a machine, as Markdown to paste into an issue. A part that fails does not stop the others."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint import Layout, load_model, load_tokenizer, read_layout
from ..models import Model
from .kernel_times import KernelTime, kernel_table, kernel_times
from .local import K, decode_batch
from .machine import current_load, device_facts, memory_facts, without_private_names
from .machine_costs import check_facts, describe_facts, logged, memory_costs, settings
from .measurement import Trial, add_up
from .probe import Divergence, ProbeReport, decode_depths, find_divergences, probe_prompts
from .report import bullets, table
from .system import system_info
from .time_limit import OutOfTime, TimeLimit

DEEPEST = 4  # most drafts per step
TOKENS = 40  # per answer
STEPS = 5 * (DEEPEST + 2) + 4  # of progress per model: the runs of a probe, loading, the batch, kernels, costs
SECONDS = {
    "facts": 30.0,
    "load": 120.0,
    "decoding": 100.0,
    "batch": 30.0,
    "kernels": 45.0,
    "costs": 30.0,
}  # of a part, at most

NOTE = """
- rows agree: a row has the same bits among 1 to 16 rows; distance: from stock ops, relative
- µs: medians of runs in turns, with the time to launch"""

Progress = Callable[[str], None]


@dataclass
class MachineReport:
    progress: Progress
    limit: TimeLimit = field(default_factory=TimeLimit)
    parts: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # titles of parts that could not be made, or found a mistake
    unfinished: list[str] = field(default_factory=list)  # titles of parts whose time was over
    shown: list[KernelTime] = field(default_factory=list)  # models may share shapes, which Metal's tuning lists once

    def begin(self, doing: str) -> None:
        """Report what is about to be done, as long as there is time for it."""
        self.limit.check()
        self.progress(doing)

    def add(self, title: str, make: Callable[[], str], part: str = "facts") -> None:
        """Add a part. Where it fails or takes too long, the report says so and goes on."""
        self.parts += [title, self.attempt(title, make, part)]

    def attempt(self, title: str, make: Callable[[], str], part: str = "facts") -> str:
        """Return what `make` returns, or why it did not."""
        try:
            with self.limit.part(SECONDS[part]):
                return make()
        except OutOfTime as over:
            self.unfinished.append(title.lstrip("# "))
            return f"**No figures: {over}.**"
        except Exception as error:
            self.failed.append(title.lstrip("# "))
            return f"**Failed.** {type(error).__name__}: {error}"

    def hung(self) -> "MachineReport":
        """Return the report as far as it is made, where a part does not end."""
        self.failed.append(f"a part that hangs, after {self.parts[-2].lstrip('# ') if self.parts else 'nothing'}")
        return self

    def markdown(self) -> str:
        """Return the report without private names."""
        verdict = f"**Failed: {', '.join(self.failed)}.**" if self.failed else "Nothing failed."
        if self.unfinished:
            verdict += f" Out of time: {', '.join(self.unfinished)}."
        when = datetime.now(UTC).strftime("%Y-%m-%d")
        parts = ["# Headstart report", f"{when}. {verdict}", *self.parts]
        return without_private_names("\n\n".join(parts)) + "\n"


def report_machine(report: MachineReport, models: Sequence[tuple[str, Path]]) -> None:
    """Measure this machine with the models, each a name and its folder. The report has what was measured so far."""
    with logged() as said:
        before = report.attempt("load before", current_load)
        report.add("## Device", lambda: _facts(device_facts() | {"settings": settings()}))
        report.add("## Memory", lambda: _facts(memory_facts()))
        for name, folder in models:
            _report_model(report, name, folder)
        report.limit.reopen(SECONDS["facts"])  # what follows takes a moment, and tells what went wrong
        report.add("## Warnings and errors", lambda: bullets(said) if said else "None, of a GPU or otherwise.")
        report.add("## Load and thermal state", lambda: _facts({"before": before, "after": current_load()}))


def _report_model(report: MachineReport, name: str, folder: Path) -> None:
    loaded: list[tuple[Model, TokenizerWrapper]] = []

    def begin(doing: str) -> None:
        report.begin(f"{name}: {doing}")

    def load() -> str:
        begin("loading")
        layout, begun = read_layout(folder), time.perf_counter()
        loaded.append((load_model(folder), load_tokenizer(folder)))
        return _facts(_about(layout, loaded[0][0], time.perf_counter() - begun))

    def decode() -> str:
        model, tokenizer = loaded[0]
        prompts = probe_prompts(tokenizer)
        if not model.has_head:
            rate = add_up([decode_batch(model, [prompt], 0, TOKENS) for prompt in prompts.values()]).rate
            reason = (model.head_unavailable or "the model has no head").rstrip(".")
            return f"No drafts: {reason}. Without them {rate:.1f} tokens/s, one sequence."
        k = min(DEEPEST, model.max_k)
        depths = decode_depths(model, prompts, k, TOKENS, begin, lambda: report.limit.is_over)
        prompts = dict(list(prompts.items())[: len(depths[0].sequences)])
        report.limit.extend(SECONDS["batch"])  # also where there was no time for more than one prompt
        begin("decoding all prompts in a batch")
        batched: dict[K, Trial] = {
            depth: decode_batch(model, list(prompts.values()), depth, TOKENS) for depth in (0, k)
        }
        alone = find_divergences(model, tokenizer, prompts, depths[0], depths)
        together = find_divergences(model, tokenizer, prompts, depths[0], batched)
        compared = len(prompts) * (len(depths) - 1 + len(batched))
        verdict = exactness([*alone, *together], compared, promised=depths[0].exact)
        remedy = f"`headstart probe {name}` says what to do."
        probe = ProbeReport({}, system_info(), depths, [*alone, *together], remedy)
        if not probe.passed:
            report.failed.append(f"{name}, decoding")
        how = f"k = 0 to {k} and auto alone, k = 0 and {k} in a batch of {len(prompts)}"
        return f"{verdict} ({how}).\n\n{probe.body()}"

    def costs() -> str:
        begin("describing steps")
        model = loaded[0][0]
        return _facts(check_facts(model.backend.checks()) | describe_facts(model) | memory_costs(model))

    def kernels() -> str:
        begin("comparing kernels with stock ops")
        times = kernel_times(loaded[0][0], lambda operation: report.limit.check())
        if wrong := [f"{each.operation} {each.shape}" for each in times if each.failed]:
            report.failed.append(f"{name}, kernels ({'; '.join(wrong)})")
        new = [each for each in times if each not in report.shown]
        report.shown += new
        in_use = loaded[0][0].backend
        return f"{kernel_table(new)}\n{NOTE}" if new else f"No shape that is not above. In use: {in_use}."

    mx.reset_peak_memory()
    report.add(f"## {name}", load, "load")
    if loaded:
        report.add(f"### {name}: decoding", decode, "decoding")
        report.add(f"### {name}: kernels", kernels, "kernels")
        report.add(f"### {name}: costs", costs, "costs")


def exactness(different: Sequence[Divergence], compared: int, *, promised: bool) -> str:
    """Return the verdict on `different`, the answers of `compared` that are not those of plain decoding."""
    wrong = sum(not each.rounding for each in different)
    if wrong:
        verdict = f"wrong: {wrong} of {compared} answers differ by more than rounding"
    elif different:
        verdict = f"{len(different)} of {compared} answers differ, each where rounding decides between two tokens"
    else:
        verdict = f"the same greedy tokens in all {compared} answers"
    promise = "promised" if promised else "not promised on these kernels"
    return f"**Exactness: {verdict}**; the same tokens are {promise}"


def _about(layout: Layout, model: Model, seconds: float) -> dict[str, str]:
    report = layout.report()
    return {
        **{name: str(report[name] or "none") for name in ("family", "layout", "quantization")},
        "parameters": f"{report['parameters']:,}",
        "stored in": layout.dtype,
        "computed in": model.dtype_name,
        "head": "yes" if model.has_head else "no",
        "loaded in": f"{seconds:.1f} s",
    }


def _facts(facts: dict[str, str]) -> str:
    return table(["what", ""], [[name, value] for name, value in facts.items()])
