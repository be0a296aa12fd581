"""Read a checkpoint of any layout into the model's modules, one parameter at a time.

A parameter is renamed, stacked, shifted and cast lazily, then computed, and what it was made from is dropped before
the next. So loading needs little more memory than the weights that stay.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer as load_mlx_lm_tokenizer

from .. import models
from ..cards import Dispatch
from ..error_log import LOG
from ..errors import CheckpointError, HeadError, printable_error
from ..kernels import Backend, choose_backend
from ..kernels.norms import Norm
from ..kernels.weights import scaled_layer
from ..limits import MAX_IMAGE_PIXELS
from ..models import memory
from ..models.memory import Footprint
from ..models.wrapped import WrappedModel
from .activations import compute_dtype, overflows, tower_dtype
from .adapters import StoredAdapter, adapter_nbytes, attach_adapters, read_adapters
from .config import check_regular, read_object
from .draft_vocabulary import read_draft_tokens
from .drafter import DrafterLayout, check_drafter, read_drafter, read_drafter_weights
from .hub import resolve, resolve_head
from .layout import Layout, read_layout
from .names import Names, is_head
from .parameters import Stored, compute_constants, parameter_shapes
from .read import EXPERTS_BY_TOKEN, LazyFiles, check_experts, read_parameter
from .vision import StoredTower, empty_tower, find_tower, read_tower
from .wrapped import compute_wrapped, read_wrapped, refuse_for_wrapped


class ModelPart(Protocol):
    """What one machine holds of a model that several hold together. Parameters go by the model's names."""

    def holds(self, name: str) -> bool: ...

    def cut(self, name: str, array: mx.array) -> mx.array: ...

    def fit(self, model: models.Model) -> models.Model:
        """Adapt the model's modules to the parameters that were read."""
        ...


MakePart = Callable[[dict[str, Any]], ModelPart]  # config.json's text part → this machine's part
WITHOUT_TOWER = "its vision tower is not loaded: load it with vision=True, or serve it with --images"


class Needs(NamedTuple):
    """The bytes that a model takes in memory."""

    weights: int  # with those of its drafter, vision tower and adapters
    request: int  # of one short request


@dataclass(frozen=True)
class LoadPlan:
    """A model that is not read yet: its modules, and where their parameters come from."""

    layout: Layout
    decision: Dispatch
    model: models.Model
    stored: Stored
    drafter: DrafterLayout | None
    tower: StoredTower
    adapters: list[StoredAdapter]

    @classmethod
    def of(
        cls,
        name: str | Path | None = None,
        *,
        mtp: bool | None = None,
        head: str | Path | None = None,
        drafter: str | Path | None = None,
        dtype: mx.Dtype | None = None,
        backend: Backend | None = None,
        vision: bool = False,
        max_image_pixels: int = MAX_IMAGE_PIXELS,
        adapters: Mapping[str, str | Path] | None = None,
        kv_bits: int | None = None,
    ) -> "LoadPlan":
        """Take the arguments of `load_model`."""
        layout = read_layout(resolve(name), resolve_head(head) if head is not None and mtp is not False else None)
        decision = layout.dispatch(mtp)
        if not models.is_ours(layout.config):
            refuse_for_wrapped(
                layout.path, layout.family, head=False, drafter=drafter is not None, adapters=bool(adapters)
            )
            return cls._of_wrapped(layout, decision, dtype, backend or choose_backend(), kv_bits)
        if layout.mtp.location and not layout.mtp.available and decision.reason == layout.mtp.reason:
            raise HeadError(f"{layout.path}: {layout.mtp.reason}")
        block = read_drafter(resolve(drafter)) if drafter is not None else None
        if block is not None:
            check_drafter(block, layout.path, layout.config)
        stored = {name: part for name, part in layout.stored.items() if decision.drafts or not is_head(name)}
        packed = {name: how for name, how in layout.quantized.items() if f"{name}.scales" in stored}  # not computed
        backend = backend or choose_backend()
        model = replace(models.build(layout.config, head=decision.drafts), backend=backend)
        if model.has_head:
            model.share_missing(stored)
        model = _quantized(model, packed, Names(layout.config), stored)
        if dtype is None:
            experts = any(".switch_" in name for name in stored)
            dtype = compute_dtype(backend, layout.dtype, experts, {how["mode"] for how in packed.values()})
        model = replace(model, dtype=dtype)
        if block is not None:
            model = replace(model, drafter=block.drafter)
        blind = "vision_config" not in layout.config  # which find_tower says
        tower = find_tower(layout.path, layout.config) if vision or blind else StoredTower(WITHOUT_TOWER)
        if tower.available:
            model = replace(model, tower=empty_tower(layout.path, layout.config, max_image_pixels))
        model = replace(model, tower_unavailable=tower.reason)
        if kv_bits is not None:
            model = model.with_kv_bits(kv_bits)
        return cls(layout, decision, model, stored, block, tower, read_adapters(adapters or {}, model))

    @classmethod
    def _of_wrapped(
        cls, layout: Layout, decision: Dispatch, dtype: mx.Dtype | None, backend: Backend, kv_bits: int | None
    ) -> "LoadPlan":
        """Take a model that mlx-lm runs."""
        if dtype is None:
            how = layout.quantization
            modes = {str(how["mode"])} if how is not None else set()
            dtype = compute_dtype(backend.around(), layout.dtype, _has_experts(layout.config), modes)
        model = read_wrapped(layout.path, layout.config, backend, dtype, layout.dtype)
        tower = find_tower(layout.path, layout.config)
        model = replace(model, tower_unavailable=tower.reason)
        if kv_bits is not None:
            model = model.with_kv_bits(kv_bits)
        return cls(layout, decision, model, {}, None, tower, [])

    @property
    def dtype(self) -> mx.Dtype:
        return self.model.dtype

    @property
    def needs(self) -> Needs:
        request = int(Footprint.of(self.model).bytes([1]) / memory.SHARE)
        tower = _nbytes(self.model.tower, self.dtype) if self.model.tower is not None else 0
        beside = self.drafter_nbytes + tower + adapter_nbytes(self.adapters)
        return Needs(_nbytes(self.model.weights, self.dtype) + beside, request)

    @property
    def drafter_nbytes(self) -> int:
        return _nbytes(self.drafter.drafter.weights, self.dtype) if self.drafter is not None else 0


def load_model(
    name: str | Path | None = None,
    *,
    mtp: bool | None = None,
    head: str | Path | None = None,
    drafter: str | Path | None = None,
    dtype: mx.Dtype | None = None,
    backend: Backend | None = None,
    split: MakePart | None = None,
    vision: bool = False,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    adapters: Mapping[str, str | Path] | None = None,
    kv_bits: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> models.Model:
    """Load a model with its head, if it has one.

    Args:
        name: See `resolve`.
        mtp: False loads no head; None leaves it to HEADSTART_MTP.
        head: A model or a drafter (`qwen3_5_mtp`) whose head is taken, by a name as `resolve` takes it.
        drafter: A block drafter for this model (DFlash), by a name as `resolve` takes it.
        dtype: Of activations, and of all weights that are not quantised; None chooses it by `compute_dtype`.
        backend: What computes; None: `choose_backend`'s for MLX's default device.
        split: Read only this machine's part of the model.
        vision: Also load the vision tower; where there is none, `Model.tower_unavailable` says why.
        max_image_pixels: Larger images are scaled down.
        adapters: LoRA adapters by name: folders that `mlx_lm.lora` has written. A request may name one.
        kv_bits: 8 keeps the KV caches of sequences in 8 bits.
        progress: Called after every parameter with the share of all that have been read.

    Raises:
        HeadError: There is a head but it cannot be used. Where there is none, `Model.head_unavailable` says why.
        DrafterError: The drafter cannot be used, or was made for another model.
        AdapterError: An adapter cannot be used, or was made for another model.
    """
    given: dict[str, Any] = {
        "mtp": mtp, "head": head, "drafter": drafter, "backend": backend, "vision": vision and split is None,
        "max_image_pixels": max_image_pixels, "adapters": adapters, "kv_bits": kv_bits,
    }  # fmt: skip
    plan = LoadPlan.of(name, dtype=dtype, **given)
    part = _part_here(plan, split)
    model = _read(plan, part, progress)
    layout, decision = plan.layout, plan.decision
    if decision.drafts and split is None and (listed := _draft_tokens(layout, model.vocabulary)):
        model = model.with_draft_vocabulary(*listed)
        assert model.draft_vocabulary is not None
        model.backend.prepare(model.draft_vocabulary.lm_head, model.dtype, model.layers)
    if plan.adapters:
        _prepare(model := attach_adapters(model, plan.adapters))
    if dtype is None and split is None and overflows(model, layout.dtype):
        LOG.warning("%s overflows in float16 and is read again, to compute in bfloat16, which is slower", layout.path)
        del model, plan
        return load_model(name, dtype=mx.bfloat16, progress=progress, **given)
    k, max_k, reason, copies = decision.k, decision.max_k, decision.reason, decision.copies and model.copies
    model = replace(model, tables=tuple(table.open() for table in layout.tables))
    return replace(model, head_unavailable=reason, default_k=k, max_k=max_k, copies=copies)


def _part_here(plan: LoadPlan, split: MakePart | None) -> ModelPart | None:
    """Return this machine's part of a model, None for all of it: refuse what cannot be divided, or has no room."""
    layout = plan.layout
    if split is None:
        _check_memory(layout.path, plan.needs, plan.drafter_nbytes)
        return None
    if not plan.model.family.divisible:
        raise CheckpointError(f"{layout.path}: {layout.family} models cannot be divided among several machines yet.")
    if plan.adapters:
        raise CheckpointError("adapters are not available on several machines: leave them out.")
    return split(models.text_config(layout.config))


def _read(plan: LoadPlan, part: ModelPart | None, progress: Callable[[float], None]) -> models.Model:
    """Read the weights of a model, its drafter and its tower, and prepare what computes them."""
    model, layout = plan.model, plan.layout
    if isinstance(model, WrappedModel):
        model = compute_wrapped(model, progress)
        LOG.warning("%s: mlx-lm's own forward runs %s models, %s", layout.path, layout.family, model.plan)
    else:
        _read_weights(plan, part, progress)
    if plan.drafter is not None:
        read_drafter_weights(plan.drafter, plan.dtype)
        compute_constants(plan.drafter.drafter.weights)
        model.backend.prepare(plan.drafter.drafter.weights, model.dtype)
    if model.tower is not None:
        read_tower(model.tower, plan.tower, tower_dtype(plan.dtype, layout.dtype))
    if part is not None:  # machines that time kernels may choose different ones, and must not: they draft the same
        return part.fit(model)
    _prepare(model)
    return model


def _prepare(model: models.Model) -> None:
    layers = (*model.layers, *model.head_layers) if model.has_head else model.layers
    model.backend.prepare(model.weights, model.dtype, layers, images=model.tower is not None)


def _read_weights(plan: LoadPlan, part: ModelPart | None, progress: Callable[[float], None]) -> None:
    """Read the parameters into the model's modules, one after the other."""
    model, family, files, names = plan.model, plan.model.family, LazyFiles(), parameter_shapes(plan.model.weights)
    norms = {f"{name}.weight" for name, module in model.weights.named_modules() if isinstance(module, Norm)}
    for number, name in enumerate(names, 1):
        if part is not None and not part.holds(name):
            continue
        norm: Any = {"norm_offset": family.norm_offset, "norms_stay": family.norms_stay} if name in norms else {}
        array = read_parameter(name, plan.stored, files, plan.dtype, **norm)
        if part is not None:
            array = part.cut(name, array)
        mx.eval(array)
        if name.endswith(EXPERTS_BY_TOKEN):
            check_experts(name, array, models.text_config(plan.layout.config))
        model.weights.update(tree_unflatten([(name, array)]))
        del array
        mx.clear_cache()
        progress(number / len(names))
    compute_constants(model.weights)


def _has_experts(config: dict[str, Any]) -> bool:
    return any("experts" in name and bool(count) for name, count in models.text_config(config).items())


def _nbytes(weights: nn.Module, dtype: mx.Dtype) -> int:
    """Return the bytes that weights take in memory: those of a float8 file are twice as large as on disk."""
    arrays: Any = dict(tree_flatten(weights.parameters())).values()
    return sum(a.size * (dtype.size if mx.issubdtype(a.dtype, mx.floating) else a.itemsize) for a in arrays)


def _check_memory(path: Path, needs: Needs, drafter: int = 0) -> None:
    """Refuse a model that does not fit with one short request: the machine would swap, or the system end the process
    without a message."""
    if sum(needs) > (free := memory.unused()):
        beside = f" (its drafter's {drafter / 1e9:.2f} of them)" if drafter else ""
        raise CheckpointError(
            f"{path}: its weights take {needs.weights / 1e9:.2f} GB{beside}, and {free / 1e9:.2f} GB of "
            f"this device's memory are left{memory.system_share()}; a short request takes {needs.request / 1e9:.2f} "
            f"GB more. {'Leave the drafter out, take' if drafter else 'Take'} a smaller model, a conversion of fewer "
            "bits (`headstart convert --bits 4`), or several machines. If you know that it fits, set "
            f"{memory.VARIABLE} to the gigabytes that Headstart may take."
        )


def load_tokenizer(path: Path, options: Mapping[str, Any] | None = None) -> TokenizerWrapper:
    """Load mlx-lm's tokenizer for the folder `path`, which stops at every end token that the configs name. `options`
    are transformers' for it."""
    files = [path / name for name in ("config.json", "generation_config.json", "tokenizer_config.json")]
    remedy = "Copy it from the original model."
    check_regular(path)
    config, generation, own = (read_object(file, remedy) if file.exists() else {} for file in files)
    end = generation.get("eos_token_id")
    end = end or config.get("eos_token_id") or models.text_config(config).get("eos_token_id")
    if not all(type(token) is int for token in (end if isinstance(end, list) else [end or 0])):
        raise CheckpointError(f"{path}: eos_token_id is {shortened(end)}, not a token's number or a list of them.")
    if not isinstance(longest := own.get("model_max_length", 0), (int, float)):
        raise CheckpointError(f"{files[2]}: model_max_length is {shortened(longest)}, not a number. {remedy}")
    try:
        # Code that comes with a model is never run, and the user is not asked whether it may be.
        options = {**(options or {}), "trust_remote_code": False}
        return load_mlx_lm_tokenizer(path, options, eos_token_ids=end)
    except BaseException as error:  # tokenizers written in Rust panic with a BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"{path}: no usable tokenizer ({printable_error(error)}). Copy tokenizer.json and tokenizer_config.json "
            "from the original model."
        ) from error


def _draft_tokens(layout: Layout, vocabulary: int) -> tuple[list[int], str] | None:
    """Return the list beside the model, else the one beside its head."""
    return read_draft_tokens(layout.path, vocabulary) or read_draft_tokens(layout.head_folder, vocabulary)


def _quantized(model: models.Model, packed: dict[str, dict[str, Any]], names: Names, stored: Stored) -> models.Model:
    """Return the model with quantised modules where the files hold quantised weights."""

    def replaced(whole: nn.Module, prefix: str) -> None:
        def canonical(path: str) -> str:
            return names.canonical(f"{prefix}{path}.").removesuffix(".")

        nn.quantize(whole, class_predicate=lambda path, module: packed.get(canonical(path), False))
        modules = [each for each in whole.named_modules() if f"{canonical(each[0])}.global_scale" in stored]
        whole.update_modules(tree_unflatten([(path, scaled_layer(module)) for path, module in modules]))

    replaced(model.lm, "")
    mtp = model.weights.mtp if model.has_head else None
    if mtp is not None:
        replaced(mtp, "mtp.")
    family, lm = model.family, model.lm
    return replace(model, weights=models.Weights(family.text(lm), family.lm_head(lm), mtp, family.beside))
