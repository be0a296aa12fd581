"""`headstart inspect`: what a checkpoint is, and whether its head can be used."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..checkpoint import Layout


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
    from ..checkpoint.hub import outline

    with outline(model) as folder:
        layout = read_layout(folder)
        if as_json:
            typer.echo(json.dumps(layout.report()))
        else:
            _print_table(layout)


def _print_table(layout: "Layout") -> None:
    from rich.console import Console
    from rich.table import Table

    mtp = layout.mtp
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("path", str(layout.path))
    table.add_row("family", layout.family)
    table.add_row("layout", layout.layout)
    table.add_row("dtype", layout.dtype)
    table.add_row("quantization", _describe(layout.quantization))
    table.add_row("parameters", f"{layout.parameters:,}")
    table.add_row("bytes", f"{layout.bytes:,}")
    table.add_row("mtp", "available" if mtp.available else "not available")
    if mtp.reason:
        table.add_row("  reason", mtp.reason)
    if mtp.location:
        table.add_row("  location", mtp.location)
        table.add_row("  num_layers", str(mtp.num_layers))
        table.add_row("  quantization", _describe(mtp.quantization))
    table.add_row("card", str(layout.report()["card"] or "none"))
    Console(markup=False, highlight=False).print(table)


def _describe(quantization: dict[str, Any] | None) -> str:
    if quantization is None:
        return "none"
    return f"{quantization['bits']} bits, groups of {quantization['group_size']}, {quantization['mode']}"
