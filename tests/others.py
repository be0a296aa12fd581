"""Tiny random checkpoints of architectures that mlx-lm has and we do not, as mlx-lm converts them."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from checkpoints import TOKENIZER, TOKENIZER_FILES

BASE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "eos_token_id": 8187,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048},
    },
    "gemma3_text": {
        "num_hidden_layers": 3, "sliding_window": 8, "sliding_window_pattern": 3, "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0, "rope_global_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh",
    },
    "phi3": {"num_key_value_heads": 4, "original_max_position_embeddings": 4096},
    "olmo2": {},
    "granite": {
        "logits_scaling": 2.0, "attention_multiplier": 0.2, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
        "attention_bias": False, "mlp_bias": False,
    },
    "smollm3": {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
    "cohere2": {
        "head_dim": 16,"sliding_window": 8, "sliding_window_pattern": 2, "logit_scale": 0.5, "num_hidden_layers": 4},
    "gemma3n": {
        "text_config": {
            **BASE, "model_type": "gemma3n_text", "num_hidden_layers": 4, "intermediate_size": [128] * 4,
            "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 8192, "sliding_window": 8,
            "activation_sparsity_pattern": None, "hidden_size_per_layer_input": 16, "altup_num_inputs": 2,
            "altup_coef_clip": 100.0, "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 8,
            "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 32.0, "final_logit_softcapping": 30.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    },
    "starcoder2": {"norm_epsilon": 1e-6, "tie_word_embeddings": True},
    "mamba": {
        "state_size": 16, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 8,
        "max_position_embeddings": None,
    },
    "lfm2": {
        "block_dim": 64, "block_ff_dim": 128, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False, "conv_bias": False, "conv_L_cache": 3, "norm_eps": 1e-6,
        "layer_types": ["conv", "full_attention"], "full_attn_idxs": [1],
    },
    "falcon_h1": {
        "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9, "attention_bias": False,
        "embedding_multiplier": 1.0, "key_multiplier": 0.8, "lm_head_multiplier": 1.0, "mamba_chunk_size": 16,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16,
        "mamba_expand": 1, "mamba_n_groups": 1, "mamba_n_heads": 4, "mamba_norm_before_gate": False,
        "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_bias": False,
        "mlp_multipliers": [1.0, 1.0], "projectors_bias": False, "ssm_in_multiplier": 1.0,
        "ssm_multipliers": [1.0] * 5, "ssm_out_multiplier": 1.0,
    },
    "rwkv7": {
        "head_dim": 32, "norm_eps": 1e-6, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "gpt2": {
        "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "n_ctx": 512, "num_key_value_heads": 4,
        "max_position_embeddings": None,
    },
    "gpt_bigcode": {
        "n_embd": 64, "n_head": 2, "n_layer": 2, "n_inner": 128, "n_positions": 512, "max_position_embeddings": None,
        "multi_query": True, "num_key_value_heads": 1,
    },
    "llama4": {
        "text_config": {
            **BASE, "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8,
            "intermediate_size_mlp": 128, "num_local_experts": 2, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1, "rope_scaling": None, "use_qk_norm": True, "num_hidden_layers": 4,
        },
    },
}  # fmt: skip


def write_other(
    folder: Path, model_type: str, *, seed: int = 0, bits: int | None = None, mode: str = "affine", **changes: Any
) -> Path:
    """Write a checkpoint with a tokenizer and return its folder."""
    config = {**BASE, "model_type": model_type, **CONFIGS[model_type], **changes}
    config = {name: value for name, value in config.items() if value is not None}
    model, args = _get_classes(config)
    lm = model(args.from_dict(config))
    folder.mkdir(parents=True, exist_ok=True)
    randomize(lm, seed)
    if bits is not None:
        quantized: dict[str, Any] = {"group_size": 32 if mode != "nvfp4" else 16, "bits": bits, "mode": mode}
        nn.quantize(lm, **quantized)
        config["quantization"] = quantized
    flat: Any = tree_flatten(lm.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(flat), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, folder / name)
    return folder


def randomize(lm: nn.Module, seed: int) -> None:
    """Give every matrix random numbers, large enough that texts vary."""
    mx.random.seed(seed)
    flat: Any = tree_flatten(lm.parameters())
    drawn = [
        (name, 0.3 * mx.random.normal(a.shape) if a.ndim > 1 and mx.issubdtype(a.dtype, mx.floating) else a)
        for name, a in flat
    ]
    lm.update(tree_unflatten(drawn))
    mx.eval(lm.parameters())
