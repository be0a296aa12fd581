"""Tiny random checkpoints of every family and layout, written as real safetensors folders.

    write(folder, "dense")                                  raw, as released
    write(folder, "moe", "raw-fused")                       raw, experts of trunk and head fused
    write(folder, "next", "converted", bits=4)              as mlx-lm converts it, with the head kept
    write(folder, "dense", "sidecar", sidecar="mtp.safetensors")

The same family, seed and sizes give the same model in every layout. Its next token is mostly a
permutation of the last one, disturbed by the layers, and its head knows that permutation: greedy
text varies, and some drafts are accepted and some are not.
"""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

Arrays = dict[str, mx.array]

TOKENIZER = Path(__file__).parents[1] / "src/headstart/builtin/tiny-qwen3.5"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

FAMILIES = {"dense": "qwen3_5", "moe": "qwen3_5_moe", "next": "qwen3_next"}
LAYOUTS = (
    "raw",  # as released: Qwen3.5 MoE has a fused trunk and a per-expert head
    "raw-fused",  # Qwen3.6: the head's experts are fused too
    "raw-per-expert",
    "fp8",  # raw, per expert, 128 x 128 blocks with `weight_scale_inv`
    "converted",  # MLX, head kept
    "stripped",  # MLX, no head, config still promises one
    "sidecar",  # MLX, head in a file of its own
    "raw-sidecar",  # MLX trunk, raw head in a file of its own
)

DTYPES = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16",
    mx.uint8: "U8", mx.uint32: "U32", mx.int8: "I8", mx.int32: "I32", mx.int64: "I64",
}  # fmt: skip


def write(
    folder: Path,
    family: str = "dense",
    layout: str = "raw",
    *,
    seed: int = 0,
    dtype: mx.Dtype = mx.bfloat16,
    head: bool = True,
    tie: bool = False,
    bits: int | None = None,
    group_size: int = 64,
    head_bits: int | None = None,
    shards: int = 2,
    sidecar: str = "mtp.safetensors",
    **sizes: Any,
) -> Path:
    """Write the checkpoint and return its folder. `bits` and `head_bits` want a converted layout."""
    assert layout in LAYOUTS
    assert bits is None or layout in ("converted", "stripped", "sidecar", "raw-sidecar")
    config = make_config(family, tie=tie, dtype=dtype, **sizes)
    text = config.get("text_config", config)
    arrays = random_arrays(text, seed=seed, dtype=dtype)
    trunk = {k: v for k, v in arrays.items() if not k.startswith("mtp.")}
    mtp = {k: v for k, v in arrays.items() if k.startswith("mtp.")} if head else {}
    if layout == "stripped":
        mtp = {}

    folder.mkdir(parents=True, exist_ok=True)
    if layout in ("raw", "raw-fused", "raw-per-expert", "fp8"):
        trunk_fused = layout == "raw-fused" or (layout == "raw" and family == "moe")
        trunk = fuse_experts(trunk) if trunk_fused else trunk
        mtp = fuse_experts(mtp) if layout == "raw-fused" else mtp
        files = raw_names({**trunk, **mtp}, family)
        if layout == "fp8":
            files = to_fp8(files)
            config["quantization_config"] = {
                "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]
            }  # fmt: skip
        write_shards(folder, files, shards, {"format": "pt"})
    else:
        raw_mtp = mtp
        trunk, mtp = convert(trunk), convert(mtp)
        if bits:
            trunk = quantize(trunk, bits, group_size)
            config["quantization"] = {"group_size": group_size, "bits": bits, "mode": "affine"}
            config["quantization_config"] = config["quantization"]
        if head_bits:
            mtp = quantize(mtp, head_bits, group_size)
        trunk = converted_names(trunk, family)
        if layout == "converted":
            trunk |= converted_names(mtp, family)
        write_shards(folder, trunk, shards, {"format": "mlx"})
        if layout == "sidecar" and head:
            save(folder / sidecar, mtp, {"format": "mlx"})
        if layout == "raw-sidecar" and head:
            save(folder / sidecar, raw_mtp, {"format": "pt"})

    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


def make_config(family: str, *, tie: bool, dtype: mx.Dtype, **sizes: Any) -> dict[str, Any]:
    dtype_name = str(dtype).removeprefix("mlx.core.")
    text: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "tie_word_embeddings": tie,
        "mtp_num_hidden_layers": 1,
        "dtype": dtype_name,
        "eos_token_id": 8187,
    }
    if family != "dense":
        text |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    if family == "next":
        text |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_scaling": None}
        text["num_nextn_predict_layers"] = text.pop("mtp_num_hidden_layers")
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            **text,
            **sizes,
        }
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    }
    kind = FAMILIES[family]
    names = {"dense": "Qwen3_5", "moe": "Qwen3_5Moe"}
    return {
        "architectures": [f"{names[family]}ForConditionalGeneration"],
        "model_type": kind,
        "dtype": dtype_name,
        "tie_word_embeddings": tie,
        "text_config": {**text, "model_type": f"{kind}_text", **sizes},
    }


def random_arrays(text: dict[str, Any], *, seed: int, dtype: mx.Dtype) -> Arrays:
    """Raw arrays (zero-centred norms, conv1d [C, 1, K], one array per expert), without prefixes."""
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    H, V = text["hidden_size"], text["vocab_size"]

    def put(name: str, values: Any) -> None:
        arrays[name] = mx.array(np.asarray(values, np.float32)).astype(dtype)

    def linear(name: str, out: int, inp: int, scale: float = 1.0) -> None:
        put(f"{name}.weight", rng.standard_normal((out, inp)) * scale / inp**0.5)

    def norm(name: str, size: int) -> None:
        # Multiples of 1/128, so that 1 + w is exact in bfloat16 and a converted file holds the
        # same norm as a raw one.
        put(f"{name}.weight", rng.integers(-24, 25, size) / 128)

    def mlp(name: str, inner: int) -> None:
        linear(f"{name}.gate_proj", inner, H)
        linear(f"{name}.up_proj", inner, H)
        linear(f"{name}.down_proj", H, inner)

    def layer(name: str, *, full: bool) -> None:
        norm(f"{name}.input_layernorm", H)
        norm(f"{name}.post_attention_layernorm", H)
        if full:
            heads, kv, D = (
                text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
            )  # fmt: skip
            linear(f"{name}.self_attn.q_proj", 2 * heads * D, H)
            linear(f"{name}.self_attn.k_proj", kv * D, H)
            linear(f"{name}.self_attn.v_proj", kv * D, H)
            linear(f"{name}.self_attn.o_proj", H, heads * D)
            norm(f"{name}.self_attn.q_norm", D)
            norm(f"{name}.self_attn.k_norm", D)
        else:
            n_k, n_v = text["linear_num_key_heads"], text["linear_num_value_heads"]
            key, value = n_k * text["linear_key_head_dim"], n_v * text["linear_value_head_dim"]
            net, conv = f"{name}.linear_attn", 2 * key + value
            if "num_nextn_predict_layers" in text:
                linear(f"{net}.in_proj_qkvz", conv + value, H)
                linear(f"{net}.in_proj_ba", 2 * n_v, H)
            else:
                linear(f"{net}.in_proj_qkv", conv, H)
                linear(f"{net}.in_proj_z", value, H)
                linear(f"{net}.in_proj_b", n_v, H)
                linear(f"{net}.in_proj_a", n_v, H)
            put(
                f"{net}.conv1d.weight",
                rng.standard_normal((conv, 1, text["linear_conv_kernel_dim"])) / 2,
            )
            put(f"{net}.dt_bias", rng.uniform(-4, 0, n_v))
            put(f"{net}.A_log", np.log(rng.uniform(1, 8, n_v)))
            put(f"{net}.norm.weight", 1 + rng.integers(-24, 25, text["linear_value_head_dim"]) / 128)
            linear(f"{net}.out_proj", H, value)
        if experts := text.get("num_experts", 0):
            linear(f"{name}.mlp.gate", experts, H, scale=3)
            linear(f"{name}.mlp.shared_expert_gate", 1, H)
            mlp(f"{name}.mlp.shared_expert", text["shared_expert_intermediate_size"])
            for e in range(experts):
                mlp(f"{name}.mlp.experts.{e}", text["moe_intermediate_size"])
        else:
            mlp(f"{name}.mlp", text["intermediate_size"])

    # Tied, a large embedding would only ever repeat the last token.
    embedding = rng.standard_normal((V, H)) * (0.1 if text["tie_word_embeddings"] else 1.0)
    put("embed_tokens.weight", embedding)
    for n in range(text["num_hidden_layers"]):
        layer(f"layers.{n}", full=(n + 1) % text["full_attention_interval"] == 0)
    norm("norm", H)
    if not text["tie_word_embeddings"]:
        follows = rng.permutation(V)
        put("lm_head.weight", embedding[follows] * 3 / H**0.5)

    # The head starts from the embedding of the last token, as the trunk does.
    fc = np.concatenate([np.eye(H), np.zeros((H, H))], axis=1)
    put("mtp.fc.weight", fc + rng.standard_normal((H, 2 * H)) * 0.1 / H**0.5)
    norm("mtp.pre_fc_norm_embedding", H)
    norm("mtp.pre_fc_norm_hidden", H)
    norm("mtp.norm", H)
    heads = text.get("mtp_num_hidden_layers") or text["num_nextn_predict_layers"]
    for n in range(heads):
        layer(f"mtp.layers.{n}", full=True)
    return arrays


def experts_of(arrays: Arrays) -> dict[str, int]:
    """`...mlp` -> number of experts, for every MoE block in `arrays`."""
    counts: dict[str, int] = {}
    for name in arrays:
        if ".mlp.experts." in name:
            block = name.split(".experts.")[0]
            counts[block] = max(counts.get(block, 0), int(name.split(".experts.")[1].split(".")[0]) + 1)
    return counts


def fuse_experts(arrays: Arrays) -> Arrays:
    """Per expert -> `experts.gate_up_proj` [E, 2I, H] (gate first), `experts.down_proj` [E, H, I]."""
    arrays = dict(arrays)
    for block, count in experts_of(arrays).items():
        gate, up, down = (
            mx.stack([arrays.pop(f"{block}.experts.{e}.{p}.weight") for e in range(count)])
            for p in ("gate_proj", "up_proj", "down_proj")
        )
        arrays[f"{block}.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
        arrays[f"{block}.experts.down_proj"] = down
    return arrays


def is_shifted_norm(name: str) -> bool:
    return "norm" in name and not name.endswith("linear_attn.norm.weight")


def convert(arrays: Arrays) -> Arrays:
    """What a conversion to MLX does: shift norms, transpose conv1d, stack experts."""
    arrays = dict(arrays)
    for block, count in experts_of(arrays).items():
        for p in ("gate_proj", "up_proj", "down_proj"):
            arrays[f"{block}.switch_mlp.{p}.weight"] = mx.stack(
                [arrays.pop(f"{block}.experts.{e}.{p}.weight") for e in range(count)]
            )
    for name, value in arrays.items():
        if is_shifted_norm(name):
            arrays[name] = value + 1.0
        elif name.endswith("conv1d.weight"):
            arrays[name] = mx.contiguous(value.moveaxis(2, 1))
    return arrays


def quantize(arrays: Arrays, bits: int, group_size: int) -> Arrays:
    """Every matrix to `bits`, routers to 8, `mtp.fc` as it is: what conversions do."""
    out: Arrays = {}
    for name, value in arrays.items():
        if value.ndim < 2 or "conv1d" in name or name == "mtp.fc.weight":
            out[name] = value
            continue
        router = name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        packed = mx.quantize(value, group_size=group_size, bits=8 if router else bits)
        for suffix, part in zip(("weight", "scales", "biases"), packed, strict=True):
            out[name.removesuffix("weight") + suffix] = part
    return out


def requantize(folder: Path, mode: str, *, keep: tuple[str, ...] = ()) -> Path:
    """Rewrite a converted checkpoint with its matrices in nvfp4, mxfp4 or mxfp8, routers in affine 8 bits as mlx-lm
    writes them; those with a part of `keep` in their names stay as they are."""
    bits, group = {"nvfp4": (4, 16), "mxfp4": (4, 32), "mxfp8": (8, 32)}[mode]
    files = sorted(folder.glob("*.safetensors"))
    arrays: Arrays = {name: array for file in files for name, array in mx.load(str(file)).items()}  # type: ignore[union-attr]
    out: Arrays = {}
    for name, value in arrays.items():
        router = name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        if value.ndim < 2 or any(part in name for part in ("conv1d", "mtp.fc", *keep)):
            out[name] = value
            continue
        packed = mx.quantize(value, bits=8) if router else mx.quantize(value, group, bits, mode=mode)
        for suffix, part in zip(("weight", "scales", "biases"), packed, strict=False):
            out[name.removesuffix("weight") + suffix] = part
    mx.eval(out)
    write_shards(folder, out, len(files), {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": group, "bits": bits, "mode": mode}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def to_fp8(arrays: Arrays, block: int = 128) -> Arrays:
    """Linear layers inside decoder layers to float8 e4m3 with one scale per block."""
    out: Arrays = {}
    for name, value in arrays.items():
        small = ("in_proj_a.", "in_proj_b.", "in_proj_ba.", ".gate.", "_gate.", "conv1d", "mtp.fc")
        if value.ndim != 2 or ".layers." not in name or any(part in name for part in small):
            out[name] = value
            continue
        rows, cols = value.shape
        pad = [(0, -rows % block), (0, -cols % block)]
        tiles = mx.pad(value.astype(mx.float32), pad)
        tiles = tiles.reshape(tiles.shape[0] // block, block, tiles.shape[1] // block, block)
        scale = mx.abs(tiles).max(axis=(1, 3)) / 448
        codes = mx.to_fp8((tiles / scale[:, None, :, None]).reshape(rows + pad[0][1], -1))
        out[name] = codes[:rows, :cols]  # uint8, saved as F8_E4M3
        out[f"{name}_scale_inv"] = scale.astype(mx.bfloat16)
    return out


def raw_names(arrays: Arrays, family: str) -> Arrays:
    model = "model" if family == "next" else "model.language_model"
    return {k if k.startswith(("mtp.", "lm_head.")) else f"{model}.{k}": v for k, v in arrays.items()}


def converted_names(arrays: Arrays, family: str) -> Arrays:
    outer = "" if family == "next" else "language_model."
    return {
        f"{outer}{k}" if k.startswith(("mtp.", "lm_head.")) else f"{outer}model.{k}": v for k, v in arrays.items()
    }


def write_shards(folder: Path, arrays: Arrays, shards: int, metadata: dict[str, str]) -> None:
    """In order of name and cut anywhere, so that one layer's experts can lie in two files."""
    names = sorted(arrays)
    size = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for n in range(shards):
        part = names[n * size : (n + 1) * size]
        file = f"model-{n + 1:05}-of-{shards:05}.safetensors"
        save(folder / file, {name: arrays[name] for name in part}, metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(a.nbytes for a in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def save(path: Path, arrays: Arrays, metadata: dict[str, str] | None) -> None:
    """mlx cannot name float8, and writes `"__metadata__": null` where others write none."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    mx.eval(arrays)  # they may be lazy, and of this very file
    at = 0
    for name, value in arrays.items():
        dtype = "F8_E4M3" if f"{name}_scale_inv" in arrays else DTYPES[value.dtype]
        header[name] = {"dtype": dtype, "shape": value.shape, "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for value in arrays.values():
            file.write(np.array(mx.contiguous(value).reshape(-1).view(mx.uint8)).tobytes())


def write_empty(folder: Path, config: dict[str, Any], shapes: dict[str, list[int]]) -> Path:
    """A folder of any size whose bfloat16 tensors are holes on disk: nothing but headers is stored."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_drafter(
    folder: Path,
    target: Path,
    *,
    layers: tuple[int, ...] = (0, 2),
    block_size: int = 16,
    kinds: tuple[str, ...] = ("full_attention", "full_attention"),
    window: int = 6,
    flat: bool = False,
    seed: int = 1,
    dtype: mx.Dtype = mx.bfloat16,
    second: bool = False,
    dim: int = 16,
    **fields: Any,
) -> Path:
    """Write a random DFlash drafter for the model at `target`, or with `second` a DFlash2, in the released layout."""
    config = json.loads((target / "config.json").read_text())
    text = config.get("text_config", config)
    hidden, heads, kv, inner = text["hidden_size"], 4, 2, 96
    ours = {"mask_token_id": text["vocab_size"] - 1, "target_layer_ids": list(layers)}
    taps, group, rank = 2, 16, 8
    if second:
        ours |= {"conv_kernel_size": taps, "conv_group_size": group, "selector_rank": rank, "selector_top_k": 4}
        fields = {"is_causal": False, **fields}
    drafter = {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "vocab_size": text["vocab_size"],
        "num_target_layers": text["num_hidden_layers"],
        "num_hidden_layers": len(kinds),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "intermediate_size": inner,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": text["max_position_embeddings"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "block_size": block_size,
        "layer_types": list(kinds),
        "sliding_window": window if "sliding_attention" in kinds else None,
        **(ours if flat else {"dflash_config": ours}),
        **fields,
    }
    rng = np.random.default_rng(seed)

    def matrix(out: int, inp: int) -> mx.array:
        return mx.array((rng.standard_normal((out, inp)) / inp**0.5).astype(np.float32)).astype(dtype)

    def norm(size: int) -> mx.array:
        return mx.array(1 + rng.integers(-24, 25, size).astype(np.float32) / 128).astype(dtype)

    arrays = {"fc.weight": matrix(hidden, len(layers) * hidden), "hidden_norm.weight": norm(hidden)}
    for n in range(len(kinds)):
        part, mlp = f"layers.{n}.self_attn", f"layers.{n}.mlp"
        for name, out, inp in (
            (f"{part}.q_proj", heads * dim, hidden), (f"{part}.k_proj", kv * dim, hidden),
            (f"{part}.v_proj", kv * dim, hidden), (f"{part}.o_proj", hidden, heads * dim),
            (f"{mlp}.gate_proj", inner, hidden), (f"{mlp}.up_proj", inner, hidden),
            (f"{mlp}.down_proj", hidden, inner),
        ):  # fmt: skip
            arrays[f"{name}.weight"] = matrix(out, inp)
        arrays |= {f"{part}.{name}.weight": norm(dim) for name in ("q_norm", "k_norm")}
        arrays |= {
            f"layers.{n}.{name}.weight": norm(hidden) for name in ("input_layernorm", "post_attention_layernorm")
        }
        for conv in ("attention_conv", "mlp_conv") if second else ():
            arrays[f"layers.{n}.{conv}.base_kernel"] = matrix(2 * taps, hidden).reshape(2, taps, hidden) * 4
            arrays[f"layers.{n}.{conv}.kernel_projection.weight"] = matrix(2 * taps * (hidden // group), hidden)
    arrays["norm.weight"] = norm(hidden)
    if second:
        for name in ("predecessor_codebook", "successor_codebook"):
            arrays[f"candidate_selector.{name}"] = matrix(text["vocab_size"], rank) * 3
        arrays["candidate_selector.hidden_projection.weight"] = matrix(rank, hidden)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "model.safetensors", arrays, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(drafter, indent=2))
    return folder
