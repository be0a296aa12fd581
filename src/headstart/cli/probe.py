"""`headstart probe`: is a model's head sound, and does drafting pay on this machine?"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from ..errors import HeadError
from . import options
from .download import find_model
from .progress import Progress
from .show import check_output, print_report

if TYPE_CHECKING:
    from ..checkpoint import Layout


@options.with_model
def probe_command(
    model: str | None,
    k: int | None = Option(None, help="Most drafts per step.", show_default="3"),
    tokens: int = Option(40, "--tokens", "-n", help="Tokens per prompt. More of them show smaller faults."),
    as_json: bool = options.JSON,
    output: Path | None = options.OUTPUT,
) -> None:
    """Check a model's MTP head. Is the output the same at every depth, are its drafts as good as they should be, and
    which depth pays on this machine? Exits with status 1 when something is wrong."""
    from ..bench.probe import DEFAULT_K, check_probe, probe_model, probe_steps
    from ..bench.probe_report import ProbeReport
    from ..bench.system import system_info
    from ..checkpoint import load_model, load_tokenizer, read_layout
    from ..checkpoint.convert import head_field
    from ..checkpoint.layout import hub_id
    from ..limits import MAX_K

    # Refuse wrong options before anything is downloaded or loaded.
    check_output(output)
    check_probe(DEFAULT_K if k is None else k, tokens, MAX_K)
    if model is None:
        typer.echo("No model given: probing the small built-in one. Name a model to probe yours.", err=True)
    layout = read_layout(find_model(model))
    if not layout.mtp.available:
        raise HeadError(f"{layout.path}: no head to probe: {layout.mtp.reason}")
    if not (decision := layout.dispatch(mtp=True)).drafts:
        reason = (decision.reason or "").rstrip(".")
        field = head_field(layout.family)
        raise HeadError(f"{layout.path}: its head is not used: {reason}. Declare it in config.json, `{field}`: 1.")
    deepest = min(DEFAULT_K, decision.max_k) if k is None else k
    check_probe(deepest, tokens, decision.max_k)
    name = hub_id(layout.path) or layout.path.absolute().name  # never the path, which is private
    typer.echo(
        f"Probing {name}: decoding 4 prompts of {tokens} tokens at k=0 to {deepest} and auto, checking the head and "
        f"timing each depth. About as long as decoding {4 * tokens * (deepest + 4):,} tokens one by one.",
        err=True,
    )
    tokenizer = load_tokenizer(layout.path)
    with Progress(probe_steps(deepest), "steps") as progress:
        loaded = load_model(layout.path, mtp=True)
        result = probe_model(loaded, tokenizer, k=deepest, tokens=tokens, progress=progress.begin)
    report = ProbeReport(
        {"id": name, **_about(layout), "computed_in": loaded.dtype_name},
        system_info(),
        result,
        tokenizer,
        _remedy(layout),
    )
    print_report(report, as_json, output)
    if not result.passed:
        raise typer.Exit(1)


def _about(layout: "Layout") -> dict[str, Any]:
    report = layout.report()
    facts = {name: report[name] for name in ("family", "layout", "dtype", "quantization", "parameters", "card")}
    return facts | {f"head_{name}": report["native_mtp"][name] for name in ("location", "num_layers", "quantization")}


def _remedy(layout: "Layout") -> str:
    """Say how to get a sound head where this one is not."""
    from ..checkpoint.layout import find_sidecar, original_id

    source = original_id(layout.path, layout.family) or "ORIGINAL"
    if layout.layout == "raw":
        again = "Download the model again."
    elif find_sidecar(layout.path, layout.config):
        again = f"Delete {layout.mtp.location}; `headstart graft MODEL --from {source}` writes the original's head."
    else:
        again = f"`headstart convert {source} FOLDER` writes the model anew, with the original's head."
    return f"{again} If this is the original's head, Headstart wires it wrong: report it with the page of --output."
