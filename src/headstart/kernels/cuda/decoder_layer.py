"""A decoder layer in one kernel (see layer.py): which layers it takes, and of what it is made of them."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from ...state import KV, Recurrent
from ..adapters import has_adapters
from ..layers import Attention, FeedForward, GatedDeltaNet, Layer, Mixer, Pass
from ..types import GatedDeltaWeights
from ..weights import MatrixWeights, matrix_weights
from .attention import WIDEST, arrange_fits, attention_fits
from .gated_delta import draft_lines, gated_delta_fits
from .layer import MOST_PAIRS, MOST_ROWS, count_stages, launch_layer
from .layer_parts import GatedAttention, GatedDelta, Mixture, Mlp, NormWeights
from .norm import norm_fits
from .packing import packed_weights
from .persistent import Persistent
from .products import ProductTile, SumOrder, product_refusal


def decoder_layer(
    persistent: Persistent, layer: Layer, x: mx.array, memory: KV | Recurrent, run: Pass
) -> mx.array | None:
    """Return the residual stream x [B, W, H] after a layer of a mixer and an MLP or experts. None where it takes
    several kernels, as in prefill; then `memory` has not changed."""
    B, W, _ = x.shape
    (first, mixer, *_), (second, ahead, *_) = layer.parts
    if B * W > MOST_ROWS or run.certain > 1 or not persistent.claim() or not norm_fits(x, first["weight"]):
        return None
    packed = packed_weights(layer.module)
    assert isinstance(ahead, FeedForward)
    feed = _feed_forward(ahead.module, x.dtype)
    mixed = None if isinstance(mixer, FeedForward) else _mixer(mixer, x, memory, run)
    if feed is None or mixed is None or (isinstance(feed, Mixture) and B * W * feed.experts_per_row > MOST_PAIRS):
        return None
    before, between = (NormWeights(each["weight"], each.eps) for each in (first, second))
    made = launch_layer(x, persistent.status, before, mixed, between, feed, packed)
    persistent.status, persistent.launched = made.status, True
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


def _feed_forward(module: nn.Module, dtype: mx.Dtype) -> Mlp | Mixture | None:
    if "switch_mlp" not in module:
        return _mlp(module, dtype)
    if "shared_expert_gate" not in module:
        return None
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
    if "gate_proj" not in module:
        return None
    found = _matrices(dtype, module.gate_proj, module.up_proj, module.down_proj)
    if found is None or SumOrder.of(found[0]) != SumOrder.of(found[1]):
        return None
    return Mlp(*found) if count_stages(found[0], ProductTile(32, 16)) else None


def _mixer(mixer: Mixer, x: mx.array, memory: KV | Recurrent, run: Pass) -> GatedDelta | GatedAttention | None:
    if isinstance(mixer, GatedDeltaNet) and isinstance(memory, Recurrent):
        return _delta(mixer, x, memory, run.accepted)
    if isinstance(mixer, Attention) and isinstance(memory, KV):
        return _attention(mixer, x, memory)
    return None


def _delta(layer: GatedDeltaNet, x: mx.array, memory: Recurrent, accepted: mx.array) -> GatedDelta | None:
    net, W = layer.module, x.shape[1]
    if len(layer.projections) != 4 or not gated_delta_fits(memory.state, x.dtype, net.conv1d.weight.shape[1]):
        return None
    found = _matrices(x.dtype, *layer.projections, net.out_proj)
    if found is None:
        return None
    pending = memory.pending
    if pending is None and W > 1:  # one draft that was not accepted stands for none
        pending, accepted = [mx.zeros(*draft_lines(memory.state, memory.conv, 1))], mx.zeros_like(accepted)
    weights = GatedDeltaWeights.of(net)
    return GatedDelta(found[:4], found[4], weights, memory.state, memory.conv, accepted, pending, W - 1)


def _attention(layer: Attention, x: mx.array, memory: KV) -> GatedAttention | None:
    part, rope, norms = layer.module, layer.plain_rope, layer.norms
    plain = layer.gated and layer.window is None and memory.start is None  # the kernel rotates by `offset`
    if not plain or not arrange_fits(layer) or not attention_fits(layer) or x.shape[1] > WIDEST:
        return None
    found = _matrices(x.dtype, part.q_proj, part.k_proj, part.v_proj, part.o_proj)
    if found is None or memory.keys.dtype != x.dtype:
        return None
    assert rope is not None
    assert norms is not None
    weights = norms[0].weight, norms[1].weight
    return GatedAttention(
        found[:3], found[3], weights, norms[0].eps, rope, part.scale, memory.keys, memory.values, memory.offset
    )
