"""Sliding windows of families that mlx-lm runs without them: as transformers reads config.json."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import ModuleType
from typing import Any

import mlx.nn as nn

from ..errors import CheckpointError
from ..kernels.layers import Attention
from .mixers import grouped_attention

SLIDING = "sliding_attention"


def attention_windows(text: dict[str, Any]) -> list[int | None]:
    """Return how many positions each layer's attention sees; None: all.

    `layer_types` says it, where it is given. Else all layers of a Mistral slide if `sliding_window` is a number; of a
    Qwen2 or Qwen3 those from `max_window_layers` on, of a Qwen3 with experts all, if `use_sliding_window` is set.
    """
    kind, layers = text.get("model_type", "mistral"), text["num_hidden_layers"]
    window = text.get("sliding_window", None if kind == "ministral3" else 4096)
    if kind.startswith("qwen") and not text.get("use_sliding_window"):
        window = None
    if (types := text.get("layer_types")) is None:
        first = {"llama": layers, "qwen2": 28, "qwen3": 28}.get(kind, 0)
        if kind in ("qwen2", "qwen3"):
            first = text.get("max_window_layers", first)
        types = [SLIDING if layer >= first else "full_attention" for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(f"config.json: layer_types must name the attention of {layers} layers.")
    if SLIDING in types and window is not None and (type(window) is not int or window < 1):
        raise CheckpointError(f"config.json: sliding_window is {window!r}; it must be a whole number above 0.")
    return [window if each == SLIDING else None for each in types]


def build_with_windows(make: Callable[[dict[str, Any]], nn.Module], text: dict[str, Any]) -> nn.Module:
    """Build mlx-lm's model by `make` from config.json's text part, and give its layers a `window`."""
    windows = attention_windows(text)
    lm = make(text if None in windows else {**text, "layer_types": None})  # mlx-lm refuses a list of sliding ones
    for layer, window in zip(lm.layers, windows, strict=True):
        layer.window = window
    return lm


def windowed(module: ModuleType) -> Callable[[dict[str, Any]], nn.Module]:
    """Return what builds the model of a module of mlx-lm, with windows."""
    return partial(build_with_windows, lambda text: module.Model(module.ModelArgs.from_dict(text)))


def trained_head_layer(lm: nn.Module) -> nn.Module:
    """Return a layer like the last, for the head of a model that is released without one (`train-head`)."""
    return deepcopy(lm.layers[-1])


def windowed_attention(layer: nn.Module, **fields: Any) -> Attention:
    """Describe grouped-query attention that sees the window of its layer."""
    return grouped_attention(layer, window=layer.window, **fields)
