"""Model cards: what is known of a model beyond its files. One TOML for each, and the user's own go before ours."""

from .card import MAX_K, Card, NativeMtp, known, matching, named
from .dispatch import DEFAULT_K, Dispatch, dispatch

__all__ = [
    "DEFAULT_K", "MAX_K", "Card", "Dispatch", "NativeMtp", "dispatch", "known", "matching", "named",
]  # fmt: skip
