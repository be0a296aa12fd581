"""DeepSeek-V4: attention to a window and to entries of compressed blocks, several mixed residual streams, and experts
that the first layers choose by the token.

mlx-lm has its successor alone (`deepseek_v41`). These modules have transformers' names, and no forward: `kernels/`
computes from their descriptions. As in transformers, keys and the index are not rounded to FP8 and FP4 on the way,
which DeepSeek's own code does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import YarnRoPE
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from ..errors import CheckpointError
from ..kernels.compressed import CompressedAttention
from ..kernels.experts import HashRouter, LimitedSwiGLU, ScoreRouter
from ..kernels.layers import FeedForward, Part
from ..kernels.streams import HyperConnection, StreamEnd
from ..state import BLOCK
from .family import Family
from .head import HeadNames, HeadSpec

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
EVERY = {SPARSE: 4, HEAVY: 128}  # tokens of a block, where config.json does not say it
RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}
HASH, LEARNED = "hash_moe", "moe"


def layer_types(text: dict[str, Any]) -> list[str]:
    """Return the attention of each layer, as transformers reads config.json."""
    count, ratios = text["num_hidden_layers"], text.get("compress_ratios")
    types = text.get("layer_types")
    if types is None and ratios is not None:
        if any(ratio not in RATIOS for ratio in ratios):
            raise CheckpointError(f"config.json: compress_ratios must be some of {', '.join(map(str, RATIOS))}.")
        if any(ratios[count:]):
            raise CheckpointError("config.json: compress_ratios gives the head entries; only a window is known.")
        types = [RATIOS[ratio] for ratio in ratios]
    if types is None:
        types = [HEAVY] * 2 + [SPARSE if layer % 2 else HEAVY for layer in range(count - 2)]
    types = list(types[:count])
    if len(types) != count or not {*types} <= {SLIDING, SPARSE, HEAVY}:
        raise CheckpointError(f"config.json: layer_types must name {SLIDING}, {SPARSE} or {HEAVY} of {count} layers.")
    return types


def mlp_types(text: dict[str, Any]) -> list[str]:
    """Return which layers choose experts by the token."""
    count, first = text["num_hidden_layers"], text.get("num_hash_layers", 3)
    types = list(text.get("mlp_layer_types") or [HASH] * first + [LEARNED] * count)[:count]
    if len(types) != count or not {*types} <= {HASH, LEARNED}:
        raise CheckpointError(f"config.json: mlp_layer_types must name {HASH} or {LEARNED} of {count} layers.")
    return types


def rotations(text: dict[str, Any], dims: int) -> dict[bool, nn.Module]:
    """Return the rotation of layers without entries, and with (True): only theirs is scaled, by YaRN without a factor
    for what turns."""
    nested = text.get("rope_parameters") or {}
    scaled = nested.get("compress") or text.get("rope_scaling") or {}
    plain = nn.RoPE(dims, traditional=True, base=float(text.get("rope_theta", 10000.0)))
    base = float(text.get("compress_rope_theta", 160000.0))
    kind = scaled.get("rope_type", scaled.get("type", "default"))
    if kind == "default":
        return {False: plain, True: nn.RoPE(dims, traditional=True, base=base)}
    if kind != "yarn" or scaled.get("attention_factor", 1.0) != 1.0 or not scaled.get("truncate", True):
        raise CheckpointError(f"config.json: rotation {kind!r} is not yarn without a factor, the only one known.")
    given = {name: scaled[name] for name in ("beta_fast", "beta_slow") if name in scaled}
    yarn = YarnRoPE(
        dims,
        traditional=True,
        base=base,
        scaling_factor=float(scaled["factor"]),
        original_max_position_embeddings=int(scaled["original_max_position_embeddings"]),
        mscale=0,
        **given,
    )
    return {False: plain, True: yarn}


@dataclass(frozen=True)
class V4Args:
    """What config.json says, by transformers' names and by those of a release."""

    hidden: int
    vocabulary: int
    heads: int
    head_dim: int
    rank: int
    groups: int
    output_rank: int
    eps: float
    window: int
    types: tuple[str, ...]
    every: dict[str, int]
    rope: dict[bool, nn.Module]
    index_heads: int
    index_size: int
    budget: int
    hashed: tuple[bool, ...]
    experts: int
    chosen: int
    shared: int
    expert_size: int
    scoring: str
    scaling: float
    limit: float
    streams: int
    iterations: int
    mix_eps: float

    @classmethod
    def of(cls, text: dict[str, Any]) -> "V4Args":
        head_dim = int(text["head_dim"])
        share = text.get("partial_rotary_factor") or text.get("qk_rope_head_dim", head_dim // 8) / head_dim
        rotated = int(head_dim * share)
        every = {
            SPARSE: text.get("compress_rate_csa") or EVERY[SPARSE],
            HEAVY: text.get("compress_rate_hca") or EVERY[HEAVY],
        } | (text.get("compress_rates") or {})
        if any(type(size) is not int or size < 2 or BLOCK % size for size in every.values()):
            raise CheckpointError(f"config.json: blocks of {every} tokens; only divisors of {BLOCK} are known.")
        if text.get("num_key_value_heads", 1) != 1:
            raise CheckpointError("config.json: num_key_value_heads must be 1, the only number that is known.")
        if text["index_head_dim"] < rotated:
            raise CheckpointError(f"config.json: index_head_dim is less than the {rotated} numbers that rotate.")
        if text.get("n_shared_experts", 1) != 1:
            raise CheckpointError("config.json: n_shared_experts must be 1, the only number that is known.")
        scoring = text.get("scoring_func", "sqrtsoftplus")
        if scoring not in ScoreRouter.SCORES:
            raise CheckpointError(
                f"config.json: scoring_func {scoring!r} is none of {', '.join(ScoreRouter.SCORES)}."
            )
        return cls(
            hidden=text["hidden_size"],
            vocabulary=text["vocab_size"],
            heads=text["num_attention_heads"],
            head_dim=head_dim,
            rank=text["q_lora_rank"],
            groups=text["o_groups"],
            output_rank=text["o_lora_rank"],
            eps=text["rms_norm_eps"],
            window=text["sliding_window"],
            types=tuple(layer_types(text)),
            every=every,
            rope=rotations(text, rotated),
            index_heads=text["index_n_heads"],
            index_size=text["index_head_dim"],
            budget=text["index_topk"],
            hashed=tuple(kind == HASH for kind in mlp_types(text)),
            experts=text["n_routed_experts"],
            chosen=text["num_experts_per_tok"],
            shared=text.get("n_shared_experts", 1),
            expert_size=text["moe_intermediate_size"],
            scoring=scoring,
            scaling=float(text.get("routed_scaling_factor", 1.5)),
            limit=float(text["swiglu_limit"]),
            streams=text["hc_mult"],
            iterations=text["hc_sinkhorn_iters"],
            mix_eps=text["hc_eps"],
        )

    def connection(self, *, injects: bool = True) -> HyperConnection:
        given = self.hidden, self.streams, self.eps, self.iterations, self.mix_eps
        return HyperConnection(*given, injects=injects)

    def end(self) -> StreamEnd:
        return StreamEnd(self.hidden, self.streams, self.eps, self.connection(injects=False))


class V4Compressor(nn.Module):
    """What makes entries of blocks: for attention, or with fewer numbers for an index."""

    def __init__(self, args: V4Args, size: int, every: int, *, overlaps: bool):
        super().__init__()
        wide = (1 + overlaps) * size
        self.kv_proj, self.gate_proj = (nn.Linear(args.hidden, wide, bias=False) for _ in range(2))
        self.position_bias = mx.zeros((every, wide))
        self.kv_norm = nn.RMSNorm(size, args.eps)


class V4Indexer(V4Compressor):
    def __init__(self, args: V4Args, every: int):
        super().__init__(args, args.index_size, every, overlaps=True)
        self.heads, self.head_dim = args.index_heads, args.index_size
        self.q_b_proj = nn.Linear(args.rank, args.index_heads * args.index_size, bias=False)
        self.scorer = nn.Module()
        self.scorer.weights_proj = nn.Linear(args.hidden, args.index_heads, bias=False)


class V4Attention(nn.Module):
    def __init__(self, args: V4Args, kind: str):
        super().__init__()
        self.kind, self.head_dim = kind, args.head_dim
        wide = args.heads * args.head_dim
        self.q_a_proj = nn.Linear(args.hidden, args.rank, bias=False)
        self.q_a_norm = nn.RMSNorm(args.rank, args.eps)
        self.q_b_proj = nn.Linear(args.rank, wide, bias=False)
        self.kv_proj = nn.Linear(args.hidden, args.head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(args.head_dim, args.eps)
        self.o_a_proj = SwitchLinear(wide // args.groups, args.output_rank, args.groups, bias=False)
        self.o_b_proj = nn.Linear(args.groups * args.output_rank, args.hidden, bias=False)
        self.sinks = mx.zeros((args.heads,))
        self.rope = args.rope[kind != SLIDING]
        if kind != SLIDING:
            every, overlaps = args.every[kind], kind == SPARSE
            self.compressor = V4Compressor(args, args.head_dim, every, overlaps=overlaps)
            if overlaps:
                self.compressor.indexer = V4Indexer(args, every)


class V4Mlp(nn.Module):
    def __init__(self, args: V4Args):
        super().__init__()
        size = args.shared * args.expert_size
        self.gate_proj, self.up_proj = (nn.Linear(args.hidden, size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(size, args.hidden, bias=False)
        self.activation = LimitedSwiGLU(args.limit)


class V4Experts(nn.Module):
    def __init__(self, args: V4Args, *, hashed: bool):
        super().__init__()
        given = args.hidden, args.experts, args.chosen, args.scoring, args.scaling
        self.gate = HashRouter(*given, args.vocabulary) if hashed else ScoreRouter(*given)
        self.switch_mlp = SwitchGLU(args.hidden, args.expert_size, args.experts, LimitedSwiGLU(args.limit))
        self.shared_experts = V4Mlp(args)


class V4Layer(nn.Module):
    def __init__(self, args: V4Args, kind: str, *, hashed: bool):
        super().__init__()
        self._args = args  # names with an underscore are no parameters
        self.self_attn = V4Attention(args, kind)
        self.mlp = V4Experts(args, hashed=hashed)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(args.hidden, args.eps) for _ in range(2))
        self.attn_hc, self.ffn_hc = args.connection(), args.connection()

    @property
    def args(self) -> V4Args:
        return self._args


class V4HeadLayer(V4Layer):
    """A module of the head: a layer that sees a window, and what is around it."""

    def __init__(self, args: V4Args):
        super().__init__(args, SLIDING, hashed=False)
        self.enorm, self.hnorm = (nn.RMSNorm(args.hidden, args.eps) for _ in range(2))
        self.e_proj, self.h_proj = (nn.Linear(args.hidden, args.hidden, bias=False) for _ in range(2))
        self.norm = args.end()


class V4Text(nn.Module):
    def __init__(self, args: V4Args):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocabulary, args.hidden)
        kinds = zip(args.types, args.hashed, strict=True)
        self.layers = [V4Layer(args, kind, hashed=hashed) for kind, hashed in kinds]
        self.norm = args.end()


class DeepseekV4(nn.Module):
    def __init__(self, args: V4Args, *, tied: bool):
        super().__init__()
        self._args = args
        self.model = V4Text(args)
        if not tied:
            self.lm_head = nn.Linear(args.hidden, args.vocabulary, bias=False)

    @property
    def args(self) -> V4Args:
        return self._args

    @property
    def layers(self) -> Sequence[nn.Module]:
        layers: Sequence[nn.Module] = self.model.layers
        return layers


def build_deepseek_v4(config: dict[str, Any]) -> nn.Module:
    return DeepseekV4(V4Args.of(config), tied=bool(config.get("tie_word_embeddings")))


def compressed_parts(layer: nn.Module) -> tuple[Part, ...]:
    assert isinstance(layer, V4Layer)
    args, part = layer.args, layer.self_attn
    shape: dict[str, Any] = {}
    if part.kind != SLIDING:
        selects = part.kind == SPARSE
        shape = {"every": args.every[part.kind], "overlaps": selects, "budget": args.budget if selects else None}
    attention = CompressedAttention(part, args.heads, args.groups, args.window, **shape)
    return (
        Part(layer.input_layernorm, attention, mixer=layer.attn_hc),
        Part(layer.post_attention_layernorm, FeedForward(layer.mlp), mixer=layer.ffn_hc),
    )


FAMILY = Family(
    "deepseek_v4",
    build_deepseek_v4,
    lambda lm: lm.model,
    lambda lm: lm.get("lm_head"),
    head_layer=lambda lm: V4HeadLayer(lm.args),
    head_parts=lambda lm: {},  # all are in its layer
    parts=compressed_parts,
    head=HeadSpec(
        fed_after_norm=False,
        chains_after_norm=False,
        in_layer=True,
        names=HeadNames(fc="h_proj", embedding_norm="enorm", hidden_norm="hnorm", added="e_proj"),
        released_as="mtp.{module}.",
    ),
    streams=lambda lm: lm.args.streams,
    renamed=(
        (r"^embed\.", "embed_tokens."),
        (r"^head\.", "lm_head."),
        (r"^hc_head\.hc_", "hc_head_"),  # as transformers has it
        (r"(^|\.)hc_head_(fn|base|scale)$", r"\1norm.hc.\2"),
        (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
        (r"((?:^|[._])hc)\.fn$", r"\1.fn.weight"),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
        (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
        (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
        (r"(\.compressor(?:\.indexer)?)\.norm\.", r"\1.kv_norm."),
        (r"\.ape$", ".position_bias"),
        (r"\.w(q_a|q_b|kv|o_a|o_b)\.", r".\1_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"(\.(?:experts\.\d{1,6}|shared_experts))\.w1\.", r"\1.gate_proj."),
        (r"(\.(?:experts\.\d{1,6}|shared_experts))\.w2\.", r"\1.down_proj."),
        (r"(\.(?:experts\.\d{1,6}|shared_experts))\.w3\.", r"\1.up_proj."),
    ),
)
