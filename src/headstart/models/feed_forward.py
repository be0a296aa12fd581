"""The second half of a decoder layer over mlx-lm's modules: an MLP, or experts and a router.

The same as the modules' own calls; only the products go through `kernels`, several at once where they share an input.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.step3p5 import Step3p5MLP, clamped_swiglu
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU, SwitchMLP

from ..kernels import cpu
from ..kernels.adapters import has_adapters
from ..kernels.experts import combine, expert_products, route, swiglu_experts
from ..kernels.products import product, products, swiglu_product
from .residual import Residual


def feed_forward(module: nn.Module, x: mx.array, residual: Residual) -> tuple[mx.array, mx.array]:
    """Add `module(x)` of an MLP or a mixture of experts to the residual → the sum and its norm."""
    if (native := cpu.native()) is not None and ("switch_mlp" in module or _is_swiglu(module)):
        made = cpu.native_feed_forward(native, module, x, residual.native)
        if made is not None:
            return residual.added(made)
    return residual.add(mlp_or_mixture(module, x))


def mlp_or_mixture(module: nn.Module, x: mx.array) -> mx.array:
    """Return `module(x)`, [B, W, H] → [B, W, H]."""
    if "switch_mlp" not in module:
        return _mlp(module, x)
    if "shared_expert_gate" not in module:
        return _mixture(module, x)
    if module.sharding_group is not None:  # its experts are on several machines
        return module(x)
    shared = module.shared_expert
    logits, weight = products(x, module.gate, module.shared_expert_gate)
    indices, scores = route(logits, module.top_k, module.norm_topk_prob)
    parts = chosen_experts(module.switch_mlp, x, indices)
    always = product(swiglu_product(x, shared.gate_proj, shared.up_proj), shared.down_proj)
    return combine(parts, scores, always, weight)


def _is_swiglu(module: nn.Module) -> bool:
    return "gate_proj" in module and not (isinstance(module, Step3p5MLP) and module.limit is not None)


def _mlp(module: nn.Module, x: mx.array) -> mx.array:
    if _is_swiglu(module):
        hidden = swiglu_product(x, module.gate_proj, module.up_proj)
    elif "gate_proj" in module:
        up, gate = products(x, module.up_proj, module.gate_proj)
        hidden = clamped_swiglu(up, gate, module.limit)
    else:
        hidden = nn.relu2(product(x, module.up_proj))
    return product(hidden, module.down_proj)


def _mixture(module: nn.Module, x: mx.array) -> mx.array:
    """Run Qwen3's mixture, or DeepSeek's, Step's and Nemotron's, whose shared experts have no gate."""
    if "router" in module:
        return _mixture_with_identity(module, x)
    if isinstance(module.gate, nn.Linear | nn.QuantizedLinear):
        indices, scores = route(product(x, module.gate), module.top_k, module.norm_topk_prob)
    else:
        indices, scores = module.gate(x)
    latent = product(x, module.fc1_latent_proj) if "fc1_latent_proj" in module else x
    parts = chosen_experts(module.switch_mlp, latent, indices)
    out = (parts * scores[..., None]).sum(axis=-2).astype(x.dtype)
    out = product(out, module.fc2_latent_proj) if "fc2_latent_proj" in module else out
    shared = module.get("shared_experts", module.get("share_expert"))
    return out if shared is None else out + _mlp(shared, x)


def _mixture_with_identity(module: nn.Module, x: mx.array) -> mx.array:
    """Run LongCat's mixture: experts past the last return their input."""
    indices, scores = module.router(x)
    same = indices >= module.n_routed_experts
    parts = chosen_experts(module.switch_mlp, x, mx.where(same, 0, indices))
    out = (parts * mx.where(same, 0.0, scores)[..., None]).sum(axis=-2)
    return out + x * mx.where(same, scores, 0.0).sum(axis=-1, keepdims=True)


def chosen_experts(module: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
    """Return `module(x, indices)` for mlx-lm's SwitchGLU or SwitchMLP: [B, W, H] and [B, W, E] → [B, W, E, H]."""
    if not isinstance(module, SwitchGLU | SwitchMLP):
        return module(x, indices)
    always = has_adapters(*module.children().values())
    if isinstance(module, SwitchMLP):
        made, last = expert_products(x, indices, module.fc1, always=always), module.fc2
        hidden = None if made is None else module.activation(made[0])
    elif isinstance(module.activation, SwiGLU):
        hidden, last = swiglu_experts(x, indices, module.gate_proj, module.up_proj, always=always), module.down_proj
    else:
        made = expert_products(x, indices, module.up_proj, module.gate_proj, always=always)
        last = module.down_proj
        hidden = None if made is None else module.activation(*made)
    if hidden is None:
        return module(x, indices)
    down = expert_products(hidden, indices, last, always=always)
    assert down is not None, "an MLP's layers are quantised alike"
    return down[0]
