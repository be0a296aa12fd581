"""What is on disk: `layout` recognises a model folder, `load` reads it, `hub` finds or downloads it."""

from .hub import resolve
from .layout import Layout, read_layout
from .load import load, load_layout, load_tokenizer

__all__ = ["Layout", "load", "load_layout", "load_tokenizer", "read_layout", "resolve"]
