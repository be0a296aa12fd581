"""What config.json has by other names where transformers 5 wrote it, by the names of releases and of mlx-lm."""

from typing import Any

Config = dict[str, Any]
BAILING = {
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "max_position_embeddings": "model_max_length",
}


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
    elif family == "bailing_hybrid":
        found = {ours: text[theirs] for ours, theirs in BAILING.items() if theirs in text}
    elif family == "step3p7":
        found = _step3p7(text)
    elif family == "gemma4":
        found = _gemma4(text)
    return {name: value for name, value in found.items() if name not in text}


def _qwen3_moe(text: Config) -> Config:
    hidden, heads, experts = (text.get(name) for name in ("hidden_size", "num_attention_heads", "num_local_experts"))
    return {
        **({"num_experts": experts} if experts is not None else {}),
        **({"head_dim": hidden // heads} if hidden and heads else {}),
    }


def _gemma4(text: Config) -> Config:
    layers, kinds, own = (text.get(name) for name in ("num_hidden_layers", "layer_types", "per_layer_config"))
    unified = "unified" in str(text.get("model_type"))
    full: dict[str, Any] = {"head_dim": 512, "num_key_value_heads": None}
    if isinstance(own, dict) and (first := next(iter(own.values()), None)) and isinstance(first, dict):
        full |= first
    if kinds is None and isinstance(layers, int):
        kinds = [("full" if (layer + 1) % 6 == 0 or layer + 1 == layers else "sliding") for layer in range(layers)]
        kinds = [f"{kind}_attention" for kind in kinds]
    return {  # what its class in transformers has for fields that are missing
        "layer_types": kinds,
        "global_head_dim": full["head_dim"],
        "num_global_key_value_heads": full["num_key_value_heads"],
        "hidden_size_per_layer_input": 0 if unified else 256,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "attention_k_eq_v": False,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "sliding_window": 1024 if unified else 512,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "max_position_embeddings": 262144 if unified else 131072,
        "rms_norm_eps": 1e-6,
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


def _step3p7(text: Config) -> Config:
    """Lists of a release include the head's layers, whose activations are not limited."""
    kinds, mlps, rope = (text.get(name) for name in ("layer_types", "mlp_layer_types", "rope_parameters"))
    if not (isinstance(kinds, list) and isinstance(mlps, list) and isinstance(rope, dict)):
        return {}
    extra = text.get("mtp_layer_types") or []
    turned = [rope.get(kind) or {} for kind in (*kinds, *extra)]
    full = rope.get("full_attention") or {}
    return {
        "moe_layers_enum": ",".join(str(layer) for layer, kind in enumerate(mlps) if kind == "sparse"),
        "num_attention_groups": text.get("num_key_value_heads"),
        "attention_other_setting": {
            "num_attention_heads": text.get("num_sliding_attention_heads"),
            "num_attention_groups": text.get("num_key_value_heads"),
        },
        "rope_theta": [each.get("rope_theta") for each in turned],
        "partial_rotary_factors": [each.get("partial_rotary_factor", 1.0) for each in turned],
        "rope_scaling": None if full.get("rope_type", "default") == "default" else full,
        "moe_num_experts": text.get("n_routed_experts"),
        "moe_top_k": text.get("num_experts_per_tok"),
        "norm_expert_weight": True,
        "use_head_wise_attn_gate": True,
    }
