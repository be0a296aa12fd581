"""Tensors of other quantisers, as MLX's quantisation has them: AWQ, GPTQ, compressed-tensors, ModelOpt and FP8.

What a matrix is made of stands beside it under names that say what it is. Whole numbers with a scale, and FP4 and
FP8 with scales of eight bits, are the same numbers in one of MLX's modes: codes change places, nothing is rounded.
Other FP8, and codes whose groups are in another order (GPTQ's act-order), are computed in float32.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import CheckpointError
from ..kernels.weights import NVFP4_MOST
from .blocks import pack, unpack
from .parameters import GROUP_SIZES
from .safetensors import Header, TensorInfo

METHODS = ("awq", "gptq", "compressed-tensors", "modelopt", "fp8")  # as config.json names them
FP8_BLOCK = 128
MXFP8_GROUP = 32
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word AWQ has each of eight outputs
# The matrix, and what may stand beside it.
NAMES = {
    "qweight": ("scales", "qzeros", "g_idx"),
    "weight_packed": ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_global_scale", "weight_shape"),
    "weight": ("weight_scale", "weight_scale_2", "weight_scale_inv", "weight_zero_point", "scale"),
}
SCALES = {"scales", "weight_scale", "weight_scale_inv", "scale"}  # one of which every matrix has
CODES = (mx.uint8, mx.int8)  # of floats in eight bits, and of two in four
IGNORED = ("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale")  # of activations
DIVIDED = "kv_b_proj"  # in two, across its groups
Parts = dict[str, TensorInfo]  # of a matrix, by NAMES


class Unpacked(NamedTuple):
    """A matrix of whole numbers: (code - zero) · scale."""

    words: mx.array  # [N, K · bits / 32], as MLX packs them
    scales: mx.array  # [N, G]
    zeros: mx.array | None  # [N, G]; None: half of the codes are below


def repacked(headers: list[Header], config: dict[str, Any]) -> list[Header]:
    """Return the headers with MLX's tensors in place of those of other quantisers. What a tensor is made of may be in
    several files. `config` is config.json."""
    found = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    made: dict[str, list[TensorInfo]] = {}  # by the name of the matrix
    gone: set[str] = set()
    tried: set[Any] = set()  # shapes that fit together
    settings = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config") or {}
    for name in found:
        module, _, leaf = name.rpartition(".")
        beside = {part: found[f"{module}.{part}"] for part in NAMES.get(leaf, ()) if f"{module}.{part}" in found}
        if found[name].dtype not in CODES:  # `scale` is DeepSeek-V4's name, and of other families something else's
            beside.pop("scale", None)
        if SCALES & beside.keys():
            parts = {leaf: found[name], **beside}
            made[name] = _made(module, parts, settings)
            shapes = tuple((part, tensor.shape, tensor.dtype) for part, tensor in parts.items())
            if shapes not in tried and not all(map(_fits, made[name])):
                raise _unreadable(module, parts)
            tried.add(shapes)
            gone |= {f"{module}.{part}" for part in beside}
    if not made:
        return headers
    gone |= {name for name in found if name.rpartition(".")[2] in IGNORED}
    new = []
    for header in headers:
        kept = [
            each for name, tensor in header.tensors.items() if name not in gone for each in made.get(name, [tensor])
        ]
        new.append(replace(header, tensors={each.name: each for each in kept}, provenance="raw"))
    return new


def _made(module: str, parts: Parts, settings: dict[str, Any]) -> list[TensorInfo]:
    if "scale" in parts:
        parts = {"weight": parts["weight"], "weight_scale": parts["scale"]}
    try:
        if "qweight" in parts:
            same = parts["qweight"].shape[1] == parts["scales"].shape[1]
            return _gptq(module, parts, settings) if same else _awq(module, parts, settings)
        if "weight_scale_inv" not in parts and parts["weight_scale"].dtype == mx.uint8:
            blocks = tuple(-(-size // FP8_BLOCK) for size in parts.get("weight", parts["weight_scale"]).shape)
            return (_mxfp8 if parts["weight_scale"].shape == blocks else _fp4)(module, parts)
        if "weight" in parts and parts["weight"].dtype == mx.uint8:
            return _fp8(module, parts)
        return _whole_numbers(module, parts, settings)
    except (ValueError, KeyError, IndexError, ZeroDivisionError, StopIteration) as error:
        raise _unreadable(module, parts) from error


def _fits(tensor: TensorInfo) -> bool:
    """Return whether what a tensor is made of fits together; nothing is computed."""
    assert tensor.make is not None
    try:
        like = tensor.make(*(mx.zeros(part.shape, part.dtype) for part in tensor.parts))
    except ValueError:
        return False
    return (like.shape, like.dtype) == (tensor.shape, tensor.dtype)


def _unreadable(module: str, parts: Parts) -> CheckpointError:
    shapes = ", ".join(f"{name} {list(part.shape)} {part.dtype}" for name, part in parts.items())
    return CheckpointError(f"{module}: cannot be read as it is quantised ({shapes.replace('mlx.core.', '')}).")


# -- Whole numbers


def _gptq(module: str, parts: Parts, settings: dict[str, Any]) -> list[TensorInfo]:
    weight, scales, zeros = parts["qweight"], parts["scales"], parts.get("qzeros")
    bits = int(settings["bits"]) if zeros is None else 32 * zeros.shape[1] // scales.shape[1]
    less = settings.get("checkpoint_format", "gptq") != "gptq_v2"  # the first format has zeros less one
    symmetric = zeros is None or bool(settings.get("sym"))
    shape = scales.shape[1], weight.shape[0] * 32 // bits

    def read(codes: mx.array, scales: mx.array, zeros: mx.array | None = None) -> Unpacked:
        words = mx.contiguous(codes.T).view(mx.uint32)
        if zeros is None or symmetric:
            return Unpacked(words, scales.T, None)
        return Unpacked(words, scales.T, unpack(zeros.view(mx.uint32), bits).T.astype(mx.int32) + int(less))

    index = parts.get("g_idx") if settings.get("desc_act") else None
    used = [weight, scales, *([] if zeros is None else [zeros])]
    return _matrix(module, shape, bits, scales.shape[0], used, read, symmetric, index)


def _awq(module: str, parts: Parts, settings: dict[str, Any]) -> list[TensorInfo]:
    weight, scales = parts["qweight"], parts["scales"]
    if str(settings.get("version", "gemm")).lower() != "gemm" or weight.shape[1] * 8 != scales.shape[1]:
        raise ValueError("not AWQ's gemm version")

    def read(codes: mx.array, scales: mx.array, zeros: mx.array) -> Unpacked:
        return Unpacked(pack(mx.contiguous(_awq_codes(codes).T), 4), scales.T, _awq_codes(zeros).T)

    used = [weight, scales, parts["qzeros"]]
    return _matrix(module, (scales.shape[1], weight.shape[0]), 4, scales.shape[0], used, read, symmetric=False)


def _awq_codes(packed: mx.array) -> mx.array:
    """Return the codes [..., N] of words that hold eight each."""
    shifts = mx.array([4 * place for place in AWQ_PLACES], mx.uint32)
    return ((packed.view(mx.uint32)[..., None] >> shifts) & 15).astype(mx.uint8).flatten(-2)


def _whole_numbers(module: str, parts: Parts, settings: dict[str, Any]) -> list[TensorInfo]:
    """Read compressed-tensors' codes in words, or its whole numbers of eight bits."""
    scale, zeros, packed = parts["weight_scale"], parts.get("weight_zero_point"), parts.get("weight_packed")
    groups = scale.shape[1] if len(scale.shape) > 1 else 1
    codes = parts["weight"] if packed is None else packed
    bits = (
        8
        if packed is None
        else next(
            bits
            for bits, size in _schemes(settings)
            if groups == 1 or packed.shape[1] * 32 // bits == groups * size  # of a mixture, those whose groups fit
        )
    )
    shape = codes.shape[0], codes.shape[1] if packed is None else codes.shape[1] * 32 // bits
    if (codes.dtype != mx.int8 if packed is None else codes.dtype != mx.int32) or bits not in (2, 4, 8):
        raise ValueError("neither bytes nor words")

    def read(codes: mx.array, scales: mx.array, zeros: mx.array | None = None) -> Unpacked:
        scales = mx.broadcast_to(scales.reshape(-1, groups), (shape[0], groups))
        if codes.dtype == mx.int8:
            words = pack((codes.astype(mx.int32) + 128).astype(mx.uint8), 8)
            return Unpacked(words, scales, None if zeros is None else zeros.astype(mx.int32) + 128)
        if zeros is not None:  # packed by output
            zeros = unpack(mx.contiguous(zeros.T).view(mx.uint32), bits).T
        return Unpacked(codes.view(mx.uint32), scales, zeros)

    used = [codes, scale, *([] if zeros is None else [zeros])]
    return _matrix(module, shape, bits, groups, used, read, zeros is None, parts.get("weight_g_idx"))


def _schemes(settings: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the bits and group sizes that config.json names."""
    groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    return [(int(each["num_bits"]), int(each.get("group_size") or 0)) for each in groups if "num_bits" in each]


def _matrix(
    module: str,
    shape: tuple[int, int],
    bits: int,
    groups: int,
    parts: list[TensorInfo],
    read: Callable[..., Unpacked],
    symmetric: bool,
    index: TensorInfo | None = None,
) -> list[TensorInfo]:
    """Return weight, scales and biases of a matrix [N, K] in the affine mode; those of larger groups are repeated.

    The product of a zero and a scale is exact in float32, in any type if the zero is a power of two. With the `index`
    of every input's group [K] the matrix is computed.
    """
    rows, columns = shape
    group, weight = columns // groups, parts[0]
    size = next((size for size in reversed(GROUP_SIZES) if group % size == 0), None)
    if index is not None or size is None or module.endswith(DIVIDED):
        used = [*parts, *([] if index is None else [index])]
        return [
            _dense(module, shape, used, partial(_numbers, read, bits, index is not None), f"{bits} bits", bits, group)
        ]
    dtype = parts[1].dtype if symmetric else mx.float32
    sizes = {"weight": columns * bits // 32, "scales": columns // size, "biases": columns // size}
    return [
        TensorInfo(
            f"{module}.{leaf}",
            mx.uint32 if leaf == "weight" else dtype,
            (rows, size_of_leaf),
            weight.file,
            weight.start,
            tuple(parts),
            partial(_leaf, read, leaf, bits, group // size, dtype),
        )
        for leaf, size_of_leaf in sizes.items()
    ]


def _leaf(
    read: Callable[..., Unpacked], leaf: str, bits: int, times: int, dtype: mx.Dtype, *parts: mx.array
) -> mx.array:
    words, scales, zeros = read(*parts)
    if leaf == "weight":
        return words
    scales = mx.repeat(scales.astype(dtype), times, axis=1)
    if leaf == "scales":
        return scales
    return scales * -(1 << bits - 1) if zeros is None else -scales * mx.repeat(zeros.astype(dtype), times, axis=1)


def _numbers(read: Callable[..., Unpacked], bits: int, ordered: bool, *parts: mx.array) -> mx.array:
    """Return the numbers [N, K] of codes whose groups are in order, or as the last part says."""
    words, scales, zeros = read(*(parts[:-1] if ordered else parts))
    codes = unpack(words, bits).astype(mx.float32)
    index = parts[-1] if ordered else mx.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    zero: Any = 1 << bits - 1 if zeros is None else zeros.astype(mx.float32)[:, index]
    return (codes - zero) * scales.astype(mx.float32)[:, index]


# -- Small floats


def _fp4(module: str, parts: Parts) -> list[TensorInfo]:
    """Read FP4 with E4M3 scales for 16 numbers and one for all (NVFP4), or E8M0 scales for 32 (MXFP4)."""
    codes, scale = parts.get("weight_packed", parts.get("weight")), parts["weight_scale"]
    assert codes is not None
    shape, group = (*codes.shape[:-1], codes.shape[-1] * 2), codes.shape[-1] * 2 // scale.shape[-1]
    common = parts.get("weight_scale_2", parts.get("weight_global_scale"))
    inverse = "weight_global_scale" in parts
    if codes.dtype not in CODES or group not in (16, 32) or shape[-1] % group or codes.shape[:-1] != scale.shape[:-1]:
        raise ValueError("neither NVFP4 nor MXFP4")
    scaled = partial(_common_scale, inverse)
    if module.endswith(DIVIDED) or (common is not None and module.endswith("embed_tokens")):

        def make(codes: mx.array, scale: mx.array, *common: mx.array) -> mx.array:
            mode, whole = ("nvfp4" if group == 16 else "mxfp4"), scaled(*common) if common else None
            words = codes.view(mx.uint32)
            return mx.dequantize(words, scale, None, group, 4, mode, global_scale=whole, dtype=mx.float32)

        used = [codes, scale, *([] if common is None else [common])]
        return [_dense(module, shape, used, make, "fp4", 4, group)]
    words = TensorInfo(
        f"{module}.weight", mx.uint32, (*shape[:-1], shape[-1] // 8), codes.file, codes.start, (codes,), _as_words
    )
    made = [words, replace(scale, name=f"{module}.scales", parts=(scale,), make=_same)]
    if common is not None:
        made.append(replace(common, name=f"{module}.global_scale", shape=(), parts=(common,), make=scaled))
    return made


def _mxfp8(module: str, parts: Parts) -> list[TensorInfo]:
    """Read E4M3 with an E8M0 scale for blocks of 128 x 128 numbers, as MLX has one for 32 of a row."""
    codes, scale = parts["weight"], parts["weight_scale"]
    rows, columns = codes.shape
    if codes.dtype != mx.uint8 or columns % MXFP8_GROUP:
        raise ValueError("not FP8 in groups")

    def make(scales: mx.array) -> mx.array:
        wide = mx.repeat(mx.repeat(scales, FP8_BLOCK, axis=0), FP8_BLOCK // MXFP8_GROUP, axis=1)
        return wide[:rows, : columns // MXFP8_GROUP]

    words = TensorInfo(
        f"{module}.weight", mx.uint32, (rows, columns // 4), codes.file, codes.start, (codes,), _as_words
    )
    shape = rows, columns // MXFP8_GROUP
    return [words, replace(scale, name=f"{module}.scales", shape=shape, parts=(scale,), make=make)]


def _as_words(codes: mx.array) -> mx.array:
    return codes.view(mx.uint32)


def _same(array: mx.array) -> mx.array:
    return array


def _common_scale(inverse: bool, scale: mx.array) -> mx.array:
    scale = scale.astype(mx.float32).reshape(())
    return (1 / scale if inverse else scale) * NVFP4_MOST


def _fp8(module: str, parts: Parts) -> list[TensorInfo]:
    """Read E4M3 with a scale for all numbers, for each row, or for blocks."""
    codes = parts["weight"]
    scale = parts.get("weight_scale_inv") or parts["weight_scale"]
    if not mx.issubdtype(scale.dtype, mx.floating) or len(codes.shape) not in (2, 3):
        raise ValueError("not FP8")
    group = FP8_BLOCK if len(scale.shape) > 1 and scale.shape[-1] > 1 else codes.shape[-1]
    return [_dense(module, codes.shape, [codes, scale], _from_fp8, "fp8", 8, group)]


def _from_fp8(codes: mx.array, scales: mx.array) -> mx.array:
    """Return float32 values [..., N, K] for codes and scales: one, [N], [N, 1], or of blocks of 128 x 128."""
    scales = scales.astype(mx.float32)
    scales = scales.reshape(-1, 1) if scales.ndim == 1 else scales
    for axis in (-2, -1) if scales.ndim > 1 else ():
        if scales.shape[axis] not in (1, codes.shape[axis]):
            scales = mx.repeat(scales, FP8_BLOCK, axis=axis)
    if scales.ndim > 1:
        scales = scales[..., : codes.shape[-2], : codes.shape[-1]]
    return mx.from_fp8(codes, dtype=mx.float32) * scales


def _dense(
    module: str,
    shape: tuple[int, ...],
    parts: list[TensorInfo],
    make: Callable[..., mx.array],
    mode: str,
    bits: int,
    group: int,
) -> TensorInfo:
    """Return a matrix that is computed in float32."""
    how = {"group_size": group, "bits": bits, "mode": mode}
    first = parts[0]
    return TensorInfo(f"{module}.weight", mx.float32, shape, first.file, first.start, tuple(parts), make, how)
