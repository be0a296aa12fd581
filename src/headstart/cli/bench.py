"""`headstart bench`: how fast a model decodes at each depth here, or how fast servers answer under load."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Option

from ..errors import HeadstartError, RequestError
from . import options
from .download import find_model
from .progress import Progress
from .show import check_output, print_report

if TYPE_CHECKING:
    from ..bench.client import BenchServer
    from ..bench.plan import BenchPlan, LoadKind, Measure, Trials
    from ..bench.prompts import PromptSource
    from ..bench.report import BenchReport

INTERRUPTED = "interrupted"  # why a report is not complete after Ctrl-C
FOR_SERVERS = {"api_key", "concurrency", "rate", "requests", "completions", "timeout"}


@options.with_model
def bench_command(
    context: typer.Context,
    model: str | None,
    prompts: str | None = Option(
        None,
        metavar="LIST",
        help="Kinds (code, prose, chat, repetitive, edit, json), lengths (short, medium, long, or a number of words) "
        "or files: a prompt per line, or .jsonl.",
        show_default="the first four kinds; with --url all lengths",
    ),
    tokens: int = Option(64, "--tokens", "-n", help="Tokens per sequence."),
    repeats: int = Option(3, help="Interleaved repeats of everything."),
    as_json: bool = options.JSON,
    output: Path | None = options.OUTPUT,
    k: str = Option("0-3,auto", metavar="LIST", help="Depths (drafts per step), such as 0-5,auto."),
    batch_size: str = Option("1,4", metavar="LIST", help="Sequences decoded together."),
    url: list[str] | None = Option(
        None,
        metavar="[NAME=]URL",
        help="Measure a server with OpenAI's API instead. Repeat to compare with the first. #FIELD=VALUE after the "
        "URL goes into every request. MODEL is its model's name, if it has several.",
    ),
    api_key: list[str] | None = Option(
        None,
        metavar="KEY",
        help="With --url, in the servers' order.",
        show_default="HEADSTART_API_KEY, for the first",
    ),
    concurrency: str = Option("1,4,16", metavar="LIST", help="With --url: clients that each wait for an answer."),
    rate: str = Option("", metavar="LIST", help="With --url: Poisson arrivals per second instead."),
    requests: int = Option(16, min=1, help="With --url: per run, at least two per client."),
    completions: bool = Option(False, "--completions", help="With --url: complete texts instead of chatting."),
    timeout: float = Option(120.0, min=0.1, help="With --url: seconds to wait for data."),
) -> None:
    """Measure speed at each depth, or of servers. Decodes a model on this machine at each depth, or with --url puts
    servers under load. Ctrl-C reports what was measured so far, marked as not complete, and exits with status 130."""
    from ..bench.plan import BenchPlan
    from ..bench.prompts import KINDS, LENGTHS, prompt_source

    # Refuse wrong options before a model is loaded and minutes are spent.
    check_output(output)
    source = prompt_source(_parts(prompts, "--prompts") if prompts is not None else list(LENGTHS if url else KINDS))
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, how in sources.items() if how is not None and how.name == "COMMANDLINE"}
    if url:
        _refuse_options(given & {"k", "batch_size"}, "is for a model on this machine: leave out --url")
        kind: LoadKind = "rate" if rate or "rate" in given else "concurrency"
        servers = _servers(url, api_key, model, chat=not completions)
        names = [server.name for server in servers]
        values = _numbers(kind, rate if kind == "rate" else concurrency)
        plan = BenchPlan(names, source.names, kind, values, tokens, repeats)
        report = _bench_servers(servers, source, plan, requests, timeout)
    else:
        _refuse_options(given & FOR_SERVERS, "is for a server: give its --url")
        values = _numbers("batch_size", batch_size)
        plan = BenchPlan(_depths(k), source.names, "batch_size", values, tokens, repeats)
        report = _bench_here(model, source, plan)
    print_report(report, as_json, output)
    if report.exact and report.different:
        raise HeadstartError("the tokens are not those of plain decoding, though this device promises them")
    if report.stopped == INTERRUPTED:
        raise typer.Exit(130)
    if report.stopped is not None:
        raise HeadstartError(f"not complete: {report.stopped}")


def _bench_here(name: str | None, source: "PromptSource", plan: "BenchPlan") -> "BenchReport":
    from ..bench.local import measure_locally
    from ..bench.report import bench_report
    from ..checkpoint.layout import hub_id
    from ..library import load

    if name is None:
        typer.echo("No model given: measuring the small built-in one. Name a model to measure yours.", err=True)
    folder = find_model(name)
    model, tokenizer = load(folder)
    if not model.has_head:
        raise RequestError(f"there is no depth to measure: {model.head_unavailable or 'the model has no head'}")
    deepest = max(int(depth.removeprefix("k=")) for depth in plan.variants if depth != "k=auto")
    if deepest > model.max_k:
        raise RequestError(f"--k goes to {deepest}, and this model drafts at most {model.max_k} tokens")
    numbers = range(int(max(plan.values)))
    prompts = {name: [source.prompt(name, n).tokens(tokenizer) for n in numbers] for name in source.names}
    title = hub_id(folder) or folder.absolute().name
    trials, stopped = _run(title, plan, measure_locally(model, prompts, plan.tokens))
    return bench_report(plan, trials, model=title, stopped=stopped)


def _bench_servers(
    servers: "list[BenchServer]", source: "PromptSource", plan: "BenchPlan", requests: int, timeout: float
) -> "BenchReport":
    from ..bench.load import LoadTest
    from ..bench.report import bench_report

    with asyncio.Runner() as runner, LoadTest(runner, servers, source, plan.tokens, requests, timeout) as test:
        trials, stopped = _run(", ".join(plan.variants), plan, test.measure)
    return bench_report(plan, trials, stopped=stopped)


def _run(title: str, plan: "BenchPlan", measure: "Measure") -> "tuple[Trials, str | None]":
    """Return the trials, and why there are fewer than planned where that is so."""
    from ..bench.plan import Trials, run_plan

    trials: Trials = {}
    typer.echo(f"Measuring {title}: {plan}.", err=True)
    try:
        with Progress(plan.runs, "runs") as progress:
            run_plan(plan, measure, trials, progress.begin)
    except (KeyboardInterrupt, HeadstartError) as error:
        if not trials:
            raise
        return trials, str(error) if isinstance(error, HeadstartError) else INTERRUPTED
    return trials, None


def _servers(urls: list[str], keys: list[str] | None, model: str | None, *, chat: bool) -> "list[BenchServer]":
    from ..bench.client import BenchServer

    servers = [BenchServer.parse(url, model=model, chat=chat) for url in urls]
    # The key in the environment is our own server's: no other server may see it. It may hold several keys.
    keys = keys or os.environ.get("HEADSTART_API_KEY", "").split()[:1]
    by_url = dict(zip(dict.fromkeys(server.url for server in servers), keys, strict=False))
    return [replace(server, key=by_url.get(server.url)) for server in servers]


def _refuse_options(given: set[str], why: str) -> None:
    if given:
        raise RequestError(f"--{min(given).replace('_', '-')} {why}")


def _numbers(kind: "LoadKind", text: str) -> list[float]:
    option = f"--{kind.replace('_', '-')}"
    try:
        return [float(part) if kind == "rate" else int(part) for part in _parts(text, option)]
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
