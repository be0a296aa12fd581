"""DeepSeek-V4: attention to a window and to entries of compressed blocks, several mixed residual streams, and experts
that the first layers choose by the token.

mlx-lm has its successor alone (`deepseek_v41`). These modules have transformers' names, and no forward: `kernels/`
computes from their descriptions. As in transformers, keys and the index are not rounded to FP8 and FP4 on the way,
which DeepSeek's own code does.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from ..kernels.compressed import CompressedAttention
from ..kernels.experts import HashRouter, LimitedSwiGLU, ScoreRouter
from ..kernels.layers import FeedForward, Part
from .deepseek_v4_args import SLIDING, SPARSE, V4Args
from .family import Family
from .head import HeadNames, HeadSpec


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
