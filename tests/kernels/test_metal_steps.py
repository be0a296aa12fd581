"""Steps on Metal: described once, in few launches, without a copy of a KV cache. Run on the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cuda_on_cpu
import metal_on_cpu
import mlx.core as mx
import pytest
from backends import choose_all
from launches import address, describe_only, operations_of

from checkpoints import write
from headstart.checkpoint import load_model
from headstart.engine.batch import Batch
from headstart.engine.invariance import _logits
from headstart.engine.step import prefill_prompts, step
from headstart.kernels import Backend
from headstart.kernels.metal import attention, choice
from headstart.kernels.metal.backend import MetalBackend
from headstart.kernels.metal.fused import FUSED
from headstart.models import Model
from headstart.models.memory import Footprint

SIZES = {"vocab_size": 64, "head_dim": 32, "linear_value_head_dim": 32, "linear_key_head_dim": 32}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that have inputs and outputs, and compute nothing."""
    monkeypatch.setattr(mx.fast, "metal_kernel", describe_only)
    monkeypatch.setattr(choice, "_decided", {})
    cuda_on_cpu.forget_kernels("metal")
    yield
    cuda_on_cpu.forget_kernels("metal")


@pytest.fixture
def emulated(described: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_on_cpu.metal_kernel)
    monkeypatch.setattr(attention, "SPLIT", 128)


def metal_model(folder: Path, family: str = "dense", **sizes: int) -> Model:
    model = load_model(write(folder, family, **SIZES | sizes), dtype=mx.bfloat16)
    choose_all(model)
    return replace(model, backend=MetalBackend())


def begin(model: Model, k: int) -> Batch:
    return prefill_prompts(replace(model, backend=Backend()), [PROMPT], k)


def decode(model: Model, k: int, count: int) -> list[int]:
    """Tokens of steps with k drafts, the next described before the last is read."""
    batch, tokens = begin(model, k), []
    for _ in range(count):
        result = step(model, batch, k)
        mx.async_eval(result.verdict.tokens, result.verdict.accepted, *batch.arrays())
        tokens += result.verdict.tokens.tolist()[0][: result.verdict.accepted.item() + 1]
    return tokens


def pending(model: Model, batch: Batch, k: int) -> list[mx.array]:
    """What a step gives, described."""
    result = step(model, batch, k)
    return [result.verdict.tokens, result.verdict.accepted, *batch.arrays()]


def test_no_cache_is_copied_while_a_command_buffer_holds_the_last_one(tmp_path: Path) -> None:
    model = metal_model(tmp_path)
    batch = begin(model, 3)
    assert batch.head_state is not None
    states = batch.trunk_state, batch.head_state
    held, places = [], []
    for _ in range(4):  # described once, remembered, and twice as remembered
        mx.eval(pending(model, batch, 3))
        held.append([a for state in states for layer in state.kv_layers for a in layer.arrays()])  # of all steps
        places.append([address(a) for a in held[-1]])
    assert len(places[0]) == 4
    assert places[1:] == places[:-1]


def test_a_remembered_step_launches_what_it_describes(tmp_path: Path) -> None:
    model = metal_model(tmp_path)
    batch, counts = begin(model, 3), []
    for _ in range(4):
        arrays = pending(model, batch, 3)
        counts.append(operations_of(arrays)["Launch"])
        mx.eval(arrays)
    # Five a layer; the norm and the product of logits; and three drafts of a layer, two norms before it, a product,
    # and those of logits.
    trunk, draft = 5 * len(model.layers) + 2, 5 + 3 + 2
    assert counts == [trunk + 3 * draft] * 4


def test_what_only_reads_a_cache_waits_for_what_was_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX orders it before nothing else."""
    model = metal_model(tmp_path)
    waited: list[object] = []
    for _ in range(2):  # described, and remembered
        batch = begin(model, 0)
        pending(model, batch, 0)
        (cache,) = batch.trunk_state.kv_layers
        waited.clear()
        with monkeypatch.context() as patch:
            patch.setattr(mx, "eval", lambda *arrays: waited.append(arrays))
            batch.trunk_state.bounds = [cache.capacity]
            batch.trunk_state.reserve(1)
            assert len(waited) == 1
            batch.trunk_state.reserve(1)
            assert len(waited) == 1


def test_memory_counts_what_a_command_buffer_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = metal_model(tmp_path)
    once, held = Footprint.of(replace(model, backend=Backend())), Footprint.of(model)
    assert (held.fixed, held.position) == (2 * once.fixed, once.position)
    eight_bits = replace(model, eight_bit_kv=True)
    once, held = (Footprint.of(replace(eight_bits, backend=backend)) for backend in (Backend(), MetalBackend()))
    assert held.position == 2 * once.position
    monkeypatch.setattr(choice, "_decided", {})
    assert Footprint.of(model).position == 2 * Footprint.of(replace(model, backend=Backend())).position


@pytest.mark.slow
def test_fused_layers_have_the_bits_of_separate_kernels(tmp_path: Path, emulated: None) -> None:
    mx.disable_compile()
    model = metal_model(tmp_path, num_hidden_layers=2, full_attention_interval=2)
    assert all(model.backend._launches(layer, model.dtype) for layer in model.layers)  # type: ignore[attr-defined]
    fused = _logits(model, 3, 1)
    mx.eval(fused)
    kernels = choice._decided
    for key in [key for key in kernels if key.startswith(FUSED)]:
        check = kernels.pop(key)
        if "gated" in key:
            kernels[key.replace(", normed", "")] = check
    apart = replace(model, backend=MetalBackend())
    MetalBackend._fused.clear()  # as loading does
    assert not any(apart.backend._launches(layer, model.dtype) for layer in model.layers)  # type: ignore[attr-defined]
    assert mx.array_equal(_logits(apart, 3, 1), fused)
    mx.enable_compile()


@pytest.mark.slow
def test_remembered_steps_decode_what_described_ones_do(tmp_path: Path, emulated: None) -> None:
    model = metal_model(tmp_path)
    remembered = [decode(model, k, 6) for k in (0, 2)]
    mx.disable_compile()
    described = [decode(replace(model, backend=MetalBackend()), k, 6) for k in (0, 2)]
    mx.enable_compile()
    assert remembered == described
    assert remembered[1][:6] == remembered[0]
