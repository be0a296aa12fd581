"""`headstart recommend`: the known models that fit into this machine's memory."""

import json
from typing import TYPE_CHECKING, Any

import typer

from . import options
from .show import print_table

if TYPE_CHECKING:
    from ..cards import Card

WEIGHTS_SHARE = 0.8  # of the memory that is free; the rest is for prompts and steps
RELEASED_BITS = 16  # of a parameter in the makers' release
SCALE_BITS = 0.5  # per parameter: a scale and a bias of 16 bits for a group of 64
SUFFIXES = {"M": 1e6, "B": 1e9, "T": 1e12}


def recommend_command(
    memory_gb: float | None = typer.Option(None, min=0.1, help="Memory to fill.", show_default="what is free"),
    as_json: bool = options.JSON,
) -> None:
    """List models with an MTP head that fit into memory. Shows the download, the memory of the weights at the most
    bits that fit, and how much faster drafts make decoding, where that is known. Sizes follow from the rounded number
    of parameters."""
    from ..cards import all_cards
    from ..models.memory import unused

    memory = unused() if memory_gb is None else memory_gb * 1e9
    found = [fit for card in all_cards() if (fit := fit_card(card, memory))]
    found.sort(key=lambda fit: -fit["download_gb"])
    if as_json:
        typer.echo(json.dumps({"memory_gb": memory / 1e9, "models": found}))
        return
    typer.echo(f"{memory / 1e9:.1f} GB of memory\n")
    rows = [["model", "download", "in memory", "bits", "faster by", ""]]
    for fit in found:
        gain = fit["gain"]
        times = [f"{gain['speed']:g} ×", f"{gain['kind']}: {gain['basis']}"] if gain else ["?", "not measured"]
        sizes = [f"{fit['download_gb']:.1f} GB", f"{fit['memory_gb']:.1f} GB", str(fit["bits"])]
        rows.append([fit["model"], *sizes, *times])
    print_table(rows, right=(1, 2, 3, 4))
    if any(fit["bits"] != RELEASED_BITS for fit in found):
        typer.echo("\nFewer than 16 bits: `headstart convert MODEL FOLDER --bits 4`")


def fit_card(card: "Card", memory: float) -> dict[str, Any] | None:
    """Return a model's entry at the most bits that fit into `memory` bytes; None if none do, or it has no head."""
    if card.hub_id is None or card.native_mtp is None or card.parameters is None:
        return None
    parameters = float(card.parameters[:-1]) * SUFFIXES[card.parameters[-1]]
    for bits in (RELEASED_BITS, 8, 4):
        size = parameters * (bits if bits == RELEASED_BITS else bits + SCALE_BITS) / 8
        if size <= WEIGHTS_SHARE * memory:
            return {
                "model": card.hub_id,
                "parameters": card.parameters,
                "active_parameters": card.active_parameters,
                "download_gb": parameters * RELEASED_BITS / 8e9,
                "bits": bits,
                "memory_gb": size / 1e9,
                "gain": card.gain.model_dump() if card.gain else None,
            }
    return None
