"""What config.json has by other names where transformers 5 wrote it, by the names of releases and of mlx-lm."""

from typing import Any

Config = dict[str, Any]


def missing_names(text: Config, family: str) -> Config:
    """Return the fields that config.json's text part lacks and transformers 5 says otherwise."""
    found: Config = {}
    if family == "qwen3_moe":
        found = _qwen3_moe(text)
    elif family == "longcat_flash":  # what its class in transformers does whatever the config says
        found = {"attention_method": "MLA", "zero_expert_type": "identity"}
        found |= {"mla_scale_q_lora": True, "mla_scale_kv_lora": True}
    elif family == "mimo_v2_flash":
        found = _mimo_v2(text)
    return {name: value for name, value in found.items() if name not in text}


def _qwen3_moe(text: Config) -> Config:
    hidden, heads, experts = (text.get(name) for name in ("hidden_size", "num_attention_heads", "num_local_experts"))
    return {
        **({"num_experts": experts} if experts is not None else {}),
        **({"head_dim": hidden // heads} if hidden and heads else {}),
    }


def _mimo_v2(text: Config) -> Config:
    kinds, mlps, rope = (text.get(name) for name in ("layer_types", "mlp_layer_types", "rope_parameters"))
    if not (isinstance(kinds, list) and isinstance(mlps, list) and isinstance(rope, dict)):
        return {}
    full, sliding = (
        each if isinstance(each, dict) else {} for each in map(rope.get, ("full_attention", "sliding_attention"))
    )
    return {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "moe_layer_freq": [int(kind == "sparse") for kind in mlps],
        "sliding_window_size": text.get("sliding_window"),
        "rope_theta": full.get("rope_theta"),
        "swa_rope_theta": sliding.get("rope_theta"),
        "partial_rotary_factor": full.get("partial_rotary_factor"),
        "layernorm_epsilon": text.get("rms_norm_eps"),
        # What its class in transformers does whatever the config says.
        "swa_num_attention_heads": text.get("num_attention_heads"),
        "swa_num_key_value_heads": 2 * (text.get("num_key_value_heads") or 0),
        "swa_head_dim": text.get("head_dim"),
        "swa_v_head_dim": text.get("v_head_dim"),
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
