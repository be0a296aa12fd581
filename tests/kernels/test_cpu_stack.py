"""Layers in a row as one operation: the bits of one after the other."""

from dataclasses import replace

import mlx.core as mx
import pytest

from fixtures import family_model, random_model
from headstart.kernels import Backend, choose_backend
from headstart.kernels.cpu.backend import CpuBackend
from headstart.kernels.layers import Pass
from headstart.models import Model

CPU = choose_backend()
pytestmark = pytest.mark.skipif(not isinstance(CPU, CpuBackend), reason="no CPU kernels here")
FAMILIES = ("dense", "moe", "next", "llama", "mimo_v2_flash", "glm4_moe_lite", "nemotron_h", "deepseek_v3")


class OneByOne(CpuBackend):
    decoder_layers = Backend.decoder_layers


def passes(model: Model) -> list[mx.array]:
    """A prompt, a window of which one draft is accepted and another window: all that the trunk gives and holds."""
    state, made = model.make_state(2), []
    tokens = (mx.arange(22).reshape(2, 11) * 7 + 3) % model.vocabulary
    for window, certain, accepted in ((tokens, 11, 0), (tokens[:, :4], 1, 1), (tokens[:, 5:7], 1, 0)):
        made.append(model.trunk(window, state, certain))
        state.commit(mx.full((2,), certain + accepted, mx.int32), most=certain + accepted)
        state.accepted = mx.full((2,), accepted, mx.int32)
        made += [mx.contiguous(array) + 0 for array in state.arrays()]
        mx.eval(made)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stack_has_the_bits_of_its_layers(family: str) -> None:
    assert isinstance(CPU, CpuBackend)
    model = random_model(family) if family in FAMILIES[:3] else family_model(family)
    one_by_one = replace(model, backend=OneByOne(CPU.native))
    for mine, other in zip(passes(model), passes(one_by_one), strict=True):
        assert mx.array_equal(mine, other, equal_nan=True)


def test_a_stack_is_one_operation() -> None:
    """Or a small model waits for the description of its layers."""
    assert isinstance(CPU, CpuBackend)
    made: list[object] = []

    class Counted:
        def __getattr__(self, name: str) -> object:
            made.append(name)
            return getattr(CPU.native, name)

    model = family_model("llama")
    layers, state = model.layers, model.make_state(1)
    run = Pass(state.reserve(1), state.accepted)
    x = mx.zeros((1, 1, model.config["hidden_size"]), model.dtype)
    CpuBackend(Counted()).decoder_layers(layers, x, x, state.layers, run)
    assert len(layers) > 1
    assert [name for name in made if name not in ("isa", "threads")] == ["stack"]
