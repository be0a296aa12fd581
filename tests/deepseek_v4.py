"""Tiny random checkpoints of DeepSeek-V4 (`deepseek_v4`) with the tensor names of its release."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from checkpoints import TOKENIZER, TOKENIZER_FILES, Arrays, write_shards
from headstart import models
from headstart.checkpoint.parameters import parameter_shapes

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4, 0],
    "compress_rate_hca": 8,  # in place of 128: blocks end within a short text
    "num_hash_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 8,
    "index_n_heads": 16,  # as many that no two entries have the score 0, of which torch and we take different ones
    "index_head_dim": 32,
    "index_topk": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 0.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 6,
    "hc_eps": 1e-6,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    },
    "tie_word_embeddings": False,
    "eos_token_id": 7,
    "num_nextn_predict_layers": 1,
    "dtype": "float32",
}  # fmt: skip
RELEASED = (  # our names, and the release's
    (r"^mtp\.layers\.", "mtp."),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"(^|\.)norm\.hc\.(fn|base|scale)(\.weight)?$", r"\1hc_head_\2"),
    (r"\.(attn|ffn)_hc\.(fn|base|scale)(\.weight)?$", r".hc_\1_\2"),
    (r"\.compressor\.indexer\.(kv_proj|gate_proj|position_bias|kv_norm)", r".indexer.compressor.\1"),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj", ".indexer.wq_b"),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.position_bias$", ".ape"),
    (r"\.self_attn\.", ".attn."),
    (r"\.(q_a|q_b|kv|o_a|o_b)_proj\.", r".w\1."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"((?:experts\.\d+|shared_experts)\.)gate_proj\.", r"\1w1."),
    (r"((?:experts\.\d+|shared_experts)\.)down_proj\.", r"\1w2."),
    (r"((?:experts\.\d+|shared_experts)\.)up_proj\.", r"\1w3."),
)


def make_config(**changed: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(CONFIG)) | changed
    return made


def released_name(name: str) -> str:
    for ours, theirs in RELEASED:
        name = re.sub(ours, theirs, name)
    return name


def released_arrays(config: dict[str, Any], seed: int = 0) -> Arrays:
    """All tensors of a release, in float32."""
    rng = np.random.default_rng(seed)
    model = models.build(json.loads(json.dumps(config)))
    H, V, experts = config["hidden_size"], config["vocab_size"], config["n_routed_experts"]
    embedding = rng.standard_normal((V, H))
    lm_head = embedding[rng.permutation(V)] * 3 / H**0.5

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "embed_tokens.weight":
            return embedding
        if name == "lm_head.weight":
            return lm_head
        if name.endswith("tid2eid"):
            return np.stack([rng.permutation(experts)[: shape[1]] for _ in range(shape[0])])
        if "norm" in name and name.endswith("weight") and len(shape) == 1:
            return 1 + rng.integers(-24, 25, shape) / 128
        if name.endswith("hc.scale"):
            return 1 + rng.standard_normal(shape) * 0.3
        if len(shape) == 1 or name.endswith("position_bias"):
            return rng.standard_normal(shape) * 0.5
        if name.endswith((".e_proj.weight", ".h_proj.weight")):  # the head starts from the embedding
            return np.eye(H) * (2 if ".e_proj" in name else 0.1) + rng.standard_normal(shape) * 0.03
        scale = 3 if name.endswith((".gate.weight", "o_b_proj.weight", "down_proj.weight")) else 1
        return rng.standard_normal(shape) / shape[-1] ** 0.5 * scale

    made: Arrays = {}
    for name, shape in parameter_shapes(model.weights).items():
        array = values(name, shape)
        if name.endswith(".o_a_proj.weight"):
            array = array.reshape(-1, shape[-1])
        parts = {name: array}
        if ".switch_mlp." in name:
            parts = {name.replace(".switch_mlp.", f".experts.{n}."): one for n, one in enumerate(array)}
        for part, each in parts.items():
            kind = np.int64 if name.endswith("tid2eid") else np.float32
            made[released_name(part)] = mx.array(each.astype(kind))
    return made


FLOAT32 = (".ape", ".attn_sink", ".bias", "_fn", "_base", "_scale")
FLOAT8 = re.compile(r"\.(wq_a|wq_b|wo_a|wo_b|attn\.wkv|shared_experts\.w[123]|[eh]_proj)\.weight$")


def in_released_types(arrays: Arrays, *, experts: str = "fp4") -> Arrays:
    """FP8 with one scale for 128 x 128 numbers, experts in FP4 with one for 32, or in FP8 (then of float32)."""
    made: Arrays = {}
    for name, array in arrays.items():
        scale = name.removesuffix("weight") + "scale"
        if ".experts." in name and experts == "fp4":
            codes, made[scale] = mx.quantize(array, 32, 4, "mxfp4")
            made[name] = codes.view(mx.int8)
        elif FLOAT8.search(name) or ".experts." in name:
            rows, columns = array.shape
            blocks = mx.pad(array, [(0, -rows % 128), (0, -columns % 128)]).reshape(-(-rows // 128), 128, -1, 128)
            most = mx.abs(blocks).max(axis=(1, 3)) / 448
            power = mx.ceil(mx.log2(most))
            shared = 2**power if experts == "fp4" else most
            wide = mx.repeat(mx.repeat(shared, 128, axis=0), 128, axis=1)[:rows, :columns]
            made[name] = mx.to_fp8(array / wide)
            made[scale] = (power + 127).astype(mx.uint8) if experts == "fp4" else shared
        else:
            wide = array.dtype != mx.float32 or name.endswith(FLOAT32)
            made[name] = array if wide else array.astype(mx.bfloat16)
    return made


def name_types(folder: Path) -> None:
    """Name the types of codes and scales in the files' headers, which mlx has no names for."""
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        for name, entry in header.items():
            if entry.get("dtype") == "U8":
                entry["dtype"] = "F8_E8M0" if name.endswith(".scale") else "F8_E4M3"
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def write_deepseek_v4(
    folder: Path, *, seed: int = 0, dtype: mx.Dtype = mx.float32, arrays: Arrays | None = None, **changed: Any
) -> Path:
    """Write a release."""
    config = make_config(**changed)
    arrays = arrays or released_arrays(config, seed)
    arrays = {name: a.astype(dtype) if a.dtype == mx.float32 else a for name, a in arrays.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder, arrays, 2, {"format": "pt"})
    name_types(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


if __name__ == "__main__":
    write_deepseek_v4(Path(sys.argv[1]))
