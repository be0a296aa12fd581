"""Make the model's parameters of the tensors in files, lazily: a file is read when a result is computed."""

import json
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import open_files
from ..errors import CheckpointError, printable_error
from .parameters import Stored, TensorSource
from .safetensors import DTYPE_CODES, TensorInfo

FLOAT32 = (
    ".A_log",
    ".e_score_correction_bias",
    ".router_bias",
    ".expert_bias",
    ".attention.dt_bias",
    ".self_attn.dt_bias",
    ".indexer.weights_proj.weight",
    ".index_kpool_compress_ape",
    ".global_scale",
    ".input_mix_weight_down.weight",
    ".input_mix_weight_up.weight",
    ".block_inject_weight.weight",
    *("hc.fn.weight", "hc.base", "hc.scale"),
    *(".position_bias", ".sinks"),
)
EXPERTS_BY_TOKEN = ".tid2eid"
SCALES = (".scales", ".biases")  # of quantised weights
LazyFiles = dict[Path, dict[str, mx.array]]  # what `mx.load` returned and is not used up


def read_parameter(
    name: str,
    stored: Stored,
    files: LazyFiles,
    dtype: mx.Dtype,
    *,
    norm_offset: float | None = None,
    norms_stay: bool = False,
) -> mx.array:
    """Return the parameter `name` in the model's shape, of type `dtype`; norms and what is in `FLOAT32` in float32.

    `norm_offset` is what released norms leave out, None for what is no norm; `norms_stay`: converted ones do too.
    What it is made of is dropped from `files`, so that its memory is freed with the result.
    """
    part = stored[name]
    arrays = [_take(source, files) for source in part.sources]
    _, expert, half, heads, groups = part.sources[0].part
    array = arrays[0] if expert is None else mx.stack(arrays)
    if heads is not None:
        number, key, _ = heads
        keys, values = mx.split(array.reshape(number, -1, array.shape[-1]), [key], axis=1)
        array = mx.contiguous(keys.swapaxes(-1, -2) if half == 0 else values)
    elif half is not None:
        array = mx.contiguous(mx.split(array, 2, axis=-2)[half])
    if groups is not None:
        array = array.reshape(part.shape)
    if part.raw and name.endswith("conv1d.weight"):
        array = mx.contiguous(array.moveaxis(1, 2))  # [C, 1, K] → [C, K, 1]
    if norm_offset is not None:
        array = array.astype(mx.float32)
        return array + norm_offset if (part.raw or norms_stay) and norm_offset else array
    if name.endswith(FLOAT32):
        return array.astype(mx.float32)
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    if name.endswith(SCALES) and array.dtype != dtype:
        if dtype == mx.bfloat16:  # which does not hold those of another type
            return array.astype(mx.float32)
        if (dtype, array.dtype) == (mx.float32, mx.float16):  # which float32 adds nothing to
            return array
    return array.astype(dtype)


def check_experts(name: str, table: mx.array, text: dict[str, Any]) -> None:
    """Refuse a table of experts by token that names others than there are: kernels would read past the weights."""
    count = int(text["n_routed_experts"])
    whole = mx.issubdtype(table.dtype, mx.integer)
    if not whole or not bool(((table >= 0) & (table < count)).all()):
        raise CheckpointError(
            f"{name} names experts that are none of the {count} there are. Download the model again."
        )


def open_file(path: Path, files: LazyFiles) -> dict[str, mx.array]:
    """Return the tensors of a file, which are not read yet."""
    if path not in files:
        open_files.fill_standard_streams()
        try:
            arrays: Any = mx.load(str(path))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({printable_error(error)}). Download it again.") from error
        files[path] = arrays
    return files[path]


def read_lazily(tensor: TensorInfo) -> mx.array:
    """Return one tensor of any file, which is read when a result is computed."""
    file: Any = _OneTensor(tensor)
    arrays: Any = mx.load(file, format="safetensors")
    array: mx.array = arrays[tensor.name]
    return array


class _OneTensor(RawIOBase):
    """A safetensors file with nothing but a tensor that lies in another file: MLX reads only these lazily."""

    def __init__(self, tensor: TensorInfo):
        entry = {"dtype": DTYPE_CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [0, tensor.nbytes]}
        header = json.dumps({tensor.name: entry}).encode()
        self.tensor, self.header, self.at = tensor, len(header).to_bytes(8, "little") + header, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        size = len(self.header) + self.tensor.nbytes
        self.at = offset + {SEEK_SET: 0, SEEK_CUR: self.at, SEEK_END: size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        if self.at < len(self.header):
            part = self.header[self.at : self.at + len(buffer)]
            buffer[: len(part)] = part
            count = len(part)
        else:
            with self.tensor.file.open("rb") as file:
                file.seek(self.tensor.start + self.at - len(self.header))
                count = file.readinto(buffer)
        self.at += count
        return count


def _take(source: TensorSource, files: LazyFiles) -> mx.array:
    if source.tensor.make is not None:
        return source.tensor.make(*map(read_lazily, source.tensor.parts))
    arrays, name = open_file(source.tensor.file, files), source.tensor.name
    # The first half of a fused tensor, `gate_proj` or `embed_q`, is read before the second.
    return arrays[name] if source.part.half == 0 else arrays.pop(name)
