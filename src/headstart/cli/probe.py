"""`headstart probe`: is a model's head right, and does it pay on this machine?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import HeadError
from .outputs import check_folders, write

if TYPE_CHECKING:
    from ..checkpoint import Layout


def probe(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a built-in model, a name in the Hugging Face cache, or a hub id."),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", help="Most drafts a round.", show_default="as many as the model allows"),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", "-n", help="Tokens for each prompt. More of them show smaller faults.")
    ] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write a Markdown page, to attach to an issue.")
    ] = None,
) -> None:
    """Prove a model's head: does it leave the text as it is at every depth, are its drafts as good as they should be,
    and which depth pays on this machine? Exit status 1 says that something is wrong."""
    from rich.console import Console

    from ..bench.machine import this_machine
    from ..bench.page import markdown, show
    from ..bench.probe import check_asked
    from ..bench.probe import probe as run
    from ..cards import MAX_K
    from ..checkpoint import load, load_tokenizer, read_layout, resolve
    from ..checkpoint.convert import head_field

    # What is wrong with the options is said before anything is downloaded, or loaded.
    check_folders({"--report": report})
    check_asked(k, tokens, MAX_K)
    layout = read_layout(resolve(model))
    if not layout.mtp.available:
        raise HeadError(f"{layout.path}: no head to probe: {layout.mtp.reason}")
    if not (decision := layout.dispatch(mtp=True)).drafts:
        raise HeadError(
            f"{layout.path}: its head is not used: {decision.reason}. Declare it in config.json, "
            f"`{head_field(layout.family)}`: 1."
        )
    check_asked(k, tokens, decision.max_k)
    loaded, tokenizer, machine = load(layout.path, mtp=True), load_tokenizer(layout.path), this_machine()
    name, way_out = _name(layout), _way_out(layout)
    with Console(stderr=True).status("loading", spinner="dots") as status:
        found = run(loaded, tokenizer, k=k, tokens=tokens, progress=lambda doing: status.update(doing))
    if as_json:
        facts = {"model": {"name": name, **_about(layout)}, "machine": machine.as_dict(), "way_out": way_out}
        typer.echo(json.dumps({**found.as_dict(tokenizer), **facts}))
    else:
        console = Console(highlight=False, markup=False)
        console.print(f"{name} · {machine}", soft_wrap=True)
        show(console, found, tokenizer, way_out)
    if report is not None:
        about = {key: str(value) for key, value in _about(layout).items()}
        write(report, markdown(name, about, machine, found, tokenizer, way_out), "--report")
    if not found.passed:
        raise typer.Exit(1)


def _name(layout: "Layout") -> str:
    """What others know it by. Never its path: that is the user's own affair."""
    from ..checkpoint.identity import hub_id

    return hub_id(layout.path) or layout.path.absolute().name


def _about(layout: "Layout") -> dict[str, Any]:
    facts = layout.report()
    head = {name: facts["mtp"][name] for name in ("location", "num_layers", "quantization")}
    about = {name: facts[name] for name in ("family", "layout", "dtype", "quantization", "parameters", "card")}
    return {**about, **{f"head_{name}": value for name, value in head.items()}}


def _way_out(layout: "Layout") -> str:
    """How to get a head that is right, where this one is not."""
    from ..checkpoint.identity import original
    from ..checkpoint.layout import find_sidecar

    source = original(layout.path, layout.family) or "ORIGINAL"
    if layout.layout == "raw":
        again = "Download the model again."
    elif find_sidecar(layout.path, layout.config):
        again = (
            f"Delete {layout.mtp.location}, and `headstart graft MODEL --from {source}` writes the original's head."
        )
    else:
        again = f"`headstart convert {source} FOLDER` writes the model anew, with the original's head."
    return f"{again} If this is the original's head, it is wired wrong here: report it, with the page of --report."
