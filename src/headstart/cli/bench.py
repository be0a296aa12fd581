"""`headstart bench`: what drafts earn and cost on this machine."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import HeadstartError, RequestError

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
    """Measure speed, acceptance and cost by depth, kind of text and number of rows. A few minutes on a CPU with the
    built-in model; --k 0-8,auto --rows 1,2,4,8,16 is the whole sweep. Markdown goes to standard output."""
    from ..bench.plot import check_plot, plot
    from ..bench.prompts import KINDS, builtin_prompts, by_kind, read_prompts
    from ..bench.sweep import Plan
    from ..checkpoint import resolve
    from ..checkpoint.identity import hub_id
    from ..library import load

    # What is wrong with the options is said before a model is loaded, and before minutes are spent.
    if plot_file is not None:
        check_plot(plot_file)
    for option, file in (("--json", json_file), ("--report", report_file), ("--plot", plot_file)):
        if file is not None and file != "-" and not Path(file).absolute().parent.is_dir():
            raise RequestError(f"{option} {file}: there is no such folder")
    if prompts is not None and kinds is not None:
        raise RequestError("--kinds chooses among the built-in prompts: leave it out where --prompts is given")
    asked = read_prompts(prompts) if prompts else builtin_prompts(_list(kinds) if kinds else KINDS)
    pattern = None if acceptance is None else _shares(acceptance)
    depths = _depths(k or ("0-3,auto" if pattern is None else f"0-{len(pattern)}"))
    numbers = [_whole(part, "--rows") for part in _list(rows)]
    Plan({}, numbers, depths, tokens, repeats, pattern)

    folder = resolve(model)
    loaded, tokenizer = load(folder)
    plan = Plan(by_kind(asked, tokenizer), numbers, depths, tokens, repeats, pattern)
    plan.check(loaded)
    report = _measure(loaded, hub_id(folder) or folder.absolute().name, plan, tokenizer.eos_token_ids)

    if json_file == "-":
        typer.echo(json.dumps(report.as_dict()))
    else:
        typer.echo(report.markdown(), nl=False)
        if json_file is not None:
            _write(Path(json_file), json.dumps(report.as_dict()), "--json")
    if report_file is not None:
        _write(report_file, report.markdown(), "--report")
    if plot_file is not None:
        plot(report, plot_file)
    if report.exact and not all(figure.identical for figure in report.figures):
        raise HeadstartError("the token ids are not those of plain decoding, though rows are independent here")


def _measure(model: "Model", name: str, plan: "Plan", ends: set[int]) -> "Report":
    from ..bench.cost import looks, measure_costs
    from ..bench.figures import figures, judge_auto, past_end
    from ..bench.machine import this_machine
    from ..bench.report import Report
    from ..bench.sweep import sweep

    with _progress(f"Measuring {name}", plan.count + looks(plan.rows, plan.depths, plan.repeats)) as progress:
        runs = sweep(model, plan, progress)
        mixed = [prompt for prompts in zip(*plan.prompts.values(), strict=False) for prompt in prompts]
        costs = measure_costs(model, mixed, plan.rows, plan.depths, plan.repeats, progress)
    return Report(
        model=name,
        machine=this_machine(),
        tokens=plan.tokens,
        repeats=plan.repeats,
        acceptance=plan.acceptance,
        figures=figures(runs),
        costs=costs,
        auto=judge_auto(runs),
        past_end=past_end(runs, ends),
        exact=all(run.exact for by_k in runs.values() for done in by_k.values() for run in done),
    )


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Runs done, and the time left. Runs differ, but every repeat is like the others."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _depths(text: str) -> list[int | Literal["auto"]]:
    """0-3,5,auto → 0, 1, 2, 3, 5, auto."""
    depths: list[int | Literal["auto"]] = []
    for part in _list(text):
        if part == "auto":
            depths.append("auto")
            continue
        first, _, last = part.partition("-")
        depths += range(_whole(first, "--k"), _whole(last or first, "--k") + 1)
    return list(dict.fromkeys(depths))


def _whole(text: str, option: str) -> int:
    if not text.isdecimal():
        raise RequestError(f"{option}: {text!r} is not a whole number")
    return int(text)


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in _list(text)]
    except ValueError as error:
        raise RequestError(f"--acceptance {text}: {error}") from error


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HeadstartError(f"{option} {path}: cannot be written: {error}") from error
