"""Models, prompts and oracles that the tests of models, state and engine share.

The oracle is always mlx-lm's own forward over the same arrays: it knows nothing of windows, drafts or batches.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

from checkpoints import write
from families import CONFIGS, write_family
from headstart.checkpoint import load_model
from headstart.engine import Engine, Handle, Request, Stats
from headstart.engine.batch import Batch
from headstart.kernels import choose_backend
from headstart.kernels.cpu.backend import CpuBackend, StockCpu
from headstart.kernels.graph import Remembering
from headstart.models import Model
from headstart.sampling import SamplingParams
from headstart.state import CHUNK, PrefixCache

FAMILIES = ("dense", "moe", "next")
EVERY_FAMILY = (*FAMILIES, *CONFIGS)


def by_backend(make: Callable[..., Model]) -> Callable[..., Model]:
    """Make a model once for each backend that a test may choose: a model holds the one that it was loaded with."""
    cached = lru_cache(lambda backend, *given, **named: make(*given, **named))
    return wraps(make)(lambda *given, **named: cached(str(choose_backend()), *given, **named))


@by_backend
def random_model(
    family: str = "dense", *, seed: int = 0, head: bool = True, tie: bool = False, **sizes: int
) -> Model:
    """A tiny random checkpoint, loaded in float32."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), family, seed=seed, head=head, tie=tie, **sizes)
        return load_model(folder, dtype=mx.float32)


def write_any(folder: Path, family: str, **sizes: Any) -> Path:
    """Write a tiny random checkpoint of any family that there is."""
    return write(folder, family, **sizes) if family in FAMILIES else write_family(folder, family, **sizes)


@by_backend
def family_model(family: str, **sizes: Any) -> Model:
    """A tiny random checkpoint of any family, loaded in float32."""
    with tempfile.TemporaryDirectory() as folder:
        return load_model(write_any(Path(folder), family, **sizes), dtype=mx.float32)


@by_backend
def builtin_model(name: str = "tiny-qwen3.5", dtype: mx.Dtype | None = None) -> Model:
    return load_model(name, dtype=dtype)


class RememberingCpu(Remembering, CpuBackend):
    """Remembers passes as a GPU's backend does."""


class RememberingStock(Remembering, StockCpu):
    pass


def remembering(model: Model) -> Model:
    """The model on a backend that remembers passes, without those of other tests."""
    ours = model.backend
    backend = RememberingCpu(ours.native) if isinstance(ours, CpuBackend) else RememberingStock(str(ours))
    return replace(model, backend=backend)


def random_prompt(model: Model, length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(model.vocabulary) for _ in range(length)]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    bursts: list[list[int]] = field(default_factory=list)
    finish_reason: str | None = None
    stats: Stats | None = None
    error: Exception | None = None


def collect(handle: Handle) -> Answer:
    """All events of a request, to its end."""
    answer = Answer()
    for event in handle:
        answer.tokens += event.tokens
        answer.origins += event.origins
        answer.bursts += [event.tokens] if event.tokens else []
        answer.finish_reason, answer.stats, answer.error = event.finish_reason, event.stats, event.error
    return answer


def submit(engine: Engine, prompt: Sequence[int], **params: object) -> Handle:
    return engine.submit(Request(prompt, SamplingParams(**params)))  # type: ignore[arg-type]


def generate(model: Model, prompt: Sequence[int], **params: object) -> Answer:
    """The answer of an engine that has nothing else to do."""
    return collect(submit(Engine(model, prefix=PrefixCache(0)), prompt, **params))


_greedy: dict[tuple[int, ...], tuple[Model, list[int]]] = {}  # with the model, so that no other gets its id


def mlx_lm_greedy(model: Model, prompt: Sequence[int], count: int) -> list[int]:
    """What mlx-lm's own generator generates, once for all tests that share a model."""
    _, known = _greedy.get((id(model), *prompt), (model, []))
    if len(known) < count:
        steps = generate_step(mx.array(prompt), model.lm, max_tokens=count)
        known = [int(token) for token, _ in steps]
        _greedy[id(model), *prompt] = model, known
    return known[:count]


def assert_greedy(model: Model, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Every token is the argmax of mlx-lm's logits given all before it: one plain forward, no cache."""
    logits = model.lm(mx.array([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
    assert mx.argmax(logits, axis=-1).tolist() == list(tokens)


def batch_of(model: Model, *prompts: Sequence[int], k: int | str = 8, chunk: int = CHUNK) -> Batch:
    """Sequences whose prompts the engine itself has prefilled, and that have generated nothing yet."""
    engine = Engine(model, max_sequences=len(prompts), prefix=PrefixCache(0))
    for prompt in prompts:
        submit(engine, prompt, k=k, max_tokens=2000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstart.kernels.backend.Backend.chunk", chunk)
        engine.scheduler.admit()
        while engine.scheduler.prefilling:
            engine.reader.read_pass()
    assert engine.scheduler.running.batch is not None
    assert engine.scheduler.running.batch.size == len(prompts)
    mx.eval(engine.scheduler.running.batch.arrays())
    return engine.scheduler.running.batch


class RecordsExperts(nn.Module):
    """Stands where a block's experts stand, and notes which of them were asked."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.experts = experts
        self.asked: list[mx.array] = []

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self.asked.append(mx.sort(indices, axis=-1))
        return self.experts(x, indices)


@contextmanager
def recorded_experts(model: Model) -> Iterator[list[RecordsExperts]]:
    """One recorder for every layer of the trunk: of each call, [B, W, top_k] indices in rising order."""
    recorders = [RecordsExperts(layer.mlp.switch_mlp) for layer in model.weights.layers]
    for layer, recorder in zip(model.weights.layers, recorders, strict=True):
        layer.mlp.switch_mlp = recorder
    try:
        yield recorders
    finally:
        for layer, recorder in zip(model.weights.layers, recorders, strict=True):
            layer.mlp.switch_mlp = recorder.experts
