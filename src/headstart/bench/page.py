"""A probe as a page to read: the same tables on a terminal and in Markdown, to be attached to an issue."""

from collections.abc import Iterator, Sequence
from io import StringIO

from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich import box
from rich.console import Console
from rich.table import Table

from .faults import COLLAPSED
from .identity import BEST, divergences
from .machine import Machine
from .probe import Probe

WIDE = 1000  # columns of a Markdown page: nothing is to be cut


def markdown(
    title: str, about: dict[str, str], machine: Machine, probe: Probe, tokenizer: TokenizerWrapper, way_out: str
) -> str:
    page = Console(file=StringIO(), width=WIDE, color_system=None, markup=False, highlight=False)
    page.print(f"# headstart probe {title}: {_verdict(probe)}\n")
    page.print(f"{machine}\n")
    page.print(_table(("model", title), about.items(), box.MARKDOWN))
    show(page, probe, tokenizer, way_out, box.MARKDOWN)
    text: str = page.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def show(
    console: Console,
    probe: Probe,
    tokenizer: TokenizerWrapper,
    way_out: str,
    lines: box.Box | None = box.SIMPLE_HEAD,
) -> None:
    """Everything but what the model and the machine are."""
    console.print(by_depth(probe, lines))
    console.print(acceptance(probe, lines))
    if probe.faults:
        console.print(faults(probe, lines))
    for sentence in sentences(probe, tokenizer, way_out):
        console.print(f"- {sentence}", soft_wrap=True)


def by_depth(probe: Probe, lines: box.Box | None) -> Table:
    heads = ("k", "answers as plain", "tokens per round", "ms a step", "to k = 0", "β", "expected tokens/s")
    plain, rates, costs = probe.runs[0], probe.tokens_per_second, {cost.k: cost for cost in probe.costs}
    rows = []
    for run in probe.runs:
        same = len(run.answers) - len(divergences(plain, run))
        figures = [str(run.k), f"{same} of {len(run.answers)}", f"{run.tokens_per_round:.2f}"]
        if run.k != "auto":
            cost = costs[run.k]
            best = " ←" if run.k == probe.best_k else ""
            figures += [f"{cost.seconds * 1e3:.1f}", f"{cost.ratio:.2f}", f"{cost.verify:.2f}"]
            figures += [f"{rates[run.k]:.1f}{best}"]
        rows.append(figures + [""] * (len(heads) - len(figures)))
    return _table(heads, rows, lines)


def acceptance(probe: Probe, lines: box.Box | None) -> Table:
    """Of the deepest run, the share of rounds that accepted so many drafts, and of those that got so far."""
    cumulative = probe.deepest.acceptance_by_position
    rows, before = [], 1.0
    for position, share in enumerate(cumulative, 1):
        conditional = f"{share / before:.0%}" if before else ""
        rows.append((str(position), f"{share:.0%}", conditional))
        before = share
    return _table((f"draft, k = {probe.deepest.k}", "accepted", "where those before it were"), rows, lines)


def faults(probe: Probe, lines: box.Box | None) -> Table:
    rows = [
        (each.name, each.what, f"{each.acceptance:.0%}", "" if each.mended is None else f"{each.mended:.0%}")
        for each in probe.faults
    ]
    return _table(("fault", "what", "first drafts that stand", "and mended"), rows, lines)


def sentences(probe: Probe, tokenizer: TokenizerWrapper, way_out: str) -> Iterator[str]:
    """What to make of it, the verdict last."""
    yield "Kernels: " + "; ".join(f"{what} {whose}" for what, whose in probe.kernels.items()) + "."
    if probe.exact:
        yield "Rows are independent: these kernels compute a row the same whatever stands beside it."
    else:
        yield (
            "Rows are not independent: these kernels round differently with the number of rows, so the same tokens "
            f"are not promised. On these texts two logits moved by up to {probe.rounding:.3g} against each other."
        )
    if probe.identical:
        yield f"Every answer is that of plain decoding, at k = 1 to {probe.deepest.k} and auto."
    else:
        yield _divergence(probe, tokenizer)
    stand = f"{probe.first_drafts.share:.0%} of the head's first drafts stand, of {probe.first_drafts.tried}"
    yield f"{stand}: it is collapsed, clearly below {COLLAPSED:.0%}." if probe.collapsed else f"{stand}."
    if not probe.faults:
        yield "No other norms, no other feed and no other order of mtp.fc's inputs draft better. No weights are zero."
    else:
        yield way_out
    yield f"The k that pays here, for one row and texts like these: {probe.best_k}."
    yield f"{_verdict(probe).capitalize()}."


def _divergence(probe: Probe, tokenizer: TokenizerWrapper) -> str:
    first = probe.divergences[0]
    told = probe.told(first, tokenizer)
    gaps = ""
    if first.plain_gap is not None and first.drafted_gap is not None:
        gaps = f" Each preferred its own, by {first.plain_gap:.3g} and {first.drafted_gap:.3g} in logits"
        gaps += ": a near-tie that rounding decides." if probe.is_rounding(first) else ", which must not happen here."
    elif first.plain is not None and first.drafted is not None:
        gaps = f" One run's token is not among the {BEST} likeliest of the other's, which must not happen anywhere."
    return (
        f"{len(probe.divergences)} of {sum(len(run.answers) for run in probe.runs[1:])} answers differ from plain "
        f"decoding. The first: k = {first.k}, after {told['prompt']!r}, token {first.position + 1} of the answer is "
        f"{_token(told['drafted'])} where plain decoding says {_token(told['plain'])}.{gaps}"
    )


def _token(token: dict[str, object] | None) -> str:
    return "the end" if token is None else f"{token['text']!r} ({token['id']})"


def _verdict(probe: Probe) -> str:
    return "passed" if probe.passed else "failed"


def _table(heads: Sequence[str], rows: object, lines: box.Box | None) -> Table:
    table = Table(*heads, box=lines, header_style="")
    for row in rows:  # type: ignore[attr-defined]
        table.add_row(*row)
    return table
