"""Call the extension's operations with mlx-lm's modules, and say which modules they take.

Functions return None for what does not fit: callers then take stock ops. `native` is the extension (see `load.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear

from ...state import Recurrent
from ..adapters import ChosenAdapters, LowRank
from ..experts import is_swiglu
from ..layers import Pass
from ..norms import is_sigmoid_gated
from ..weights import NVFP4_MOST, ScaledLinear, ScaledSwitchLinear

TYPES = (mx.bfloat16, mx.float32)
DENSE = (nn.Linear, nn.Embedding, SwitchLinear, MultiLinear)
QUANTISED = (
    nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear, QuantizedMultiLinear, ScaledLinear,
    ScaledSwitchLinear,
)  # fmt: skip
SCALES = (*TYPES, mx.float16)  # of affine codes

# Weight, scales, biases or nvfp4's factor of each matrix, bits, group size, what is added to the outputs, and what
# adapters add.
Linear = tuple[mx.array, mx.array | None, mx.array | None, int, int, mx.array | None, LowRank | None]
# What to add to [..., H], and the weight and epsilon of the norm of the sum.
NativeResidual = tuple[mx.array, mx.array, float]


class HeldLinear(NamedTuple):
    linear: Linear
    types: tuple[mx.Dtype, ...]  # of the activations that it takes

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeldLinear":
        """Return itself: MLX's types cannot be copied, and a copied module finds that its weight is another."""
        return self


def linear(layer: nn.Module, dtype: mx.Dtype) -> Linear | None:
    """Return a layer as the extension takes it, None if it does not fit activations of this type.

    The answer is kept in the module, where names with an underscore are no parameters: to ask mlx-lm's modules for
    every weight in every step takes longer than to compute with some of them.
    """
    held = layer.get("_linear")
    if held is None or held.linear[0] is not layer.get("weight") or held.linear[5] is not layer.get("bias"):
        held = layer["_linear"] = _hold(layer)
    return held.linear if dtype in held.types else None


def _hold(layer: nn.Module) -> HeldLinear:
    weight: Any = layer.get("weight")
    bias = layer.get("bias")
    if type(layer) in DENSE and weight.dtype in TYPES:
        return HeldLinear((weight, None, None, 0, 0, bias, None), (weight.dtype,))
    if type(layer) in QUANTISED:
        scales, added = layer.scales, layer.get("biases")
        if "global_scale" in layer:
            added = mx.contiguous(layer.global_scale.astype(mx.float32).reshape(-1)) / NVFP4_MOST
        if scales.dtype in (SCALES if layer.mode == "affine" else (mx.uint8,)):
            return HeldLinear((weight, scales, added, layer.bits, layer.group_size, bias, None), TYPES)
    return HeldLinear((weight, None, None, 0, 0, bias, None), ())


def linears(
    layers: Sequence[nn.Module], dtype: mx.Dtype, adapters: ChosenAdapters | None = None
) -> list[Linear] | None:
    """Return layers as the extension takes them, with the adapters of sequences; None if one does not fit."""
    found = []
    for layer in layers:
        if (one := linear(layer, dtype)) is None:
            return None
        found.append(one if adapters is None else (*one[:6], adapters.low_rank(layer)))
    return found


def native_products(
    native: Any,
    x: mx.array,
    layers: Sequence[nn.Module],
    adapters: ChosenAdapters | None = None,
    *,
    gated: bool = False,
    experts: mx.array | None = None,
    own: bool = False,
    wide: bool = False,
) -> list[mx.array] | None:
    """Return `layer(x)` for every layer, in one pass over the threads. An embedding's is `as_linear`.

    `gated`: of a gate and a layer, `silu(gate(x)) * layer(x)`. With `experts` [..., E] of each row; then x is
    [..., K], or [..., E, K] where each expert has its `own` input. `wide`: in float32.
    """
    found = linears(layers, x.dtype, adapters)
    if found is None or (gated and _kind(found[0]) != _kind(found[1])):
        return None
    made: list[mx.array] = native.products(x, found, gated, experts, own, wide)
    return made


def _kind(layer: Linear) -> tuple[object, ...]:
    """Return bits, group size and type of scales: layers that are computed together must be of one kind."""
    return layer[3], layer[4], None if layer[1] is None else layer[1].dtype


def is_native_feed_forward(module: nn.Module) -> bool:
    """Return whether the extension takes an MLP or a mixture of experts, if it takes the weights."""
    if "switch_mlp" not in module:
        return is_swiglu(module)
    switch = module["switch_mlp"]
    known = type(switch) is SwitchGLU and type(switch["activation"]) is SwiGLU
    return known and "shared_expert_gate" in module and module.sharding_group is None


def feed_forward_arguments(
    module: nn.Module, x: mx.array, adapters: ChosenAdapters | None
) -> tuple[str, tuple[Any, ...]] | None:
    """Return which operation of the extension computes `module(x)` for an MLP or a mixture of experts, and what it is
    given of it."""
    if not is_native_feed_forward(module):
        return None
    mixture = "switch_mlp" in module
    shared = module["shared_expert"] if mixture else module
    mlp = linears((shared["gate_proj"], shared["up_proj"], shared["down_proj"]), x.dtype, adapters)
    if mlp is None or _kind(mlp[0]) != _kind(mlp[1]):
        return None
    if not mixture:
        return "mlp", (mlp,)
    switch = module["switch_mlp"]
    gates = linears((module["gate"], module["shared_expert_gate"]), x.dtype, adapters)
    experts = linears((switch["gate_proj"], switch["up_proj"], switch["down_proj"]), x.dtype, adapters)
    if gates is None or experts is None or _kind(experts[0]) != _kind(experts[1]):
        return None
    return "mixture", (gates, mlp, experts, module.top_k, module.norm_topk_prob)


def native_gated_delta_fits(dtype: mx.Dtype, key_dim: int) -> bool:
    """Return whether the extension takes a GatedDeltaNet layer with keys of this size."""
    return key_dim % 16 == 0 and dtype in TYPES


def replace_recurrent(memory: Recurrent, made: list[mx.array], drafts: int) -> list[mx.array]:
    """Hold the first arrays of what a layer made of a window with so many drafts, and return the others."""
    count = 7 if drafts else 2
    memory.state, memory.conv, *pending = made[:count]
    memory.pending = pending or None
    return made[count:]


def gated_delta_arguments(net: nn.Module, x: mx.array, memory: Recurrent, run: Pass) -> tuple[Any, ...] | None:
    """Return what the extension is given of a GatedDeltaNet layer with one matrix for each projection."""
    if "in_proj_qkv" not in net or not native_gated_delta_fits(x.dtype, memory.state.shape[-1]):
        return None
    layers = (net["in_proj_qkv"], net["in_proj_z"], net["in_proj_b"], net["in_proj_a"], net["out_proj"])
    found = linears(layers, x.dtype, run.adapters)
    if found is None:
        return None
    norm = net["norm"]
    weights = [net["conv1d"]["weight"], net["A_log"], net["dt_bias"], norm["weight"]]
    held = memory.state, memory.conv, run.accepted, memory.pending or [], run.certain, is_sigmoid_gated(net)
    return found[:4], found[4], (weights, norm.eps, *held)
