"""The models that this machine has beside the one that is served, and the cards of those that it has not."""

from pathlib import Path
from typing import Any

from ..cards import Card, all_cards
from ..checkpoint.inventory import Found, on_disk


def model_list(loaded: Path) -> dict[str, Any]:
    """Reads the headers of all of them, which takes a while. `loaded`: the folder of the one that is served."""
    found = on_disk()
    cards = {card.name for each in found if each.layout is not None and (card := each.layout.card) is not None}
    return {
        "on_disk": [_found(each, loaded) for each in found],
        "known": [_known(card) for card in all_cards() if card.name not in cards],
    }


def _found(found: Found, loaded: Path) -> dict[str, Any]:
    """With the fields of /v1/models."""
    layout, decision = found.layout, found.dispatch
    card = layout.card if layout is not None else None
    return {
        "id": found.name,
        "loaded": found.folder.resolve() == loaded.resolve(),  # perhaps under another name
        "problem": _discreet(found.problem, found),
        "bytes": layout.bytes if layout is not None else None,
        "family": layout.family if layout is not None else None,
        "quantization": layout.quantization if layout is not None else None,
        "context_length": card.context_length if card is not None else None,
        "capabilities": list(card.capabilities) if card is not None else [],
        "native_mtp": {
            "available": decision is not None and decision.drafts,
            "default_k": decision.k if decision is not None else 0,
            "max_k": decision.max_k if decision is not None else 0,
            "reason": _discreet(decision.reason, found) if decision is not None else None,
        },
    }


def _discreet(told: str | None, found: Found) -> str | None:
    """With the model's name for its folder: clients may be anywhere."""
    return told.replace(str(found.folder), found.name) if told is not None else None


def _known(card: Card) -> dict[str, Any]:
    head = card.native_mtp
    return {
        "id": card.hub_id or card.name,
        "parameters": card.parameters,
        "active_parameters": card.active_parameters,
        "family": card.family,
        "context_length": card.context_length,
        "capabilities": list(card.capabilities),
        "native_mtp": {
            "available": head is not None,
            "default_k": head.default_k if head is not None else 0,
            "max_k": head.max_k if head is not None else 0,
            "reason": None if head is not None else "the model was released without a head",
        },
    }
