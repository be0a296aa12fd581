"""`headstart bench`: how fast a model decodes at each depth here, or how fast servers answer under load."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import HeadstartError, RequestError
from .outputs import check_folders, print_report
from .progress import run_progress

if TYPE_CHECKING:
    from ..bench.load import Workload
    from ..bench.plan import BenchPlan, Load, LoadKind, Measure, Trials
    from ..bench.prompts import PromptSource
    from ..bench.report import BenchReport
    from ..bench.server import BenchServer

INTERRUPTED = "interrupted"  # why a report is not complete after Ctrl-C
HERE, SERVER, OUTPUT = "On this machine", "A server (--url)", "Output"


def bench(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a built-in model, a name in the Hugging Face cache, or a hub id. With --url, the model's "
            "name on the server.",
            show_default="the built-in model; on a server the only one",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Kinds (code, prose, chat, repetitive), lengths (short, medium, long, or a number of words), or "
            "files: a prompt per line, or .jsonl.",
            show_default="all kinds; for a server all lengths",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens per sequence.")] = 64,
    repeats: Annotated[int, typer.Option(help="Interleaved repeats of everything.")] = 3,
    k: Annotated[
        str, typer.Option("--k", metavar="LIST", help="Depths, such as 0-5,auto.", rich_help_panel=HERE)
    ] = "0-3,auto",
    batch_size: Annotated[
        str, typer.Option(metavar="LIST", help="Sequences decoded together.", rich_help_panel=HERE)
    ] = "1,4",
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL",
            help="Any server with OpenAI's API. Repeat to compare with the first. #FIELD=VALUE after the URL goes "
            "into every request.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Repeat for more servers, in their order.",
            show_default="HEADSTART_API_KEY, for the first",
            rich_help_panel=SERVER,
        ),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(metavar="LIST", help="Clients that each wait for an answer.", rich_help_panel=SERVER)
    ] = "1,4,16",
    rate: Annotated[
        str, typer.Option(metavar="LIST", help="Poisson arrivals per second instead.", rich_help_panel=SERVER)
    ] = "",
    requests: Annotated[
        int, typer.Option(min=1, help="Per run, at least two per client.", rich_help_panel=SERVER)
    ] = 16,
    cached: Annotated[
        float, typer.Option(min=0, max=1, help="Share of prompts with a cached prefix.", rich_help_panel=SERVER)
    ] = 0.0,
    completions: Annotated[
        bool, typer.Option("--completions", help="Complete texts instead of chatting.", rich_help_panel=SERVER)
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for data.", rich_help_panel=SERVER)
    ] = 120.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of Markdown.", rich_help_panel=OUTPUT)
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write it: Markdown, or JSON to a .json.", rich_help_panel=OUTPUT),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it: .png, .svg or .pdf.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Measure how fast a model decodes on this machine at each depth, or with --url how fast servers answer under
    load. Ctrl-C reports what was measured so far, marked as not complete, and exits with status 130."""
    from ..bench.load import Workload
    from ..bench.plan import BenchPlan
    from ..bench.plot import check_plot, plot_report
    from ..bench.prompts import KINDS, LENGTHS, prompt_source

    # Refuse what is wrong with the options before a model is loaded and minutes are spent.
    if plot is not None:
        check_plot(plot)
    check_folders({"--output": output, "--plot": plot})
    source = prompt_source(_parts(prompts, "--prompts") if prompts is not None else list(LENGTHS if url else KINDS))
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, how in sources.items() if how is not None and how.name == "COMMANDLINE"}
    if url:
        _refuse_options(given & {"k", "batch_size"}, "is for a model on this machine: leave out --url")
        kind: LoadKind = "rate" if rate or "rate" in given else "concurrency"
        servers = _servers(url, api_key, model, chat=not completions)
        loads = _loads(kind, rate if kind == "rate" else concurrency)
        plan = BenchPlan([server.name for server in servers], source.names, loads, tokens, repeats)
        report = _bench_servers(servers, Workload(source, tokens, requests, cached, timeout), plan)
    else:
        of_servers = {"api_key", "concurrency", "rate", "requests", "cached", "completions", "timeout"}
        _refuse_options(given & of_servers, "is for a server: give its --url")
        plan = BenchPlan(_depths(k), source.names, _loads("batch_size", batch_size), tokens, repeats)
        report = _bench_here(model, source, plan)
    print_report(report, as_json, output)
    if plot is not None:
        plot_report(report, plot)
    if report.exact and report.different:
        raise HeadstartError("the tokens are not those of plain decoding, though this device promises them")
    if report.stopped == INTERRUPTED:
        raise typer.Exit(130)
    if report.stopped is not None:
        raise HeadstartError(f"not complete: {report.stopped}")


def _bench_here(name: str | None, source: "PromptSource", plan: "BenchPlan") -> "BenchReport":
    from ..bench.local import measure_locally
    from ..bench.report import bench_report
    from ..checkpoint import resolve
    from ..checkpoint.identity import hub_id
    from ..library import load

    if name is None:
        typer.echo("No model given: measuring the small built-in one. Name a model to measure yours.", err=True)
    folder = resolve(name)
    model, tokenizer = load(folder)
    if not model.has_head:
        raise RequestError(f"there is no depth to measure: {model.head_unavailable or 'the model has no head'}")
    deepest = max(int(depth.removeprefix("k=")) for depth in plan.variants if depth != "k=auto")
    if deepest > model.max_k:
        raise RequestError(f"--k goes to {deepest}, and this model drafts at most {model.max_k} tokens")
    largest = max(int(load.value) for load in plan.loads)
    prompts = {
        name: [source.prompt(name, number).tokens(tokenizer) for number in range(largest)] for name in source.names
    }
    title = hub_id(folder) or folder.absolute().name
    trials, stopped = _run(title, plan, measure_locally(model, prompts, plan.tokens))
    return bench_report(plan, trials, model=title, end_tokens=tokenizer.eos_token_ids, stopped=stopped)


def _bench_servers(servers: "list[BenchServer]", workload: "Workload", plan: "BenchPlan") -> "BenchReport":
    import asyncio

    from ..bench.load import LoadTest
    from ..bench.report import bench_report

    with asyncio.Runner() as runner, LoadTest(runner, servers, workload) as test:
        trials, stopped = _run(", ".join(plan.variants), plan, test.measure)
    return bench_report(plan, trials, stopped=stopped)


def _run(title: str, plan: "BenchPlan", measure: "Measure") -> "tuple[Trials, str | None]":
    """Return the trials, and why there are fewer than planned where that is so."""
    from ..bench.plan import Trials, run_plan

    trials: Trials = {}
    typer.echo(f"Measuring {title}: {plan}.", err=True)
    try:
        with run_progress(plan.runs) as progress:
            run_plan(plan, measure, trials, progress)
    except KeyboardInterrupt:
        if not trials:
            raise
        return trials, INTERRUPTED
    except HeadstartError as error:
        if not trials:
            raise
        return trials, str(error)
    return trials, None


def _servers(urls: list[str], keys: list[str] | None, model: str | None, *, chat: bool) -> "list[BenchServer]":
    from ..bench.server import BenchServer

    servers = [BenchServer.parse(url, model=model, chat=chat) for url in urls]
    # The key in the environment is our own server's: no other server may see it. It may hold several keys.
    keys = keys or os.environ.get("HEADSTART_API_KEY", "").split()[:1]
    by_url = dict(zip(dict.fromkeys(server.url for server in servers), keys, strict=False))
    return [replace(server, key=by_url.get(server.url)) for server in servers]


def _refuse_options(given: set[str], why: str) -> None:
    if given:
        raise RequestError(f"--{min(given).replace('_', '-')} {why}")


def _loads(kind: "LoadKind", text: str) -> "list[Load]":
    from ..bench.plan import Load

    option = f"--{kind.replace('_', '-')}"
    try:
        return [Load(kind, float(part) if kind == "rate" else int(part)) for part in _parts(text, option)]
    except ValueError as error:
        raise RequestError(f"{option} {text}: give {'' if kind == 'rate' else 'whole '}numbers") from error


def _depths(text: str) -> list[str]:
    """Return the depths of "0-3,5,auto" as variants, k=0 first: it is what the others are compared with."""
    depths: list[str] = []
    for part in _parts(text, "--k"):
        first, _, last = part.partition("-")
        if part == "auto":
            depths.append("k=auto")
        elif first.isdecimal() and (last or first).isdecimal() and int(first) <= int(last or first):
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
