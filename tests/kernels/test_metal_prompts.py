"""Prompts on a Mac: attention as MLX fuses it, and passes as wide as model and device allow, whatever is free."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from fixtures import family_model, random_prompt
from headstart.engine import Engine, Request
from headstart.kernels.layers import Attention, Pass
from headstart.kernels.metal import choice, device, prompts, stock
from headstart.kernels.metal.backend import MetalBackend
from headstart.kernels.metal.device import has_matrix_units
from headstart.kernels.metal.prompts import MetalPrompts, reads_wide
from headstart.kernels.types import ArrangedHeads
from headstart.models import Model
from headstart.models.memory import Footprint
from headstart.sampling import SamplingParams
from headstart.state import KV, PrefixCache

pytestmark = pytest.mark.usefixtures("stock_ops")
WIDE = 96  # tokens, in place of 2,048


class Checked(MetalPrompts):
    """Looks whether the host knows where a pass begins."""

    causal = 0

    def attend_heads(self, layer: Attention, heads: ArrangedHeads, both: mx.array, memory: KV, run: Pass) -> mx.array:
        if both.shape[1] > prompts.WIDEST and run.certain == both.shape[1]:
            assert [memory.begins] == memory.offset.tolist()
            run = replace(run, mask=lambda window: pytest.fail("a mask array was made"))
            self.causal += 1
        return super().attend_heads(layer, heads, both, memory, run)


@pytest.fixture(autouse=True)
def on_a_mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choice, "_decided", {})
    monkeypatch.setattr(stock, "gated_delta_kernel", gated_delta_ops)
    monkeypatch.setattr(prompts, "WIDE", WIDE)


def on_metal(family: str, *, wide: bool = True) -> tuple[Model, Checked]:
    backend = MetalBackend()
    reader = Checked(wide, backend._order)
    backend._readers = {True: reader, False: reader}
    return replace(family_model(family), backend=backend), reader


def answer(model: Model, prompt: list[int], prefix: PrefixCache) -> tuple[list[int], int]:
    events = list(
        Engine(model, prefix=prefix).submit(
            Request(prompt, SamplingParams(max_tokens=6, k=2 if model.has_head else 0))
        )
    )
    assert events[-1].error is None
    assert events[-1].stats is not None
    return [token for event in events for token in event.tokens], events[-1].stats.prefix_cache_hit


@pytest.mark.parametrize("family", ["dense", "llama", pytest.param("moe", marks=pytest.mark.slow)])
def test_a_prompt_is_read_without_a_mask_array_and_as_with_one(family: str) -> None:
    model, reader = on_metal(family)
    prompt = random_prompt(model, 2 * WIDE + 40, 3)
    found, _ = answer(model, prompt, PrefixCache(0))
    assert model.reading.backend is reader, "it was found to be right"
    assert reader.causal, "and of the head, if there is one"
    plain = replace(family_model(family), backend=MetalBackend())
    plain.__dict__["reading"] = plain
    assert found == answer(plain, prompt, PrefixCache(0))[0]
    expected, made = hidden(plain, prompt), hidden(model.reading, prompt)
    assert mx.linalg.norm(made - expected) < 1e-5 * mx.linalg.norm(expected)


def hidden(model: Model, prompt: list[int]) -> mx.array:
    """Hidden states of a prompt in two passes, of which the second does not end at a stride of the cache."""
    state, made = model.make_state(1), []
    for part in (prompt[:WIDE], prompt[WIDE : 2 * WIDE + 7]):
        made.append(model.trunk(mx.array([part]), state, certain=len(part)))
        state.commit(mx.full((1,), len(part), mx.int32), most=len(part))
    return mx.concatenate(made, axis=1)


def test_a_hit_resumes_where_a_wide_pass_ended() -> None:
    model, reader = on_metal("dense")
    prompt = random_prompt(model, 2 * WIDE + 40, 5)
    prefix = PrefixCache(1 << 30, chunk=model.reading.backend.chunk)
    first, _ = answer(model, prompt, prefix)
    again, hit = answer(model, prompt, prefix)
    assert hit == 2 * WIDE
    assert again == first
    assert reader.chunk == reader.widest == WIDE


@pytest.mark.parametrize(
    ("architecture", "macos", "units"),
    [
        ("applegpu_g13g", "26.3", False),  # M1
        ("applegpu_g16s", "26.3", False),  # M4 Max
        ("applegpu_g17g", "26.2", True),  # M5
        ("applegpu_g17s", "26.1", False),  # before MLX uses them
        ("applegpu_g17p", "26.2", False),  # of a phone
        ("applegpu_g18p", "27.0", True),
        ("", "", False),
    ],
)
def test_matrix_units_are_those_that_mlx_uses(
    architecture: str, macos: str, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": architecture})
    monkeypatch.setattr(device.platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))
    assert has_matrix_units() == units


def test_passes_are_wide_where_attention_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wide(family: str, size: int, *, units: bool) -> bool:
        model = family_model(family)
        monkeypatch.setattr(Attention, "head_sizes", property(lambda layer: (size, size)))
        monkeypatch.setattr(prompts, "has_matrix_units", lambda: units)
        return reads_wide(model.layers)

    assert [wide("dense", size, units=False) for size in (128, 256, 192)] == [True, False, False]
    assert [wide("dense", size, units=True) for size in (128, 256, 192)] == [True, True, False]
    assert wide("sliding", 128, units=True)
    assert not wide("sliding", 256, units=True), "a window needs a mask array"
    assert not wide("deepseek_v3", 128, units=True), "latent attention"


def test_scores_of_a_pass_that_is_not_fused_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1 << 34})
    sizes = {}
    for wide in (False, True):
        model, reader = on_metal("dense", wide=wide)
        sizes[reader.scored] = Footprint.of(model).scores
    assert sizes[1024] == 2 * sizes[512] > 0


def test_narrow_passes_and_decoding_write_into_caches_in_one_order() -> None:
    backend = MetalBackend()
    reader = backend.reader((), mx.bfloat16)
    assert isinstance(reader, MetalPrompts)
    assert reader._order is backend._order
    assert backend.reader((), mx.bfloat16) is reader
