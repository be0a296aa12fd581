"""`headstart models`: what is on this machine, and what else is known."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def models(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Also these: models, or folders with models in them.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models on this machine, whether their heads can draft and how far, and the others with a card."""
    from ..cards import all_cards
    from ..checkpoint.inventory import on_disk

    found = [model.report() for model in on_disk(folders or ())]
    here = {model["card"] for model in found}
    others = [card for card in all_cards() if card.name not in here]
    if as_json:
        typer.echo(json.dumps({"on_disk": found, "known": [card.model_dump(exclude_none=True) for card in others]}))
        return
    _print_tables(found, others)


def _print_tables(found: list[dict[str, Any]], others: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("on disk", "GB", "head", "k", "max k", ""):
        table.add_column(column, overflow="fold", justify="right" if column in ("GB", "k", "max k") else "left")
    for model in found:
        size = f"{model['bytes'] / 1e9:.2f}" if model["bytes"] else ""
        depth = (str(model["default_k"]), str(model["max_k"])) if model["head"] else ("", "")
        why = model["problem"] or model["head_unavailable"] or ""
        table.add_row(model["name"], size, "usable" if model["head"] else "none", *depth, why)
    console.print(table)
    if not others:
        return
    console.print()
    table = Table(box=None, pad_edge=False)
    for column in ("known, not here", "parameters", "k", "max k"):
        table.add_column(column, overflow="fold", justify="right" if column in ("k", "max k") else "left")
    for card in others:
        size = f"{card.parameters or ''}{f', {card.active_parameters} active' if card.active_parameters else ''}"
        depth = (str(card.native_mtp.default_k), str(card.native_mtp.max_k)) if card.native_mtp else ("", "")
        table.add_row(card.hub_id or card.name, size, *depth)
    console.print(table)
