"""Tiny random Qwen3.5 checkpoints with a vision tower, and pictures for them.

    python tests/vision_models.py FOLDER        writes FOLDER/dense and FOLDER/moe, raw, in float32

Their tokenizer is the built-in models' with the three tokens of images, and the chat template places images as the
released ones do. Patches are of 4 x 4 pixels, so that pictures can be small.
"""

import io
import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import checkpoints
from reference.pictures import END, IMAGE, START

TOKENS = {IMAGE: "<|image_pad|>", START: "<|vision_start|>", END: "<|vision_end|>"}
VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "in_channels": 3, "patch_size": 4,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 16,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
PART = "{%- if p.text is defined %}{{- p.text }}{%- endif %}"


def write_with_tower(
    folder: Path, family: str = "dense", layout: str = "raw", tower: dict[str, Any] | None = None, **options: Any
) -> Path:
    """Write the checkpoint of `checkpoints.write` with a tower in a shard of its own; `tower`: its sizes."""
    checkpoints.write(folder, family, layout, vocab_size=8200, **options)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    vision = VISION | (tower or {})
    vision |= {"out_hidden_size": text["hidden_size"], "model_type": checkpoints.FAMILIES[family]}
    ids = {
        "image_token_id": IMAGE,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "video_token_id": 8195,
    }
    raw = layout.startswith("raw") and layout != "raw-sidecar"
    arrays = tower_arrays(vision, options.get("dtype", mx.bfloat16), raw=raw)
    side = vision["patch_size"]
    size = {"shortest_edge": 16 * side**2, "longest_edge": 256 * side**2}
    processor = PROCESSOR | {"patch_size": side, "size": size}
    part = "<|vision_start|><|image_pad|><|vision_end|>"
    return add_tower(
        folder, {**ids, "vision_config": vision}, arrays, processor, TOKENS, part, "pt" if raw else "mlx"
    )


def add_tower(
    folder: Path,
    fields: dict[str, Any],
    arrays: dict[str, mx.array],
    processor: dict[str, Any],
    tokens: dict[int, str],
    part: str,
    format: str = "pt",
) -> Path:
    """Add a tower to a checkpoint, in a shard of its own.

    Args:
        fields: Of config.json.
        processor: preprocessor_config.json.
        tokens: The tokens of images, which the tokenizer has not.
        part: What the chat template writes in an image's place.
    """
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}, indent=2))
    checkpoints.save(folder / "model-visual.safetensors", arrays, {"format": format})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(arrays, "model-visual.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    template = (folder / "chat_template.jinja").read_text()
    assert PART in template
    place = f"{{%- if p.type == 'image' %}}{{{{- '{part}' }}}}{{%- endif %}}"
    (folder / "chat_template.jinja").write_text(template.replace(PART, PART + place))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    first = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**first, "id": id, "content": text} for id, text in tokens.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    first = settings["added_tokens_decoder"]["8185"]
    settings["added_tokens_decoder"] |= {str(id): {**first, "content": text} for id, text in tokens.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tower_arrays(vision: dict[str, Any], dtype: mx.Dtype, *, raw: bool) -> dict[str, mx.array]:
    rng = np.random.default_rng(7)
    hidden, wide, inner = vision["hidden_size"], 4 * vision["hidden_size"], vision["intermediate_size"]
    kernel = (vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    arrays: dict[str, Any] = {"pos_embed.weight": rng.standard_normal((vision["num_position_embeddings"], hidden))}

    def linear(name: str, out: int, shape: tuple[int, ...]) -> None:
        arrays[f"{name}.weight"] = rng.standard_normal((out, *shape)) / np.prod(shape) ** 0.5
        arrays[f"{name}.bias"] = rng.standard_normal(out) / 4

    def norm(name: str) -> None:
        arrays[f"{name}.weight"] = 1 + rng.standard_normal(hidden) / 8
        arrays[f"{name}.bias"] = rng.standard_normal(hidden) / 8

    linear("patch_embed.proj", hidden, kernel)
    for n in range(vision["depth"]):
        norm(f"blocks.{n}.norm1")
        norm(f"blocks.{n}.norm2")
        linear(f"blocks.{n}.attn.qkv", 3 * hidden, (hidden,))
        linear(f"blocks.{n}.attn.proj", hidden, (hidden,))
        linear(f"blocks.{n}.mlp.linear_fc1", inner, (hidden,))
        linear(f"blocks.{n}.mlp.linear_fc2", hidden, (inner,))
    norm("merger.norm")
    linear("merger.linear_fc1", wide, (wide,))
    linear("merger.linear_fc2", vision["out_hidden_size"], (wide,))
    made = {name: mx.array(np.asarray(values, np.float32)).astype(dtype) for name, values in arrays.items()}
    if not raw:
        made["patch_embed.proj.weight"] = mx.contiguous(made["patch_embed.proj.weight"].moveaxis(1, -1))
    return {("model.visual." if raw else "vision_tower.") + name: value for name, value in made.items()}


def encoded(pixels: np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    """Return a picture as the bytes of a file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format, **options)
    return file.getvalue()


def giant_png(width: int, height: int) -> bytes:
    """Return a PNG of a kilobyte that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(2**20))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


if __name__ == "__main__":
    for each in ("dense", "moe"):
        write_with_tower(Path(sys.argv[1]) / each, each, dtype=mx.float32)
