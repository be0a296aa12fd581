"""Model cards: what is known of a model beyond its files. One TOML for each, and the user's own go before ours."""

from .card import Card, NativeMtp, known, matching, named
from .dispatch import Dispatch, dispatch

__all__ = ["Card", "Dispatch", "NativeMtp", "dispatch", "known", "matching", "named"]
