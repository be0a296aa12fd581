"""Model cards: what is known of a model beyond its files. One TOML each; the user's own replace the built-in ones."""

from .card import (
    Card,
    Dispatch,
    NativeMtp,
    SamplingDefaults,
    all_cards,
    dispatch,
    find_card,
    match_card,
    read_head_card,
)

__all__ = [
    "Card",
    "Dispatch",
    "NativeMtp",
    "SamplingDefaults",
    "all_cards",
    "dispatch",
    "find_card",
    "match_card",
    "read_head_card",
]
