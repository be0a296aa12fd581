"""Model cards: what is known of a model beyond its files. One TOML each; the user's own replace the built-in ones."""

from .card import Card, Dispatch, NativeMtp, dispatch, known, matching, named

__all__ = ["Card", "Dispatch", "NativeMtp", "dispatch", "known", "matching", "named"]
