"""`headstart probe`: is a model's head sound, and does drafting pay on this machine?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import HeadError
from .outputs import check_folders, print_report
from .progress import run_progress

if TYPE_CHECKING:
    from ..checkpoint import Layout


def probe(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a built-in model, a name in the Hugging Face cache, or a hub id.",
            show_default="the built-in model",
        ),
    ] = None,
    k: Annotated[int | None, typer.Option("--k", help="Most drafts per step.", show_default="3")] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", "-n", help="Tokens per prompt. More of them show smaller faults.")
    ] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of Markdown.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write it, to attach to an issue: Markdown, or JSON to a .json."),
    ] = None,
) -> None:
    """Check a model's head: is the output the same at every depth, are its drafts as good as they should be, and
    which depth pays on this machine? Exits with status 1 when something is wrong."""
    from ..bench.probe import check_probe, depth_of, probe_model, probe_steps
    from ..bench.probe_report import ProbeReport
    from ..bench.system import system_info
    from ..checkpoint import load, load_tokenizer, read_layout, resolve
    from ..checkpoint.convert import head_field
    from ..checkpoint.identity import hub_id
    from ..limits import MAX_K

    # Refuse what is wrong with the options before anything is downloaded or loaded.
    check_folders({"--output": output})
    check_probe(k, tokens, MAX_K)
    if model is None:
        typer.echo("No model given: probing the small built-in one. Name a model to probe yours.", err=True)
    layout = read_layout(resolve(model))
    if not layout.mtp.available:
        raise HeadError(f"{layout.path}: no head to probe: {layout.mtp.reason}")
    if not (decision := layout.dispatch(mtp=True)).drafts:
        raise HeadError(
            f"{layout.path}: its head is not used: {decision.reason}. Declare it in config.json, "
            f"`{head_field(layout.family)}`: 1."
        )
    check_probe(k, tokens, decision.max_k)
    name = hub_id(layout.path) or layout.path.absolute().name  # never the path, which is the user's own affair
    deepest = depth_of(k, decision.max_k)
    typer.echo(
        f"Probing {name}: decoding 4 prompts of {tokens} tokens at k=0 to {deepest} and auto, checking the head and "
        f"timing each depth. About as long as decoding {4 * tokens * (deepest + 4):,} tokens one by one.",
        err=True,
    )
    tokenizer = load_tokenizer(layout.path)
    with run_progress(probe_steps(deepest)) as progress:
        result = probe_model(load(layout.path, mtp=True), tokenizer, k=deepest, tokens=tokens, progress=progress)
    report = ProbeReport(name, _about(layout), system_info(), result, tokenizer, _remedy(layout))
    print_report(report, as_json, output)
    if not result.passed:
        raise typer.Exit(1)


def _about(layout: "Layout") -> dict[str, Any]:
    facts = layout.report()
    head = {f"head_{name}": facts["mtp"][name] for name in ("location", "num_layers", "quantization")}
    return {name: facts[name] for name in ("family", "layout", "dtype", "quantization", "parameters", "card")} | head


def _remedy(layout: "Layout") -> str:
    """Say how to get a sound head where this one is not."""
    from ..checkpoint.identity import original
    from ..checkpoint.layout import find_sidecar

    source = original(layout.path, layout.family) or "ORIGINAL"
    if layout.layout == "raw":
        again = "Download the model again."
    elif find_sidecar(layout.path, layout.config):
        again = f"Delete {layout.mtp.location}; `headstart graft MODEL --from {source}` writes the original's head."
    else:
        again = f"`headstart convert {source} FOLDER` writes the model anew, with the original's head."
    return f"{again} If this is the original's head, Headstart wires it wrong: report it with the page of --output."
