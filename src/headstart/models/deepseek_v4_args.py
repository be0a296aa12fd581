"""What config.json says of a DeepSeek-V4, by the names of its release and by transformers'."""

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.rope_utils import YarnRoPE

from ..errors import CheckpointError
from ..kernels.experts import ScoreRouter
from ..kernels.streams import HyperConnection, StreamEnd
from ..state import BLOCK

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
EVERY = {SPARSE: 4, HEAVY: 128}  # tokens of a block, where config.json does not say it
RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}
HASH, LEARNED = "hash_moe", "moe"
MAX_COUNT = 1 << 24


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


def check_counts(text: dict[str, Any]) -> None:
    """Refuse counts with which a pass would be without end, or without anything to attend to or to choose."""
    most = {"sliding_window": MAX_COUNT, "index_topk": MAX_COUNT, "hc_mult": 16, "hc_sinkhorn_iters": 100}
    for name, limit in (most | {"num_experts_per_tok": text["n_routed_experts"]}).items():
        if type(text[name]) is not int or not 1 <= text[name] <= limit:
            raise CheckpointError(
                f"config.json: {name} is {text[name]!r}; it must be a whole number from 1 to {limit}."
            )


@dataclass(frozen=True)
class V4Args:
    """The fields that its modules are built by."""

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
        check_counts(text)
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
