"""Headstart: decode with a model's own multi-token-prediction head, without changing a token."""

from importlib.metadata import version

__version__ = version("headstart")
