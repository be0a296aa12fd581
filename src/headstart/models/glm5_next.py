"""GLM-5.3-Flash: Kimi's delta attention, latent attention without positions to the pools of tokens that an index
selects, several residual streams, and experts with limited activations. The head has one stream.

mlx-lm has no module for it. These have upstream's names, and no forward: `kernels/` computes from their descriptions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchGLU

from ..errors import CheckpointError
from ..kernels.experts import LimitedSwiGLU, ScoreRouter
from ..kernels.layers import DeltaAttention, LatentAttention, Mixer, Part
from ..kernels.streams import HyperConnection, StreamEnd
from .deepseek_v3 import NEXTN
from .deepseek_v32 import FULL, indexer_types
from .family import Family
from .mixers import decoder_parts

LINEAR = "linear_attention"
INDEXED = ("indexed_attention", "deepseek_sparse_attention", "full_attention")  # all of them are what it is called
SPARSE = "sparse"
# What else config.json may say, and the only value of which the layers are known.
KNOWN = {
    "qk_rope_head_dim": 0,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "mhc": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class Glm5Args:
    """What config.json says."""

    text: dict[str, Any]
    layer_types: tuple[str, ...]
    mlp_types: tuple[str, ...]
    linear_heads: int
    linear_size: int
    taps: int
    lower_bound: float | None

    @classmethod
    def of(cls, text: dict[str, Any]) -> "Glm5Args":
        for field, only in KNOWN.items():
            if text.get(field, only) != only:
                raise CheckpointError(f"config.json: {field} is {text[field]!r}; only {only!r} is known.")
        count = int(text["num_hidden_layers"])
        types = text.get("layer_types") or [LINEAR if n % 4 != 3 else INDEXED[0] for n in range(count)]
        dense = int(text.get("first_k_dense_replace", 3))
        mlps = text.get("mlp_layer_types") or ["dense" if n < dense else SPARSE for n in range(count)]
        known = {*types} <= {LINEAR, *INDEXED} and {*mlps} <= {"dense", SPARSE}
        if not known or {len(types), len(mlps)} != {count}:
            raise CheckpointError("config.json: layer_types and mlp_layer_types must name a known kind per layer.")
        kinds = indexer_types(text)
        if any(kind != FULL and each != LINEAR for kind, each in zip(kinds, types, strict=True)):
            raise CheckpointError("config.json: indexer_types lets layers share a selection, which is not known.")
        pool, budget = int(text["index_kpool"]), int(text["index_topk"])
        if pool < 1 or budget < pool or budget % pool:
            raise CheckpointError(f"config.json: index_topk {budget} is no multiple of pools of {pool} tokens.")
        if not float(text["swiglu_limit"]) > 0:
            raise CheckpointError(f"config.json: swiglu_limit {text['swiglu_limit']} must be above 0.")
        own = text.get("linear_attn_config") or {}
        bound = own.get("gate_lower_bound", text.get("linear_lower_bound", -5.0))
        if bound is None and own.get("safe_gate", bool(own)):
            bound = -5.0
        return cls(
            text,
            tuple(types),
            tuple(mlps),
            linear_heads=int(own.get("num_heads") or text.get("linear_num_heads", 64)),
            linear_size=int(own.get("head_dim") or text.get("linear_head_dim", 128)),
            taps=int(own.get("short_conv_kernel_size") or text.get("linear_conv_kernel_dim", 4)),
            lower_bound=bound,
        )

    def __getattr__(self, name: str) -> Any:
        """Return a field of config.json."""
        if name in self.text:
            return self.text[name]
        raise AttributeError(name)

    @property
    def eps(self) -> float:
        return float(self.rms_norm_eps)

    def hyper_connection(self) -> HyperConnection:
        count, rounds = int(self.hc_mult), int(self.hc_sinkhorn_iters)
        return HyperConnection(self.hidden_size, count, self.eps, rounds, float(self.hc_eps))


def _linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


class DeltaNet(nn.Module):
    """Kimi's delta attention."""

    def __init__(self, args: Glm5Args):
        super().__init__()
        self.num_heads, self.head_dim, self.lower_bound = args.linear_heads, args.linear_size, args.lower_bound
        hidden, size = args.hidden_size, self.num_heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (_linear(hidden, size) for _ in range(3))
        convolutions = (nn.Conv1d(size, size, args.taps, groups=size, bias=False) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = convolutions
        self.f_a_proj, self.g_a_proj = (_linear(hidden, self.head_dim) for _ in range(2))
        self.f_b_proj, self.g_b_proj = (_linear(self.head_dim, size) for _ in range(2))
        self.b_proj = _linear(hidden, self.num_heads)
        self.A_log = mx.zeros((self.num_heads,))
        self.dt_bias = mx.zeros((size,))
        self.o_norm = nn.RMSNorm(self.head_dim, args.eps)
        self.o_proj = _linear(size, hidden)


class PoolIndexer(nn.Module):
    def __init__(self, args: Glm5Args):
        super().__init__()
        self.n_heads, self.head_dim = int(args.index_n_heads), int(args.index_head_dim)
        hidden = args.hidden_size
        self.wq_b = _linear(args.q_lora_rank, self.n_heads * self.head_dim)
        self.wk = _linear(hidden, self.head_dim)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6)
        self.weights_proj = _linear(hidden, self.n_heads)
        self.index_kpool_compress_ape = mx.zeros((args.index_kpool, self.head_dim))
        self.index_kpool_compress_gate = _linear(hidden, self.head_dim)


class PooledAttention(nn.Module):
    """Latent attention without positions, and its index."""

    def __init__(self, args: Glm5Args):
        super().__init__()
        self.num_heads = heads = int(args.num_attention_heads)
        self.q_lora_rank, self.kv_lora_rank = int(args.q_lora_rank), int(args.kv_lora_rank)
        self.qk_nope_head_dim = self.q_head_dim = int(args.qk_nope_head_dim)
        self.qk_rope_head_dim = 0
        self.scale = self.q_head_dim**-0.5
        self.budget, self.pool = int(args.index_topk), int(args.index_kpool)
        hidden, bias = args.hidden_size, bool(args.text.get("attention_bias"))
        self.q_a_proj = _linear(hidden, self.q_lora_rank, bias)
        self.q_a_layernorm = nn.RMSNorm(self.q_lora_rank, args.eps)
        self.q_b_proj = _linear(self.q_lora_rank, heads * self.q_head_dim)
        self.kv_a_proj_with_mqa = _linear(hidden, self.kv_lora_rank, bias)
        self.kv_a_layernorm = nn.RMSNorm(self.kv_lora_rank, args.eps)
        self.embed_q = MultiLinear(self.q_head_dim, self.kv_lora_rank, heads)
        self.unembed_out = MultiLinear(self.kv_lora_rank, args.v_head_dim, heads)
        self.o_proj = _linear(heads * args.v_head_dim, hidden, bias)
        self.indexer = PoolIndexer(args)


class LimitedMLP(nn.Module):
    def __init__(self, args: Glm5Args, size: int):
        super().__init__()
        self.gate_proj, self.up_proj = (_linear(args.hidden_size, size) for _ in range(2))
        self.down_proj = _linear(size, args.hidden_size)
        self.activation = LimitedSwiGLU(args.swiglu_limit)


class LimitedMixture(nn.Module):
    def __init__(self, args: Glm5Args):
        super().__init__()
        activation = LimitedSwiGLU(args.swiglu_limit)
        size, experts = int(args.moe_intermediate_size), int(args.n_routed_experts)
        top, scaling = int(args.num_experts_per_tok), float(args.routed_scaling_factor)
        self.gate = ScoreRouter(args.hidden_size, experts, top, "sigmoid", scaling)
        self.switch_mlp = SwitchGLU(args.hidden_size, size, experts, activation=activation)
        self.shared_experts = LimitedMLP(args, size * int(args.text.get("n_shared_experts") or 1))


class Glm5Layer(nn.Module):
    def __init__(self, args: Glm5Args, index: int | None):
        """`index`: None for the head's, which has attention, experts and one residual stream."""
        super().__init__()
        linear = index is not None and args.layer_types[index] == LINEAR
        self.self_attn = DeltaNet(args) if linear else PooledAttention(args)
        experts = index is None or args.mlp_types[index] == SPARSE
        self.mlp = LimitedMixture(args) if experts else LimitedMLP(args, args.intermediate_size)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, args.eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, args.eps)
        if index is not None:
            self.attn_hc, self.ffn_hc = args.hyper_connection(), args.hyper_connection()


class Glm5Text(nn.Module):
    def __init__(self, args: Glm5Args):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Glm5Layer(args, n) for n in range(args.num_hidden_layers)]
        self.norm = StreamEnd(args.hidden_size, args.hc_mult, args.eps)


class Glm5Next(nn.Module):
    def __init__(self, args: Glm5Args):
        super().__init__()
        self._args = args  # names with an underscore are no parameters
        self.model = Glm5Text(args)
        if not args.text.get("tie_word_embeddings"):
            self.lm_head = _linear(args.hidden_size, args.vocab_size)

    @property
    def args(self) -> Glm5Args:
        return self._args

    @property
    def layers(self) -> Sequence[nn.Module]:
        layers: Sequence[nn.Module] = self.model.layers
        return layers


def build_glm5_next(config: dict[str, Any]) -> nn.Module:
    return Glm5Next(Glm5Args.of(config.get("text_config", config)))


def pooled_mixer(layer: nn.Module) -> Mixer:
    part = layer.self_attn
    if isinstance(part, PooledAttention):
        return LatentAttention(part, budget=part.budget, pool=part.pool)
    convolutions = part.q_conv1d, part.k_conv1d, part.v_conv1d
    return DeltaAttention(
        part, (part.f_a_proj, part.f_b_proj), (part.g_a_proj, part.g_b_proj), convolutions, part.lower_bound
    )


def pooled_parts(layer: nn.Module) -> Sequence[Part]:
    attention, feed_forward = decoder_parts(layer, pooled_mixer(layer))
    if "attn_hc" not in layer:  # the head's
        return attention, feed_forward
    return attention._replace(mixer=layer.attn_hc), feed_forward._replace(mixer=layer.ffn_hc)


def glm5_text(lm: nn.Module) -> Any:
    return SimpleNamespace(embed_tokens=lm.model.embed_tokens, layers=lm.model.layers, norm=lm.model.norm)


FAMILY = Family(
    "glm5_next",
    build_glm5_next,
    glm5_text,
    lambda lm: lm.get("lm_head"),
    head_layer=lambda lm: Glm5Layer(lm.args, None),
    parts=pooled_parts,
    head=NEXTN,
    streams=lambda lm: int(lm.args.hc_mult),
    renamed=(
        (r"\.hc_(attn|ffn)_fn$", r".\1_hc.fn.weight"),
        (r"\.hc_(attn|ffn)_(base|scale)$", r".\1_hc.\2"),
        (r"\.index_kpool_compress_gate$", ".index_kpool_compress_gate.weight"),
    ),
)
