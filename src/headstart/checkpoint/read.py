"""Make the model's parameters of the tensors in files, lazily: a file is read when a result is computed."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from .config import printable_error
from .parameters import FP8_BLOCK, Source, Stored

LazyFiles = dict[Path, dict[str, mx.array]]  # what `mx.load` returned and is not used up


def read_parameter(
    name: str, stored: Stored, files: LazyFiles, dtype: mx.Dtype, *, is_norm: bool = False
) -> mx.array:
    """Return the parameter `name` in the model's shape, of type `dtype`; norms, as 1 + w, and `A_log` in float32.

    What it is made of is dropped from `files`, so that its memory is freed with the result.
    """
    part = stored[name]
    arrays = [_take(source, files) for source in part.sources]
    if scales := stored.get(f"{name}_scale_inv"):
        blocks = [_take(source, files) for source in scales.sources]
        arrays = [_dequantize_fp8(codes, scale).astype(dtype) for codes, scale in zip(arrays, blocks, strict=True)]
    array = arrays[0] if part.sources[0].expert is None else mx.stack(arrays)
    if (half := part.sources[0].half) is not None:
        array = mx.contiguous(mx.split(array, 2, axis=-2)[half])
    if part.raw and name.endswith("conv1d.weight"):
        array = mx.contiguous(array.moveaxis(1, 2))  # [C, 1, K] → [C, K, 1]
    if is_norm:
        array = array.astype(mx.float32)
        return array + 1.0 if part.raw else array
    if name.endswith(".A_log"):
        return array.astype(mx.float32)
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array


def open_file(path: Path, files: LazyFiles) -> dict[str, mx.array]:
    """Return the tensors of a file, which are not read yet."""
    if path not in files:
        try:
            arrays: Any = mx.load(str(path))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({printable_error(error)}). Download it again.") from error
        files[path] = arrays
    return files[path]


def _take(source: Source, files: LazyFiles) -> mx.array:
    arrays, name = open_file(source.tensor.file, files), source.tensor.name
    # The first half of a fused tensor, `gate_proj`, is read before the second, `up_proj`.
    return arrays[name] if source.half == 0 else arrays.pop(name)


def _dequantize_fp8(codes: mx.array, scales: mx.array) -> mx.array:
    """Return float32 values [R, C] for codes [R, C] with one scale for each block of 128 x 128."""
    rows, columns = codes.shape
    scales = mx.repeat(mx.repeat(scales.astype(mx.float32), FP8_BLOCK, axis=0), FP8_BLOCK, axis=1)
    return mx.from_fp8(codes, dtype=mx.float32) * scales[:rows, :columns]
