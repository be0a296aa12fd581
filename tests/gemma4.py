"""Tiny random releases of Gemma 4's shapes, and of the assistants that draft for them."""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from checkpoints import Arrays, save

TEXT: dict[str, Any] = {
    "num_hidden_layers": 6,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 8,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
LARGE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
SMALL = {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4_unified": {**TEXT, **LARGE},
    "gemma4_a4b": {**TEXT, **LARGE, **EXPERTS, "model_type": "gemma4"},
    "gemma4_e2b": {**TEXT, **SMALL, "num_key_value_heads": 1, "use_double_wide_mlp": True, "model_type": "gemma4"},
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {  # shapes that are nearly those above
    "gemma4_31b": ("gemma4_unified", {"model_type": "gemma4", "num_hidden_layers": 9, "num_attention_heads": 8,
                   "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 3}),
    "gemma4_e4b": ("gemma4_e2b", {"num_key_value_heads": 2, "use_double_wide_mlp": False}),
}  # fmt: skip
SHAPES = (*CONFIGS, *MORE)


def nested(text: dict[str, Any]) -> dict[str, Any]:
    """A config.json with this text part."""
    kind = text["model_type"]
    outer = {"model_type": kind, "eos_token_id": 8187, "dtype": "float32", "tie_word_embeddings": True}
    outer["vocab_size"] = text["vocab_size"]  # which mlx-lm reads
    return {
        **outer,
        "vision_config": None,
        "audio_config": None,
        "text_config": {**text, "model_type": f"{kind}_text"},
    }


def as_released(arrays: Arrays, text: dict[str, Any]) -> Arrays:
    """Name tensors as a release does, with experts in one tensor, and keys that nothing reads."""
    out: Arrays = {}
    for name, array in arrays.items():
        name = name.replace("language_model.model.", "model.language_model.")
        if name.endswith("experts.switch_glu.gate_proj.weight"):
            up = name.replace("model.language_model.", "language_model.model.").replace("gate_proj", "up_proj")
            out[name.replace("switch_glu.gate_proj.weight", "gate_up_proj")] = mx.concatenate(
                [array, arrays[up]], axis=1
            )
        elif "experts.switch_glu.down_proj" in name:
            out[name.replace("switch_glu.down_proj.weight", "down_proj")] = array
        elif "experts.switch_glu" not in name:
            out[name] = array
    layers = text["num_hidden_layers"]
    for layer in range(layers - text["num_kv_shared_layers"], layers):
        out[f"model.language_model.layers.{layer}.self_attn.k_norm.weight"] = mx.ones((32,))
    out["model.embed_vision.embedding_projection.weight"] = mx.ones((4, 4))
    return out


def write_shape(folder: Path, shape: str, **changed: Any) -> Path:
    """Write a release of one of all shapes."""
    from families import write_family

    family, fields = MORE.get(shape, (shape, {}))
    return write_family(folder, family, **fields, **changed)


def write_assistant(
    folder: Path, target: Path, *, dtype: mx.Dtype = mx.float32, seed: int = 0, hidden_size: int = 48, **changed: Any
) -> Path:
    """Write a random assistant for a release of `write_shape`; one that likes to repeat a token, as the target does.

    For E2B's and E4B's shape it scores clusters of the vocabulary.
    """
    config = json.loads((target / "config.json").read_text())
    theirs, kind = config["text_config"], config["model_type"]
    hidden, vocabulary, ordered = theirs["hidden_size"], theirs["vocab_size"], bool(theirs["num_kv_shared_layers"])
    text = {name: value for name, value in theirs.items() if name not in EXPERTS}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False}
    text |= {"enable_moe_block": False, "num_hidden_layers": 4, "num_kv_shared_layers": 4, "intermediate_size": 96}
    text |= {"layer_types": [*["sliding_attention"] * 3, "full_attention"], "hidden_size": hidden_size}
    own: dict[str, Any] = {
        "model_type": f"{kind}_assistant",
        "backbone_hidden_size": hidden,
        "use_ordered_embeddings": ordered,
        "num_centroids": 16,
        "centroid_intermediate_top_k": 4,
        "tie_word_embeddings": True,
        "dtype": str(dtype).removeprefix("mlx.core."),
        "text_config": text,
    } | changed
    rng, text = np.random.default_rng(seed), own["text_config"]
    size, wide = text["hidden_size"], text["intermediate_size"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns)) / columns**0.5

    def norm(length: int, about: float = 1.0) -> np.ndarray:
        return about * (1 + rng.integers(-24, 25, length) / 128)

    (file,) = [
        f for f in target.glob("*.safetensors") if "model.language_model.embed_tokens.weight" in mx.load(str(f))
    ]
    known = np.array(mx.load(str(file))["model.language_model.embed_tokens.weight"].astype(mx.float32))
    down = matrix(size, hidden)  # [size, hidden], of the target's embeddings
    arrays = {"model.embed_tokens.weight": known @ down.T, "model.norm.weight": norm(size)}
    arrays["pre_projection.weight"] = np.concatenate([down, matrix(size, hidden) / 48], axis=1)
    arrays["post_projection.weight"] = 16 * matrix(hidden, size)  # the trunk's hidden states are as large
    for layer, kind in enumerate(text["layer_types"]):
        head = text["head_dim"] if kind == "sliding_attention" else text["global_head_dim"]
        queries, name = text["num_attention_heads"] * head, f"model.layers.{layer}."
        arrays[f"{name}self_attn.q_proj.weight"] = matrix(queries, size)
        arrays[f"{name}self_attn.o_proj.weight"] = matrix(size, queries)
        arrays[f"{name}self_attn.q_norm.weight"] = norm(head, 0.4)
        arrays[f"{name}mlp.gate_proj.weight"] = matrix(wide, size)
        arrays[f"{name}mlp.up_proj.weight"] = matrix(wide, size)
        arrays[f"{name}mlp.down_proj.weight"] = matrix(size, wide)
        for part in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            arrays[f"{name}{part}_layernorm.weight"] = norm(size, 0.1 if part.startswith("post") else 1.0)
        arrays[f"{name}layer_scalar"] = norm(1)
    made = {name: mx.array(array.astype(np.float32)).astype(dtype) for name, array in arrays.items()}
    if own["use_ordered_embeddings"]:
        made["masked_embedding.centroids.weight"] = mx.array(
            matrix(own["num_centroids"], size).astype(np.float32)
        ).astype(dtype)
        made["masked_embedding.token_ordering"] = mx.array(rng.permutation(vocabulary))  # whole numbers
    folder.mkdir(parents=True)
    save(folder / "model.safetensors", made, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(own, indent=2))
    return folder


if __name__ == "__main__":
    for shape in SHAPES:
        release = write_shape(Path(sys.argv[1], shape), shape)
        write_assistant(Path(sys.argv[1], f"{shape}-assistant"), release)
