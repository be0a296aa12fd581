"""A decoder layer over mlx-lm's modules in one kernel, where the device has one (see `kernels/cuda/layer.py`)."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from ..kernels.adapters import has_adapters
from ..kernels.cuda.attention import arrange_fits, attention_fits
from ..kernels.cuda.gated_delta import draft_lines, gated_delta_fits
from ..kernels.cuda.layer import MOST_PAIRS, MOST_ROWS, count_stages, launch_layer
from ..kernels.cuda.layer_parts import GatedAttention, GatedDelta, Mixture, Mlp, NormWeights
from ..kernels.cuda.norm import norm_fits
from ..kernels.cuda.packing import packed_weights
from ..kernels.cuda.persistent import PERSISTENT
from ..kernels.cuda.products import MatrixWeights, ProductTile, SumOrder, matrix_weights, product_refusal
from ..kernels.types import GatedDeltaWeights
from ..state import KV, Recurrent


def decoder_layer(
    layer: nn.Module, norm: nn.Module, x: mx.array, memory: KV | Recurrent, accepted: mx.array, certain: int
) -> mx.array | None:
    """Return the residual stream x [B, W, H] after the layer, which begins with `norm`. None where the layer takes
    several kernels, as in prefill; then `memory` has not changed."""
    B, W, _ = x.shape
    if B * W > MOST_ROWS or certain > 1 or not PERSISTENT.claim() or not norm_fits(x, norm["weight"]):
        return None
    if isinstance(memory, KV) and memory.start is not None:  # the kernel rotates by `offset`
        return None
    packed = packed_weights(layer)
    ahead = _ahead(layer.mlp, x.dtype)
    mixer = _delta(layer, x, memory, accepted) if isinstance(memory, Recurrent) else _attention(layer, x, memory)
    if ahead is None or mixer is None or (isinstance(ahead, Mixture) and B * W * ahead.experts_per_row > MOST_PAIRS):
        return None
    before, between = (NormWeights(each["weight"], each.eps) for each in (norm, layer.post_attention_layernorm))
    made = launch_layer(x, PERSISTENT.status, before, mixer, between, ahead, packed)
    PERSISTENT.status, PERSISTENT.launched = made.status, True
    if isinstance(memory, Recurrent):
        assert made.state is not None
        assert made.conv is not None
        memory.state, memory.conv, memory.pending = made.state, made.conv, made.drafts
    else:
        # They have been written in place: whoever reads them must do so after the launch.
        memory.keys, memory.values = mx.depends([memory.keys, memory.values], [made.x])
    return made.x


def _matrices(dtype: mx.Dtype, *layers: nn.Module) -> list[MatrixWeights] | None:
    found = [matrix_weights(layer) for layer in layers]
    biased = any("bias" in layer for layer in layers)
    fit = all(product_refusal(dtype, each) is None and count_stages(each, ProductTile(16, 16)) for each in found)
    return found if fit and not biased and not has_adapters(*layers) else None


def _ahead(module: nn.Module, dtype: mx.Dtype) -> Mlp | Mixture | None:
    if "switch_mlp" not in module:
        return _mlp(module, dtype)
    experts, router = module.switch_mlp, _matrices(dtype, module.gate, module.shared_expert_gate)
    plain = isinstance(experts, SwitchGLU) and isinstance(experts.activation, SwiGLU)
    if router is None or not plain or module.sharding_group is not None:
        return None
    if router[0].outputs > 1024 or module.top_k > 32:  # more than a warp chooses
        return None
    shared, chosen = _mlp(module.shared_expert, dtype), _mlp(experts, dtype)
    if shared is None or chosen is None:
        return None
    return Mixture(router[0], router[1], shared, chosen, module.top_k, module.norm_topk_prob)


def _mlp(module: nn.Module, dtype: mx.Dtype) -> Mlp | None:
    found = _matrices(dtype, module.gate_proj, module.up_proj, module.down_proj)
    if found is None or SumOrder.of(found[0]) != SumOrder.of(found[1]):
        return None
    return Mlp(*found) if count_stages(found[0], ProductTile(32, 16)) else None


def _delta(layer: nn.Module, x: mx.array, memory: Recurrent, accepted: mx.array) -> GatedDelta | None:
    net, W = layer.linear_attn, x.shape[1]
    if "in_proj_qkv" not in net or not gated_delta_fits(memory.state, x.dtype, net.conv1d.weight.shape[1]):
        return None
    found = _matrices(x.dtype, net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a, net.out_proj)
    if found is None:
        return None
    pending = memory.pending
    if pending is None and W > 1:  # one draft that was not accepted stands for none
        pending, accepted = [mx.zeros(*draft_lines(memory.state, memory.conv, 1))], mx.zeros_like(accepted)
    weights = GatedDeltaWeights(net.conv1d.weight, net.A_log, net.dt_bias, net.norm.weight, net.norm.eps)
    return GatedDelta(found[:4], found[4], weights, memory.state, memory.conv, accepted, pending, W - 1)


def _attention(layer: nn.Module, x: mx.array, memory: KV) -> GatedAttention | None:
    part = layer.self_attn
    heads, dim = part.num_attention_heads, part.head_dim
    if not arrange_fits(part.rope, dim) or not attention_fits(x.shape[1], heads, memory.keys):
        return None
    found = _matrices(x.dtype, part.q_proj, part.k_proj, part.v_proj, part.o_proj)
    if found is None or memory.keys.dtype != x.dtype:
        return None
    norms = (part.q_norm.weight, part.k_norm.weight)
    return GatedAttention(
        found[:3], found[3], norms, part.q_norm.eps, part.rope, part.scale, memory.keys, memory.values, memory.offset
    )
