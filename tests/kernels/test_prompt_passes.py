"""Prompts by the kernels for CUDA, run on the CPU: the same bits wherever they are cut, and near the reference."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import cuda_on_cpu
import mlx.core as mx
import pytest

from checkpoints import write
from headstart.checkpoint import load_model
from headstart.kernels import Backend
from headstart.kernels.cuda import delta_chunks, device, full_matrix, prompt_attention, prompt_experts, prompts
from headstart.kernels.cuda.backend import CudaBackend
from headstart.kernels.cuda.prompt_experts import PromptTile
from headstart.kernels.cuda.prompts import CUT, CudaPrompts, reads_prompts
from headstart.models import Model
from headstart.state import KV

HOPPER = {16: 132, 75: 9, 97: 232448}  # attributes of a device
SIZES = {"num_hidden_layers": 2, "full_attention_interval": 2, "hidden_size": 128, "head_dim": 64}
SIZES |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1}
SIZES |= {"linear_num_value_heads": 2, "moe_intermediate_size": 64}
SLOW = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("stock_ops")


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    tile = PromptTile(4, 32, 3, blocks=1, depth=256)
    with cuda_on_cpu.emulated() as patch:
        for module in (prompts, prompt_attention, delta_chunks, device):
            patch.setattr(module, "device_attribute", HOPPER.__getitem__)
        patch.setattr(full_matrix, "HEIGHTS", (64, 128))
        patch.setattr(prompt_experts, "choose_tile", lambda bits: tile)
        full_matrix.heights_of.cache_clear()
        yield
    full_matrix.heights_of.cache_clear()


@cache
def model(family: str) -> Model:
    """One GatedDeltaNet layer and one of attention, in 4 bits."""
    with TemporaryDirectory() as folder:
        write(Path(folder), family, "converted", bits=4, **SIZES)
        return load_model(folder, dtype=mx.bfloat16, backend=CudaBackend())


def read(reading: Model, length: int, ends: Sequence[int], keep: int | None = None) -> tuple[list[mx.array], list]:
    """Read a prompt in passes → the hidden states and what layers hold after it, and what the last kept."""
    tokens = (mx.arange(length)[None] * 37 + 11) % reading.vocabulary
    state, hidden = reading.make_state(1), []
    for begin, end in pairwise([0, *ends, length]):
        within = keep - begin if keep is not None and begin < keep < end else None
        hidden.append(reading.trunk(tokens[:, begin:end], state, end - begin, keep=within))
        state.commit(mx.full((1,), end - begin, mx.int32), most=end - begin)
    held = [a[:, :, :length] if isinstance(m, KV) else a for m in state.layers for a in m.arrays()]
    kept = [a for m in state.recurrent_layers for a in m.kept or ()]
    made = [mx.concatenate(hidden, axis=1), *held]
    mx.eval(made, kept)
    return made, kept


def same(a: Sequence[mx.array], b: Sequence[mx.array]) -> bool:
    return len(a) == len(b) and all(mx.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("family", ["dense", pytest.param("moe", marks=SLOW)])
def test_a_prompt_has_the_same_bits_wherever_it_is_cut(family: str) -> None:
    reading = replace(model(family), backend=CudaPrompts())
    length = 2 * CUT + 21
    whole, _ = read(reading, length, [])
    cut, _ = read(reading, length, [CUT, 2 * CUT])
    assert same(whole, cut)
    kept, states = read(reading, length, [], keep=CUT)
    assert same(kept, whole)
    prefix, _ = read(reading, CUT, [])
    assert same(states, prefix[1:3])  # of the first layer: those of its state and convolution


@pytest.mark.parametrize("family", ["dense", pytest.param("moe", marks=SLOW)])
def test_a_prompt_is_near_what_mlx_makes_of_it(family: str) -> None:
    reading = replace(model(family), backend=CudaPrompts())
    reference = replace(reading, backend=Backend())
    ours, theirs = (read(each, CUT + 9, [])[0] for each in (reading, reference))
    for a, b in zip(ours, theirs, strict=True):
        a, b = a.astype(mx.float32), b.astype(mx.float32)
        assert mx.linalg.norm(a - b).item() < 0.05 * mx.linalg.norm(b).item()


def test_what_has_no_kernel_is_read_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model("dense")
    assert isinstance(net.backend.reader(net.layers, mx.bfloat16), CudaPrompts)
    assert not reads_prompts(net.layers, mx.float32)
    monkeypatch.setattr(prompts, "device_attribute", {**HOPPER, 97: 40_000}.__getitem__)
    assert not reads_prompts(net.layers, mx.bfloat16)
    assert net.backend.reader(net.layers, mx.bfloat16) is net.backend
