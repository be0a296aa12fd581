"""Tiny random checkpoints of the families beside Qwen3.5's, with the tensor names of their releases.

The trunk's tensors are those of mlx-lm's model, as `sanitize` finds them in a release; the head's are listed here as
published. Its next token is mostly a permutation of the last one, which the head knows, so that some drafts are
accepted and some are not.
"""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

import gemma4
from checkpoints import TOKENIZER, TOKENIZER_FILES, Arrays, to_fp8, write_shards
from headstart import models

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "eos_token_id": 8187,
}

MOE = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
}
NEXTN = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens")

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 32, "sliding_window": None},
    "sliding": {
        "model_type": "llama",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "ministral3": {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mistral3": {"head_dim": 32},
    "glm4_moe": {
        **MOE,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
    },
    "glm4_moe_lite": {**MOE, **LATENT, "first_k_dense_replace": 1},
    "deepseek_v3": {**MOE, **LATENT, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    "mimo": {"num_nextn_predict_layers": 1},
    "mimo_v2_flash": {
        **{name: value for name, value in MOE.items() if name != "num_nextn_predict_layers"},
        "n_shared_experts": None,
        "routed_scaling_factor": None,
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 500.0,
        "head_dim": 24,
        "v_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.334,
        "attention_value_scale": 0.7,
    },
}
CONFIGS["step3p5"] = {
    "num_attention_groups": 2,
    "head_dim": 32,
    "layer_types": ["full_attention", *["sliding_attention"] * 4],
    "sliding_window": 8,
    "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 32},
    "rope_theta": [10000.0, *[500.0] * 4],
    "partial_rotary_factors": [0.5, *[1.0] * 4],
    "use_head_wise_attn_gate": True,
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_intermediate_size": 64,
    "share_expert_dim": 64,
    "moe_layers_enum": "1",
    "moe_router_scaling_factor": 1.5,
    "norm_expert_weight": True,
    "swiglu_limits": [0.0, 0.5, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.7, 0.9, 0.9, 0.9],
    "num_nextn_predict_layers": 3,
}
CONFIGS["step3p7"] = {
    **CONFIGS["step3p5"],
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", *["sliding_attention"] * 5],
    "rope_theta": [10000.0, *[500.0] * 5],
    "partial_rotary_factors": [0.5, *[1.0] * 5],
    "swiglu_limits": [0.0, 0.5, 0.0, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.9] * 6,
}
SELECTING = {
    **MOE,
    **LATENT,
    "first_k_dense_replace": 1,
    "index_n_heads": 16,  # with few, many scores are 0, and equals are told apart otherwise in transformers
    "index_head_dim": 32,
    "index_topk": 12,
    "attention_bias": False,
}
CONFIGS["deepseek_v32"] = {**SELECTING, "n_group": 4, "topk_group": 2}
CONFIGS["glm_moe_dsa"] = {
    **SELECTING,
    "num_hidden_layers": 4,
    "indexer_types": ["full", "shared", "full", "full"],
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIGS["glm5_next"] = {
    **{name: value for name, value in SELECTING.items() if name not in ("n_group", "topk_group")},
    "num_hidden_layers": 5,
    "layer_types": [*["linear_attention"] * 2, "deepseek_sparse_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", *["sparse"] * 4],
    "qk_rope_head_dim": 0,
    "head_dim": 0,
    "linear_attn_config": {
        "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "safe_gate": True,
    },
    "index_topk": 16,
    "index_kpool": 4,
    "swiglu_limit": 1.5,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "pad_token_id": 0,
}  # fmt: skip
CONFIGS["bailing_hybrid"] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    **{name: LATENT[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")},
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "layer_group_size": 2,
    "short_conv_kernel_size": 4,
    "kda_lower_bound": -5.0,
    "moe_shared_expert_intermediate_size": 64,
    "num_nextn_predict_layers": 1,
    "num_hidden_layers": 4,
}
CONFIGS["exaone_moe"] = {
    **{name: MOE[name] for name in ("num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor")},
    "head_dim": 32,
    "num_experts": 8,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "is_moe_layer": [False, True],
    "num_nextn_predict_layers": 1,
    "mtp_layer_types": ["sliding_attention"],
}
CONFIGS["nemotron_h"] = {
    **MOE,
    "head_dim": 16,
    "hybrid_override_pattern": "ME*-M",
    "num_hidden_layers": 5,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 2,
    "layer_norm_epsilon": 1e-5,
    "moe_shared_expert_intermediate_size": 96,
    "moe_latent_size": 32,
    "time_step_limit": [0.0, 50.0],
    "mtp_hybrid_override_pattern": "*E",
}
CONFIGS["ernie4_5_moe"] = {
    "use_bias": False,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": 64,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "num_nextn_predict_layers": 1,
}
CONFIGS["longcat_flash"] = {
    **LATENT,
    "attention_method": "MLA",
    "attention_bias": False,
    "zero_expert_type": "identity",
    "zero_expert_num": 4,
    "n_routed_experts": 8,
    "moe_topk": 3,
    "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 64,
    "num_layers": 2,
    "routed_scaling_factor": 1.5,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "rms_norm_eps": 1e-5,
}
CONFIGS |= gemma4.CONFIGS
HEADS = {  # where a release has a module of the head, its parts beside a decoder layer's, how many modules there are
    "glm4_moe": ("model.layers.{layer}.", NEXTN, 1),
    "glm4_moe_lite": ("model.layers.{layer}.", NEXTN, 1),
    "deepseek_v3": ("model.layers.{layer}.", NEXTN, 1),
    "mimo": ("model.mtp_layers.0.", ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"), 1),
    "mimo_v2_flash": ("model.mtp.layers.{module}.", ("eh_proj", "enorm", "hnorm", "final_layernorm"), 3),
    "step3p5": ("model.layers.{layer}.", NEXTN[:-1], 3),
    "step3p7": ("model.layers.{layer}.", NEXTN[:-1], 3),
    "deepseek_v32": ("model.layers.{layer}.", NEXTN, 1),
    "glm_moe_dsa": ("model.layers.{layer}.", NEXTN, 1),
    "glm5_next": ("model.layers.{layer}.", NEXTN[:-2], 1),
    "bailing_hybrid": ("model.layers.{layer}.", ("eh_proj", "enorm", "hnorm", "final_layernorm"), 1),
    "nemotron_h": ("mtp.layers.0.", ("eh_proj", "enorm", "hnorm"), 1),
    "ernie4_5_moe": ("model.mtp_block.0.", (), 1),
    "longcat_flash": ("model.mtp.layers.0.", ("eh_proj", "enorm.m", "hnorm.m"), 1),
    "exaone_moe": ("mtp.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), 1),
}


WITHOUT_EXPERTS = ("mimo_v2_flash", "step3p5", "step3p7", "exaone_moe", "ernie4_5_moe")  # heads
NOT_IN_MLX_LM = ("step3p7", "glm_moe_dsa", "glm5_next")  # or without layers that share what another one selected
LEFT_OUT = object()
MIMO_OF_TRANSFORMERS = (
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "n_group", "topk_group",
    "head_dim", "v_head_dim", "attention_value_scale", "routed_scaling_factor",
)  # fmt: skip
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
TRUNKS: dict[str, tuple[str, dict[str, Any]]] = {  # whose configs transformers 5.23 writes otherwise, or that slide
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {**SLIDING, "max_window_layers": 1}),
    "qwen2-all": ("qwen2", {**SLIDING, "max_window_layers": 0}),
    "qwen3-all": ("qwen3", {**SLIDING, "max_window_layers": 0}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-all": ("qwen3_moe", {**SLIDING, "max_window_layers": 0}),
    "longcat_flash": ("longcat_flash", {"num_hidden_layers": 4, "head_dim": LATENT["qk_rope_head_dim"]}),
    "mimo_v2_flash": ("mimo_v2_flash", {
        "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 9, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.334},
        },
        **dict.fromkeys((name for name in CONFIGS["mimo_v2_flash"] if name not in MIMO_OF_TRANSFORMERS), LEFT_OUT),
    }),
}  # fmt: skip

OTHER_HEADS = {"attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 32}}
BAILING_HEAD = {"pad_token_id": None, "mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]}
REFERENCES: dict[str, tuple[str, dict[str, Any]]] = {  # that transformers computes too: see `make_families.py`
    "step3p7": ("step3p7", {}),
    "bailing_hybrid": ("bailing_hybrid", BAILING_HEAD),
    "deepseek_v32": ("deepseek_v32", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "glm5_next": ("glm5_next", {}),
    "step3p7-head": ("step3p7", OTHER_HEADS),  # transformers gives the head the trunk's number of heads
}

GLM_TOWER = {  # of which no file has tensors
    "depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16, "out_hidden_size": 64,
    "projection_intermediate_size": 16, "patch_size": 14, "image_size": 28,
}  # fmt: skip
STEP = (  # from mlx-lm's names to the released ones
    (r"\.mlp\.switch_mlp\.", ".moe."),
    (r"\.mlp\.gate\.gate\.", ".moe.gate."),
    (r"\.mlp\.gate\.router_bias", ".moe.router_bias"),
    (r"\.mlp\.share_expert\.", ".share_expert."),
    (r"\.shared_head\.head\.", ".transformer.shared_head.output."),
    (r"\.shared_head\.norm\.", ".transformer.shared_head.norm."),
)


def make_config(family: str, **changed: Any) -> dict[str, Any]:
    text = {**BASE, "model_type": family, **CONFIGS[family], **changed}
    if text["model_type"].startswith("gemma4"):
        return gemma4.nested({name: value for name, value in text.items() if name != "rope_theta"})
    if "rope_parameters" in text or family == "glm5_next":  # which has no rotation
        text.pop("rope_theta", None)
    if family == "mistral3":
        outer = {"model_type": "mistral3", "eos_token_id": 8187, "dtype": "float32"}
        return {**outer, "text_config": {**text, "model_type": "mistral"}}
    if family == "glm5_next":
        outer = {"model_type": family, "eos_token_id": 8187, "dtype": "float32", "vision_config": GLM_TOWER}
        return {**outer, "text_config": {**text, "model_type": "glm5_next_text"}}
    if family == "step3p7":
        outer = {"model_type": "step3p7", "eos_token_id": 8187, "dtype": "float32"}
        sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
        outer["vision_config"] = dict(zip(sizes, (16, 1, 2, 28, 14), strict=True))  # of which no file has tensors
        return {**outer, "text_config": {**text, "model_type": "step3p5"}}
    return {**text, "dtype": "float32"}


def mlx_lm_model(config: dict[str, Any]) -> nn.Module:
    """mlx-lm's own model, with random weights; ours where it has none."""
    if config["model_type"] == "glm5_next":
        return models.build(config, head=False).lm
    if config.get("moe_layer_end_index") == -1:  # which it takes for none
        config = {**config, "moe_layer_end_index": None}
    if config["model_type"] == "step3p7":
        config = config["text_config"]
    other = {"mistral": "llama", "bailing_hybrid": "bailing_moe_v3", "gemma4_unified": "gemma4"}
    kind = other.get(config["model_type"], config["model_type"])
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    return module.Model(module.ModelArgs.from_dict(config))


def released_arrays(config: dict[str, Any], seed: int = 0) -> Arrays:
    """All tensors of a release, in float32."""
    text = config.get("text_config", config)
    rng = np.random.default_rng(seed)
    H = text["hidden_size"]
    gemma = text["model_type"].startswith("gemma4")
    embedding = rng.standard_normal((text["vocab_size"], H)) * (0.1 if text["tie_word_embeddings"] else 1.0)
    embedding = embedding / 2 if gemma else embedding  # layers decide what follows
    lm_head = embedding[rng.permutation(text["vocab_size"])] * 3 / H**0.5
    arrays: Arrays = {}

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("mtp.embed_tokens.weight"):  # LongCat's; others have copies of the trunk's
            return embedding + rng.standard_normal(shape) * 0.3
        if name.endswith(("embed_tokens.weight", "embeddings.weight")):
            return embedding
        later = {"step3p5": "34", "step3p7": "45"}.get(config["model_type"], "-")
        if re.search(rf"layers\.[{later}]\.shared_head\.head\.", name):  # Step's later modules have others
            return lm_head[::-1]
        if name.endswith(("lm_head.weight", "shared_head.head.weight")):
            return lm_head
        if gemma and name.endswith(("q_norm.weight", "k_norm.weight")):
            return 0.4 + rng.integers(-24, 25, shape) / 256  # it does not scale scores
        if gemma and name.endswith("model.norm.weight"):
            return 16 + rng.integers(-24, 25, shape) / 8  # so that logits come near their limit
        if "norm" in name:
            return 1 + rng.integers(-24, 25, shape) / 128
        if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            return 1 + rng.integers(-24, 25, shape) / 128
        if len(shape) == 1:
            return rng.standard_normal(shape) * 0.1 + name.endswith("_hc.scale")
        scale = (
            3 if name.endswith((".gate.weight", "o_proj.weight", "dense.weight", "down_proj.weight")) else 1
        )  # so layers matter
        return rng.standard_normal(shape) / shape[-1] ** 0.5 * scale

    for name, array in tree_flatten(mlx_lm_model(json.loads(json.dumps(config))).parameters()):
        arrays[name] = mx.array(values(name, array.shape).astype(np.float32))
    if config["model_type"] == "glm_moe_dsa":
        shared = [
            f"layers.{n}.self_attn.indexer." for n, kind in enumerate(text["indexer_types"]) if kind == "shared"
        ]
        arrays = {name: a for name, a in arrays.items() if not any(each in name for each in shared)}
    if config["model_type"] == "ernie4_5_moe":
        arrays["model.layers.1.mlp.moe_statics.e_score_correction_bias"] = mx.array(rng.normal(0, 0.1, (1, 8)))
    if config["model_type"] in HEADS:
        released, parts, modules = HEADS[config["model_type"]]
        last = f"model.layers.{text['num_hidden_layers'] - 1}."
        for module in range(modules):
            prefix = released.format(layer=text["num_hidden_layers"] + module, module=module)
            layer = prefix + "layers.0." * (prefix == "mtp.")
            shapes = {layer + name.removeprefix(last): a.shape for name, a in arrays.items() if name.startswith(last)}
            shapes = {name: shape for name, shape in shapes.items() if "_hc." not in name}  # of several streams
            if config["model_type"] in WITHOUT_EXPERTS:
                shapes = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
                sizes = (H, text["intermediate_size"])
                shapes |= {f"{layer}mlp.{part}.weight": sizes[::-1] for part in ("gate_proj", "up_proj")}
                shapes[f"{layer}mlp.down_proj.weight"] = sizes
            if config["model_type"] == "nemotron_h":  # a layer of attention and one of experts, like the trunk's
                found = {n.replace("backbone.layers.2", "mtp.layers.0"): a.shape for n, a in arrays.items()}
                found |= {n.replace("backbone.layers.1", "mtp.layers.1"): a.shape for n, a in arrays.items()}
                shapes = {name: shape for name, shape in found.items() if name.startswith("mtp.")}
                shapes["mtp.layers.1.final_layernorm.weight"] = (H,)
            if config["model_type"] == "longcat_flash":
                own = {name.removeprefix(last): a.shape for name, a in arrays.items() if name.startswith(last)}
                own = {re.sub(r"mlps\.0", "transformer_layer.mlp", name): shape for name, shape in own.items()}
                own = {re.sub(r"^(self_attn|\w+_layernorm)\.0", r"\1", name): shape for name, shape in own.items()}
                shapes = {prefix + n: shape for n, shape in own.items() if not re.match(r"mlps?\.|\w+\.1\.", n)}
                shapes |= {"model.mtp.norm.weight": (H,), "model.mtp.embed_tokens.weight": (text["vocab_size"], H)}
            if config["model_type"] == "ernie4_5_moe":
                own = {"mtp_linear_proj": (H, 2 * H), "mtp_emb_norm": (H,), "mtp_hidden_norm": (H,)}
                shapes |= {f"model.{part}.0.weight": shape for part, shape in own.items()}
            fc = ("eh_proj", "input_proj", "fc", "model.mtp_linear_proj.0")
            shapes |= {f"{prefix}{part}.weight": (H, 2 * H) if part in fc else (H,) for part in parts}
            for name, shape in shapes.items():
                made = values(name, shape)
                if name.removeprefix(prefix).removesuffix(".weight") in fc:
                    # The head starts from the embedding of the last token, as the trunk does.
                    half = np.concatenate([np.eye(H), np.zeros((H, H))][:: -1 if "input" in name else 1], axis=1)
                    made = half + made * 0.5
                arrays[name] = mx.array(made.astype(np.float32))
    released = as_released(arrays, text)
    if config["model_type"] == "step3p7":  # transformers reads heads without this part of their names
        released = {name.replace(".transformer.", "."): array for name, array in released.items()}
    return released


def as_released(arrays: Arrays, text: dict[str, Any]) -> Arrays:
    """Undo what mlx-lm's `sanitize` does: one tensor per expert, latent attention's two expansions in one."""
    out: Arrays = {}
    if text["model_type"].startswith("gemma4"):
        return gemma4.as_released(arrays, text)
    if text["model_type"] == "step3p5":
        for name, array in arrays.items():
            for pattern, released in STEP:
                name = re.sub(pattern, released, name)
            out[name] = array - 1 if "norm" in name else array
        return out
    for name, array in arrays.items():
        if text["model_type"] == "nemotron_h":
            name = name.replace(".fc1.", ".up_proj.").replace(".fc2.", ".down_proj.")
            array = array.moveaxis(1, 2) if name.endswith("conv1d.weight") else array
        if text["model_type"] in ("bailing_hybrid", "glm5_next_text") and name.endswith("conv1d.weight"):
            array = array.moveaxis(1, 2)
        if text["model_type"] == "glm5_next_text":
            name = re.sub(r"\.(attn|ffn)_hc\.(fn|base|scale)(\.weight)?$", r".hc_\1_\2", name)
            name = re.sub(r"_compress_gate\.weight$", "_compress_gate", name)
        if text["model_type"] == "exaone_moe":
            name = name.replace("mlp.gate.e_score", "mlp.e_score")
        if text["model_type"] == "mimo_v2_flash" and ".mtp." in name:
            name = name.replace("post_attention", "pre_mlp")
        if ".switch_mlp." in name:
            for expert in range(array.shape[0]):
                out[name.replace(".switch_mlp.", f".experts.{expert}.")] = array[expert]
        elif name.endswith("embed_q.weight"):
            values = arrays[name.replace("embed_q", "unembed_out")]  # [heads, v, rank]
            both = mx.concatenate([array.swapaxes(-1, -2), values], axis=1)
            out[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif not name.endswith("unembed_out.weight"):
            out[name] = array
    if text["model_type"] == "glm5_next_text":
        out = {re.sub(r"^model\.", "model.language_model.", name): array for name, array in out.items()}
    return out


def write_family(
    folder: Path, family: str, *, seed: int = 0, dtype: mx.Dtype = mx.float32, fp8: bool = False, **changed: Any
) -> Path:
    """Write a release of the family."""
    config = make_config(family, **changed)
    arrays = {name: a.astype(dtype) for name, a in released_arrays(config, seed).items()}
    if fp8:
        arrays = to_fp8(arrays)
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder, arrays, 2, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


def write_trunk(folder: Path, family: str, fields: dict[str, Any]) -> Path:
    """Write a release without its head, of whose config mlx-lm, which shapes the weights, need not know `fields`."""
    config = {name: value for name, value in (make_config(family) | fields).items() if value is not LEFT_OUT}
    arrays = {name: a for name, a in released_arrays(make_config(family)).items() if "mtp" not in name}
    for name in [name for name in arrays if family == "longcat_flash" and re.search(r"\.[0-3]\.(gate|up)_", name)]:
        zero = re.sub(r"experts\.(\d)\.", lambda found: f"experts.{8 + int(found[1])}.", name)
        arrays[zero] = arrays[name]  # transformers has these weights of experts that return their input
    folder.mkdir(parents=True)
    write_shards(folder, arrays, 2, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


if __name__ == "__main__":
    for name in HEADS:
        write_family(Path(sys.argv[1], name), name)
    for name, (family, changed) in REFERENCES.items():
        write_family(Path(sys.argv[1], "references", name), family, **changed)
    for name, (family, fields) in TRUNKS.items():
        write_trunk(Path(sys.argv[1], "trunks", name), family, fields)
