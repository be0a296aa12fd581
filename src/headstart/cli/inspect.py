"""`headstart inspect`: what a checkpoint is, and whether its head can be used."""

import json
from typing import Annotated, Any

import typer


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a built-in model, a name in the Hugging Face cache, or a hub id."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a checkpoint is: family, layout, quantisation, and where its MTP head is. It reads headers only: a hub
    id that is not in the cache is not downloaded."""
    from ..checkpoint import read_layout
    from ..checkpoint.hub import header_folder

    with header_folder(model) as (folder, name):
        report = read_layout(folder).report()
    report["path"] = name
    if reason := report["mtp"]["reason"]:
        report["mtp"]["reason"] = reason.replace(str(folder), name)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print_table(report)


def _print_table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    mtp = report["mtp"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name in ("path", "family", "layout", "dtype"):
        table.add_row(name, report[name])
    table.add_row("quantization", _describe(report["quantization"]))
    for name in ("parameters", "bytes"):
        table.add_row(name, f"{report[name]:,}")
    table.add_row("mtp", "available" if mtp["available"] else "not available")
    if mtp["reason"]:
        table.add_row("  reason", mtp["reason"])
    if mtp["location"]:
        table.add_row("  location", mtp["location"])
        table.add_row("  num_layers", str(mtp["num_layers"]))
        table.add_row("  quantization", _describe(mtp["quantization"]))
    table.add_row("card", report["card"] or "none")
    Console(markup=False, highlight=False).print(table)


def _describe(quantization: dict[str, Any] | None) -> str:
    if quantization is None:
        return "none"
    return f"{quantization['bits']} bits, groups of {quantization['group_size']}, {quantization['mode']}"
