"""`headstart bench`: how fast a model decodes at each depth on this machine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from ..errors import HeadstartError, RequestError
from ..limits import MAX_K
from . import options
from .download import find_drafter, find_model
from .progress import Progress
from .show import check_output, print_report

if TYPE_CHECKING:
    from ..bench.features import FeatureCell
    from ..bench.plan import BenchPlan

MAX_BATCH = 1024


@options.with_model
@options.with_sampling
def bench_command(
    model: str | None,
    sampling: dict[str, Any],
    prompts: str = Option(
        "code,prose,chat,repetitive",
        metavar="LIST",
        help="Kinds (these; also edit, json), or files: a prompt per line, or .jsonl.",
    ),
    k: str = Option("0-3,auto", metavar="LIST", help="Depths (drafts per step), such as 0-5,auto."),
    batch_size: str = Option("1,4", metavar="LIST", help="Sequences decoded together."),
    max_tokens: int = Option(64, "--tokens", "-n", min=options.FEWEST_TOKENS, help="Tokens per sequence."),
    drafter: str | None = options.DRAFTER,
    repeats: int = Option(3, min=1, help="Interleaved repeats of everything."),
    features: bool = Option(
        False,
        "--features",
        help="Measure instead what each thing that can be switched on costs; --prompts is left out.",
    ),
    context: str = Option(
        "60,2000", metavar="LIST", help="With --features: tokens before the first that is decoded."
    ),
    as_json: bool = options.JSON,
    output: Path | None = options.OUTPUT,
) -> None:
    """Measure speed at each depth, with the sampling that the model's card recommends, or greedy without a card;
    sampling flags choose another (`--temperature 0` is greedy). Ctrl-C reports what was measured so far, marked as
    not complete, and exits with status 130."""
    from ..bench.plan import BenchPlan

    # Refuse wrong options before a model is loaded and minutes are spent.
    check_output(output)
    if features:
        _measure_features(model, _cells(context, batch_size, k), max_tokens, repeats, as_json, output)
    else:
        kinds, sizes = _parts(prompts, "--prompts"), _batch_sizes(batch_size)
        plan = BenchPlan(_depths(k), kinds, "batch_size", sizes, max_tokens, repeats, sampling)
        _measure_depths(model, plan, drafter, as_json, output)


def _measure_depths(
    model: str | None, plan: "BenchPlan", drafter: str | None, as_json: bool, output: Path | None
) -> None:
    from ..bench.local import measure_locally
    from ..bench.measurement import summarise
    from ..bench.plan import INTERRUPTED, run_plan
    from ..bench.prompts import prompts_by_kind
    from ..bench.report import BenchReport
    from ..bench.system import system_info
    from ..checkpoint.layout import hub_id, read_layout
    from ..library import load

    chosen = prompts_by_kind(plan.prompts)
    plan = replace(plan, prompts=list(chosen))
    if model is None:
        typer.echo("No model given: measuring the small built-in one. Name a model to measure yours.", err=True)
    folder = find_model(model)
    if not plan.sampling and (card := read_layout(folder).card) is not None:
        plan = replace(plan, sampling=card.sampling_defaults.params(thinking=True))
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
        trials, stopped = run_plan(plan, measure_locally(loaded, texts, plan.tokens, plan.sampling), progress.begin)
    exact = all(trial.exact for by_k in trials.values() for runs in by_k.values() for trial in runs.values())
    report = BenchReport(name, system_info(), plan, summarise(plan, trials), exact, stopped)
    print_report(report, as_json, output)
    if exact and report.different:
        raise HeadstartError("the tokens are not those of plain decoding, though this device promises them")
    if stopped == INTERRUPTED:
        raise typer.Exit(130)
    if stopped is not None:
        raise HeadstartError(f"not complete: {stopped}")


def _measure_features(
    model: str | None, cells: "Sequence[FeatureCell]", tokens: int, repeats: int, as_json: bool, output: Path | None
) -> None:
    from ..bench.features import FEATURES, measure_features
    from ..checkpoint.layout import hub_id

    folder = find_model(model)
    name = hub_id(folder) or folder.absolute().name
    with Progress((repeats + 1) * len(cells) * len(FEATURES), "runs") as progress:
        report = measure_features(folder, name, cells, tokens, repeats, progress.begin)
    print_report(report, as_json, output)


def _cells(context: str, batch_size: str, k: str) -> "list[FeatureCell]":
    from ..bench.features import FeatureCell

    lengths, sizes = _numbers(context, "--context"), _batch_sizes(batch_size)
    depths = [depth.removeprefix("k=") for depth in _depths(k)]
    return [
        FeatureCell(length, size, "auto" if depth == "auto" else int(depth))
        for length in lengths
        for size in sizes
        for depth in depths
    ]


def _numbers(text: str, option: str) -> list[int]:
    parts = _parts(text, option)
    if not all(part.isdecimal() and int(part) for part in parts):
        raise RequestError(f"{option} {text}: give whole numbers above 0")
    return list(map(int, parts))


def _batch_sizes(text: str) -> list[int]:
    sizes = _numbers(text, "--batch-size")
    if (largest := max(sizes)) > MAX_BATCH:
        raise RequestError(f"--batch-size {largest}: at most {MAX_BATCH}")
    return sizes


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
