"""GGUF files of the tiny random checkpoints, as llama.cpp's `convert_hf_to_gguf.py` writes them.

    write_gguf(folder / "tiny.gguf", raw, "Q4_0")

Names come from gguf's own table, quantised numbers from its own quantisation; K-quants, which it cannot write, are
random blocks. The release in `raw` is written anew with the numbers that gguf's own reader makes of them.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf.quants import dequantize, quantize

from checkpoints import write_shards

ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
}  # fmt: skip
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a random block has numbers in float16
SIZES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "full_attention_interval": "full_attention_interval", "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim", "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads", "nextn_predict_layers": "mtp_num_hidden_layers",
}  # fmt: skip
Numbers = dict[str, np.ndarray]


def write_gguf(file: Path, raw: Path, kind: str = "F32", **fields: Any) -> Path:
    """Write the release in the folder `raw`, its matrices in blocks of a kind. `fields` are of the metadata."""
    config = json.loads((raw / "config.json").read_text())
    architecture, text = ARCHITECTURES[config["model_type"]], config.get("text_config", config)
    writer, layers = gguf.GGUFWriter(file, architecture), text["num_hidden_layers"]
    blocks = layers + text.get("mtp_num_hidden_layers", 0)
    sizes = {name: text[ours] for name, ours in SIZES.items() if text.get(ours) is not None} | {"block_count": blocks}
    rope = text.get("rope_parameters") or {"rope_theta": text["rope_theta"]}
    if architecture.startswith("qwen35"):
        sizes["ssm.inner_size"] = text["linear_num_value_heads"] * text["linear_value_head_dim"]
        sizes["rope.dimension_count"] = int(text["head_dim"] * rope["partial_rotary_factor"])
        writer.add_array(f"{architecture}.rope.dimension_sections", [*rope["mrope_section"], 0])
    for name, size in sizes.items():
        writer.add_uint32(f"{architecture}.{name}", size)
    writer.add_float32(f"{architecture}.rope.freq_base", rope["rope_theta"])
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", text["rms_norm_eps"])
    write_scaling(writer, architecture, text)
    write_tokenizer(writer, raw, text["vocab_size"])
    for name, value in fields.items():
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], blocks)
    release: dict[str, mx.array] = {}
    for name, values in _release(raw).items():
        columns = name.endswith("linear_attn.out_proj.weight")  # which change places
        kept, stored, numbers = _stored(name, _tiled(values, text, 1) if columns else values, kind)
        numbers = _grouped(numbers, text, 1) if columns else numbers
        release |= _single(name, numbers)
        theirs = _head_name(name, layers) or names.get_name(_renamed(name, layers), try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        writer.add_tensor(theirs, _rows(name, kept, text, config["model_type"]), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_shards(raw, release, 2, {"format": "pt"})
    return file


def write_scaling(writer: gguf.GGUFWriter, architecture: str, text: dict[str, Any]) -> None:
    """Write how rotations are scaled: Llama 3's as what its frequencies are divided by."""
    scaling = text.get("rope_scaling") or {"rope_type": "default"}
    factor = scaling.get("factor", 1.0)
    if scaling["rope_type"] == "llama3":
        size = text["hidden_size"] // text["num_attention_heads"]
        factors = []
        for index in range(0, size, 2):
            wavelength = 2 * math.pi * text["rope_theta"] ** (index / size)
            smooth = (8192 / wavelength - 1) / 3
            middle = 1 / ((1 - smooth) / factor + smooth)
            factors.append(1 if wavelength < 8192 / 4 else factor if wavelength > 8192 else middle)
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    elif scaling["rope_type"] != "default":
        writer.add_string(f"{architecture}.rope.scaling.type", scaling["rope_type"])
        writer.add_float32(f"{architecture}.rope.scaling.factor", factor)
        if original := scaling.get("original_max_position_embeddings"):
            writer.add_uint32(f"{architecture}.rope.scaling.original_context_length", original)


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    """Write the tokenizer of a folder; tokens past `size` are left out, missing ones are filled in."""
    found = json.loads((folder / "tokenizer.json").read_text())
    tokens = {index: token for token, index in found["model"]["vocab"].items()}
    added = {each["id"]: each for each in found["added_tokens"]}
    tokens |= {index: each["content"] for index, each in added.items()}
    tokens = {index: token for index, token in tokens.items() if index < size}
    known = {*tokens.values()}
    kinds = [1 if index not in added else 3 if added[index]["special"] else 4 for index in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types([kind if index in tokens else 5 for index, kind in enumerate(kinds)])
    writer.add_token_merges([" ".join(pair) for pair in found["model"]["merges"] if {*pair, "".join(pair)} <= known])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
    for index, token in tokens.items():
        if token == "<|im_end|>":
            writer.add_eos_token_id(index)


def _release(raw: Path) -> Numbers:
    """Return the tensors of a release, single experts in one."""
    files: Any = [mx.load(str(file)) for file in sorted(raw.glob("*.safetensors"))]
    found = {name: np.array(a.astype(mx.float32)) for file in files for name, a in file.items()}
    experts: dict[str, list[str]] = {}
    for name in found:
        experts.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(name)
    return {
        name: found[name]
        if name in found
        else np.stack([found[re.sub("experts", f"experts.{e}", name)] for e in range(len(parts))])
        for name, parts in experts.items()
    }


def _single(name: str, numbers: np.ndarray) -> dict[str, mx.array]:
    if ".experts." not in name:
        return {name: mx.array(numbers)}
    return {name.replace(".experts.", f".experts.{e}."): mx.array(each) for e, each in enumerate(numbers)}


def _stored(name: str, values: np.ndarray, kind: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType, np.ndarray]:
    """Return a tensor as the file has it, its type, and the numbers that are read."""
    stored = gguf.GGMLQuantizationType[kind]
    if values.ndim < 2 or re.search(r"conv1d|norm|mlp\.gate\.|shared_expert_gate", name):
        stored = gguf.GGMLQuantizationType.F32
    elif values.shape[-1] % gguf.GGML_QUANT_SIZES[stored][0] or (kind in HALVES and "out_proj" in name):
        stored = gguf.GGMLQuantizationType.Q8_0
    if stored.name not in HALVES:
        numbers = dequantize(quantize(values, stored), stored).astype(np.float32)
        return quantize(numbers, stored), stored, numbers
    size, nbytes = gguf.GGML_QUANT_SIZES[stored]
    rng = np.random.default_rng(len(name))
    raw = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // size, nbytes), dtype=np.uint8)
    for at in HALVES[stored.name]:
        halves = rng.uniform(0.5, 1, (*raw.shape[:-1], 1)).astype(np.float16) / np.float16(4000)
        raw[..., at : at + 2] = halves.view(np.uint8)
    raw = raw.reshape(*values.shape[:-1], -1)
    return raw, stored, dequantize(raw, stored)


def _head_name(name: str, layers: int) -> str | None:
    """Return the name of what the head has beside a layer, which gguf 0.19 does not know of these models."""
    parts = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head_norm",
    }
    match = re.fullmatch(r"mtp\.(\w+)\.weight", name)
    return f"blk.{layers}.nextn.{parts[match[1]]}.weight" if match else None


def _renamed(name: str, layers: int) -> str:
    """Return what llama.cpp's converter calls a tensor of the head before it looks it up."""
    name = name.replace("model.language_model.", "model.")
    if match := re.fullmatch(r"mtp\.layers\.(\d)\.(.+)", name):
        return f"model.layers.{layers + int(match[1])}.{match[2]}"
    return name.replace(".dt_bias", ".dt_proj.bias")


def _tiled(x: np.ndarray, text: dict[str, Any], axis: int = 0) -> np.ndarray:
    """Value heads one of each key head after another, as `_reorder_v_heads` has them."""
    keys, per_key = text["linear_num_key_heads"], text["linear_num_value_heads"] // text["linear_num_key_heads"]
    parts = x.reshape(*x.shape[:axis], keys, per_key, -1, *x.shape[axis + 1 :])
    return np.ascontiguousarray(parts.swapaxes(axis, axis + 1)).reshape(x.shape)


def _grouped(x: np.ndarray, text: dict[str, Any], axis: int) -> np.ndarray:
    """Undo `_tiled`."""
    return x.take(np.argsort(_tiled(np.arange(x.shape[axis]), text)), axis)


def _rows(name: str, x: np.ndarray, text: dict[str, Any], model_type: str) -> np.ndarray:
    """Return a tensor's numbers or blocks, row after row, as the converter arranges them."""
    if model_type == "llama" and (match := re.search(r"\.([qk])_proj\.", name)):
        heads = text["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if model_type.startswith("qwen3_5") and "norm" in name and "linear_attn" not in name:
        return (x.view(np.float32) + 1).astype(np.float32)
    if "linear_attn." not in name or name.endswith(("norm.weight", "out_proj.weight")):
        return x
    if name.endswith("A_log"):
        return _tiled(-np.exp(x.view(np.float32)), text)
    if "in_proj_qkv" in name or "conv1d" in name:
        x = x.squeeze(1) if "conv1d" in name else x
        first = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"]
        return np.concatenate([x[:first], _tiled(x[first:], text)])
    return _tiled(x, text)
