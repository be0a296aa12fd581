"""Releases rewritten as other quantisers save them, with the numbers that their own formulas make of the codes.

    numbers = quantised(folder, "gptq", bits=4)

Codes, scales and zeros are random but sensible; the formulas are those of vLLM's readers, in float64 by numpy.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from checkpoints import write_shards

Numbers = dict[str, np.ndarray]
KEPT = (
    "embed_tokens",
    "lm_head",
    "norm",
    "conv1d",
    "mlp.gate.",
    "shared_expert_gate",
    "mtp.fc",
    "in_proj_a",
    "in_proj_b",
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
rng = np.random.default_rng(0)


def quantised(folder: Path, kind: str, **options: Any) -> Numbers:
    """Rewrite the release in a folder. Return what its matrices are now, in float64."""
    files: Any = [mx.load(str(file)) for file in sorted(folder.glob("*.safetensors"))]
    numbers, made = {}, {}
    for name, array in {name: a for file in files for name, a in file.items()}.items():
        if array.ndim != 2 or any(part in name for part in KEPT):
            made[name] = array
            continue
        tensors, numbers[name] = KINDS[kind](np.array(array.astype(mx.float32)), **options)
        made |= {f"{name.removesuffix('weight')}{part}": values for part, values in tensors.items()}
    write_shards(folder, made, 2, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CONFIGS[kind](**options)
    (folder / "config.json").write_text(json.dumps(config))
    return numbers


def affine(w: np.ndarray, bits: int, group: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, K], scales [N, G] in float16 and zeros [N, G]."""
    group = w.shape[1] if group < 0 else group
    parts = w.reshape(len(w), -1, group)
    zeros = np.full(parts.shape[:2], 1 << (bits - 1))
    if not symmetric:
        zeros = rng.integers(1, (1 << bits) - 1, parts.shape[:2])
    scales = (np.abs(parts).max(-1) / (1 << (bits - 1))).astype(np.float16)
    codes = np.clip(np.rint(parts / scales[..., None]) + zeros[..., None], 0, (1 << bits) - 1)
    return codes.reshape(w.shape).astype(np.uint32), scales, zeros


def stream(values: np.ndarray, bits: int) -> mx.array:
    """Pack along the last axis, from low to high, across words."""
    digits = (values[..., None] >> np.arange(bits)) & 1
    words = digits.reshape(*values.shape[:-1], -1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
    return mx.array(words.sum(-1).astype(np.uint32).view(np.int32))


def gptq(
    w: np.ndarray, bits: int = 4, group: int = 32, sym: bool = False, order: bool = False, v2: bool = False
) -> Any:
    codes, scales, zeros = affine(w, bits, group, sym)
    index = np.arange(w.shape[1]) // (w.shape[1] // scales.shape[1])
    index = rng.permutation(index) if order else index
    numbers = (codes.astype(np.float64) - zeros[:, index]) * scales.astype(np.float64)[:, index]
    parts = {
        "qweight": mx.contiguous(stream(codes, bits).T),
        "scales": mx.array(scales.T.copy()),
        "qzeros": stream((zeros.T - (0 if v2 else 1)).astype(np.uint32), bits),
        "g_idx": mx.array(index.astype(np.int32)),
    }
    return parts, numbers


def awq(w: np.ndarray, group: int = 64) -> Any:
    codes, scales, zeros = affine(w, 4, group, symmetric=False)

    def packed(values: np.ndarray) -> mx.array:
        words = np.zeros((len(values), values.shape[1] // 8), np.uint32)
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words |= values[:, output::8].astype(np.uint32) << np.uint32(4 * place)
        return mx.array(words.view(np.int32))

    numbers = (codes.astype(np.float64) - np.repeat(zeros, group, 1)) * np.repeat(scales.astype(np.float64), group, 1)
    return {"qweight": packed(codes.T), "scales": mx.array(scales.T.copy()), "qzeros": packed(zeros.T)}, numbers


def packed_integers(w: np.ndarray, bits: int = 4, group: int = 32, sym: bool = True, order: bool = False) -> Any:
    codes, scales, zeros = affine(w, bits, group, sym)
    index = np.arange(w.shape[1]) // (w.shape[1] // scales.shape[1])
    index = rng.permutation(index) if order else index
    numbers = (codes.astype(np.float64) - zeros[:, index]) * scales.astype(np.float64)[:, index]
    parts = {
        "weight_packed": stream(codes, bits),
        "weight_scale": mx.array(scales),
        "weight_shape": mx.array(w.shape, mx.int64),
    }
    if not sym:
        parts["weight_zero_point"] = mx.contiguous(stream(zeros.T.astype(np.uint32), bits).T)
    if order:
        parts["weight_g_idx"] = mx.array(index.astype(np.int32))
    return parts, numbers


def eight_bit_integers(w: np.ndarray, sym: bool = True) -> Any:
    codes, scales, zeros = affine(w, 8, -1, sym)
    numbers = (codes.astype(np.float64) - zeros) * scales.astype(np.float64)
    parts = {"weight": mx.array((codes.astype(np.int32) - 128).astype(np.int8)), "weight_scale": mx.array(scales)}
    if not sym:
        parts["weight_zero_point"] = mx.array((zeros - 128).astype(np.int8))
    return parts, numbers


def fp8(w: np.ndarray, scales: str = "channel") -> Any:
    shape = {"tensor": (), "one": (1,), "row": (len(w),), "channel": (len(w), 1)}[scales]
    scale = np.abs(w).max(1, keepdims=True) if len(shape) and shape[0] == len(w) else np.abs(w).max()
    scale = (scale / 448).astype(np.float32).reshape(shape)
    wide = scale.reshape(-1, 1) if scale.ndim else scale
    codes = mx.to_fp8(mx.array(w / wide))
    numbers = np.array(mx.from_fp8(codes, mx.float32)).astype(np.float64) * wide
    return {"weight": codes, "weight_scale": mx.array(scale), "input_scale": mx.array(1.0)}, numbers


def fp4(w: np.ndarray, maker: str = "modelopt") -> Any:
    size = 32 if maker == "mx" else 16
    parts = w.reshape(len(w), -1, size)
    largest = np.abs(parts).max(-1)
    whole = np.float32(largest.max() / 2688) if maker != "mx" else np.float32(1)
    if maker == "mx":
        exponents = np.ceil(np.log2(largest / 6))
        stored, scale = mx.array((exponents + 127).astype(np.uint8)), 2.0**exponents
    else:
        stored = mx.to_fp8(mx.array((largest / 6 / whole).astype(np.float32)))
        scale = np.array(mx.from_fp8(stored, mx.float32)).astype(np.float64) * np.float64(whole)
    codes = np.abs(parts[..., None] / scale[..., None, None] - E2M1).argmin(-1).reshape(w.shape)
    numbers = E2M1[codes] * np.repeat(scale, size, 1)
    packed = mx.array((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
    if maker == "modelopt":
        return {"weight": packed, "weight_scale": stored, "weight_scale_2": mx.array(whole)}, numbers
    made = {"weight_packed": packed, "weight_scale": stored}
    if maker != "mx":  # compressed-tensors divides by it
        made["weight_global_scale"] = mx.array([float(np.float32(1) / whole)])
    return made, numbers


KINDS: dict[str, Callable[..., tuple[dict[str, mx.array], np.ndarray]]] = {
    "gptq": gptq, "awq": awq, "packed": packed_integers, "int8": eight_bit_integers, "fp8": fp8, "fp4": fp4,
}  # fmt: skip


def _gptq_config(bits: int = 4, group: int = 32, sym: bool = False, order: bool = False, v2: bool = False) -> Any:
    form = {"checkpoint_format": "gptq_v2"} if v2 else {}
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": order, **form}


def _scheme(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


CONFIGS: dict[str, Callable[..., dict[str, Any]]] = {
    "gptq": _gptq_config,
    "awq": lambda group=64: {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"},
    "packed": lambda bits=4, group=32, **_: _scheme(num_bits=bits, group_size=group if group > 0 else None),
    "int8": lambda **_: _scheme(num_bits=8, strategy="channel"),
    "fp8": lambda **_: _scheme(num_bits=8, type="float"),
    "fp4": lambda maker="modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
