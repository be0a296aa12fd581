"""`headstart probe`: is a model's head sound, and does drafting pay on this machine?"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from ..errors import HeadError
from ..limits import MAX_K
from . import options
from .download import find_drafter, find_model
from .progress import Progress
from .show import check_output, print_report

if TYPE_CHECKING:
    from ..checkpoint import Layout


@options.with_model
def probe_command(
    model: str | None,
    k: int = Option(3, min=1, max=MAX_K, help="Most drafts per step."),
    tokens: int = Option(40, "--tokens", "-n", min=options.FEWEST_TOKENS, help="Tokens per prompt."),
    drafter: str | None = options.DRAFTER,
    as_json: bool = options.JSON,
    output: Path | None = options.OUTPUT,
) -> None:
    """Check a model's MTP head, or a block drafter. Is the output the same at every depth, are enough drafts
    accepted, and which depth pays on this machine? Exits with status 1 when something is wrong."""
    from ..bench.probe import ProbeReport, decode_depths, find_divergences, probe_prompts
    from ..bench.system import system_info
    from ..checkpoint import load_model, load_tokenizer, read_layout
    from ..checkpoint.drafter import read_drafter
    from ..checkpoint.layout import head_field, hub_id

    check_output(output)
    if model is None:
        typer.echo("No model given: probing the small built-in one. Name a model to probe yours.", err=True)
    layout = read_layout(find_model(model))
    decision = layout.dispatch(mtp=True)
    block = find_drafter(drafter)
    if block is None and not decision.drafts:
        declare = f" Declare it in config.json, `{head_field(layout.config)}`: 1." if layout.mtp.available else ""
        raise HeadError(f"{layout.path}: no head to probe: {decision.reason}{declare}")
    k = min(k, decision.max_k if block is None else read_drafter(block).drafter.max_k)
    name = hub_id(layout.path) or layout.path.absolute().name  # never the path, which is private
    tokenizer = load_tokenizer(layout.path)
    prompts = probe_prompts(tokenizer)
    runs = (k + 2) * (1 + len(prompts))
    typer.echo(f"Probing {name}: {runs} runs of {tokens} tokens, at k=0 to {k} and auto.", err=True)
    with Progress(runs, "runs") as progress:
        loaded = load_model(layout.path, mtp=True, drafter=block)
        depths = decode_depths(loaded, prompts, k, tokens, progress.begin)
    different = find_divergences(loaded, tokenizer, prompts, depths[0], depths)
    about = {"id": name, **_about(layout), "computed_in": loaded.dtype_name}
    if block is not None:
        about["drafter"] = hub_id(block) or block.absolute().name
    remedy = _remedy(layout) if block is None else "Name the drafter that was released for this model."
    excluded = [each for check in loaded.backend.checks() for each in check.excluded]
    report = ProbeReport(about, system_info(), depths, different, remedy, excluded)
    print_report(report, as_json, output)
    if not report.passed:
        raise typer.Exit(1)


def _about(layout: "Layout") -> dict[str, Any]:
    report = layout.report()
    facts = {name: report[name] for name in ("family", "layout", "dtype", "quantization", "parameters", "card")}
    return facts | {f"head_{name}": report["native_mtp"][name] for name in ("location", "num_layers", "quantization")}


def _remedy(layout: "Layout") -> str:
    """Say how to get a sound head where this one is not."""
    from ..checkpoint.head import find_sidecar
    from ..checkpoint.layout import original_id

    source = original_id(layout.path, layout.family) or "ORIGINAL"
    if layout.layout == "raw":
        again = "Download the model again."
    elif find_sidecar(layout.path, layout.config):
        again = f"Delete {layout.mtp.location}; `headstart graft MODEL --from {source}` writes the original's head."
    else:
        again = f"`headstart convert {source} FOLDER` writes the model anew, with the original's head."
    return f"{again} If this is the original's head, Headstart wires it wrong: report it with the page of --output."
