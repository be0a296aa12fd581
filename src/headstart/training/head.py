"""The head that is trained: one of the family's form, in float32, begun as a copy of the trunk's last layer."""

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .. import models
from ..checkpoint.layout import Layout, head_field
from ..errors import HeadError
from ..kernels.layers import Attention, LatentAttention
from ..kernels.weights import dequantised
from ..models import Model
from ..models.head import Head, find_part, share_missing_parts

FAMILIES = (
    "llama", "mistral3", "ministral3", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next",
    "glm4_moe",
)  # fmt: skip
EXPERTS = ".switch_mlp."  # stay as they are: there are too many to train


def require_trainable(layout: Layout) -> None:
    """Refuse a model before anything of it is loaded."""
    if layout.family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise HeadError(f"{layout.path}: no head is trained for {layout.family}. train-head takes {known}.")


def promising(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the promise of a head of one module."""
    config = deepcopy(config)
    models.text_config(config)[head_field(config)] = 1
    return config


def new_head(model: Model, config: dict[str, Any], tokens: mx.array) -> Model:
    """Return the model with a head that gives on, nearly, what the trunk's last layer makes of a hidden state.

    Args:
        model: Without a head.
        config: Its config.json.
        tokens: Of any text [B, T], to see how large the residual stream is.
    """
    mtp = models.build(promising(config)).weights.mtp
    spec = model.family.head
    share_missing_parts(mtp, spec, ())
    source = next(each for each in reversed(model.layers) if isinstance(each.mixers[0], Attention | LatentAttention))
    _copy(source.module, mtp.layers[0])
    owner = mtp.layers[0] if spec.in_layer else mtp
    size = int(model.config["hidden_size"])
    last = model.weights.norm.weight.astype(mx.float32)
    identity = mx.diag(1 / mx.where(mx.abs(last) < 1e-3, 1e-3, last)) if spec.fed_after_norm else mx.eye(size)
    halves = [mx.zeros((size, size)), identity * _stream_size(model, tokens)]
    fc = find_part(owner, spec.names.fc)
    fc.weight = mx.concatenate(halves if spec.embedding_first else halves[::-1], axis=1)
    if spec.own_norm:
        find_part(owner, spec.names.norm).weight = last
    return with_head(model, mtp)


def opened_head(model: Model, config: dict[str, Any]) -> Model:
    """Return a model with its own head widened to float32."""
    mtp = model.weights.mtp
    if len(mtp.layers) > 1:
        raise HeadError(f"its head has {len(mtp.layers)} modules, and train-head trains heads of one.")
    built = models.build(promising(config)).weights.mtp
    share_missing_parts(built, model.family.head, {name for name, _ in _flat(mtp, "mtp.")})
    _copy(mtp, built)
    return with_head(model, built)


def with_head(model: Model, mtp: Head) -> Model:
    """Return the model with this head, as it is trained: in float32, by operations with gradients."""
    weights = copy(model.weights)
    weights.mtp = mtp
    return replace(model, weights=weights, backend=model.backend.with_gradients(), dtype=mx.float32, max_k=1)


def trained_parameters(mtp: nn.Module) -> Any:
    """Return the parameters that are trained."""
    return tree_unflatten([(name, array) for name, array in _flat(mtp) if EXPERTS not in f".{name}"])


def _copy(source: nn.Module, target: nn.Module) -> None:
    """Give a module the numbers of another one of its form, in float32. Experts are shared."""
    modules = dict(target.named_modules())
    for path, module in source.named_modules():
        if path.endswith(EXPERTS.strip(".")):
            owner, _, name = path.rpartition(".")
            modules[owner][name] = module
        elif EXPERTS not in f".{path}.":
            for name, array in module.items():
                if isinstance(array, mx.array) and name in ("weight", "bias", *modules[path].parameters()):
                    modules[path][name] = dequantised(module) if name == "weight" else array.astype(mx.float32)


def _flat(module: nn.Module, prefix: str = "") -> Sequence[tuple[str, mx.array]]:
    found: Any = tree_flatten(module.parameters())
    return [(prefix + name, array) for name, array in found]


def _stream_size(model: Model, tokens: mx.array) -> mx.array:
    """Return the root mean square of the residual stream after the last layer."""
    head = replace(model.family.head, fed_after_norm=False)
    before = replace(model.reading, family=replace(model.family, head=head))
    x = before.trunk(tokens, model.make_state(tokens.shape[0]), certain=tokens.shape[1]).astype(mx.float32)
    return mx.sqrt(mx.square(x[:, 1:]).mean())
