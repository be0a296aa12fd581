"""`headstart bench`: what drafts earn and cost on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import HeadstartError, RequestError
from .lists import listed, numbers, whole
from .outputs import INTERRUPTED, check_folders, tell
from .progress import counted_bar

if TYPE_CHECKING:
    from ..bench.report import Report
    from ..bench.sweep import Plan
    from ..models import Model


def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a built-in model, a name in the Hugging Face cache, or a hub id."),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option("--k", metavar="LIST", help="Depths, such as 0-8,auto.", show_default="0-3,auto"),
    ] = None,
    rows: Annotated[str, typer.Option("--rows", metavar="LIST", help="Numbers of rows, such as 1,2,4,8,16.")] = "1,4",
    kinds: Annotated[
        str | None,
        typer.Option("--kinds", metavar="LIST", help="Of the built-in prompts.", show_default="all four"),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='Your own: a prompt a line, or .jsonl of {"kind", "text" or "messages"}.',
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens that every row writes.")] = 64,
    repeats: Annotated[int, typer.Option("--repeats", help="Interleaved runs of everything.")] = 5,
    acceptance: Annotated[
        str | None,
        typer.Option(
            "--acceptance",
            metavar="LIST",
            help="Impose an acceptance, cumulative by position, such as .88,.75,.62; costs stay real.",
        ),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - is standard output.")
    ] = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the report as Markdown.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw speed by depth: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Measure speed, acceptance and cost by depth, kind of text and number of rows. --k 0-8,auto
    --rows 1,2,4,8,16 is the whole sweep, or 0-5,auto where a model drafts no more than 5. Markdown goes to standard
    output. Ctrl-C ends early and keeps whole repeats: the report says so, and the exit status is 130."""
    from ..bench.plot import check_plot, plot
    from ..bench.prompts import KINDS, builtin_prompts, by_kind, read_prompts
    from ..bench.sweep import Plan
    from ..checkpoint import resolve
    from ..checkpoint.identity import hub_id
    from ..library import load

    # What is wrong with the options is said before a model is loaded, and before minutes are spent.
    if plot_file is not None:
        check_plot(plot_file)
    check_folders({"--json": json_file, "--report": report_file, "--plot": plot_file})
    if prompts is not None and kinds is not None:
        raise RequestError("--kinds chooses among the built-in prompts: leave it out where --prompts is given")
    chosen = KINDS if kinds is None else listed(kinds, "--kinds")
    asked = read_prompts(prompts) if prompts else builtin_prompts(chosen)
    pattern = None if acceptance is None else numbers(acceptance, "--acceptance")
    if k is None:
        k = "0-3,auto" if pattern is None else f"0-{len(pattern)}"
    depths = _depths(k)
    counts = [whole(part, "--rows") for part in listed(rows, "--rows")]
    Plan({}, counts, depths, tokens, repeats, pattern)

    folder = resolve(model)
    loaded, tokenizer = load(folder)
    plan = Plan(by_kind(asked, tokenizer), counts, depths, tokens, repeats, pattern)
    plan.check(loaded)
    report = _measure(loaded, hub_id(folder) or folder.absolute().name, plan, tokenizer.eos_token_ids)

    tell(report, json_file, report_file)
    if plot_file is not None:
        plot(report, plot_file)
    if report.exact and not all(figure.identical for figure in report.figures):
        raise HeadstartError("the token ids are not those of plain decoding, though rows are independent here")
    if report.stopped is not None:
        raise typer.Exit(130)


def _measure(model: "Model", name: str, plan: "Plan", ends: set[int]) -> "Report":
    from ..bench.cost import Cost, looks, measure_costs
    from ..bench.figures import figures, judge_auto, past_end
    from ..bench.machine import this_machine
    from ..bench.report import Report
    from ..bench.sweep import sweep

    with counted_bar(f"Measuring {name}", plan.count + looks(plan.rows, plan.depths, plan.repeats)) as progress:
        runs = sweep(model, plan, progress)
        repeats = min(len(done) for by_k in runs.values() for done in by_k.values())
        mixed = [prompt for prompts in zip(*plan.prompts.values(), strict=False) for prompt in prompts]
        costs, stopped = list[Cost](), INTERRUPTED if repeats < plan.repeats else None
        if stopped is None:  # otherwise somebody has waited long enough
            try:
                costs = measure_costs(model, mixed, plan.rows, plan.depths, repeats, progress)
            except KeyboardInterrupt:
                stopped = INTERRUPTED
    return Report(
        model=name,
        machine=this_machine(),
        tokens=plan.tokens,
        repeats=repeats,
        acceptance=plan.acceptance,
        figures=figures(runs),
        costs=costs,
        auto=judge_auto(runs),
        past_end=past_end(runs, ends),
        exact=all(run.exact for by_k in runs.values() for done in by_k.values() for run in done),
        stopped=stopped,
    )


def _depths(text: str) -> list[int | Literal["auto"]]:
    """0-3,5,auto → 0, 1, 2, 3, 5, auto."""
    depths: list[int | Literal["auto"]] = []
    for part in listed(text, "--k"):
        if part == "auto":
            depths.append("auto")
            continue
        first, _, last = part.partition("-")
        least, most = whole(first, "--k"), whole(last or first, "--k")
        if most < least:
            raise RequestError(f"--k {part}: say {most}-{least}")
        depths += range(least, most + 1)
    return list(dict.fromkeys(depths))
