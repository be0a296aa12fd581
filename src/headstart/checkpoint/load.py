"""Read a checkpoint of any layout into the model's modules, one parameter at a time.

`mx.load` reads nothing yet; a parameter is renamed, stacked, shifted and cast lazily, then computed, and what
it was made from is dropped before the next. So loading needs little more memory than what stays.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer as load_mlx_lm_tokenizer

from .. import models
from ..errors import CheckpointError, HeadError
from ..models import memory
from ..models.base import Norm
from ..models.compiler import ensure_compiles
from .hub import resolve
from .layout import Layout, read_layout
from .names import canonical, is_head
from .parameters import Source, Stored
from .untrusted import describe, read_object

FP8_BLOCK = 128


class Part(Protocol):
    """What one machine holds of a model that several hold together. Parameters go by the model's names."""

    def holds(self, name: str) -> bool: ...

    def cut(self, name: str, array: mx.array) -> mx.array: ...

    def fit(self, model: models.Model) -> models.Model:
        """The model's modules, adapted to what was read of them."""
        ...


Split = Callable[[dict[str, Any]], Part]  # config.json's text part → this machine's part


def load(
    name: str | Path | None = None,
    *,
    mtp: bool | None = None,
    dtype: mx.Dtype | None = None,
    split: Split | None = None,
) -> models.Model:
    """The model that `name` stands for (see `resolve`), with its head if it has one, unless `mtp` is false or, where
    that is left open, HEADSTART_MTP is 0.

    A head that is there but unusable is a HeadError; where there is none, `Model.head_unavailable` says why. `split`:
    read only this machine's part of it.
    """
    layout = read_layout(resolve(name))
    if layout.mtp.location and not layout.mtp.available and layout.dispatch(mtp).reason == layout.mtp.reason:
        raise HeadError(f"{layout.path}: {layout.mtp.reason}")
    return load_layout(layout, mtp=mtp, dtype=dtype, split=split)


def load_layout(
    layout: Layout, *, mtp: bool | None = None, dtype: mx.Dtype | None = None, split: Split | None = None
) -> models.Model:
    ensure_compiles()
    decision = layout.dispatch(mtp)
    head = decision.drafts
    stored = {name: part for name, part in layout.stored.items() if head or not is_head(name)}
    if split is None:
        _check_room(layout, sum(part.nbytes for part in stored.values()))
    packed = {
        name: how for name, how in layout.quantized.items() if how["mode"] != "fp8" and f"{name}.scales" in stored
    }
    model = _quantized(models.build(layout.config, head=head), packed)
    norms = {f"{name}.weight" for name, module in model.weights.named_modules() if isinstance(module, Norm)}
    dtype = dtype or compute_dtype(layout.dtype, experts=_has_experts(stored), packed=bool(packed))

    files, part = Files(stored), split(models.text_config(layout.config)) if split is not None else None
    flat: Any = tree_flatten(model.weights.parameters())
    for name, _ in flat:
        if part is not None and not part.holds(name):
            continue
        array = _read(name, stored, files, dtype, is_norm=name in norms)
        if part is not None:
            array = part.cut(name, array)
        mx.eval(array)
        model.weights.update(tree_unflatten([(name, array)]))
        del array
        mx.clear_cache()
    if part is not None:
        model = part.fit(model)
    return replace(model, head_unavailable=decision.reason, default_k=decision.k, max_k=decision.max_k)


def _check_room(layout: Layout, needed: int) -> None:
    """A machine that runs out of memory is slow for everybody, or ends the process without a word."""
    if needed > (free := memory.unused()):
        raise CheckpointError(
            f"{layout.path}: its weights take {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB of this device's memory "
            "are left. Take a smaller model, a conversion of fewer bits (`headstart convert --bits 4`), or several "
            "machines."
        )


def load_tokenizer(path: Path) -> TokenizerWrapper:
    """mlx-lm's tokenizer for the folder `path`, which stops at every end token that the configs name."""
    remedy = "Copy it from the original model."
    found: dict[str, Any] = {}
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        with suppress(FileNotFoundError):
            found[file] = read_object(path / file, remedy)
    config = found.get("config.json", {})
    end = found.get("generation_config.json", {}).get("eos_token_id")
    end = end or config.get("eos_token_id") or models.text_config(config).get("eos_token_id")
    if not all(type(token) is int for token in (end if isinstance(end, list) else [end or 0])):
        raise CheckpointError(f"{path}: eos_token_id is {shortened(end)}, not a token's number or a list of them.")
    try:
        # Code that comes with a model is never run, and nobody is asked whether it may be.
        return load_mlx_lm_tokenizer(path, {"trust_remote_code": False}, eos_token_ids=end)
    except BaseException as error:  # tokenizers written in Rust panic with a BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"{path}: no usable tokenizer ({describe(error)}). Copy tokenizer.json and tokenizer_config.json from "
            "the original model."
        ) from error


def compute_dtype(stored: str, *, experts: bool, packed: bool) -> mx.Dtype:
    """The type of all that is not packed codes: the file's own, except on CPU.

    There mlx multiplies experts (`gather_mm`) in float32 only, and quantised weights 10 to 50 times slower in
    half precision than in float32.
    """
    if mx.default_device() == mx.Device(mx.cpu) and (experts or packed):
        return mx.float32
    dtype: mx.Dtype = getattr(mx, stored)
    return dtype


class Files:
    """Lazy arrays of the files, each forgotten when the last parameter made from it has been read."""

    def __init__(self, stored: dict[str, Stored]):
        self.uses = Counter((s.file, s.name) for part in stored.values() for s in part.sources)
        self.arrays: dict[Path, dict[str, mx.array]] = {}

    def take(self, source: Source) -> mx.array:
        key = (source.file, source.name)
        if source.file not in self.arrays:
            try:
                everything: Any = mx.load(str(source.file))
            except (RuntimeError, ValueError) as error:
                raise CheckpointError(
                    f"{source.file}: cannot be read ({describe(error)}). Download it again."
                ) from error
            self.arrays[source.file] = {n: a for n, a in everything.items() if self.uses[source.file, n]}
        self.uses[key] -= 1
        arrays = self.arrays[source.file]
        return arrays[source.name] if self.uses[key] else arrays.pop(source.name)


def _read(name: str, stored: dict[str, Stored], files: Files, dtype: mx.Dtype, *, is_norm: bool) -> mx.array:
    """The parameter `name` as the model wants it, lazily."""
    part = stored[name]
    raw = part.sources[0].provenance == "raw"
    parts = [files.take(source) for source in part.sources]
    if scales := stored.get(f"{name}_scale_inv"):
        blocks = [files.take(source) for source in scales.sources]
        parts = [from_fp8(codes, scale).astype(dtype) for codes, scale in zip(parts, blocks, strict=True)]

    array = parts[0] if part.sources[0].expert is None else mx.stack(parts)
    if (half := part.sources[0].half) is not None:
        array = mx.contiguous(mx.split(array, 2, axis=-2)[half])
    if raw and name.endswith("conv1d.weight"):
        array = mx.contiguous(array.moveaxis(1, 2))  # [C, 1, K] → [C, K, 1]
    if is_norm:
        array = array.astype(mx.float32)
        return array + 1.0 if raw else array
    if name.endswith(".A_log"):
        return array.astype(mx.float32)
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array


def from_fp8(codes: mx.array, scale: mx.array) -> mx.array:
    """[R, C] codes and one scale for each 128 × 128 block of them → [R, C] in float32."""
    rows, columns = codes.shape
    scale = mx.repeat(mx.repeat(scale.astype(mx.float32), FP8_BLOCK, axis=0), FP8_BLOCK, axis=1)
    return mx.from_fp8(codes, dtype=mx.float32) * scale[:rows, :columns]


def _quantized(model: models.Model, packed: dict[str, dict[str, Any]]) -> models.Model:
    """The same model with quantised modules where the files hold packed weights."""

    def how(prefix: str) -> Callable[[str, nn.Module], dict[str, Any] | bool]:
        return lambda path, module: packed.get(prefix + canonical(path), False)

    nn.quantize(model.lm, class_predicate=how(""))
    mtp = model.weights.mtp if model.has_head else None
    if mtp is not None:
        nn.quantize(mtp, class_predicate=how("mtp."))
    return replace(model, weights=models.Weights(model.family.text(model.lm), model.family.lm_head(model.lm), mtp))


def _has_experts(stored: dict[str, Stored]) -> bool:
    return any(".switch_mlp." in name for name in stored)
