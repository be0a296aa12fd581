"""What a GGUF file says of a model, as config.json and safetensors files say it: its sizes and its tensors.

llama.cpp's converter renames tensors, adds the 1 of Qwen3.5's norms and changes the order of heads: queries and keys
of Llama by pairs, and values of a gated delta rule, for which it also stores -exp(A_log). All of that is undone here.
Rows change places as they are stored; columns do so by whole groups, or their numbers are computed first.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from .blocks import GROUP, Blocks, Repacked, pack
from .gguf import GGUFFile, GGUFTensor
from .read import read_lazily
from .safetensors import Header, TensorInfo

Arrange = Callable[[mx.array], mx.array]

MODEL_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
}  # fmt: skip
NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.switch_mlp.gate_proj", "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
BARE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}  # parameters without a leaf's name
HEAD = {
    "nextn.eh_proj": "fc", "nextn.enorm": "pre_fc_norm_embedding", "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}  # fmt: skip
BLOCK = re.compile(r"blk\.(\d{1,4})\.(.+)")
ROPE_FACTORS = "rope_freqs.weight"
GGUF = "gguf"  # a header's format
OUTER = ("dtype", "tie_word_embeddings", "eos_token_id")  # fields of config.json beside a text part
LEAVES = "weight", "scales", "biases"  # of a quantised matrix
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(gguf: GGUFFile) -> dict[str, Any]:
    """Return config.json's content for the model in a file."""
    kind = MODEL_TYPES.get(gguf.architecture)
    if kind is None or (kind == "llama" and gguf.get("expert_count")):
        what = "a mixture of experts of " * (kind is not None) + gguf.architecture
        raise CheckpointError(f"{gguf.path}: {what}. Headstart reads GGUF files of {', '.join(MODEL_TYPES)}.")
    tensors, heads = gguf.tensors, _size(gguf, "attention.head_count")
    hidden, nextn = _size(gguf, "embedding_length"), gguf.get("nextn_predict_layers", 0)
    head_dim = gguf.get("attention.key_length", gguf.get("rope.dimension_count", hidden // heads))
    theta, dimensions = gguf.get("rope.freq_base", 10000.0), gguf.get("rope.dimension_count", head_dim)
    end = gguf.metadata.get("tokenizer.ggml.eos_token_id")
    config = {
        "model_type": kind,
        "vocab_size": len(gguf.metadata.get("tokenizer.ggml.tokens", ())) or gguf.get("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": gguf.get("feed_forward_length", 0),
        "num_hidden_layers": _size(gguf, "block_count") - nextn,
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _size(gguf, "context_length"),
        "rms_norm_eps": gguf.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end,
        "dtype": str(_dtype(gguf)).removeprefix("mlx.core."),
    }
    scaling = _rope_scaling(gguf, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if kind == "llama":
        config |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    if kind.endswith(("_moe", "_moe_text")):
        config |= {
            "num_experts": gguf.get("expert_count"),
            "num_experts_per_tok": gguf.get("expert_used_count"),
            "moe_intermediate_size": gguf.get("expert_feed_forward_length"),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    if kind.startswith("qwen3_5"):
        config |= _hybrid_config(gguf, theta, dimensions / head_dim)
    elif dimensions != head_dim:
        raise CheckpointError(
            f"{gguf.path}: rope.dimension_count is {dimensions}, and heads have {head_dim} numbers."
        )
    config = {name: value for name, value in config.items() if value is not None}
    if kind.startswith("qwen3_5"):  # as mlx-lm knows it
        outer = {name: config[name] for name in OUTER if name in config}
        return {"model_type": kind.removesuffix("_text"), **outer, "text_config": config}
    return config


def _hybrid_config(gguf: GGUFFile, theta: float, rotated: float) -> dict[str, Any]:
    """Return what Qwen3.5 has beside Qwen3's fields."""
    values = _size(gguf, "ssm.time_step_rank")
    return {
        "full_attention_interval": gguf.get("full_attention_interval", 4),
        "linear_conv_kernel_dim": gguf.get("ssm.conv_kernel"),
        "linear_key_head_dim": gguf.get("ssm.state_size"),
        "linear_num_key_heads": _size(gguf, "ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": _size(gguf, "ssm.inner_size") // values,
        "shared_expert_intermediate_size": gguf.get("expert_shared_feed_forward_length"),
        "mtp_num_hidden_layers": gguf.get("nextn_predict_layers", 0),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": rotated,
            "mrope_section": [size for size in gguf.get("rope.dimension_sections", ()) if size],
            "mrope_interleaved": True,
        },
    }


def gguf_header(gguf: GGUFFile, config: dict[str, Any]) -> Header:
    """Return the tensors of a file by the model's names, as MLX has them once they are made from it. `config` is
    config.json's text part."""
    tensors = {
        made.name: made
        for name, tensor in gguf.tensors.items()
        if name != ROPE_FACTORS
        for made in _made(tensor, config)
    }
    return Header(gguf.path, tensors, GGUF, False, "converted")


def _size(gguf: GGUFFile, name: str) -> int:
    value = gguf.get(name)
    if type(value) is not int or not 0 < value < 2**31:
        raise CheckpointError(f"{gguf.path}: {gguf.architecture}.{name} is {value!r}, not a size.")
    return value


def _dtype(gguf: GGUFFile) -> mx.Dtype:
    """Return the type of the embedding where the file holds it as it is; bfloat16, which has the range of all others,
    where it is quantised."""
    embedding = gguf.tensors.get("token_embd.weight")
    return embedding.blocks.dtype if embedding is not None and embedding.blocks.plain else mx.bfloat16


def _rope_scaling(gguf: GGUFFile, config: dict[str, Any]) -> dict[str, Any] | None:
    kind, factor = gguf.get("rope.scaling.type"), gguf.get("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = gguf.get("rope.scaling.original_context_length", config["max_position_embeddings"])
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind not in (None, "none"):
        raise CheckpointError(f"{gguf.path}: RoPE is scaled by {kind}; Headstart reads linear, yarn and Llama 3's.")
    if (tensor := gguf.tensors.get(ROPE_FACTORS)) is None:
        return None
    factors = read_lazily(_raw(tensor)).view(mx.float32)
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
    if not mx.allclose(factors, _llama3_factors(config, scaling), rtol=1e-4):
        raise CheckpointError(f"{gguf.path}: {ROPE_FACTORS} are not those of Llama 3, which Headstart reads.")
    return scaling


def _llama3_factors(config: dict[str, Any], scaling: dict[str, Any]) -> mx.array:
    """Return by what Llama 3 divides each frequency."""
    size = config["head_dim"]
    lengths = 2 * mx.pi * config["rope_theta"] ** (mx.arange(0, size, 2) / size)  # of waves
    low, high, original = (scaling[name] for name in LLAMA3)
    smooth = (original / lengths - low) / (high - low)
    middle = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    factors = mx.where(lengths > original / low, mx.array(scaling["factor"]), middle)
    return mx.where(lengths < original / high, mx.array(1.0), factors)


def _made(tensor: GGUFTensor, config: dict[str, Any]) -> Iterator[TensorInfo]:
    """Return what a tensor becomes: one, or a quantised matrix's three."""
    name, blocks = _canonical(tensor.name, config["num_hidden_layers"]), tensor.blocks
    path, _, leaf = name.rpartition(".")
    arrange = _arrangement(path if leaf in ("weight", "bias") else name, config)
    whole = not path.endswith("linear_attn.out_proj") or config["linear_value_head_dim"] % GROUP == 0
    if blocks.bits and leaf == "weight" and whole:
        columns = tensor.shape[-1]
        sizes = (columns * blocks.bits // 32, mx.uint32), *[(columns // GROUP, blocks.dtype)] * 2
        parts = [
            (f"{path}.{leaf}", (*tensor.shape[:-1], size), dtype, partial(_part, blocks, index))
            for index, (leaf, (size, dtype)) in enumerate(zip(LEAVES, sizes, strict=True))
        ]
    else:
        parts = [(name, tensor.shape, blocks.dtype, partial(_numbers, blocks))]
    for made, shape, dtype, make in parts:
        like = arrange(mx.zeros(shape, dtype))  # not computed
        yield TensorInfo(
            made,
            like.dtype,
            like.shape,
            tensor.file,
            tensor.start,
            (_raw(tensor),),
            partial(_arranged, arrange, make),
        )


def _raw(tensor: GGUFTensor) -> TensorInfo:
    """Return the tensor as the file holds it: its numbers, or the bytes of its rows."""
    if tensor.blocks.plain:
        return TensorInfo(tensor.name, tensor.blocks.dtype, tensor.shape, tensor.file, tensor.start)
    shape = (*tensor.shape[:-1], tensor.blocks.row_bytes(tensor.shape[-1]))
    return TensorInfo(tensor.name, mx.uint8, shape, tensor.file, tensor.start)


def _repacked(blocks: Blocks, raw: mx.array) -> Repacked:
    assert blocks.repack is not None
    return blocks.repack(raw.reshape(*raw.shape[:-1], -1, blocks.nbytes))


def _part(blocks: Blocks, index: int, raw: mx.array) -> mx.array:
    assert blocks.bits is not None
    made = _repacked(blocks, raw)
    return pack(made.codes, blocks.bits) if index == 0 else made[index]


def _numbers(blocks: Blocks, raw: mx.array) -> mx.array:
    if blocks.plain:
        return raw
    if blocks.compute is not None:
        return blocks.compute(raw.reshape(*raw.shape[:-1], -1, blocks.nbytes)).flatten(-2)
    codes, scales, biases = (part.astype(mx.float32) for part in _repacked(blocks, raw))
    return (mx.unflatten(codes, -1, (-1, GROUP)) * scales[..., None] + biases[..., None]).flatten(-2)


def _arranged(arrange: Arrange, make: Arrange, raw: mx.array) -> mx.array:
    return arrange(make(raw))


def _canonical(name: str, layers: int) -> str:
    """Return the model's name for a tensor, its own if it is unknown."""
    if (match := BLOCK.fullmatch(name)) is None:
        part, _, leaf = name.rpartition(".")
        return f"{NAMES[part]}.{leaf}" if part in NAMES else name
    layer, rest = int(match[1]), match[2]
    part, _, leaf = rest.rpartition(".")
    if part in HEAD:
        return f"mtp.{HEAD[part]}.{leaf}"
    place = f"layers.{layer}" if layer < layers else f"mtp.layers.{layer - layers}"
    if rest in BARE:
        return f"{place}.{BARE[rest]}"
    return f"{place}.{NAMES[part]}.{leaf}" if part in NAMES else name


def _arrangement(path: str, config: dict[str, Any]) -> Arrange:
    """Return what a parameter needs to be as it was released."""
    kind = path.rpartition(".")[2]
    if config["model_type"] == "llama" and kind in ("q_proj", "k_proj"):
        return partial(_unpaired, heads=config["num_attention_heads" if kind == "q_proj" else "num_key_value_heads"])
    if kind == "shared_expert_gate":
        return lambda x: x[None] if x.ndim == 1 else x
    if "linear_attn." not in path:
        return lambda x: x
    keys, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    regrouped = partial(_regrouped, keys=keys, per_key=config["linear_num_value_heads"] // keys)
    if kind == "out_proj":
        return lambda x: regrouped(x, axis=x.ndim - 1)
    if kind in ("in_proj_qkv", "conv1d"):
        first = 2 * keys * dim  # rows of queries and keys

        def values(x: mx.array) -> mx.array:
            made = mx.concatenate([x[:first], regrouped(x[first:])])
            return made[..., None] if kind == "conv1d" else made

        return values
    if kind == "A_log":
        return lambda x: regrouped(mx.log(-x))
    return regrouped if kind != "norm" else lambda x: x


def _unpaired(x: mx.array, heads: int) -> mx.array:
    """Return the rows of every head with its first halves of pairs before the second ones."""
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _regrouped(x: mx.array, keys: int, per_key: int, axis: int = 0) -> mx.array:
    """Return value heads that come key head after key head in the order of their key heads."""
    parts = x.reshape(*x.shape[:axis], per_key, keys, -1, *x.shape[axis + 1 :])
    return parts.swapaxes(axis, axis + 1).reshape(x.shape)
