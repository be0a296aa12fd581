"""Models on disk: `hub` finds or downloads a model, `layout` recognises it, `load` reads it, `convert` and `graft`
write it."""

from .hub import resolve
from .layout import Layout, read_layout
from .load import LoadPlan, Needs, load_model, load_tokenizer

__all__ = ["Layout", "LoadPlan", "Needs", "load_model", "load_tokenizer", "read_layout", "resolve"]
