"""The models that `headstart serve` names, as a pool. Importing this takes seconds."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import read_layout
from ..checkpoint.local import local_models
from ..engine import DeviceThread, EngineThread
from ..engine.memory import memory_for_prefixes
from ..engine.prefix_disk import PrefixOptions
from ..errors import HeadstartError, RequestError
from ..models.memory import unused
from ..server.model_pool import ModelPool
from ..server.pooled_model import PooledModel
from ..server.settings import Limits
from . import machines
from .download import find_drafter, find_model
from .serve_settings import ServeSettings

if TYPE_CHECKING:
    from ..cluster import Machines


def make_pool(models: list[str], settings: ServeSettings, limits: Limits) -> tuple[ModelPool, list[PooledModel]]:
    """Return the models to serve, and which of them are loaded at the start."""
    pool = ModelPool(
        DeviceThread(),
        _find_models(models, settings),
        limits=limits,
        budget=_budget(settings, models),
        prefix_bytes=settings.prefix_bytes,
        prefix_options=PrefixOptions(
            settings.prefix_cache_8bit, settings.prefix_cache_dir, int(settings.prefix_cache_dir_gb * 1e9)
        ),
        **settings.sizes,
    )
    for each in pool.models[: max(1, len(models))]:
        if problem := pool.misfit(each):
            raise RequestError(problem)
    return pool, [each for each in pool.models if each.pinned or each is pool.models[0]]


def join_cluster(cluster: "Machines", models: list[str], settings: ServeSettings, limits: Limits) -> ModelPool | None:
    """Load this machine's part of a model. Return the pool of the machine that leads; one that follows runs here to
    its end."""
    from ..cluster import SharedPrefix, follow, lead

    folder = find_model(models[0] if models else None)
    loaded, tokenizer = machines.load_share(folder, cluster, settings.split, **settings.parts)
    size = memory_for_prefixes() if settings.prefix_bytes is None else settings.prefix_bytes
    shared = SharedPrefix(size, eight_bits=settings.prefix_cache_8bit) if size else None
    if cluster.rank:
        follow(cluster, loaded, tokenizer, prefix=shared).run(warm_up=True)
        return None
    named: dict[str, Any] = {"id": settings.model_id, "mtp": settings.mtp}
    model = PooledModel.of_loaded(read_layout(folder), loaded, tokenizer, **named)
    engine = lead(cluster, model.read(), tokenizer, prefix=shared, **settings.sizes)
    engine.warm_up()
    return ModelPool.of_one(EngineThread(engine), model, limits)


def _find_models(names: list[str], settings: ServeSettings) -> list[PooledModel]:
    """Return the models to serve, in the order of the command line, and those to pin if they are not among them."""
    pixels = settings.max_image_pixels if settings.images else None
    pinned = settings.pin or []
    named = [*(names or [*pinned, None][:1]), *pinned]
    folders = [find_model(name, vision=settings.images) for name in named]
    pins = folders[len(folders) - len(pinned) :]
    adapters, own = _read_adapters(settings.adapter or [], named), dict[Path, dict[str, Path]]()
    for name, folder in zip(named, folders, strict=True):
        own.setdefault(folder, {}).update(adapters.get(name, {}))
    read = partial(PooledModel.of, mtp=settings.mtp, kv_bits=settings.kv_bits, max_image_pixels=pixels)
    id, head, drafter = settings.model_id, settings.head, find_drafter(settings.drafter)
    found = [
        read(folder, id=id, head=head, drafter=drafter, pinned=folder in pins, adapters=own[folder])
        for folder in dict.fromkeys(folders)
    ]
    for local in local_models() if settings.all_models else ():
        if local.layout is not None and local.layout.path not in folders:
            with suppress(HeadstartError):  # `headstart list` says why
                found.append(read(local.layout.path))
    return found


def _read_adapters(given: list[str], models: Sequence[str | None]) -> dict[str | None, dict[str, Path]]:
    """Return the folders of adapters, by the model that they are for and by name."""
    found: dict[str | None, dict[str, Path]] = {}
    for each in given:
        left, _, path = each.partition("=")
        model, _, name = left.rpartition(":")
        if not name or not path:
            raise RequestError(f"--adapter {each}: write NAME=PATH, or MODEL:NAME=PATH")
        if model and model not in models:
            raise RequestError(f"--adapter {each}: {model} is not one of the models that the command names")
        of_model = found.setdefault(model or models[0], {})
        if name in of_model:
            raise RequestError(f"--adapter {each}: there is another {name}")
        of_model[name] = Path(path)
    return found


def _budget(settings: ServeSettings, models: list[str]) -> int | None:
    """Return the bytes for all models. One model without a limit of its own takes what it finds."""
    if settings.memory_gb is not None:
        return int(settings.memory_gb * 1e9)
    return unused() if settings.several(models) else None
