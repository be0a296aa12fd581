"""Qwen3.8-Flash-Next: Qwen3.5's gated delta rule and experts, with several residual streams, attention to selected
tokens, and embeddings of hashed n-grams from tables on disk.

mlx-lm has no module for it. These have upstream's names, and no forward: `kernels/` computes from their descriptions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
from mlx_lm.models import qwen3_5

from ..errors import CheckpointError
from ..images import QwenRules
from ..kernels.layers import FeedForward, Mixer, Part, SelectedAttention, TokenGrams
from ..kernels.norms import SigmoidGatedNorm
from ..kernels.streams import StreamMixer, StreamNorm
from .family import Family
from .grams import GramShape
from .head import HeadNames, HeadSpec
from .mixers import gated_attention, gated_delta_net
from .qwen3_5_vision import QwenTower, mrope_axes
from .vision import Vision

GATES = ("silu", "swish", "sigmoid")  # of the gated delta rule's output


@dataclass(frozen=True)
class Args:
    """What config.json says beside Qwen3.5's fields."""

    base: qwen3_5.TextModelArgs
    layer_types: tuple[str, ...]
    streams: int
    rank: int
    gate: str
    index_heads: int
    index_size: int
    budget: int
    block: int
    axes: tuple[int, ...]
    taps: int
    grams: tuple[GramShape, ...]  # of the layers in `gram_layers`
    gram_layers: tuple[int, ...]

    @classmethod
    def of(cls, text: dict[str, Any]) -> "Args":
        base = qwen3_5.TextModelArgs.from_dict(text)
        count, every = base.num_hidden_layers, int(text.get("full_attention_interval", 4))
        types = text.get("layer_types") or [
            "linear_attention" if (n + 1) % every else "full_attention" for n in range(count)
        ]
        gate = text.get("output_gate_type") or text.get("hidden_act", "silu")
        if gate not in GATES:
            raise CheckpointError(f"config.json: output_gate_type {gate!r} is none of {', '.join(GATES)}.")
        if text.get("indexer_kv_heads", 1) != 1:
            raise CheckpointError("config.json: indexer_kv_heads must be 1, the only number that is known.")
        budget, block = int(text["indexer_budget"]), int(text["indexer_compress_ratio"])
        if block < 1 or budget < block or budget % block:
            raise CheckpointError(f"config.json: indexer_budget {budget} is no multiple of blocks of {block} tokens.")
        frequencies = int(base.head_dim * base.partial_rotary_factor) // 2
        if 2 * frequencies > text["indexer_head_dim"]:
            raise CheckpointError(f"config.json: indexer_head_dim is less than the {2 * frequencies} that rotate.")
        sections = (base.rope_parameters or {}).get("mrope_section") or [frequencies, 0, 0]
        layers = tuple(sorted({int(n) - 1 for n in text.get("ple_layer_ids") or ()}))  # released from 1
        if any(not 0 <= n < count or types[n] != "linear_attention" for n in layers):
            raise CheckpointError("config.json: ple_layer_ids must name layers of linear attention.")
        return cls(
            base=base,
            layer_types=tuple(types),
            streams=int(text["hc_count"]),
            rank=int(text["hc_lowrank"]),
            gate=gate,
            index_heads=int(text["indexer_n_heads"]),
            index_size=int(text["indexer_head_dim"]),
            budget=budget,
            block=block,
            axes=mrope_axes(sections, frequencies),
            taps=int(text.get("ple_conv_kernel_size", 4)),
            grams=tuple(GramShape.of(text, number) for number in range(len(layers))),
            gram_layers=layers,
        )

    def mixer(self, *, injects: bool = True) -> StreamMixer:
        return StreamMixer(self.base.hidden_size, self.streams, self.rank, self.base.rms_norm_eps, injects=injects)


class Indexer(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        sizes = (args.index_heads + 1) * args.index_size
        self.index_qk_proj = nn.Linear(args.base.hidden_size, sizes, bias=False)
        self.q_layernorm, self.k_layernorm = (nn.RMSNorm(args.index_size, args.base.rms_norm_eps) for _ in range(2))


class GramLayer(nn.Module):
    """What a layer has beside its table of n-grams."""

    def __init__(self, args: Args, shape: GramShape):
        super().__init__()
        hidden, eps = args.base.hidden_size, args.base.rms_norm_eps
        wide = args.streams * hidden
        self.key_proj = nn.Linear(shape.size, wide, bias=False)
        self.value_proj = nn.Linear(shape.size, hidden, bias=False)
        self.norm_key, self.norm_query, self.norm_conv = (StreamNorm(hidden, args.streams, eps) for _ in range(3))
        self.conv1d = nn.Conv1d(wide, wide, args.taps, groups=wide, bias=False)


class DecoderLayer(nn.Module):
    def __init__(self, args: Args, index: int | None):
        """`index`: None for the head's, which has attention."""
        super().__init__()
        self._args, self._shape = args, None  # names with an underscore are no parameters
        if index is not None and args.layer_types[index] == "linear_attention":
            self.linear_attn = qwen3_5.GatedDeltaNet(args.base)
            if args.gate == "sigmoid":
                self.linear_attn["norm"] = SigmoidGatedNorm(args.base.linear_value_head_dim, args.base.rms_norm_eps)
        else:
            self.self_attn = qwen3_5.Attention(args.base)  # type: ignore[arg-type]
            self.self_attn.indexer = Indexer(args)
        self.mlp = qwen3_5.SparseMoeBlock(args.base)  # type: ignore[arg-type]
        self.attn_hyper_connection, self.mlp_hyper_connection = args.mixer(), args.mixer()
        if index in args.gram_layers:
            self._shape = args.grams[args.gram_layers.index(index)]
            self.ple = GramLayer(args, self._shape)

    @property
    def args(self) -> Args:
        return self._args

    @property
    def shape(self) -> GramShape | None:
        return self._shape


class TextModel(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.base.vocab_size, args.base.hidden_size)
        self.layers = [DecoderLayer(args, n) for n in range(args.base.num_hidden_layers)]
        self.hyper_connection_mixer = args.mixer(injects=False)


class LanguageModel(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.model = TextModel(args)
        if not args.base.tie_word_embeddings:
            self.lm_head = nn.Linear(args.base.hidden_size, args.base.vocab_size, bias=False)


class FlashNext(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self._args = args
        self.language_model = LanguageModel(args)

    @property
    def args(self) -> Args:
        return self._args

    @property
    def layers(self) -> Sequence[nn.Module]:
        layers: Sequence[nn.Module] = self.language_model.model.layers
        return layers


def build_qwen4_exp(config: dict[str, Any]) -> nn.Module:
    return FlashNext(Args.of(config.get("text_config", config)))


def text_of(lm: nn.Module) -> Any:
    text = lm.language_model.model
    return SimpleNamespace(embed_tokens=text.embed_tokens, layers=text.layers, norm=text.hyper_connection_mixer)


def stream_parts(layer: nn.Module) -> Sequence[Part]:
    assert isinstance(layer, DecoderLayer)
    parts = [
        Part(layer.attn_hyper_connection, mixer_of(layer)),
        Part(layer.mlp_hyper_connection, FeedForward(layer.mlp)),
    ]
    if (shape := layer.shape) is None:
        return parts
    grams = TokenGrams(layer.ple, layer.args.streams, shape.number, shape.orders - 1, shape.end)
    return [Part(layer.ple.norm_query, grams), *parts]


def mixer_of(layer: DecoderLayer) -> Mixer:
    if "linear_attn" in layer:
        return gated_delta_net(layer.linear_attn)
    args, index = layer.args, layer.self_attn.indexer
    base = float(args.base.rope_theta)
    return SelectedAttention(
        gated_attention(layer), index, args.index_heads, args.block, args.budget, base, args.axes
    )


def head_parts(lm: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of the head beside its decoder layer."""
    args = lm.args
    hidden, eps = args.base.hidden_size, args.base.rms_norm_eps
    return {
        "fc_embedding": nn.Linear(hidden, hidden, bias=False),
        "fc_hidden": nn.Linear(hidden, hidden, bias=False),
        "pre_fc_norm_embedding": nn.RMSNorm(hidden, eps),
        "pre_fc_norm_hidden": nn.RMSNorm(args.streams * hidden, eps),
        "hyper_connection_mixer": args.mixer(injects=False),
    }


FAMILY = Family(
    "qwen4_exp",
    build_qwen4_exp,
    text_of,
    lambda lm: lm.language_model.get("lm_head"),
    head_layer=lambda lm: DecoderLayer(lm.args, None),
    parts=stream_parts,
    head=HeadSpec(
        fed_after_norm=False,
        chains_after_norm=False,
        names=HeadNames(fc="fc_hidden", norm="hyper_connection_mixer", added="fc_embedding"),
    ),
    head_parts=head_parts,
    streams=lambda lm: lm.args.streams,
    tables=lambda lm: lm.args.grams,
    renamed=((r"^hyper_connection_mixer\.", "norm."),),
    norm_offset=1.0,
    norms_stay=True,
    vision=Vision(QwenTower, QwenRules),
)
