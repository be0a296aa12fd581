"""`headstart bench`: how fast a model decodes at each depth on this machine."""

from dataclasses import replace
from pathlib import Path

import typer
from typer import Option

from ..errors import HeadstartError, RequestError
from ..limits import MAX_K
from . import options
from .download import find_drafter, find_model
from .progress import Progress
from .show import check_output, print_report

MAX_BATCH = 1024


@options.with_model
def bench_command(
    model: str | None,
    prompts: str = Option(
        "code,prose,chat,repetitive",
        metavar="LIST",
        help="Kinds (these; also edit, json), or files: a prompt per line, or .jsonl.",
    ),
    k: str = Option("0-3,auto", metavar="LIST", help="Depths (drafts per step), such as 0-5,auto."),
    batch_size: str = Option("1,4", metavar="LIST", help="Sequences decoded together."),
    tokens: int = Option(64, "--tokens", "-n", min=options.FEWEST_TOKENS, help="Tokens per sequence."),
    drafter: str | None = options.DRAFTER,
    repeats: int = Option(3, min=1, help="Interleaved repeats of everything."),
    as_json: bool = options.JSON,
    output: Path | None = options.OUTPUT,
) -> None:
    """Measure speed at each depth. Ctrl-C reports what was measured so far, marked as not complete, and exits with
    status 130."""
    from ..bench.local import measure_locally
    from ..bench.measurement import summarise
    from ..bench.plan import INTERRUPTED, BenchPlan, run_plan
    from ..bench.prompts import prompts_by_kind
    from ..bench.report import BenchReport
    from ..bench.system import system_info
    from ..checkpoint.layout import hub_id
    from ..library import load

    # Refuse wrong options before a model is loaded and minutes are spent.
    check_output(output)
    chosen = prompts_by_kind(_parts(prompts, "--prompts"))
    plan = BenchPlan(_depths(k), list(chosen), "batch_size", _batch_sizes(batch_size), tokens, repeats)
    if model is None:
        typer.echo("No model given: measuring the small built-in one. Name a model to measure yours.", err=True)
    folder = find_model(model)
    loaded, tokenizer = load(folder, drafter=find_drafter(drafter))
    if not loaded.most_drafts:
        why = (loaded.head_unavailable or "the model has no head").rstrip(".")
        typer.echo(f"Without drafts of a head, k = 0 and auto, which copies, are all there is: {why}.", err=True)
        plan = replace(plan, variants=[depth for depth in plan.variants if depth in ("k=0", "k=auto")])
    deepest = max(int(depth.removeprefix("k=")) for depth in plan.variants if depth != "k=auto")
    if deepest > loaded.most_drafts:
        raise RequestError(f"--k goes to {deepest}, and this model drafts at most {loaded.most_drafts} tokens")
    texts = {kind: [prompt.tokens(tokenizer) for prompt in each] for kind, each in chosen.items()}
    name = hub_id(folder) or folder.absolute().name  # never the path, which is private
    typer.echo(f"Measuring {name}: {plan}.", err=True)
    with Progress(plan.runs, "runs") as progress:
        trials, stopped = run_plan(plan, measure_locally(loaded, texts, tokens), progress.begin)
    exact = all(trial.exact for by_k in trials.values() for runs in by_k.values() for trial in runs.values())
    report = BenchReport(name, system_info(), plan, summarise(plan, trials), exact, stopped)
    print_report(report, as_json, output)
    if exact and report.different:
        raise HeadstartError("the tokens are not those of plain decoding, though this device promises them")
    if stopped == INTERRUPTED:
        raise typer.Exit(130)
    if stopped is not None:
        raise HeadstartError(f"not complete: {stopped}")


def _batch_sizes(text: str) -> list[int]:
    parts = _parts(text, "--batch-size")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise RequestError(f"--batch-size {text}: give whole numbers above 0")
    if (largest := max(map(int, parts))) > MAX_BATCH:
        raise RequestError(f"--batch-size {largest}: at most {MAX_BATCH}")
    return list(map(int, parts))


def _depths(text: str) -> list[str]:
    """Return the depths of "0-3,5,auto" as variants, k=0 first: it is what the others are compared with."""
    depths: list[str] = []
    for part in _parts(text, "--k"):
        first, _, last = part.partition("-")
        if part == "auto":
            depths.append("k=auto")
        elif first.isdecimal() and (last or first).isdecimal() and int(first) <= int(last or first):
            if (deepest := int(last or first)) > MAX_K:
                raise RequestError(f"--k goes to {deepest}, and at most {MAX_K} tokens are drafted per step")
            depths += [f"k={k}" for k in range(int(first), int(last or first) + 1)]
        else:
            raise RequestError(f"--k: {part!r} is not a number, a range such as 0-3, or auto")
    if "k=0" not in depths:
        raise RequestError("--k must include 0, which the others are compared with")
    return list(dict.fromkeys(["k=0", *depths]))


def _parts(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise RequestError(f"{option} {text!r}: give one or more values, separated by commas")
    return parts
