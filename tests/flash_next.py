"""Tiny random checkpoints of Qwen3.8-Flash-Next (`qwen4_exp`) with the tensor names of its release."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from checkpoints import TOKENIZER, TOKENIZER_FILES, Arrays, save, write_shards
from headstart import models
from headstart.checkpoint.parameters import parameter_shapes
from reference.pictures import END, IMAGE, START
from vision_models import PROCESSOR, VISION, tower_arrays

TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "output_gate_type": "sigmoid",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "hc_count": 4,
    "hc_lowrank": 16,
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2, 4],
    "ple_embed_dim": 64,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "seed": 1234,
    "eos_token_id": 7,
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
RAW = "model.language_model."


def make_config(**changed: Any) -> dict[str, Any]:
    text = json.loads(json.dumps(TEXT)) | changed
    return {"model_type": "qwen4_exp", "dtype": "float32", "text_config": text, "tie_word_embeddings": False}


def released_arrays(config: dict[str, Any], seed: int = 0) -> Arrays:
    """All tensors of a release, in float32."""
    rng, text = np.random.default_rng(seed), config["text_config"]
    model = models.build(json.loads(json.dumps(config)))
    H, V = text["hidden_size"], text["vocab_size"]
    embedding = rng.standard_normal((V, H))
    lm_head = embedding[rng.permutation(V)] * 3 / H**0.5
    arrays: dict[str, np.ndarray] = {}

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "embed_tokens.weight":
            return embedding
        if name == "lm_head.weight":
            return lm_head
        if "norm" in name and len(shape) == 1:
            return rng.integers(-24, 25, shape) / 128 + (1 if name.endswith("linear_attn.norm.weight") else 0)
        if len(shape) == 1:
            return rng.standard_normal(shape) * 0.1
        if name.endswith(("fc_embedding.weight", "fc_hidden.weight")):  # the head starts from the embedding
            return np.eye(H) * (2 if "embedding" in name else 0.1) + rng.standard_normal(shape) * 0.03
        scale = 3 if name.endswith((".gate.weight", "o_proj.weight", "down_proj.weight", "value_proj.weight")) else 1
        return rng.standard_normal(shape) / shape[-1 if "conv1d" not in name else 1] ** 0.5 * scale

    for name, shape in parameter_shapes(model.weights).items():
        made = values(name, shape)
        name = name.replace("norm.", "hyper_connection_mixer.", 1) if name.startswith("norm.") else name
        if name.endswith("conv1d.weight"):
            made = np.moveaxis(made, 1, 2)
        arrays[name] = made
    for name in [name for name in arrays if ".switch_mlp.gate_proj." in name]:
        mlp = name.partition(".switch_mlp.")[0]
        gate, up, down = (arrays.pop(f"{mlp}.switch_mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
        arrays[f"{mlp}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        arrays[f"{mlp}.experts.down_proj"] = down
    out = {name if name.startswith(("mtp.", "lm_head.")) else RAW + name: a for name, a in arrays.items()}
    made = {name: mx.array(a.astype(np.float32)) for name, a in out.items()}
    for layer, shape in zip(sorted(text["ple_layer_ids"]), model.family.tables(model.lm), strict=True):
        prefix = f"{RAW}layers.{layer - 1}.ple.ple_embedding."
        table = mx.array(rng.standard_normal((shape.rows, shape.width)).astype(np.float32))
        for part, rows in enumerate(mx.split(table, text["split_ngram_parts"])):
            made[f"{prefix}ngram_embedding.shard_{part}.weight"] = rows
        made[f"{prefix}layer_multipliers"] = mx.array(shape.multipliers)
        made[f"{prefix}ngram_heads_vocab_sizes"] = mx.array(np.array(shape.head_rows))
        made[f"{prefix}ngram_heads_offsets"] = mx.array(shape.offsets)
    return made


def write_flash_next(
    folder: Path, *, seed: int = 0, dtype: mx.Dtype = mx.float32, config: dict[str, Any] | None = None, **changed: Any
) -> Path:
    """Write a release."""
    config = config or make_config(**changed)
    arrays = released_arrays(config, seed)
    arrays = {name: a.astype(dtype) if a.dtype == mx.float32 else a for name, a in arrays.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder, arrays, 2, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


def write_with_tower(folder: Path, dtype: mx.Dtype = mx.float32) -> Path:
    """Write a release that sees pictures."""
    config = make_config(vocab_size=8200)
    write_flash_next(folder, dtype=dtype, config=config)
    vision = VISION | {"out_hidden_size": TEXT["hidden_size"], "model_type": "qwen4_exp_vision"}
    ids = {
        "image_token_id": IMAGE,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "video_token_id": 8195,
    }
    (folder / "config.json").write_text(json.dumps({**config, **ids, "vision_config": vision}, indent=2))
    arrays = tower_arrays(vision, dtype, raw=True)
    save(folder / "model-visual.safetensors", arrays, {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(arrays, "model-visual.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    side = vision["patch_size"]
    size = {"shortest_edge": 16 * side**2, "longest_edge": 256 * side**2}
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"patch_size": side, "size": size}))
    return folder


if __name__ == "__main__":
    write_flash_next(Path(sys.argv[1]) / "text")
    write_with_tower(Path(sys.argv[1]) / "pictures")
