"""Tiny random releases of Gemma 4's shapes and of Step-3.7 that see.

    python tests/towers.py FOLDER        writes FOLDER/gemma4_e2b, …, in float32

Their tokenizer is the built-in models' with the tokens of images. Patches are small, so that pictures can be.
"""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import gemma4
from checkpoints import save
from reference.pictures import END, IMAGE, START
from vision_models import add_tower

Arrays = dict[str, mx.array]
VOCABULARY = 8200
GEMMA_TOKENS = {IMAGE: "<|image|>", START: "<|image>", END: "<image|>"}
STEP_TOKENS = {
    IMAGE: "<im_patch>", START: "<im_start>", END: "<im_end>", 8195: "<patch_start>", 8196: "<patch_end>",
    8197: "<patch_newline>",
}  # fmt: skip
GEMMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3,
    "position_embedding_size": 256, "model_type": "gemma4_vision",
}  # fmt: skip
UNIFIED = {
    "patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 64, "mm_posemb_size": 128, "output_proj_dims": 64,
    "model_type": "gemma4_unified_vision",
}  # fmt: skip
STEP = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 1.5, "image_size": 32,
    "patch_size": 2, "num_channels": 3, "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}  # fmt: skip
STEP_PROCESSOR = {
    "size": {"height": 32, "width": 32}, "patch_size": 24, "max_image_size": 144, "vision_patch_size": 2,
    "image_processor_type": "Step3p7ImageProcessor",
}  # fmt: skip
WHOLE = {"use_bidirectional_attention": "vision"}
# By name: the family and fields of its text, and of its tower.
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma4_e2b": ("gemma4_e2b", {}, {"use_clipped_linears": True}),
    "gemma4_a4b": ("gemma4_a4b", WHOLE, {"standardize": True}),
    "gemma4_unified": ("gemma4_unified", WHOLE, {}),
    "step3p7": ("step3p7", {}, {}),
    **{name: (family, {**fields, **(WHOLE if name == "gemma4_31b" else {})}, {})
       for name, (family, fields) in gemma4.MORE.items()},
}  # fmt: skip
LIKE_OTHERS = tuple(gemma4.MORE)  # whose tests are slow ones


def write_seeing(folder: Path, shape: str, dtype: mx.Dtype = mx.float32, **changed: Any) -> Path:
    """Write a release of one of SHAPES, its text with `changed` fields."""
    from families import write_family

    family, fields, tower = SHAPES[shape]
    fields = {"vocab_size": VOCABULARY, **fields, **changed}
    if shape == "step3p7":
        write_family(folder, family, dtype=dtype, **fields)
        ids, part, tokens = {"image_token_id": IMAGE}, STEP_TOKENS[IMAGE], STEP_TOKENS
        vision, processor, arrays = STEP | tower, STEP_PROCESSOR, step_arrays()
    else:
        write_family(folder, family, dtype=dtype, vocab_size_per_layer_input=VOCABULARY, **fields)
        drop(folder, "model.embed_vision.embedding_projection.weight")
        ids = {"image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END, "video_token_id": 8198}
        ids |= {"audio_token_id": 8199, "boa_token_id": 8195, "eoa_token_index": 8196}
        part, tokens = GEMMA_TOKENS[IMAGE], GEMMA_TOKENS
        unified = shape == "gemma4_unified"
        vision = (UNIFIED if unified else GEMMA) | tower
        kind = "Gemma4UnifiedImageProcessor" if unified else "Gemma4ImageProcessorPil"
        processor = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70, "image_processor_type": kind}
        arrays = unified_arrays() if unified else gemma_arrays(vision)
    made = {name: mx.array(np.asarray(array, np.float32)).astype(dtype) for name, array in arrays.items()}
    return add_tower(folder, {**ids, "vision_config": vision}, made, processor, tokens, part)


def drop(folder: Path, name: str) -> None:
    """Remove a tensor that a tower has too."""
    for file in folder.glob("*.safetensors"):
        arrays = mx.load(str(file))
        assert isinstance(arrays, dict)
        if arrays.pop(name, None) is not None:
            save(file, arrays, {"format": "pt"})


def matrix(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape) / np.prod(shape[1:]) ** 0.5


def about(rng: np.random.Generator, center: float, *shape: int) -> np.ndarray:
    return center + rng.standard_normal(shape) / 8


def gemma_arrays(vision: dict[str, Any]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    hidden, inner, head = vision["hidden_size"], vision["intermediate_size"], vision["head_dim"]
    table = (2, vision["position_embedding_size"], hidden)
    arrays = {
        "patch_embedder.input_proj.weight": matrix(rng, hidden, 3 * vision["patch_size"] ** 2),
        "patch_embedder.position_embedding_table": rng.standard_normal(table) / 2,
    }
    sizes = {
        **dict.fromkeys((f"self_attn.{name}_proj" for name in "qkvo"), (hidden, hidden)),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for layer in range(vision["num_hidden_layers"]):
        prefix = f"encoder.layers.{layer}."
        for name, size in sizes.items():
            arrays[f"{prefix}{name}.linear.weight"] = matrix(rng, *size)
            if vision.get("use_clipped_linears"):
                for limit, value in (("input_min", -1.5), ("input_max", 1.25), ("output_min", -2), ("output_max", 1)):
                    arrays[f"{prefix}{name}.{limit}"] = np.array(value)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            arrays[f"{prefix}{name}_layernorm.weight"] = about(rng, 1, hidden)
        for name in ("q_norm", "k_norm"):
            arrays[f"{prefix}self_attn.{name}.weight"] = about(rng, 0.6, head)
    if vision.get("standardize"):
        arrays |= {"std_bias": about(rng, 0, hidden), "std_scale": about(rng, 0.5, hidden)}
    made = {f"model.vision_tower.{name}": array for name, array in arrays.items()}
    return made | {"model.embed_vision.embedding_projection.weight": matrix(rng, 64, hidden)}


def unified_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    hidden, patch = UNIFIED["mm_embed_dim"], 3 * 12**2
    arrays = {"patch_dense.weight": matrix(rng, hidden, patch), "patch_dense.bias": about(rng, 0, hidden)}
    for name, size in (("patch_ln1", patch), ("patch_ln2", hidden), ("pos_norm", hidden)):
        arrays |= {f"{name}.weight": about(rng, 1, size), f"{name}.bias": about(rng, 0, size)}
    arrays["pos_embedding"] = rng.standard_normal((UNIFIED["mm_posemb_size"], 2, hidden)) / 2
    made = {f"model.vision_embedder.{name}": array for name, array in arrays.items()}
    return made | {"model.embed_vision.embedding_projection.weight": matrix(rng, 64, hidden)}


def step_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    hidden, patch = STEP["hidden_size"], STEP["patch_size"]
    arrays = {
        "conv1.weight": matrix(rng, hidden, 3, patch, patch),
        "positional_embedding": rng.standard_normal(((STEP["image_size"] // patch) ** 2, hidden)) / 2,
        "vit_downsampler1.weight": matrix(rng, 2 * hidden, hidden, 3, 3),
        "vit_downsampler1.bias": about(rng, 0, 2 * hidden),
        "vit_downsampler2.weight": matrix(rng, 4 * hidden, 2 * hidden, 3, 3),
        "vit_downsampler2.bias": about(rng, 0, 4 * hidden),
    }
    norms = ["ln_pre"]
    inner = int(hidden * STEP["mlp_ratio"])
    for layer in range(STEP["num_hidden_layers"]):
        prefix = f"transformer.resblocks.{layer}."
        norms += [f"{prefix}ln_1", f"{prefix}ln_2"]
        arrays |= {f"{prefix}ls_1.gamma": about(rng, 0.7, hidden), f"{prefix}ls_2.gamma": about(rng, 0.7, hidden)}
        sizes = {"attn.in_proj_": (3 * hidden, hidden), "attn.out_proj.": (hidden, hidden)}
        sizes |= {"mlp.c_fc.": (inner, hidden), "mlp.c_proj.": (hidden, inner)}
        for name, size in sizes.items():
            arrays |= {f"{prefix}{name}weight": matrix(rng, *size), f"{prefix}{name}bias": about(rng, 0, size[0])}
    for name in norms:
        arrays |= {f"{name}.weight": about(rng, 1, hidden), f"{name}.bias": about(rng, 0, hidden)}
    made = {f"vision_model.{name}": array for name, array in arrays.items()}
    return made | {"vit_large_projector.weight": matrix(rng, 64, 4 * hidden)}


if __name__ == "__main__":
    for each in SHAPES:
        write_seeing(Path(sys.argv[1], each), each)
