"""The models of a server: loaded when a request needs them, unloaded when another needs their memory.

The rule, where the budget does not hold all models: the model whose requests have waited longest is loaded next. It
takes the place of the least recently used one that has had no request for IDLE_SECONDS. If all are in use, the one
that was loaded first makes way once it has been loaded for TURN_SECONDS: its new requests wait, its running ones end,
and it is unloaded. So however requests alternate, a model in use is loaded at most once per turn, and those that wait
for it are then answered together. Pinned models stay.

Everything here runs in the event loop, except what reads and frees weights: that runs in the device's thread, between
the iterations of the other models' engines.
"""

import asyncio
import gc
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine import DeviceThread, Engine, EngineThread
from ..engine.memory import MAX_PREFIX_CACHE, memory_for_prefixes
from ..engine.prefix_disk import PrefixOptions
from ..error_log import log_error
from ..errors import Busy, HeadstartError, RequestError
from ..host import give_back_memory
from ..models.memory import SHARE
from .errors import Refusal
from .loaded_model import LoadedModel
from .log import LOG
from .model_names import ModelNames
from .pooled_model import PooledModel
from .settings import Limits

IDLE_SECONDS = 1.0
TURN_SECONDS = 10.0
PREFIX_SHARE = 1 / 16  # of what a model leaves of the budget: its prefix cache, if that is less than 2 GB


class ModelPool:
    def __init__(
        self,
        device: DeviceThread,
        models: Sequence[PooledModel],
        *,
        limits: Limits | None = None,
        budget: int | None = None,
        prefix_bytes: int | None = None,
        prefix_options: PrefixOptions | None = None,
        max_sequences: int = 16,
        max_queue: int | None = 256,
        idle_seconds: float = IDLE_SECONDS,
        turn_seconds: float = TURN_SECONDS,
    ):
        """Manage models, the first of which is meant where a request names none.

        Args:
            budget: Bytes for the weights and sequences of all loaded models; None if all may be loaded.
            prefix_bytes: Of each model's prefix cache; None: what the budget suggests.
        """
        self.device, self.limits, self.budget = device, limits or Limits(), budget
        self.models: list[PooledModel] = []
        self.names = ModelNames(self.models)
        self.max_sequences, self.max_queue = max_sequences, max_queue
        self._idle, self._turn = idle_seconds, turn_seconds
        self._prefix_bytes, self._prefix_options = prefix_bytes, prefix_options or PrefixOptions()
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()  # held while a model is loaded or unloaded
        self._manager: asyncio.Task[None] | None = None
        for model in models:
            self.add(model)

    @classmethod
    def of_one(cls, thread: EngineThread, model: PooledModel, limits: Limits | None = None) -> "ModelPool":
        """Return the pool of a server that has one model, which is loaded and stays."""
        model.pinned = True
        pool = cls(thread.device, [model], limits=limits, max_queue=thread.engine.scheduler.queue.max_size)
        model.put(thread, pool.limits)
        return pool

    def add(self, model: PooledModel) -> None:
        """Serve one more model, which is not loaded."""
        if any(each.id == model.id for each in self.models):
            raise RequestError(f"MODEL: two are called {model.id}: give one of their folders another name")
        if self.budget is not None:
            suggested = int(PREFIX_SHARE * SHARE * max(0, self.budget - model.needs.weights))
            model.prefix_bytes = (
                min(MAX_PREFIX_CACHE, suggested) if self._prefix_bytes is None else self._prefix_bytes
            )
        self.models.append(model)

    def start(self) -> None:
        """Start the device's thread and what loads models, in the event loop."""
        self._share_memory()
        self.device.start()
        for model in self.models:
            if model.loaded is not None:
                model.loaded.preparer.start()
        self._manager = asyncio.create_task(self._manage())

    async def close(self) -> None:
        if self._manager is not None:
            self._manager.cancel()
            await asyncio.gather(self._manager, return_exceptions=True)
        for model in self.models:
            if model.loaded is not None:
                await model.loaded.preparer.close()

    def find(self, name: str | None) -> PooledModel:
        """Return the model that a request names, by default the first."""
        return self.names.find(name)

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a model to be loaded."""
        return sum(len(each.waiters) for each in self.models)

    def misfit(self, model: PooledModel) -> str | None:
        """Return why a model can never be loaded, if it cannot."""
        kept = [each for each in self.models if each.pinned and each is not model]
        if self.budget is None or self._left([*kept, model]) >= model.needs.request:
            return None
        pinned = f", of which pinned models take {sum(m.needs.weights for m in kept) / 1e9:.2f} GB" if kept else ""
        weights, request, prefix = (size / 1e9 for size in (*model.needs, model.prefix_bytes))
        return (
            f"model {model.id!r} does not fit: its weights take {weights:.2f} GB, a short request "
            f"{request:.2f} GB and its prefix cache {prefix:.2f} GB, and the budget is {self.budget / 1e9:.2f} GB"
            f"{pinned}: take a smaller model, or raise --memory-gb"
        )

    async def acquire(self, model: PooledModel) -> LoadedModel:
        """Wait until a model is loaded, and keep it loaded until `release`."""
        if problem := self.misfit(model):
            raise Refusal(400, problem, param="model", code="model_too_large")
        if not model.ready:
            await self._wait(model)
        else:
            model.requests += 1
        assert model.loaded is not None
        return model.loaded

    async def load(self, model: PooledModel) -> None:
        """Load a model, unless it is loaded."""
        await self.acquire(model)
        self.release(model)

    async def warm_up(self, model: PooledModel) -> None:
        """Do the measurements that the first request to a loaded model would wait for."""
        if model.engine is not None:
            await asyncio.wrap_future(self.device.call(model.engine.warm_up))

    def release(self, model: PooledModel) -> None:
        model.requests -= 1
        model.used_at = asyncio.get_running_loop().time()
        self._changed.set()

    async def unload(self, model: PooledModel) -> None:
        """Unload a model that no request uses."""
        async with self._lock:
            if model.pinned or model.requests or model.waiters:
                why = "it is pinned" if model.pinned else "requests use it"
                raise Refusal(409, f"model {model.id!r} stays loaded: {why}", param="model", code="model_in_use")
            if model.loaded is not None:
                await self._unload(model)

    async def remove(self, model: PooledModel) -> None:
        """Serve a model no more, unless a request uses it."""
        await self.unload(model)
        self.models.remove(model)

    async def _wait(self, model: PooledModel) -> None:
        loop = asyncio.get_running_loop()
        if self.max_queue is not None and len(model.waiters) >= self.max_queue:
            raise Busy(f"{len(model.waiters)} requests wait for {model.id} to be loaded", retry_after=5)
        if not model.waiters:
            model.waiting_since = loop.time()
        waiter: asyncio.Future[None] = loop.create_future()
        model.waiters.append(waiter)
        self._changed.set()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(model)
            raise
        finally:
            if waiter in model.waiters:
                model.waiters.remove(waiter)

    async def _manage(self) -> None:
        while True:
            self._changed.clear()
            wanted = [each for each in self.models if each.waiters and not each.ready]
            seconds = None
            if wanted:
                model = min(wanted, key=lambda each: each.waiting_since)
                try:
                    async with self._lock:
                        seconds = await self._advance(model)
                except Exception as error:  # the device is down
                    log_error(LOG, "no model could be unloaded", error=error)
                    model.failure = error
                    _end_wait(model)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)

    async def _advance(self, wanted: PooledModel) -> float | None:
        """Do what brings a model nearer to being loaded. Return the seconds until there is more to do; None: it must
        wait for a request to end."""
        loaded = [each for each in self.models if each.loaded is not None]
        if wanted not in loaded and self._fits(wanted, loaded):
            await self._load(wanted)
            return 0
        now, movable = asyncio.get_running_loop().time(), [each for each in loaded if not each.pinned]
        idle = [each for each in movable if not each.requests]
        free = [each for each in idle if each.draining or now - each.used_at >= self._idle]
        if free:
            await self._unload(min(free, key=lambda each: each.used_at))
            return 0
        if any(each.draining for each in movable):
            return None
        over = [each for each in movable if now - each.loaded_at >= self._turn]
        if over:
            min(over, key=lambda each: each.loaded_at).draining = True
            return 0
        waits = [each.loaded_at + self._turn - now for each in movable]
        return min([*waits, *(each.used_at + self._idle - now for each in idle)], default=None)

    def _left(self, models: Sequence[PooledModel]) -> int:
        """Return the bytes that the budget leaves for sequences if these models are loaded."""
        assert self.budget is not None
        weights, prefixes = sum(m.needs.weights for m in models), sum(m.prefix_bytes for m in models)
        return int(SHARE * (self.budget - weights)) - prefixes

    def _fits(self, wanted: PooledModel, loaded: Sequence[PooledModel]) -> bool:
        if self.budget is None:
            return True
        held = sum(engine.scheduler.admitted_bytes for engine in self.device.engines)
        return self._left([*loaded, wanted]) - held >= wanted.needs.request

    def _share_memory(self, loading: PooledModel | None = None) -> None:
        present = [each for each in self.models if each.loaded is not None or each is loading]
        self.device.memory = max(0, self._left(present)) if self.budget is not None else None

    async def _load(self, model: PooledModel) -> None:
        """Load a model, and let the requests go on that wait for it."""
        model.loading, model.progress, model.failure = True, 0.0, None
        self._share_memory(model)  # before others take it
        try:
            tokenizer = await asyncio.to_thread(model.load_tokenizer)
            loading = self.device.call(partial(self._load_on_device, model, tokenizer))
            model.put(await asyncio.wrap_future(loading), self.limits)
        except Exception as error:
            if not isinstance(error, HeadstartError):
                log_error(LOG, "a model could not be loaded", error=error)
            model.failure = error
        finally:
            model.loading = False
            self._share_memory()
        model.loaded_at = model.used_at = asyncio.get_running_loop().time()
        if model.loaded is not None:
            model.loaded.preparer.start()
        for each in self.models:
            each.draining = False
            if each is model or each.loaded is not None:
                _end_wait(each)

    def _load_on_device(self, model: PooledModel, tokenizer: TokenizerWrapper) -> EngineThread:
        def report(share: float) -> None:
            model.progress = share
            self.device.give_way()

        read = model.read(report)
        if self.budget is None:
            model.prefix_bytes = memory_for_prefixes() if self._prefix_bytes is None else self._prefix_bytes
        engine = Engine(
            read,
            tokenizer,
            prefix=self._prefix_options.open(model.prefix_bytes, read),
            memory_limit=self.device.memory,
            max_sequences=self.max_sequences,
            max_queue=self.max_queue,
        )
        return EngineThread(engine, self.device)

    async def _unload(self, model: PooledModel) -> None:
        assert model.loaded is not None
        loaded, model.loaded = model.loaded, None
        model.settings = loaded.thread.settings
        self.device.remove(loaded.thread.engine)
        await loaded.preparer.close()
        await asyncio.to_thread(loaded.thread.engine.close)
        del loaded
        await asyncio.wrap_future(self.device.call(_collect))
        model.draining = False
        self._share_memory()


def _end_wait(model: PooledModel) -> None:
    """Let the requests go on that wait for a model, or refuse them if it could not be loaded."""
    waiters, model.waiters = model.waiters, []
    for waiter in waiters:
        if waiter.done():
            continue
        if model.problem is not None:
            waiter.set_exception(Refusal(503, model.problem, param="model", code="model_not_loaded"))
        else:
            model.requests += 1
            waiter.set_result(None)


def _collect() -> None:
    """Free the weights of a model that nothing refers to any more but cycles of its own."""
    gc.unfreeze()  # the server froze what was loaded before it started
    gc.collect()
    gc.freeze()
    mx.clear_cache()
    give_back_memory()
