"""Read this machine's part of a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint import load_model, load_tokenizer, resolve
from ..models import Model
from .pipeline import Pipeline
from .tensor import Tensor
from .wire import Wire

Split = Literal["tensor", "pipeline"]
SPLITS: dict[Split, Callable[[dict[str, Any], Wire], Tensor | Pipeline]] = {
    "tensor": Tensor.of,
    "pipeline": Pipeline.of,
}


def load(
    path: str | Path | None,
    wire: Wire,
    split: Split = "tensor",
    *,
    mtp: bool | None = None,
    dtype: mx.Dtype | None = None,
) -> tuple[Model, TokenizerWrapper]:
    """As `headstart.load`, on every machine: the checkpoint must be on all of them."""
    folder = resolve(path)
    model = load_model(folder, mtp=mtp, dtype=dtype, split=lambda config: SPLITS[split](config, wire))
    return model, load_tokenizer(folder)
