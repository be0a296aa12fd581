"""`headstart inspect`: what one checkpoint is. `headstart list`: which ones are on this machine, or known."""

import json
from pathlib import Path
from typing import Any

import typer

from . import options
from .show import print_table

PARTS = {
    "index": "index of tokens",
    "entries": "entries of blocks",
    "streams": "mixed streams",
}  # and how they are called


@options.with_model
def inspect_command(model: str | None, as_json: bool = options.JSON) -> None:
    """Show what a checkpoint is. Family, layout, quantisation, and where its MTP head is. Only headers are read: a
    hub id that is not in the cache is not downloaded."""
    from ..checkpoint import read_layout
    from ..checkpoint.drafter import is_drafter, read_drafter
    from ..checkpoint.hub import header_folder

    with header_folder(model) as (folder, name):
        drafter = read_drafter(folder) if is_drafter(folder) else None
        report = (drafter or read_layout(folder)).report()
    report["path"] = name
    if drafter is not None:
        _show_drafter(report, as_json)
        return
    mtp = report["native_mtp"]
    mtp["reason"] = mtp["reason"] and mtp["reason"].replace(str(folder), name)
    if as_json:
        typer.echo(json.dumps(report))
        return
    rows = {name: report[name] for name in ("path", "family", "forward", "layout", "dtype")}
    rows["quantization"] = _describe(report["quantization"])
    rows |= {name: f"{report[name]:,}" for name in ("parameters", "bytes")}
    rows["MTP head"] = "available" if mtp["available"] else "not available"
    if mtp["reason"]:
        rows["  reason"] = mtp["reason"]
    if mtp["location"]:
        rows |= {"  location": mtp["location"], "  layers": str(mtp["num_layers"])}
        rows["  quantization"] = _describe(mtp["quantization"])
    vision = report["vision"]
    size = f"{vision['parameters']:,} parameters, {vision['bytes']:,} bytes, {vision['dtype']}"
    rows["vision tower"] = size if vision["available"] else f"not available: {vision['reason']}"
    if (tables := report["tables"])["count"]:
        size = f"{tables['parameters']:,} parameters, {tables['bytes']:,} bytes"
        rows["n-gram tables"] = f"{size}, read from disk a few rows a token"
    for part, words in PARTS.items():
        if (found := report[part])["layers"]:
            rows[words] = f"{found['layers']} layers, {found['bytes']:,} bytes"
    rows["card"] = report["card"] or "none"
    if report["known_drafter"]:
        rows["drafter"] = f"{report['known_drafter']} (--drafter)"
    print_table([[name, value] for name, value in rows.items()])


def _show_drafter(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    rows = {name: str(report[name]) for name in ("path", "family", "dtype")}
    rows["quantization"] = _describe(report["quantization"])
    counts = ("parameters", "bytes", "block_size", "mask_token_id", "layers", "clusters", "scored_clusters")
    rows |= {name: f"{report[name]:,}" for name in counts if report.get(name) is not None}
    if "target_layer_ids" in report:
        rows["target layers"] = ", ".join(map(str, report["target_layer_ids"]))
    rows["for a model of"] = ", ".join(f"{name} {size}" for name, size in report["target"].items() if size)
    print_table([[name, value] for name, value in rows.items()])


def _describe(quantization: dict[str, Any] | None) -> str:
    if quantization is None:
        return "none"
    return f"{quantization['bits']} bits, groups of {quantization['group_size']}, {quantization['mode']}"


def list_command(
    folders: list[Path] | None = typer.Argument(None, help="Also these: models, or folders with models in them."),
    as_json: bool = options.JSON,
) -> None:
    """List the models on this machine. Says whether their heads can draft and how far, and which others are known."""
    from ..cards import all_cards
    from ..checkpoint.local import local_models

    found = [model.report() for model in local_models(folders or ())]
    here = {model["card"] for model in found}
    others = [card for card in all_cards() if card.name not in here]
    if as_json:
        typer.echo(json.dumps({"on_disk": found, "known": [card.model_dump(exclude_none=True) for card in others]}))
        return
    rows = [["on disk", "GB", "MTP head", "default k", "max k", ""]]
    for model in found:
        mtp = model["native_mtp"]
        size = f"{model['bytes'] / 1e9:.2f}" if model["bytes"] else ""
        head = ["usable", str(mtp["default_k"]), str(mtp["max_k"])] if mtp["available"] else ["none", "", ""]
        rows.append([model["id"], size, *head, model["problem"] or mtp["reason"] or ""])
    print_table(rows, right=(1, 3, 4))
    if others:
        rows = [["known, not here", "parameters", "default k", "max k"]]
        for card in others:
            size = f"{card.parameters or ''}{f', {card.active_parameters} active' if card.active_parameters else ''}"
            depth = [str(card.native_mtp.default_k), str(card.native_mtp.max_k)] if card.native_mtp else ["", ""]
            rows.append([card.hub_id or card.name, size, *depth])
        typer.echo()
        print_table(rows, right=(2, 3))
