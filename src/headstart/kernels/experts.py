"""The second half of a decoder layer: an MLP, or experts and a router, by MLX's own operations.

The same as mlx-lm's modules' own calls; products that share an input are asked for together.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text
from mlx_lm.models.activations import swiglu
from mlx_lm.models.step3p5 import clamped_swiglu
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU, SwitchMLP

from .adapters import ChosenAdapters, has_adapters
from .layers import FeedForward, MlpAndExperts, Pass, PerLayerInput, Residual
from .streams import Streams


def stock_experts(x: mx.array, indices: mx.array, layer: nn.Module) -> mx.array:
    """Return mlx-lm's product, the rows in their order. The order of sorted ones' sums changes with their number."""
    own = x.ndim > indices.ndim
    made: mx.array = layer(x[..., None, :] if own else x[..., None, None, :], indices)
    return made.squeeze(-2).astype(x.dtype)


def stock_route(logits: mx.array, top: int, normed: bool) -> tuple[mx.array, mx.array]:
    gates = mx.softmax(logits, axis=-1, precise=True)
    indices = mx.stop_gradient(mx.argpartition(gates, kth=-top, axis=-1)[..., -top:])
    scores = mx.take_along_axis(gates, indices, axis=-1)
    return indices, scores / scores.sum(axis=-1, keepdims=True) if normed else scores


def stock_combine(parts: mx.array, scores: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
    return (parts * scores[..., None]).sum(axis=-2) + mx.sigmoid(gate) * shared


class LimitedSwiGLU(nn.Module):
    """DeepSeek-V4's and GLM-5.3-Flash's activation. Step's limits what silu makes of the gate, this the gate."""

    def __init__(self, limit: float):
        super().__init__()
        self.limit = limit

    def __call__(self, up: mx.array, gate: mx.array) -> mx.array:
        return nn.silu(mx.minimum(gate, self.limit)) * mx.clip(up, -self.limit, self.limit)


class ScoreRouter(nn.Module):
    """DeepSeek-V4's and GLM-5.3-Flash's router: the experts with the best scores and biases, weighed by their scores
    alone."""

    SCORES: ClassVar[dict[str, Callable[[mx.array], mx.array]]] = {
        "sqrtsoftplus": lambda logits: mx.sqrt(nn.softplus(logits)),
        "sigmoid": mx.sigmoid,
        "softmax": lambda logits: mx.softmax(logits, axis=-1),
    }

    def __init__(self, hidden: int, experts: int, top: int, scoring: str, scaling: float):
        super().__init__()
        self.top_k, self.scoring, self.scaling = top, scoring, scaling
        self.weight = mx.zeros((experts, hidden))
        self.e_score_correction_bias = mx.zeros((experts,))

    def __call__(self, x: mx.array, tokens: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return the experts [B, W, E] of x [B, W, H] and their weights."""
        scores = self.SCORES[self.scoring](x.astype(mx.float32) @ self.weight.astype(mx.float32).T)
        indices = self.choose(scores, tokens)
        found = mx.take_along_axis(scores, indices, axis=-1)
        return indices, found / (found.sum(axis=-1, keepdims=True) + 1e-20) * self.scaling

    def choose(self, scores: mx.array, tokens: mx.array | None) -> mx.array:
        best = mx.argpartition(-(scores + self.e_score_correction_bias), self.top_k - 1, axis=-1)
        return best[..., : self.top_k]


class HashRouter(ScoreRouter):
    """The same with a table that names the experts of each token."""

    def __init__(self, hidden: int, experts: int, top: int, scoring: str, scaling: float, vocabulary: int):
        super().__init__(hidden, experts, top, scoring, scaling)
        del self.e_score_correction_bias
        self.tid2eid = mx.zeros((vocabulary, top), mx.int32)

    def choose(self, scores: mx.array, tokens: mx.array | None) -> mx.array:
        assert tokens is not None
        return self.tid2eid[tokens].astype(mx.uint32)


def is_swiglu(module: nn.Module) -> bool:
    """Return whether an MLP is `down(silu(gate) * up)`."""
    limited = vars(module).get("limit") is not None or isinstance(module.get("activation"), LimitedSwiGLU)
    plain = not limited and not isinstance(module, gemma4_text.MLP)
    return "gate_proj" in module and plain


class FeedForwards(Streams):
    """MLPs and mixtures of experts."""

    def add(self, residual: Residual, made: mx.array, run: Pass) -> tuple[mx.array, mx.array | None]:
        """Return the residual stream with what a part of a layer made, of which this machine may have a part, and
        its norm; None for that of several streams."""
        norm, made = residual.norm, run.share.whole(made)
        if residual.shares is not None:
            return self.inject(residual.x, made, residual.shares), None
        made = made if residual.after is None else self.norm(made, residual.after)
        return self.add_and_norm(residual.x, made, norm["weight"], norm.eps)

    def feed_forward(
        self, layer: FeedForward, x: mx.array, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array | None]:
        """Add what an MLP or a mixture of experts makes of x [B, W, H] to the residual → the sum and its norm."""
        return self.add(residual, self.mlp_or_mixture(layer.module, x, run.adapters, run.tokens), run)

    def mlp_or_mixture(
        self,
        module: nn.Module,
        x: mx.array,
        adapters: ChosenAdapters | None = None,
        tokens: mx.array | None = None,
    ) -> mx.array:
        """Return `module(x)`, [B, W, H] → [B, W, H]. `tokens` [B, W] name the experts of a `HashRouter`."""
        if "switch_mlp" not in module:
            return self._mlp(module, x, adapters)
        if "router" in module:
            return self._mixture_with_identity(module, x, adapters)
        if "shared_expert_gate" not in module:
            return self._mixture(module, x, adapters, tokens)
        if module.sharding_group is not None:  # its experts are on several machines
            return module(x)
        shared = module.shared_expert
        logits, weight = self.products(x, (module.gate, module.shared_expert_gate), adapters)
        indices, scores = self.route(logits, module.top_k, module.norm_topk_prob)
        parts = self.chosen_experts(module.switch_mlp, x, indices, adapters)
        hidden = self.gated_product(x, shared.gate_proj, shared.up_proj, adapters)
        return self.combine(parts, scores, self.product(hidden, shared.down_proj, adapters), weight)

    def mlp_and_experts(
        self, layer: MlpAndExperts, x: mx.array, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array | None]:
        """Add what Gemma 4's MLP makes of x [B, W, H], and its experts of the residual stream."""
        part, router, adapters = layer.module, layer.module.router, run.adapters
        dense = self.norm(self.mlp_or_mixture(part.mlp, x, adapters), part.post_feedforward_layernorm_1)
        scaled = mx.fast.rms_norm(residual.x, router.scale * router._root_size, router.eps).astype(x.dtype)
        indices, scores = self.route(self.product(scaled, router.proj, adapters), part.experts.top_k, True)
        scores = scores * router.per_expert_scale[indices]
        given = self.norm(residual.x, part.pre_feedforward_layernorm_2)
        parts = self.chosen_experts(part.experts.switch_glu, given, indices, adapters)
        made = (parts * scores[..., None]).sum(axis=-2).astype(x.dtype)
        return self.add(residual, dense + self.norm(made, part.post_feedforward_layernorm_2), run)

    def add_own_input(self, own: PerLayerInput, x: mx.array, run: Pass) -> mx.array:
        """Return the residual stream x [B, W, H] with what a layer makes of its own embedding."""
        assert run.own_inputs is not None
        gates = nn.gelu_approx(self.product(x, own.gate, run.adapters)) * run.own_inputs[:, :, own.index]
        return x + self.norm(self.product(gates, own.projection, run.adapters), own.norm)

    def _mlp(self, module: nn.Module, x: mx.array, adapters: ChosenAdapters | None) -> mx.array:
        if is_swiglu(module):
            hidden = self.gated_product(x, module.gate_proj, module.up_proj, adapters)
        elif "gate_proj" in module:
            up, gate = self.products(x, (module.up_proj, module.gate_proj), adapters)
            if isinstance(module.get("activation"), LimitedSwiGLU):
                hidden = module.activation(up, gate)
            else:
                gemma = isinstance(module, gemma4_text.MLP)
                hidden = gemma4_text.geglu(gate, up) if gemma else clamped_swiglu(up, gate, module.limit)
        else:
            hidden = nn.relu2(self.product(x, module.up_proj, adapters))
        return self.product(hidden, module.down_proj, adapters)

    def _mixture(
        self, module: nn.Module, x: mx.array, adapters: ChosenAdapters | None, tokens: mx.array | None
    ) -> mx.array:
        """Run Qwen3's mixture, or DeepSeek's, Step's and Nemotron's, whose shared experts have no gate."""
        if isinstance(module.gate, nn.Linear | nn.QuantizedLinear):
            logits = self.product(x, module.gate, adapters)
            indices, scores = self.route(logits, module.top_k, module.norm_topk_prob)
        else:
            indices, scores = module.gate(x, tokens) if isinstance(module.gate, ScoreRouter) else module.gate(x)
        latent = self.product(x, module.fc1_latent_proj, adapters) if "fc1_latent_proj" in module else x
        parts = self.chosen_experts(module.switch_mlp, latent, indices, adapters)
        out = (parts * scores[..., None]).sum(axis=-2).astype(x.dtype)
        out = self.product(out, module.fc2_latent_proj, adapters) if "fc2_latent_proj" in module else out
        shared = module.get("shared_experts", module.get("share_expert"))
        return out if shared is None else out + self._mlp(shared, x, adapters)

    def _mixture_with_identity(self, module: nn.Module, x: mx.array, adapters: ChosenAdapters | None) -> mx.array:
        """Run LongCat's mixture: experts past the last return their input."""
        indices, scores = module.router(x)
        same = indices >= module.n_routed_experts
        parts = self.chosen_experts(module.switch_mlp, x, mx.where(same, 0, indices), adapters)
        out = (parts * mx.where(same, 0.0, scores)[..., None]).sum(axis=-2)
        return out + x * mx.where(same, scores, 0.0).sum(axis=-1, keepdims=True)

    def route(self, logits: mx.array, top: int, normed: bool) -> tuple[mx.array, mx.array]:
        """Return the `top` experts of a row by its logits [..., E], and their scores: [..., top] each.

        The order in which stock ops name the experts, and whom they choose among equals, may change with the number
        of rows.
        """
        return stock_route(logits, top, normed)

    def combine(self, parts: mx.array, scores: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
        """Sum what experts made [..., E, N] by their scores [..., E], and what all rows share [..., N] by the sigmoid
        of its gate [..., 1]. The order of a stock sum may change with the number of rows."""
        return stock_combine(parts, scores, shared, gate)

    def chosen_experts(
        self, module: nn.Module, x: mx.array, indices: mx.array, adapters: ChosenAdapters | None
    ) -> mx.array:
        """Return `module(x, indices)` for mlx-lm's SwitchGLU or SwitchMLP: [B, W, H] and [B, W, E] → [B, W, E, H].

        mlx-lm's own module, which for many rows sorts them first, computes what no kernel of ours takes.
        """
        if not isinstance(module, SwitchGLU | SwitchMLP):
            return module(x, indices)
        adapted = has_adapters(*module.children().values())
        given = x, indices, adapters, adapted
        if isinstance(module, SwitchMLP):
            made, last = self.expert_products(*given, (module.fc1,)), module.fc2
            hidden = None if made is None else module.activation(made[0])
        elif isinstance(module.activation, SwiGLU):
            hidden, last = self.gated_experts(*given, module.gate_proj, module.up_proj), module.down_proj
        else:
            made = self.expert_products(*given, (module.up_proj, module.gate_proj))
            last = module.down_proj
            hidden = None if made is None else module.activation(*made)
        if hidden is None:
            return module(x, indices).astype(x.dtype)
        down = self.expert_products(hidden, indices, adapters, adapted, (last,))
        assert down is not None, "an MLP's layers are quantised alike"
        return down[0]

    def expert_products(
        self,
        x: mx.array,
        indices: mx.array,
        adapters: ChosenAdapters | None,
        adapted: bool,
        layers: Sequence[nn.Module],
    ) -> list[mx.array] | None:
        """Return what every expert of a row's `indices` [..., E] makes of it, for every layer: [..., E, N].

        `x` is [..., K], or [..., E, K] where each expert has an input of its own. None where no kernel takes a layer
        of experts of which none is `adapted`.
        """
        made = self.multiply_experts(x, indices, layers)
        if made is None and adapted:
            made = [stock_experts(x, indices, layer) for layer in layers]
        if made is None or adapters is None:
            return made
        return adapters.add(made, x, layers, indices, self.row_products)

    def multiply_experts(self, x: mx.array, indices: mx.array, layers: Sequence[nn.Module]) -> list[mx.array] | None:
        """Return the products of `expert_products` without adapters; None where no kernel of ours takes a layer."""
        return None

    def gated_experts(
        self,
        x: mx.array,
        indices: mx.array,
        adapters: ChosenAdapters | None,
        adapted: bool,
        gate: nn.Module,
        up: nn.Module,
    ) -> mx.array | None:
        """Return `silu(gate) * up` of each expert in `indices` [..., E]: [..., K] → [..., E, N]; None as above."""
        both = self.expert_products(x, indices, adapters, adapted, (gate, up))
        return None if both is None else swiglu(*both)
