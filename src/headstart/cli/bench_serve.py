"""`headstart bench-serve`: how fast servers answer under load."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import HeadstartError, RequestError
from .lists import listed, numbers, whole
from .outputs import INTERRUPTED, check_folders, tell, write
from .progress import counted_bar

if TYPE_CHECKING:
    from ..bench.load.ask import Count
    from ..bench.load.measure import Plan, Run
    from ..bench.load.target import Target

LOAD, OUTPUT = "Load", "Output"


def bench_serve(
    url: Annotated[str | None, typer.Argument(help="Of the server, such as http://127.0.0.1:8000.")] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Servers to measure by turns, the first against the others. #name=value sets a field.",
        ),
    ] = None,
    names: Annotated[str | None, typer.Option(metavar="LIST", help="Of the servers, for the report.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="LIST", help="One for all, or one for each.", show_default="the only one")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="One for all, or one for each.",
            show_default="HEADSTART_API_KEY, for the first server",
        ),
    ] = None,
    completions: Annotated[bool, typer.Option("--completions", help="Ask /completions; else chats.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Counts tokens of chunks, where the server does not.")
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Requests at a time.", show_default="1,4,16", rich_help_panel=LOAD),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="LIST", help="Poisson arrivals, so many a second.", rich_help_panel=LOAD)
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Of prompts, also in words.", show_default="short,medium,long", rich_help_panel=LOAD
        ),
    ] = None,
    hits: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Shares of prompts whose beginning the server has read.", rich_help_panel=LOAD
        ),
    ] = "0",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your own, as for headstart bench.", rich_help_panel=LOAD),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Of an answer, at most.", rich_help_panel=LOAD)] = 64,
    requests: Annotated[int, typer.Option(help="Of a run; two of each client at least.", rich_help_panel=LOAD)] = 16,
    repeats: Annotated[int, typer.Option(help="Interleaved runs of everything.", rich_help_panel=LOAD)] = 5,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds in which something must arrive.", rich_help_panel=LOAD)
    ] = 120.0,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="- is standard output.", rich_help_panel=OUTPUT)
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Every request.", rich_help_panel=OUTPUT)
    ] = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Markdown.", rich_help_panel=OUTPUT)
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help=".png, .svg or .pdf.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Measure a server of OpenAI's API under load, or several by turns: time to the first token, between tokens, to
    the end, and throughput. Markdown goes to standard output. Ctrl-C ends early and keeps what there is: the report
    says so, and the exit status is 130."""
    from ..bench.load.arrivals import Closed, Open
    from ..bench.load.measure import Plan
    from ..bench.load.questions import LENGTHS, Questions, made_up
    from ..bench.plot import check_plot
    from ..bench.prompts import read_prompts

    if plot_file is not None:
        check_plot(plot_file)
    check_folders({"--json": json_file, "--csv": csv_file, "--report": report_file, "--plot": plot_file})
    if prompts is not None and lengths is not None:
        raise RequestError("--lengths are of prompts that are made up: leave it out where --prompts is given")
    questions = made_up(list(LENGTHS) if lengths is None else listed(lengths, "--lengths"))
    if prompts is not None:
        given = read_prompts(prompts)
        questions = Questions(
            {kind: [p for p in given if p.kind == kind] for kind in dict.fromkeys(p.kind for p in given)}
        )
    if concurrency is None and rate is None:
        concurrency = "1,4,16"
    clients = [] if concurrency is None else listed(concurrency, "--concurrency")
    plan = Plan(
        targets=_targets(url, compare, names, model, api_key, chat=not completions),
        questions=questions,
        loads=[
            *[Closed(whole(part, "--concurrency")) for part in clients],
            *[Open(part) for part in ([] if rate is None else numbers(rate, "--rate"))],
        ],
        hits=numbers(hits, "--hits"),
        tokens=tokens,
        requests=requests,
        repeats=repeats,
        timeout=timeout,
    )
    runs: list[Run] = []
    stopped = _measure(plan, runs, None if tokenizer is None else _count(tokenizer))
    if runs:
        _tell(plan, runs, stopped, json_file, csv_file, report_file, plot_file)
    if stopped == INTERRUPTED:
        raise typer.Exit(130)
    if stopped is not None:
        raise HeadstartError(f"{stopped}; {len(runs)} runs were measured" if runs else stopped)


def _targets(
    url: str | None, compare: str | None, names: str | None, model: str | None, api_key: str | None, *, chat: bool
) -> "list[Target]":
    from ..bench.load.target import Target

    if (url is None) == (compare is None):
        raise RequestError("give the server's URL, or several with --compare URL1,URL2")
    urls = [url] if url is not None else listed(compare or "", "--compare")
    if compare is not None and len(urls) < 2:
        raise RequestError(f"--compare {compare}: give two or more, with commas between them")
    called = listed(names, "--names") if names is not None else [None] * len(urls)
    if len(called) != len(urls):
        raise RequestError(f"--names {names}: give {len(urls)}, one for each server")
    models = _for_each(urls, listed(model, "--model") if model is not None else [None], "--model")
    # None where there is nothing between two commas: not every server has a key.
    keys = _for_each(urls, [part.strip() or None for part in (api_key or "").split(",")], "--api-key")
    each = zip(urls, called, models, keys, strict=True)
    targets = [Target.of(url, name=name, model=model, key=key, chat=chat) for url, name, model, key in each]
    if api_key is None:  # what is in the environment is our own server's, and nobody else's business
        ours = next(iter(os.environ.get("HEADSTART_API_KEY", "").split()), None)  # a server may have several
        targets = [replace(target, key=ours) if target.url == targets[0].url else target for target in targets]
    return targets


def _for_each(urls: list[str], values: Sequence[str | None], option: str) -> Sequence[str | None]:
    if len(values) == 1:
        return [*values] * len(urls)
    if len(values) != len(urls):
        raise RequestError(f"{option}: give one, or {len(urls)}, one for each server")
    return values


def _count(tokenizer: str) -> "Count":
    from ..checkpoint import load_tokenizer
    from ..checkpoint.hub import tokenizer_folder

    loaded = load_tokenizer(tokenizer_folder(tokenizer))
    return lambda text: len(loaded.encode(text, add_special_tokens=False))


def _measure(plan: "Plan", runs: "list[Run]", count: "Count | None") -> str | None:
    """Adds runs as they end. Returns why there are fewer than planned, where that is so."""
    from ..bench.load.measure import measure

    async def collect(progress: Callable[[], None]) -> None:
        async for run in measure(plan, count):
            runs.extend([run] if run is not None else [])
            progress()

    try:
        with counted_bar(f"Measuring {', '.join(target.name for target in plan.targets)}", plan.count) as progress:
            asyncio.run(collect(progress))
    except KeyboardInterrupt:
        return INTERRUPTED
    except HeadstartError as error:
        return str(error)
    return None


def _tell(
    plan: "Plan",
    runs: "list[Run]",
    stopped: str | None,
    json_file: str | None,
    csv_file: Path | None,
    report_file: Path | None,
    plot_file: Path | None,
) -> None:
    from ..bench.load.plot import plot
    from ..bench.load.report import report, requests_csv

    told = report(plan, runs, stopped)
    tell(told, json_file, report_file)
    if csv_file is not None:
        write(csv_file, requests_csv(runs), "--csv")
    if plot_file is not None:
        plot(told, plot_file)
